// numeric/float_formats.h: f16, bf16, fp8 e4m3fn and e5m2 as bits, and the rounding that every encoder shares.
//
// Invariants: one source for host and device, constexpr, no table. Rounding is to nearest, ties to even, from the given
// value in one step (a double is never rounded through f32 first). Decoding is exact.
//
//   format     sign.exp.man  bias  largest  smallest normal  beyond the largest      NaN
//   f16        1.5.10        15    65504    2^-14            +-Inf (IEEE)            kept
//   bf16       1.8.7         127   3.39e38  2^-126           +-Inf (IEEE)            kept
//   fp8_e4m3   1.4.3         7     448      2^-6             saturates, Inf too      7F / FF; the format has no Inf
//   fp8_e5m2   1.5.2         15    57344    2^-14            saturates, Inf too      7F / FF; decodes 7C / FC to Inf
//
// Source: IEEE 754; "FP8 formats for deep learning", arXiv 2209.05433; methods.md 9.1. Normative:
// docs/formats/numbers.md
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "numeric/dtype.h"

namespace livequant {

// Nearest integer, ties to even. REQUIRES |x| <= 2^51. -0.4 gives -0.
constexpr double RoundHalfEven(double x) {
  constexpr double kMagic = 0x1.8p52;  // the ulp is 1 here, so the sum rounds to an integer
  return (x + kMagic) - kMagic;
}

namespace internal {

// The shape of a small format and what it does beyond its largest value.
struct F16Shape {
  static constexpr int kMan = 10, kBias = 15;
  static constexpr uint32_t kSign = 0x8000, kMaxFinite = 0x7BFF, kOverflow = 0x7C00, kNaN = 0x7E00;
};
struct Bf16Shape {
  static constexpr int kMan = 7, kBias = 127;
  static constexpr uint32_t kSign = 0x8000, kMaxFinite = 0x7F7F, kOverflow = 0x7F80, kNaN = 0x7FC0;
};
struct E4M3Shape {
  static constexpr int kMan = 3, kBias = 7;
  static constexpr uint32_t kSign = 0x80, kMaxFinite = 0x7E, kOverflow = 0x7E, kNaN = 0x7F;
};
struct E5M2Shape {
  static constexpr int kMan = 2, kBias = 15;
  static constexpr uint32_t kSign = 0x80, kMaxFinite = 0x7B, kOverflow = 0x7B, kNaN = 0x7F;
};

// Bits of `x` rounded once to Shape.
template <class Shape>
constexpr uint32_t EncodeBits(double x) {
  constexpr int kSrcMan = 52, kSrcBias = 1023;
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  const uint32_t sign = (bits >> 63) != 0 ? Shape::kSign : 0;
  const uint64_t mag = bits & ~(uint64_t{1} << 63);
  const int exponent = static_cast<int>(mag >> kSrcMan);
  if (exponent == 0x7FF) return sign | ((mag << 12) != 0 ? Shape::kNaN : Shape::kOverflow);
  // Below the smallest normal the target's ulp stays fixed, so more bits are dropped there.
  const int smallest_normal = kSrcBias + 1 - Shape::kBias;
  const bool normal = exponent >= smallest_normal;
  const int drop = kSrcMan - Shape::kMan + (normal ? 0 : smallest_normal - exponent);
  if (drop > kSrcMan + 2) return sign;  // below half of the smallest subnormal
  const uint64_t man = mag & ((uint64_t{1} << kSrcMan) - 1);
  const uint64_t significand = man | (exponent != 0 ? uint64_t{1} << kSrcMan : 0);
  const uint64_t half = uint64_t{1} << (drop - 1);
  const uint64_t rounded = (significand + (half - 1) + ((significand >> drop) & 1)) >> drop;
  // A carry out of the significand moves into the exponent by itself. A normal's hidden bit adds one exponent step.
  const uint64_t code = normal ? rounded + (static_cast<uint64_t>(exponent - smallest_normal) << Shape::kMan) : rounded;
  return sign | static_cast<uint32_t>(code > Shape::kMaxFinite ? Shape::kOverflow : code);
}

// The value of finite bits `code` (sign included); Inf and NaN are the callers'.
template <class Shape>
constexpr float DecodeFinite(uint32_t code) {
  const uint32_t mag = code & (Shape::kSign - 1);
  const uint32_t sign = (code & Shape::kSign) != 0 ? 0x80000000u : 0;
  const uint32_t exponent = mag >> Shape::kMan;
  if (exponent != 0) {
    return std::bit_cast<float>(sign |
                                ((mag << (23 - Shape::kMan)) + (static_cast<uint32_t>(127 - Shape::kBias) << 23)));
  }
  // man * 2^(1 - bias - kMan), a normal f32 for every format handled here.
  const float ulp = std::bit_cast<float>(static_cast<uint32_t>(127 + 1 - Shape::kBias - Shape::kMan) << 23);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(static_cast<float>(mag) * ulp) | sign);
}

// Inf or the quiet NaN, with a sign.
constexpr float SpecialF32(bool negative, bool nan) {
  return std::bit_cast<float>((negative ? 0x80000000u : 0) | (nan ? 0x7FC00000u : 0x7F800000u));
}

}  // namespace internal

