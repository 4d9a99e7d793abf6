// The sentences of quant/qserve_head.h and the vectors of methods.md 8.10. P1, P14, P23.
#include "quant/qserve_head.h"

#include <gtest/gtest.h>

#include "quant/groups.h"

namespace livequant {
namespace {

struct QserveCase {
  std::vector<float> x;
  int bits;
  int scale_bits, zero_bits;
  std::vector<int> safe, compat;
  std::vector<float> fma16;  // empty: not published
};

std::vector<int> Codes(const QserveSpec& spec, const std::vector<float>& x, const QserveParams& p) {
  std::vector<int> codes;
  for (float v : x) codes.push_back(QserveCode(spec, v, p));
  return codes;
}

TEST(QserveHead, PublishedRows) {
  const std::vector<int> a = {0, 15, 8, 4};
  const QserveCase cases[] = {
      {{1, 2, 1.5f, 1.25f}, 4, 0x2C44, 0xCB80, a, a, {1, 2, 1.533203125f, 1.2666015625f}},
      {{-1, .5f, 2, 0},
       4,
       0x3266,
       0x4500,
       {0, 8, 15, 5},
       {0, 8, 15, 5},
       {-1, .599609375f, 1.9990234375f, -.000244140625f}},
      {{-.7f, -.1f, -.3f, -.65f},
       4,
       0x291F,
       0x4C60,
       {0, 15, 10, 1},
       {0, 15, 10, 1},
       {-.7001953125f, -.10009765625f, -.300048828125f, -.66015625f}},
      {{-3, 3, .2f, -.2f}, 4, 0x3666, 0x4780, {0, 15, 8, 7}, {0, 15, 8, 7}, {}},
      {{100, 101, 100.5f, 100.25f}, 4, 0x2C44, 0xE5DC, a, a, {100, 101, 100.5625f, 100.25f}},
      {{1000, 1001, 1000.5f, 1000}, 4, 0x2C44, 0xF353, {4, 15, 11, 4}, {4, 3, 11, 4}, {}},
      {{68.5625f, 69.5625f, 69.0625f}, 4, 0x2C44, 0xE404, {1, 15, 8}, {1, 0, 8}, {}},
      {{1, 2, 1.5f, 1.25f}, 8, 0x1C04, 0xDBF8, {0, 255, 128, 64}, {0, 255, 128, 64}, {}},
      {{-1, .5f, 2, 0}, 8, 0x2206, 0x5550, {0, 128, 255, 85}, {0, 128, 255, 85}, {}},
  };
  for (const QserveCase& c : cases) {
    std::vector<float> x = c.x;
    for (float& v : x) v = static_cast<float>(RoundToF16(v));  // the upstream row is FP16
    const QserveSpec safe{.bits = c.bits}, compat{.bits = c.bits, .wrap = true};
    QserveParams p;
    ASSERT_EQ(FitQserve(safe, AsGroup(x), &p), FitFault::kNone);
    EXPECT_EQ(F16FromFloat(p.scale), c.scale_bits) << c.x[0] << " " << c.bits;
    EXPECT_EQ(F16FromFloat(p.zero), c.zero_bits) << c.x[0] << " " << c.bits;
    EXPECT_EQ(Codes(safe, x, p), c.safe) << c.x[0] << " " << c.bits;
    EXPECT_EQ(Codes(compat, x, p), c.compat) << c.x[0] << " " << c.bits;
    for (size_t i = 0; i < c.fma16.size(); ++i) EXPECT_EQ(QserveValueFma16(c.safe[i], p), c.fma16[i]) << c.x[i];
  }
}

TEST(QserveHead, PublishedF32Decodes) {
  const auto decode = [](std::vector<float> x) {
    QserveParams p;
    EXPECT_EQ(FitQserve({}, AsGroup(x), &p), FitFault::kNone);
    for (float& v : x) v = QserveValue(QserveCode({}, v, p), p);
    return x;
  };
  EXPECT_EQ(decode({1, 2, 1.5f, 1.25f}),
            (std::vector<float>{.999755859375f, 1.99951171875f, 1.532958984375f, 1.266357421875f}));
  const std::vector<float> hundred = decode({100, 101, 100.5f, 100.25f}),
                           want = {99.9756f, 100.9753f, 100.5088f, 100.2422f};
  const std::vector<float> wrapped = decode({1000, 1001, 1000.5f, 1000}),
                           want2 = {1000.022f, 1000.756f, 1000.489f, 1000.022f};
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_NEAR(hundred[i], want[i], 5e-5) << i;
    EXPECT_NEAR(wrapped[i], want2[i], 5e-4) << i;
  }
}

TEST(QserveHead, ConstantRowsDecodeToTheirRoundedValue) {
  for (int bits : {4, 8}) {
    for (DType qparam : {DType::kF16, DType::kF32}) {
      for (bool wrap : {false, true}) {
        const QserveSpec spec{.bits = bits, .qparam = qparam, .wrap = wrap};
        for (float c : {1.0f, -1.0f, 3.14159f, -100.1f, 65504.0f, 0x1p-14f, -0x1p-14f, 0x1p-20f, -0x1.8p-17f, 0.0f}) {
          const std::vector<float> x(5, c);
          QserveParams p;
          ASSERT_EQ(FitQserve(spec, AsGroup(x), &p), FitFault::kNone);
          EXPECT_GE(p.scale, SmallestNormal(qparam));
          EXPECT_EQ(QserveValue(QserveCode(spec, c, p), p), RoundTo(qparam, c)) << c;
        }
      }
    }
  }
  QserveParams p;
  const std::vector<float> zero(4, 0.0f), minus(4, -2.5f), small(4, 0x1p-16f), huge(4, 70000.0f);
  ASSERT_EQ(FitQserve({}, AsGroup(zero), &p), FitFault::kNone);
  EXPECT_EQ(p.scale, 1.0f);
  EXPECT_EQ(p.zero, 0.0f);
  ASSERT_EQ(FitQserve({}, AsGroup(minus), &p), FitFault::kNone);
  EXPECT_EQ(p.scale, 2.5f);
  EXPECT_EQ(p.zero, 2.0f);
  EXPECT_EQ(QserveCode({}, -2.5f, p), 1);
  EXPECT_EQ(FitQserve({.refuse_small_scale = true}, AsGroup(small), &p), FitFault::kSmallScale);
  EXPECT_EQ(FitQserve({}, AsGroup(huge), &p), FitFault::kBeyondRange);
}

// P14, methods.md 8.9
TEST(QserveHead, OffsetsBeyondF16AndNonFiniteValuesAreFaults) {
  QserveParams p;
  const auto fit = [&p](const QserveSpec& spec, std::vector<float> x) { return FitQserve(spec, AsGroup(x), &p); };
  EXPECT_EQ(fit({}, {4400, 4401}), FitFault::kBeyondRange);  // 15 * 4400 > 65504
  EXPECT_EQ(fit({}, {-4401, -4400}), FitFault::kBeyondRange);
  EXPECT_EQ(fit({}, {4300, 4301}), FitFault::kNone);
  EXPECT_EQ(fit({.bits = 8}, {300, 301}), FitFault::kBeyondRange);
  EXPECT_EQ(fit({.qparam = DType::kF32}, {4400, 4401}), FitFault::kNone);
  EXPECT_EQ(fit({}, {-1e6f, 1e6f}), FitFault::kBeyondRange);  // the scale
  for (float bad : {NAN, INFINITY, -INFINITY}) EXPECT_EQ(fit({}, {1, bad}), FitFault::kNonFinite);
}

TEST(QserveHead, ErrorStaysWithinTheDocumentedBound) {
  int64_t checked = 0;
  ForAll(20000, [&](Rng& rng) {
    const QserveSpec spec{.bits = rng.Pick({2, 3, 4, 8}), .qparam = rng.Pick({DType::kF16, DType::kF32})};
    const std::vector<float> x = AnyGroup(rng);
    QserveParams p;
    const FitFault fault = FitQserve(spec, AsGroup(x), &p);
    if (fault != FitFault::kNone) {
      EXPECT_EQ(fault, FitFault::kBeyondRange);
      return;
    }
    EXPECT_EQ(RoundTo(spec.qparam, p.scale), p.scale);
    EXPECT_EQ(RoundTo(spec.qparam, p.zero), p.zero);
    EXPECT_GE(p.scale, SmallestNormal(spec.qparam));
    const auto [mn, mx] = std::minmax_element(x.begin(), x.end());
    const double u = spec.qparam == DType::kF16 ? 0x1p-11 : 0x1p-24, scale = p.scale;
    const double bound =
        scale * (0.5 + spec.levels() * 0x1p-20) +
        (1.01 * u + 0x1p-20) * (std::fabs(static_cast<double>(*mn)) + std::fabs(static_cast<double>(*mx)));
    for (float v : x) {
      const int code = QserveCode(spec, v, p);
      EXPECT_EQ(code, std::nearbyint(std::clamp(std::fma(v, 1.0f / p.scale, p.zero), 0.0f, 1.0f * spec.levels())));
      EXPECT_LE(std::fabs(v - static_cast<double>(QserveValue(code, p))), bound) << v;
      ++checked;
    }
  });
  EXPECT_GT(checked, 300000);
}

// P23: compat equals safe while |min| / range < 32, and where it does not the two differ by exactly the wrap.
TEST(QserveHead, CompatDiffersFromSafeOnlyByTheWrap) {
  int64_t wraps = 0;
  ForAll(5000, [&](Rng& rng) {
    std::vector<float> x(64);
    const double ratio = rng.Chance(0.5) ? rng.Uniform(-32, 31) : rng.Uniform(48, 400) * (rng.Chance(0.5) ? 1 : -1);
    for (float& v : x) v = static_cast<float>(RoundToF16(ratio + rng.Uniform()));
    const QserveSpec safe, compat{.wrap = true};
    QserveParams p;
    if (FitQserve(safe, AsGroup(x), &p) != FitFault::kNone) return;
    const auto [mn, mx] = std::minmax_element(x.begin(), x.end());
    const bool near = std::fabs(*mn) / (*mx - *mn) < 32;
    for (float v : x) {
      const int a = QserveCode(safe, v, p), b = QserveCode(compat, v, p);
      if (a == b) continue;
      EXPECT_FALSE(near) << v << " of " << *mn << ".." << *mx;
      EXPECT_EQ(a, 15);
      EXPECT_LT(b, 15);
      ++wraps;
    }
  });
  EXPECT_GT(wraps, 100);  // the hazard is real at large ratios
}

}  // namespace
}  // namespace livequant
