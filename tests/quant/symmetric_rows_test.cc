// The sentences of quant/symmetric_rows.h and the vectors of methods.md 1.1. P1, P2, P14.
#include "quant/symmetric_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "quant/groups.h"

namespace livequant {
namespace {

using ::testing::HasSubstr;

struct Coded {
  float scale;
  std::vector<int> codes;
};
Coded Encode(const SymmetricSpec& spec, const std::vector<float>& x) {
  SymmetricParams p;
  EXPECT_EQ(FitSymmetric(spec, AsGroup(x), &p), FitFault::kNone);
  Coded c{.scale = p.scale, .codes = {}};
  for (float v : x) c.codes.push_back(SymmetricCode(spec, v, p));
  return c;
}

TEST(SymmetricRows, PublishedRows) {
  const std::vector<float> rows[] = {{0.5f, -1, 0.25f, 0.75f}, {0, 0, 0, 0}, {3, -4, 1, 0.1f}};
  struct Case {
    int bits;
    DType qparam;
    std::vector<int> codes[3];
    uint32_t scale_bits[3];
  };
  const Case cases[] = {
      {8, DType::kF16, {{64, -127, 32, 95}, {0, 0, 0, 0}, {95, -127, 32, 3}}, {0x2008, 0x3C00, 0x2808}},
      {8, DType::kF32, {{64, -127, 32, 95}, {0, 0, 0, 0}, {95, -127, 32, 3}}, {0x3C010204, 0x3F800000, 0x3D010204}},
      {4, DType::kF16, {{4, -7, 2, 5}, {0, 0, 0, 0}, {5, -7, 2, 0}}, {0x3092, 0x3C00, 0x3892}},
      {4, DType::kF32, {{3, -7, 2, 5}, {0, 0, 0, 0}, {5, -7, 2, 0}}, {0x3E124925, 0x3F800000, 0x3F124925}},
      {3, DType::kF16, {{2, -3, 1, 2}, {0, 0, 0, 0}, {2, -3, 1, 0}}, {0x3555, 0x3C00, 0x3D55}},
      {3, DType::kF32, {{1, -3, 1, 2}, {0, 0, 0, 0}, {2, -3, 1, 0}}, {0x3EAAAAAB, 0x3F800000, 0x3FAAAAAB}},
      {2, DType::kF16, {{0, -1, 0, 1}, {0, 0, 0, 0}, {1, -1, 0, 0}}, {0x3C00, 0x3C00, 0x4400}},
      {2, DType::kF32, {{0, -1, 0, 1}, {0, 0, 0, 0}, {1, -1, 0, 0}}, {0x3F800000, 0x3F800000, 0x40800000}},
  };
  for (const Case& c : cases) {
    for (int r = 0; r < 3; ++r) {
      const Coded got = Encode({.bits = c.bits, .qparam = c.qparam}, rows[r]);
      EXPECT_EQ(got.codes, c.codes[r]) << c.bits << " " << DTypeName(c.qparam) << " row " << r;
      EXPECT_EQ(EncodeAs(c.qparam, got.scale), c.scale_bits[r]) << c.bits << " " << DTypeName(c.qparam) << " row " << r;
    }
  }
  const SymmetricParams p{.scale = F16ToFloat(0x2008)};
  const float decoded[] = {0.50390625f, -0.99993896484375f, 0.251953125f, 0.74798583984375f};
  for (int i = 0; i < 4; ++i) EXPECT_EQ(SymmetricValue(cases[0].codes[0][static_cast<size_t>(i)], p), decoded[i]);
}

TEST(SymmetricRows, TiesGoToEven) {
  const Coded four = Encode({.bits = 4}, {7, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f});
  EXPECT_EQ(four.scale, 1.0f);
  EXPECT_EQ(four.codes, (std::vector<int>{7, 0, 2, 2, 0, -2, -2}));
  const Coded eight = Encode({.bits = 8, .qparam = DType::kF32}, {127, 0.5f, 1.5f, -2.5f, 63.5f});
  EXPECT_EQ(eight.scale, 1.0f);
  EXPECT_EQ(eight.codes, (std::vector<int>{127, 0, 2, -2, 64}));
}

TEST(SymmetricRows, CodesComeFromTheScaleThatIsStored) {
  EXPECT_EQ(Encode({.bits = 8}, {1.0f, 0.49999f, 0.3333f, -0.7777f}).codes, (std::vector<int>{127, 64, 42, -99}));
  EXPECT_EQ(Encode({.bits = 8}, {1.0f, 0.374f, 0.437f}).codes, (std::vector<int>{127, 48, 56}));
  const SymmetricParams unrounded{.scale = 1.0f / 127};  // what a writer that skips the re-read would use
  EXPECT_EQ(SymmetricCode({.bits = 8}, 0.49999f, unrounded), 63);
  EXPECT_EQ(SymmetricCode({.bits = 8}, 0.374f, unrounded), 47);
  EXPECT_EQ(SymmetricCode({.bits = 8}, 0.437f, unrounded), 55);
}

TEST(SymmetricRows, ScalesOutsideTheNormalRangeFollowThePolicy) {
  const SymmetricSpec refuse{.bits = 8, .refuse_small_scale = true}, floor{.bits = 8};
  SymmetricParams p;
  const auto fit = [&p](const SymmetricSpec& spec, float amax) {
    const std::vector<float> x = {amax, -amax / 2};
    return FitSymmetric(spec, AsGroup(x), &p);
  };
  EXPECT_EQ(fit(refuse, 0.0077f), FitFault::kSmallScale);
  EXPECT_EQ(fit(floor, 0.0077f), FitFault::kNone);
  EXPECT_EQ(p.scale, 0x1p-14f);
  EXPECT_EQ(fit(refuse, 0.00775f), FitFault::kNone);  // rounds up to 2^-14
  EXPECT_EQ(p.scale, 0x1p-14f);
  EXPECT_EQ(fit(refuse, 8320913.0f), FitFault::kNone);
  EXPECT_EQ(p.scale, 65504.0f);
  EXPECT_EQ(fit(refuse, 8321040.0f), FitFault::kBeyondRange);
  EXPECT_EQ(fit(floor, 8321040.0f), FitFault::kBeyondRange);
  EXPECT_EQ(fit({.bits = 8, .qparam = DType::kF32, .refuse_small_scale = true}, 0x1p-120f), FitFault::kSmallScale);
  EXPECT_EQ(fit({.bits = 8, .qparam = DType::kF32}, 0x1p-120f), FitFault::kNone);
  EXPECT_EQ(p.scale, 0x1p-126f);
  EXPECT_EQ(fit({.bits = 8, .qparam = DType::kF32}, std::numeric_limits<float>::max()), FitFault::kNone);
  // Thresholds on max|x| of methods.md 1.1: qmax * 2^-14, less what rounds up.
  const double thresholds[] = {6.1035e-05, 1.8311e-04, 4.2725e-04, 9.1553e-04, 1.8921e-03, 3.8452e-03, 7.7515e-03};
  for (int bits = 2; bits <= 8; ++bits) {
    const SymmetricSpec spec{.bits = bits, .refuse_small_scale = true};
    EXPECT_EQ(fit(spec, static_cast<float>(thresholds[bits - 2] * 0.999)), FitFault::kSmallScale) << bits;
    EXPECT_EQ(fit(spec, static_cast<float>(thresholds[bits - 2] * 1.001)), FitFault::kNone) << bits;
  }
}

// P14
TEST(SymmetricRows, ConstantZeroSubnormalHugeAndNonFiniteGroups) {
  for (int bits = 2; bits <= 8; ++bits) {
    for (DType qparam : {DType::kF16, DType::kF32}) {
      const SymmetricSpec spec{.bits = bits, .qparam = qparam};
      const Coded zero = Encode(spec, {0.0f, -0.0f, 0.0f});
      EXPECT_EQ(zero.scale, 1.0f);
      EXPECT_EQ(zero.codes, (std::vector<int>{0, 0, 0}));
      EXPECT_EQ(Encode(spec, {-3.0f, -3.0f}).codes, (std::vector<int>{-spec.qmax(), -spec.qmax()}));
      const Coded subnormal = Encode(spec, {0x1p-140f, -0x1p-149f});
      EXPECT_EQ(subnormal.scale, SmallestNormal(qparam));
      EXPECT_EQ(subnormal.codes, (std::vector<int>{0, 0}));
      SymmetricParams p;
      for (float bad : {NAN, -NAN, INFINITY, -INFINITY}) {
        for (size_t at : {0, 1, 6}) {
          std::vector<float> x(7, 1.0f);
          x[at] = bad;
          EXPECT_EQ(FitSymmetric(spec, AsGroup(x), &p), FitFault::kNonFinite);
        }
      }
    }
  }
}

TEST(SymmetricRows, FaultsBecomeStatusesThatNameValueAndLimit) {
  const std::vector<float> small = {0.0077f, 0}, nan = {1, NAN}, huge = {8321040.0f, -1};
  const Status s = FaultStatus(FitFault::kSmallScale, AsGroup(small), DType::kF16, "row 3");
  EXPECT_EQ(s.code(), Code::kOutOfRange);
  EXPECT_THAT(s.message(), HasSubstr("row 3: values 0 to 0.0076"));
  EXPECT_THAT(s.message(), HasSubstr("6.10351562e-05"));
  const Status n = FaultStatus(FitFault::kNonFinite, AsGroup(nan), DType::kF16, "row 4");
  EXPECT_EQ(n.code(), Code::kNonFinite);
  EXPECT_THAT(n.message(), HasSubstr("row 4: value 1 of the group is nan"));
  const Status b = FaultStatus(FitFault::kBeyondRange, AsGroup(huge), DType::kF16, "row 5");
  EXPECT_EQ(b.code(), Code::kNonFinite);
  EXPECT_THAT(b.message(), HasSubstr("8321040"));
  EXPECT_THAT(b.message(), HasSubstr("65504"));
}

// P2 and the header's error bound, over every width, dtype and magnitude.
TEST(SymmetricRows, ErrorStaysWithinTheDocumentedBoundAndTheClipNeverFires) {
  ForAll(20000, [](Rng& rng) {
    const SymmetricSpec spec{.bits = static_cast<int>(rng.Range(2, 8)), .qparam = rng.Pick({DType::kF16, DType::kF32})};
    const std::vector<float> x = AnyGroup(rng);
    SymmetricParams p;
    if (const FitFault fault = FitSymmetric(spec, AsGroup(x), &p); fault != FitFault::kNone) {
      EXPECT_EQ(fault, FitFault::kBeyondRange);
      const auto [lo, hi] = std::minmax_element(x.begin(), x.end());
      EXPECT_GE(std::max(-*lo, *hi) / spec.qmax(), 65519.0f);
      return;
    }
    EXPECT_EQ(RoundTo(spec.qparam, p.scale), p.scale);
    EXPECT_GE(p.scale, SmallestNormal(spec.qparam));
    for (float v : x) {
      EXPECT_LT(std::fabs(v / static_cast<double>(p.scale)), spec.qmax() + 0.5);
      const int code = SymmetricCode(spec, v, p);
      EXPECT_EQ(code, std::nearbyint(v / static_cast<double>(p.scale)));  // P1: from the value and what is stored
      const double decoded = SymmetricValue(code, p);
      EXPECT_LE(std::fabs(v - decoded), p.scale * 0.5 + 0x1p-24 * std::fabs(decoded)) << v;
    }
  });
}

TEST(SymmetricRows, StridedGroupsAreTheSameGroups) {
  ForAll(200, [](Rng& rng) {
    std::vector<float> x = AnyGroup(rng);
    for (float& v : x) v = std::clamp(v, -1e4f, 1e4f);
    const int64_t stride = rng.Range(2, 9);
    std::vector<float> spread(static_cast<size_t>(std::ssize(x) * stride), NAN);
    for (size_t i = 0; i < x.size(); ++i) spread[i * static_cast<size_t>(stride)] = x[i];
    SymmetricParams a, b;
    const SymmetricSpec spec{.bits = 4};
    ASSERT_EQ(FitSymmetric(spec, AsGroup(x), &a), FitFault::kNone);
    ASSERT_EQ(FitSymmetric(spec, {spread.data(), std::ssize(x), stride}, &b), FitFault::kNone);
    EXPECT_EQ(a.scale, b.scale);
  });
}

}  // namespace
}  // namespace livequant