// The f16 code nearest to `x`, ties to even; from 65520 on Inf, NaN stays NaN.
constexpr uint16_t F16FromDouble(double x) {
  return static_cast<uint16_t>(internal::EncodeBits<internal::F16Shape>(x));
}
// The same for an f32, in 32-bit steps: native rows are encoded with it.
constexpr uint16_t F16FromFloat(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), mag = bits & 0x7FFFFFFF;
  const uint32_t normal = (mag - (112u << 23) + 0xFFF + ((mag >> 13) & 1)) >> 13;
  // Below 2^-14 the f16 ulp is 2^-24, that of an f32 in [0.5, 1): the sum rounds there and leaves the code in its low
  // bits.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(mag < (113u << 23) ? mag : 0) + 0.5f) - 0x3F000000;
  uint32_t code = mag < (113u << 23) ? subnormal : normal;
  if (mag >= 0x477FF000) code = mag > 0x7F800000 ? 0x7E00 : 0x7C00;  // from 65520 on: Inf, or NaN
  return static_cast<uint16_t>(code | ((bits >> 16) & 0x8000));
}
constexpr float F16ToFloat(uint16_t bits) {
  if ((bits & 0x7C00) == 0x7C00) return internal::SpecialF32((bits & 0x8000) != 0, (bits & 0x3FF) != 0);
  return internal::DecodeFinite<internal::F16Shape>(bits);
}
// The f16 value nearest to `x`, as a double: F16ToFloat(F16FromDouble(x)), without the detour over bits.
constexpr double RoundToF16(double x) {
  const double mag = x < 0 ? -x : x;
  if (!(mag >= 0x1p-14)) return (x + 0x1.8p28) - 0x1.8p28;  // subnormal: the ulp is 2^-24. NaN passes through
  if (mag >= 65520.0) return x < 0 ? -std::numeric_limits<double>::infinity() : std::numeric_limits<double>::infinity();
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  return std::bit_cast<double>((bits + ((uint64_t{1} << 41) - 1) + ((bits >> 42) & 1)) & ~((uint64_t{1} << 42) - 1));
}

