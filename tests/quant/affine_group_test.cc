// The sentences of quant/affine_group.h and the vectors of methods.md 4.10. P1, P14.
#include "quant/affine_group.h"

#include <gtest/gtest.h>

#include "quant/groups.h"

namespace livequant {
namespace {

struct AffineCase {
  std::vector<float> x;
  int bits;
  int min_bits, scale_bits;
  std::vector<int> codes;
  std::vector<float> decoded;  // empty: not published
};

TEST(AffineGroup, PublishedGroups) {
  const AffineCase cases[] = {
      {{-1, .2f, .9f, 2}, 2, 0xBC00, 0x3C00, {0, 1, 2, 3}, {-1, 0, 1, 2}},
      {{-1, .2f, .9f, 2}, 4, 0xBC00, 0x3266, {0, 6, 10, 15}, {-1, .19970703125f, .99951171875f, 1.999267578125f}},
      {{1, 2, 1.4f, 1.6f}, 2, 0x3C00, 0x3555, {0, 3, 1, 2}, {1, 1.999755859375f, 1.333251953125f, 1.66650390625f}},
      {{1, 2, 1.4f, 1.6f}, 4, 0x3C00, 0x2C44, {0, 15, 6, 9}, {1, 1.999755859375f, 1.39990234375f, 1.599853515625f}},
      {{100, 100.25f, 100.5f, 101}, 2, 0x5640, 0x3555, {0, 1, 2, 3}, {}},
      {{100, 100.25f, 100.5f, 101}, 4, 0x5640, 0x2C44, {0, 4, 8, 15}, {}},
      {{-.3f, .05f, .4f, -.12f},
       2,
       0xB4CD,
       0x3378,
       {0, 2, 3, 1},
       {-.300048828125f, .166748046875f, .400146484375f, -.066650390625f}},
      {{-.3f, .05f, .4f, -.12f},
       4,
       0xB4CD,
       0x29FA,
       {0, 7, 15, 4},
       {-.300048828125f, .02679443359375f, .40032958984375f, -.11328125f}},
      {{8, 7.5f, -8, 6}, 2, 0xC800, 0x4555, {3, 3, 0, 3}, {7.99609375f, 7.99609375f, -8, 7.99609375f}},
      {{.1f, -.2f, .15f, .05f},
       2,
       0xB266,
       0x2F78,
       {3, 0, 3, 2},
       {.150146484375f, -.199951171875f, .150146484375f, .033447265625f}},
  };
  for (const AffineCase& c : cases) {
    const AffineSpec spec{.bits = c.bits};
    AffineParams p;
    ASSERT_EQ(FitAffine(spec, AsGroup(c.x), &p), FitFault::kNone);
    EXPECT_EQ(F16FromFloat(p.min), c.min_bits) << c.x[0] << " " << c.bits;
    EXPECT_EQ(F16FromFloat(p.scale), c.scale_bits) << c.x[0] << " " << c.bits;
    for (size_t i = 0; i < c.x.size(); ++i) {
      const int code = AffineCode(spec, c.x[i], p);
      EXPECT_EQ(code, c.codes[i]) << c.x[i] << " " << c.bits;
      if (!c.decoded.empty()) {
        EXPECT_EQ(AffineValue(code, p), c.decoded[i]) << c.x[i] << " " << c.bits;
      }
    }
  }
}

TEST(AffineGroup, ConstantGroupsDecodeExactlyAndNeverDivide) {
  for (DType qparam : {DType::kF16, DType::kF32}) {
    for (float c : {0.0f, 1.5f, -65504.0f, 0x1p-24f, -0x1p-14f}) {
      for (bool refuse : {false, true}) {
        const AffineSpec spec{.bits = 2, .qparam = qparam, .refuse_small_scale = refuse};
        const std::vector<float> x(9, c);
        AffineParams p;
        ASSERT_EQ(FitAffine(spec, AsGroup(x), &p), FitFault::kNone);
        EXPECT_EQ(p.scale, 1.0f);
        EXPECT_EQ(p.min, c);
        EXPECT_EQ(AffineCode(spec, c, p), 0);
        EXPECT_EQ(AffineValue(0, p), c);
      }
    }
  }
  // Values that become one f16 are a constant group too.
  const std::vector<float> close = {1.0f, 1.00001f};
  AffineParams p;
  ASSERT_EQ(FitAffine({.bits = 2}, AsGroup(close), &p), FitFault::kNone);
  EXPECT_EQ(p.scale, 1.0f);
}

// P14
TEST(AffineGroup, RangesBeyondTheDtypeAndNonFiniteValuesAreFaults) {
  AffineParams p;
  const auto fit = [&p](DType qparam, std::vector<float> x) {
    return FitAffine({.bits = 4, .qparam = qparam}, AsGroup(x), &p);
  };
  EXPECT_EQ(fit(DType::kF16, {-40000, 40000}), FitFault::kBeyondRange);  // each fits, their distance does not
  EXPECT_EQ(fit(DType::kF16, {-32752, 32752}), FitFault::kNone);
  EXPECT_EQ(fit(DType::kF16, {0, 65520}), FitFault::kBeyondRange);
  EXPECT_EQ(fit(DType::kF16, {70000, 70000}), FitFault::kBeyondRange);
  EXPECT_EQ(fit(DType::kF32, {-40000, 40000}), FitFault::kNone);
  EXPECT_EQ(fit(DType::kF32, {-3e38f, 3e38f}), FitFault::kBeyondRange);
  for (float bad : {NAN, INFINITY, -INFINITY}) {
    EXPECT_EQ(fit(DType::kF16, {1, bad, 2}), FitFault::kNonFinite);
    EXPECT_EQ(fit(DType::kF32, {bad}), FitFault::kNonFinite);
  }
}

TEST(AffineGroup, SmallScalesAreFlooredOrRefused) {
  const std::vector<float> x = {1.0f, 1.0009765625f};  // one f16 step: range / 15 is below 2^-14
  AffineParams p;
  EXPECT_EQ(FitAffine({.bits = 8, .refuse_small_scale = true}, AsGroup(x), &p), FitFault::kSmallScale);
  ASSERT_EQ(FitAffine({.bits = 8}, AsGroup(x), &p), FitFault::kNone);
  EXPECT_EQ(p.scale, 0x1p-14f);
  EXPECT_EQ(AffineCode({.bits = 8}, x[1], p), 16);
  EXPECT_EQ(AffineValue(16, p), x[1]);
}

// Every step of methods.md 4.2 as one f16 operation, spelled with encode and decode of f16 bits.
TEST(AffineGroup, EncoderIsFp16Arithmetic) {
  const auto f16 = [](double v) { return static_cast<double>(F16ToFloat(F16FromDouble(v))); };
  ForAll(3000, [&](Rng& rng) {
    std::vector<float> x = AnyGroup(rng);
    for (float& v : x) v = static_cast<float>(f16(v));
    const AffineSpec spec{.bits = rng.Pick({2, 4, 8})};
    AffineParams p;
    if (FitAffine(spec, AsGroup(x), &p) != FitFault::kNone) return;
    const auto [mn, mx] = std::minmax_element(x.begin(), x.end());
    EXPECT_EQ(p.min, *mn);
    const double scale = f16(f16(*mx - *mn) / spec.levels());
    if (*mn == *mx || scale < 0x1p-14) return;
    EXPECT_EQ(p.scale, scale);
    for (float v : x) {
      const double q = std::min(std::max(f16(f16(v - *mn) / scale), 0.0), static_cast<double>(spec.levels()));
      EXPECT_EQ(AffineCode(spec, v, p), std::nearbyint(q));
    }
  });
}

TEST(AffineGroup, ErrorStaysWithinTheDocumentedBound) {
  int64_t checked = 0;
  ForAll(20000, [&](Rng& rng) {
    const AffineSpec spec{.bits = rng.Pick({2, 3, 4, 8}), .qparam = rng.Pick({DType::kF16, DType::kF32})};
    const std::vector<float> x = AnyGroup(rng);
    AffineParams p;
    const FitFault fault = FitAffine(spec, AsGroup(x), &p);
    if (fault != FitFault::kNone) {
      EXPECT_EQ(fault, FitFault::kBeyondRange);  // nothing else may stop finite values here
      return;
    }
    EXPECT_EQ(RoundTo(spec.qparam, p.scale), p.scale);
    EXPECT_EQ(RoundTo(spec.qparam, p.min), p.min);
    EXPECT_GE(p.scale, SmallestNormal(spec.qparam));
    const bool f16 = spec.qparam == DType::kF16;
    const double u = f16 ? 0x1p-11 : 0x1p-24, tiny = f16 ? 0x1p-24 : 0x1p-149, scale = p.scale, levels = spec.levels();
    for (float v : x) {
      const double bound =
          scale * (0.5 + 3 * levels * u) + u * std::fabs(v) + tiny + 0x1p-24 * (std::fabs(p.min) + levels * scale);
      EXPECT_LE(std::fabs(v - static_cast<double>(AffineValue(AffineCode(spec, v, p), p))), bound) << v;
      ++checked;
    }
  });
  EXPECT_GT(checked, 300000);
}

}  // namespace
}  // namespace livequant
