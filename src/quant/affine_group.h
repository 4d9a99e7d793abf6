// quant/affine_group.h: a group of values shares one scale and one floating minimum (KIVI).
//
//   mn = min x    range = T(max x - mn)    scale = T(range / L)    code = rne(clamp(T(T(x - mn) / scale), 0, L))
//   x' = fma(code, scale, mn) in f32       L = 2^bits - 1, T(.) = one rounding to `qparam`
//
// Shapes  any group: channels of a row (KIVI's V) or rows of a channel (KIVI's K), short groups included.
// Bytes   scale and minimum in `qparam`; codes unsigned. Normative text and a worked example:
// docs/formats/affine_group.md Input   x is rounded to T first; rows that are exact in T (KIVI keeps exact rows in f16)
// are taken as they are. Constant a group of one value: code 0, scale 1, minimum = the value. Upstream divides 0 by 0
// there (methods.md 0.4). Small   range > 0 and a stored scale below the smallest normal of T: stored as the smallest
// normal, or refused. Error   u = 2^-11 for f16, 2^-24 for f32.   |x - x'| <= scale (1/2 + 3 L u) + u |x| + T's
// smallest subnormal
//         + 2^-24 (|mn| + L scale): rounding to a code (its argument was rounded twice in T), x to T, then x' to f32.
// Fails   kNonFinite: NaN or Inf. kBeyondRange: a value, or the range, beyond T.
// Source  KIVI, arXiv 2402.02750; jy-yuan/KIVI 876b4d2 quant/new_pack.py; methods.md 4.2. Differs: constant groups and
//         small scales as above; the f32 decode of the fused product is the one that holds.
#pragma once

#include <algorithm>
#include <cstdint>

#include "numeric/float_formats.h"
#include "quant/group.h"

namespace livequant {

struct AffineSpec {
  int bits = 4;                     // 2..8
  DType qparam = DType::kF16;       // kF16 or kF32; also the arithmetic of the encoder
  bool refuse_small_scale = false;  // else floored
  constexpr int levels() const { return (1 << bits) - 1; }
};

struct AffineParams {
  float scale = 1, min = 0;  // exactly representable in the spec's qparam
};

// REQUIRES x.count >= 1. On a fault `params` is unspecified.
FitFault FitAffine(const AffineSpec& spec, const Group& x, AffineParams* params);

// REQUIRES x finite. In [0, levels].
inline int AffineCode(const AffineSpec& spec, float x, const AffineParams& p) {
  double q;
  if (spec.qparam == DType::kF16) {
    // A difference of f16 values is exact in double, and a quotient of two of them cannot land on a tie by rounding to
    // double first (53 >= 2 * 11 + 2): each step below is one f16 operation.
    q = RoundToF16(RoundToF16(RoundToF16(x) - static_cast<double>(p.min)) / static_cast<double>(p.scale));
  } else {
    q = (x - p.min) / p.scale;  // f32 operations
  }
  return static_cast<int>(RoundHalfEven(std::clamp(q, 0.0, static_cast<double>(spec.levels()))));
}

// One fused f32 product-sum.
inline float AffineValue(int code, const AffineParams& p) { return std::fma(static_cast<float>(code), p.scale, p.min); }

}  // namespace livequant