// The bf16 code nearest to `x`, ties to even; NaN stays NaN.
constexpr uint16_t Bf16FromDouble(double x) {
  return static_cast<uint16_t>(internal::EncodeBits<internal::Bf16Shape>(x));
}
// The same for an f32.
constexpr uint16_t Bf16FromFloat(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>(((bits >> 16) & 0x8000) | 0x7FC0);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
// Exact.
constexpr float Bf16ToFloat(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Saturating: everything beyond 448, infinities too, becomes +-448. NaN stays NaN.
constexpr uint8_t Fp8E4M3FromDouble(double x) {
  return static_cast<uint8_t>(internal::EncodeBits<internal::E4M3Shape>(x));
}
constexpr float Fp8E4M3ToFloat(uint8_t bits) {
  if ((bits & 0x7F) == 0x7F) return internal::SpecialF32((bits & 0x80) != 0, true);
  return internal::DecodeFinite<internal::E4M3Shape>(bits);
}

// Saturating: everything beyond 57344, infinities too, becomes +-57344. NaN stays NaN.
constexpr uint8_t Fp8E5M2FromDouble(double x) {
  return static_cast<uint8_t>(internal::EncodeBits<internal::E5M2Shape>(x));
}
constexpr float Fp8E5M2ToFloat(uint8_t bits) {
  if ((bits & 0x7C) == 0x7C) return internal::SpecialF32((bits & 0x80) != 0, (bits & 3) != 0);
  return internal::DecodeFinite<internal::E5M2Shape>(bits);
}

// The largest finite value of `t`, and the smallest that has full precision.
constexpr double MaxFinite(DType t) {
  switch (t) {
    case DType::kF32:
      return std::numeric_limits<float>::max();
    case DType::kF16:
      return 65504.0;
    case DType::kBF16:
      return 0x1.FEp127;
    case DType::kFp8E4M3:
      return 448.0;
    case DType::kFp8E5M2:
      return 57344.0;
  }
  return 0;
}
constexpr double SmallestNormal(DType t) {
  switch (t) {
    case DType::kF32:
    case DType::kBF16:
      return 0x1p-126;
    case DType::kF16:
    case DType::kFp8E5M2:
      return 0x1p-14;
    case DType::kFp8E4M3:
      return 0x1p-6;
  }
  return 0;
}

// Bits of `x` rounded once to `t`, in the low DTypeBytes(t) bytes. f16, bf16 and f32 overflow to Inf, fp8 saturates.
constexpr uint32_t EncodeAs(DType t, double x) {
  switch (t) {
    case DType::kF32:
      return std::bit_cast<uint32_t>(static_cast<float>(x));
    case DType::kF16:
      return F16FromDouble(x);
    case DType::kBF16:
      return Bf16FromDouble(x);
    case DType::kFp8E4M3:
      return Fp8E4M3FromDouble(x);
    case DType::kFp8E5M2:
      return Fp8E5M2FromDouble(x);
  }
  return 0;
}
// The exact value of such bits. Higher bits of `bits` are ignored.
constexpr float DecodeAs(DType t, uint32_t bits) {
  switch (t) {
    case DType::kF32:
      return std::bit_cast<float>(bits);
    case DType::kF16:
      return F16ToFloat(static_cast<uint16_t>(bits));
    case DType::kBF16:
      return Bf16ToFloat(static_cast<uint16_t>(bits));
    case DType::kFp8E4M3:
      return Fp8E4M3ToFloat(static_cast<uint8_t>(bits));
    case DType::kFp8E5M2:
      return Fp8E5M2ToFloat(static_cast<uint8_t>(bits));
  }
  return 0;
}
// The value of `t` that is nearest to `x`: what a reader gets back. Beyond the range as in EncodeAs.
constexpr double RoundTo(DType t, double x) { return t == DType::kF16 ? RoundToF16(x) : DecodeAs(t, EncodeAs(t, x)); }

// Value `index` of an array of `t` at `base`, any alignment, little endian.
inline float LoadAs(DType t, const std::byte* base, int64_t index) {
  uint32_t bits = 0;
  const int bytes = DTypeBytes(t);
  std::memcpy(&bits, base + index * bytes, static_cast<size_t>(bytes));
  return DecodeAs(t, bits);
}
inline void StoreAs(DType t, double x, std::byte* base, int64_t index) {
  const uint32_t bits = EncodeAs(t, x);
  const int bytes = DTypeBytes(t);
  std::memcpy(base + index * bytes, &bits, static_cast<size_t>(bytes));
}

static_assert(std::endian::native == std::endian::little, "cache bytes are little endian and read as they lie");

}  // namespace livequant
