// quant/symmetric_rows.h: a group of values shares one scale; codes are signed integers around zero.
//
//   qmax = 2^(bits-1) - 1    scale = store(max |x| / qmax)    code = clip(rne(x / scale), -qmax, qmax)    x' = code *
//   scale
//
// Shapes  any group: a row of channels, or the rows of one channel.
// Bytes   scale in `qparam`; codes are two's complement fields of `bits` bits; -2^(bits-1) is never produced (narrow
// alphabet).
//         Normative text and a worked example: docs/formats/symmetric_rows.md
// Zero    a group of zeros: scale 1, codes 0. It decodes exactly and nothing divides by zero.
// Small   a nonzero group whose stored scale would be below the smallest normal of `qparam`: stored as that smallest
// normal,
//         or refused (kSmallScale) if `refuse_small_scale`. So a stored scale is normal: safe where subnormals flush to
//         zero.
// Error   |x - x'| <= scale / 2 + 2^-24 |x'|: rounding to a code, then one f32 product. The clip never fires: a normal
// stored
//         scale is at most 2^-11 below max|x| / qmax, so |x / scale| < qmax + 0.5 for every bits <= 8.
// Fails   kNonFinite: NaN or Inf. kBeyondRange: the stored scale is infinite.
// Source  methods.md 1.1.
#pragma once

#include <algorithm>
#include <cstdint>

#include "numeric/float_formats.h"
#include "quant/group.h"

namespace livequant {

struct SymmetricSpec {
  int bits = 8;                     // 2..8
  DType qparam = DType::kF16;       // kF16 or kF32
  bool refuse_small_scale = false;  // else floored
  constexpr int qmax() const { return (1 << (bits - 1)) - 1; }
};

struct SymmetricParams {
  float scale = 1;  // exactly representable in the spec's qparam
};

// REQUIRES x.count >= 1. On a fault `params` is unspecified.
FitFault FitSymmetric(const SymmetricSpec& spec, const Group& x, SymmetricParams* params);

// REQUIRES x finite. |result| <= qmax.
inline int SymmetricCode(const SymmetricSpec& spec, float x, const SymmetricParams& p) {
  const double qmax = spec.qmax();
  // Clipping first keeps RoundHalfEven in its domain when the scale is not this group's own.
  return static_cast<int>(
      RoundHalfEven(std::clamp(static_cast<double>(x) / static_cast<double>(p.scale), -qmax, qmax)));
}

// One f32 product.
inline float SymmetricValue(int code, const SymmetricParams& p) { return static_cast<float>(code) * p.scale; }

}  // namespace livequant
