// Every format against its definition: values from sign, exponent and mantissa by ldexp, rounding by search for the
// nearest value. Vectors: methods.md 9.1.
#include "numeric/float_formats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "numeric/parse_dtype.h"
#include "support/property.h"

namespace livequant {
namespace {

struct Shape {
  DType dtype;
  int exp_bits, man_bits, bias;
  bool has_inf;  // the top exponent holds Inf and NaN
  bool saturates;
};
constexpr Shape kShapes[] = {
    {DType::kF16, 5, 10, 15, true, false},
    {DType::kBF16, 8, 7, 127, true, false},
    {DType::kFp8E4M3, 4, 3, 7, false, true},
    {DType::kFp8E5M2, 5, 2, 15, true, true},
};

// The value of `code` by the textbook.
double Define(const Shape& s, uint32_t code) {
  const uint32_t man = code & ((1u << s.man_bits) - 1), exp = (code >> s.man_bits) & ((1u << s.exp_bits) - 1);
  const double sign = (code >> (s.man_bits + s.exp_bits)) != 0 ? -1 : 1;
  const uint32_t top = (1u << s.exp_bits) - 1;
  if (s.has_inf && exp == top) return man == 0 ? sign * INFINITY : NAN;
  if (!s.has_inf && exp == top && man == (1u << s.man_bits) - 1) return NAN;
  if (exp == 0) return sign * std::ldexp(man, 1 - s.bias - s.man_bits);
  return sign * std::ldexp(man + (1u << s.man_bits), static_cast<int>(exp) - s.bias - s.man_bits);
}

// Finite values >= 0 in rising order; index == code, since codes rise with magnitude.
std::vector<double> Magnitudes(const Shape& s) {
  std::vector<double> v;
  for (uint32_t c = 0; std::isfinite(Define(s, c)); ++c) v.push_back(Define(s, c));
  return v;
}

// Nearest, ties to the even code, by search. x is exact in double; all midpoints are too.
uint32_t NearestByDefinition(const Shape& s, const std::vector<double>& mags, double x) {
  const uint32_t sign = std::signbit(x) ? 1u << (s.man_bits + s.exp_bits) : 0;
  const double m = std::fabs(x);
  const uint32_t last = static_cast<uint32_t>(mags.size()) - 1;
  if (m >= mags[last]) {
    const double next = mags[last] + (mags[last] - mags[last - 1]);  // where an unbounded format would go on
    const bool down = s.saturates || m < (mags[last] + next) / 2;
    return sign | (down ? last : last + 1);  // f16, bf16: the code after the last finite one is Inf
  }
  const auto above = static_cast<uint32_t>(std::upper_bound(mags.begin(), mags.end(), m) - mags.begin());
  const double lo = mags[above - 1], hi = mags[above], mid = lo + (hi - lo) / 2;
  return sign | (m < mid ? above - 1 : m > mid ? above : above - 1 + ((above - 1) & 1));
}

TEST(FloatFormats, EveryCodeDecodesToItsDefinition) {
  for (const Shape& s : kShapes) {
    for (uint32_t code = 0; code < 1u << (8 * DTypeBytes(s.dtype)); ++code) {
      const double want = Define(s, code);
      const float got = DecodeAs(s.dtype, code);
      if (std::isnan(want)) {
        ASSERT_TRUE(std::isnan(got)) << DTypeName(s.dtype) << " " << code;
      } else {
        ASSERT_EQ(got, want) << DTypeName(s.dtype) << " " << code;
        ASSERT_EQ(std::signbit(got), std::signbit(want)) << DTypeName(s.dtype) << " " << code;
      }
    }
  }
}

TEST(FloatFormats, EveryFiniteCodeSurvivesARoundTrip) {
  for (const Shape& s : kShapes) {
    for (uint32_t code = 0; code < 1u << (8 * DTypeBytes(s.dtype)); ++code) {
      const double value = Define(s, code);
      if (std::isnan(value)) {
        ASSERT_TRUE(std::isnan(DecodeAs(s.dtype, EncodeAs(s.dtype, value))));
      } else if (std::isfinite(value) || !s.saturates) {
        ASSERT_EQ(EncodeAs(s.dtype, value), code) << DTypeName(s.dtype);
      } else {
        ASSERT_EQ(std::fabs(DecodeAs(s.dtype, EncodeAs(s.dtype, value))), MaxFinite(s.dtype));
      }
    }
  }
}

// P18: nearest-even with saturation, for every FP16 input.
TEST(FloatFormats, EveryF16InputEncodesToTheNearestFp8) {
  for (const Shape& s : kShapes) {
    if (DTypeBytes(s.dtype) != 1) continue;
    const std::vector<double> mags = Magnitudes(s);
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const double x = Define(kShapes[0], bits);
      const uint32_t got = EncodeAs(s.dtype, x);
      if (std::isnan(x)) {
        ASSERT_TRUE(std::isnan(DecodeAs(s.dtype, got)));
      } else {
        ASSERT_EQ(got, NearestByDefinition(s, mags, x)) << DTypeName(s.dtype) << " of " << x;
      }
    }
  }
}

TEST(FloatFormats, RandomValuesTiesAndNeighboursRoundToNearestEven) {
  for (const Shape& s : kShapes) {
    const std::vector<double> mags = Magnitudes(s);
    ForAll(20000, [&](Rng& rng) {
      double x;
      if (rng.Chance(0.5)) {  // exactly half-way, or a hair off it
        const auto i = static_cast<size_t>(rng.Range(0, std::ssize(mags) - 2));
        x = mags[i] + (mags[i + 1] - mags[i]) / 2;
        if (rng.Chance(0.6)) x = std::nextafter(x, rng.Chance(0.5) ? 0.0 : INFINITY);
      } else {
        x = std::ldexp(rng.Uniform(1, 2), static_cast<int>(rng.Range(-160, 140)));
      }
      if (rng.Chance(0.5)) x = -x;
      EXPECT_EQ(EncodeAs(s.dtype, x), NearestByDefinition(s, mags, x)) << DTypeName(s.dtype) << " of " << x;
      const double value = DecodeAs(s.dtype, EncodeAs(s.dtype, x));
      EXPECT_EQ(RoundTo(s.dtype, x), value) << DTypeName(s.dtype) << " of " << x;
    });
  }
}

// The f32 entry points take shorter steps than EncodeBits; they round alike, near every code and anywhere.
TEST(FloatFormats, FloatEntryPointsRoundAsTheDoubleOnesDo) {
  const auto check = [](uint32_t bits) {
    const float x = std::bit_cast<float>(bits);
    ASSERT_EQ(F16FromFloat(x), F16FromDouble(x)) << x;
    ASSERT_EQ(Bf16FromFloat(x), Bf16FromDouble(x)) << x;
  };
  for (uint32_t code = 0; code < 65536; ++code) {
    const uint32_t f16 = std::bit_cast<uint32_t>(F16ToFloat(static_cast<uint16_t>(code)));
    for (uint32_t tie : {0u, 0x1000u}) {
      for (uint32_t step : {0u, 1u, ~0u}) check(f16 + tie + step);
    }
    for (uint32_t low : {0u, 1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) check(code << 16 | low);
  }
  ForAll(20, [&](Rng& rng) {
    for (int i = 0; i < 100000; ++i) check(static_cast<uint32_t>(rng.Next()));
  });
}

TEST(FloatFormats, InfinityOverflowsOrSaturatesAndNanStaysNan) {
  for (const Shape& s : kShapes) {
    for (double sign : {1.0, -1.0}) {
      const float got = DecodeAs(s.dtype, EncodeAs(s.dtype, sign * INFINITY));
      EXPECT_EQ(got, s.saturates ? sign * MaxFinite(s.dtype) : sign * INFINITY);
    }
    EXPECT_TRUE(std::isnan(DecodeAs(s.dtype, EncodeAs(s.dtype, NAN))));
    EXPECT_TRUE(std::isnan(RoundTo(s.dtype, NAN)));
  }
  EXPECT_EQ(RoundToF16(65519.9), 65504.0);
  EXPECT_EQ(RoundToF16(65520.0), INFINITY);
  EXPECT_EQ(RoundToF16(-65520.0), -INFINITY);
}

TEST(FloatFormats, LimitsAreThoseOfTheDefinition) {
  for (const Shape& s : kShapes) {
    EXPECT_EQ(MaxFinite(s.dtype), Magnitudes(s).back()) << DTypeName(s.dtype);
    EXPECT_EQ(SmallestNormal(s.dtype), Define(s, 1u << s.man_bits)) << DTypeName(s.dtype);
  }
}

TEST(FloatFormats, PublishedFp8Vectors) {  // methods.md 9.1
  struct Row {
    double x;
    int e4m3, e5m2;
  };
  const Row rows[] = {{1.0, 0x38, 0x3C},      {0.3, 0x2A, 0x35},  {3.3, 0x45, 0x43},    {17, 0x58, 0x4C},
                      {18, 0x59, 0x4C},       {240, 0x77, 0x5C},  {0x1p-9, 0x01, 0x18}, {0x1p-10, 0x00, 0x14},
                      {0x1.8p-9, 0x02, 0x1A}, {-2.7, 0xC3, 0xC1}, {-0.0, 0x80, 0x80},   {.017, 0x09, 0x24}};
  for (const Row& r : rows) {
    EXPECT_EQ(Fp8E4M3FromDouble(r.x), r.e4m3) << r.x;
    EXPECT_EQ(Fp8E5M2FromDouble(r.x), r.e5m2) << r.x;
  }
  for (double x : {447.0, 448.0, 464.0, 465.0, 1e5}) EXPECT_EQ(Fp8E4M3FromDouble(x), 0x7E) << x;
  EXPECT_EQ(Fp8E5M2FromDouble(1e5), 0x7B);
  EXPECT_EQ(Fp8E4M3ToFloat(0x45), 3.25f);
  EXPECT_EQ(Fp8E5M2ToFloat(0x43), 3.5f);
  EXPECT_EQ(Fp8E5M2ToFloat(0x5C), 256.0f);
}

// Poison is a run of FF bytes; a reader that meets it must see NaN.
TEST(FloatFormats, PoisonBytesAreNanInEveryFormat) {
  const std::byte poison[4] = {std::byte{0xFF}, std::byte{0xFF}, std::byte{0xFF}, std::byte{0xFF}};
  for (DType t : {DType::kF32, DType::kF16, DType::kBF16, DType::kFp8E4M3, DType::kFp8E5M2}) {
    EXPECT_TRUE(std::isnan(LoadAs(t, poison, 0))) << DTypeName(t);
  }
}

TEST(FloatFormats, StoredValuesAreLittleEndianAtAnyAlignment) {
  std::byte bytes[9] = {};
  StoreAs(DType::kF16, 1.5, bytes + 1, 1);
  EXPECT_EQ(bytes[3], std::byte{0x00});
  EXPECT_EQ(bytes[4], std::byte{0x3E});
  EXPECT_EQ(LoadAs(DType::kF16, bytes + 1, 1), 1.5f);
  StoreAs(DType::kF32, -2.0, bytes + 1, 1);
  EXPECT_EQ(bytes[8], std::byte{0xC0});
  EXPECT_EQ(LoadAs(DType::kF32, bytes + 1, 1), -2.0f);
}

static_assert(F16FromFloat(1.0f) == 0x3C00 && Bf16FromFloat(1.0f) == 0x3F80 && Fp8E4M3FromDouble(448) == 0x7E);
static_assert(RoundHalfEven(2.5) == 2 && RoundHalfEven(3.5) == 4 && RoundHalfEven(-0.5) == 0 &&
              RoundHalfEven(-1.5) == -2);

TEST(ParseDType, AcceptsEveryNameAndRefusesFnuzByName) {
  for (DType t : {DType::kF32, DType::kF16, DType::kBF16, DType::kFp8E4M3, DType::kFp8E5M2}) {
    auto parsed = ParseDType(DTypeName(t));
    ASSERT_TRUE(parsed.ok());
    EXPECT_EQ(*parsed, t);
  }
  for (const char* name : {"fp8_e4m3fnuz", "fp8_e5m2fnuz", "float8_e4m3FNUZ"}) {
    auto parsed = ParseDType(name);
    ASSERT_FALSE(parsed.ok());
    EXPECT_EQ(parsed.status().code(), Code::kUnsupported);
    EXPECT_NE(parsed.status().message().find(name), std::string::npos);
  }
  for (const char* name : {"", "F16", "float16", "fp8", "int8"}) {
    EXPECT_EQ(ParseDType(name).status().code(), Code::kInvalidArgument) << name;
  }
}

}  // namespace
}  // namespace livequant
