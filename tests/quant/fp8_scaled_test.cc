// The sentences of quant/fp8_scaled.h and the scaled vectors of methods.md 9.1. P18.
#include "quant/fp8_scaled.h"

#include <gtest/gtest.h>

#include "quant/groups.h"

namespace livequant {
namespace {

TEST(Fp8Scaled, PublishedVectors) {
  const Fp8Spec small{.scale = .0125f}, eight{.scale = 8.0f / 448}, one{};
  EXPECT_EQ(eight.scale, .01785714365f);
  EXPECT_EQ(Fp8Code(small, 5.6f), 0x7E);
  EXPECT_EQ(Fp8Code(small, -1), 0xEA);
  EXPECT_EQ(Fp8Code(small, .003f), 0x27);
  EXPECT_FLOAT_EQ(Fp8Value(small, 0x27), .0029296875f);
  EXPECT_EQ(Fp8Code(small, .5f), 0x62);
  EXPECT_EQ(Fp8Code(eight, 3.1f), 0x73);
  EXPECT_EQ(Fp8Value(eight, 0x73), 3.14285728f);
  EXPECT_EQ(Fp8Code(one, 3.1f), 0x44);
  EXPECT_EQ(Fp8Value(one, 0x44), 3.0f);
  EXPECT_EQ(Fp8Code(one, .01f), 0x05);
  EXPECT_EQ(Fp8Value(one, 0x05), .009765625f);
  EXPECT_EQ(Fp8Code(one, .0007f), 0x00);
  EXPECT_EQ(Fp8Code(one, 600), 0x7E);
  EXPECT_EQ(Fp8Value(one, 0x7E), 448.0f);
}

TEST(Fp8Scaled, ErrorStaysWithinTheDocumentedBoundAndSaturates) {
  ForAll(50000, [](Rng& rng) {
    const bool e4m3 = rng.Chance(0.5);
    const Fp8Spec spec{
        .dtype = e4m3 ? DType::kFp8E4M3 : DType::kFp8E5M2,
        .scale = static_cast<float>(std::ldexp(rng.Uniform(1, 2), static_cast<int>(rng.Range(-126, 100))))};
    ASSERT_TRUE(CheckFp8Scale(spec).ok());
    const double max = MaxFinite(spec.dtype) * spec.scale;
    const float x = static_cast<float>(
        std::clamp(std::ldexp(rng.Normal(), static_cast<int>(rng.Range(-14, 20))) * spec.scale, -3e38, 3e38));
    const double decoded = Fp8Value(spec, Fp8Code(spec, x));
    if (std::fabs(x) > max) {
      EXPECT_EQ(std::fabs(decoded), static_cast<float>(max)) << x;
      EXPECT_EQ(std::signbit(decoded), std::signbit(x));
      return;
    }
    const double relative = e4m3 ? 0x1p-4 : 0x1p-3, step = e4m3 ? 0x1p-10 : 0x1p-17;
    EXPECT_LE(std::fabs(x - decoded),
              std::max(relative * std::fabs(x), step * spec.scale) + 0x1p-24 * std::fabs(decoded) + 0x1p-149)
        << x << " scale " << spec.scale;
  });
}

// A code is a fixed point of decode and encode: what was read back encodes to itself.
TEST(Fp8Scaled, EveryFiniteCodeSurvivesDecodeAndEncode) {
  ForAll(100, [](Rng& rng) {
    for (DType t : {DType::kFp8E4M3, DType::kFp8E5M2}) {
      const Fp8Spec spec{
          .dtype = t, .scale = static_cast<float>(std::ldexp(rng.Uniform(1, 2), static_cast<int>(rng.Range(-20, 20))))};
      for (int code = 0; code < 256; ++code) {
        const float value = Fp8Value(spec, static_cast<uint8_t>(code));
        if (std::isfinite(value)) {
          EXPECT_EQ(Fp8Code(spec, value), code) << DTypeName(t);
        }
      }
    }
  });
}

TEST(Fp8Scaled, ScalesThatWouldLoseMeaningAreRefused) {
  for (float bad : {0.0f, -1.0f, NAN, INFINITY, 0x1p-127f, 1e36f}) {
    const Status s = CheckFp8Scale({.scale = bad});
    EXPECT_EQ(s.code(), Code::kOutOfRange) << bad;
  }
  EXPECT_NE(CheckFp8Scale({.scale = -1.5f}).message().find("-1.5"), std::string::npos);
  EXPECT_TRUE(CheckFp8Scale({.scale = 0x1p-126f}).ok());
  EXPECT_TRUE(CheckFp8Scale({.scale = 7e35f}).ok());
  EXPECT_EQ(CheckFp8Scale({.dtype = DType::kF16}).code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace livequant
