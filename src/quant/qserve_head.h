// quant/qserve_head.h: a group (one row of one KV head) shares a scale and a floating offset in code space (QServe KV4,
// KV8).
//
//   scale = T((mx - mn) / L)    zero = T(-L mn / (mx - mn))    t = fma(x, 1 / scale, zero) in f32    L = 2^bits - 1
//   safe:   code = rne(clamp(t, 0, L))
//   compat: code = rne(clamp(t, 0, 255)) mod 2^bits, the released kernel's: a value that rounds to 16 wraps to 0
//   x' = (code - zero) * scale: one f32 difference, one f32 product
//
// Shapes  any group; QServe uses a whole row of head_dim values.
// Bytes   scale and zero in `qparam`; codes unsigned. Normative text and a worked example: docs/formats/qserve_head.md
// Wrap    compat and safe are byte-identical unless the maximum wraps, which needs |mn| / (mx - mn) >= 32 in 4 bits.
// Constant value c: scale T(|c|), code 1 and zero 0 (c > 0) or 2 (c < 0), so it decodes to +-T(|c|); zeros: scale 1,
// zero 0,
//         code 0. Upstream divides by zero there (methods.md 0.4, 8.2).
// Small   a stored scale below the smallest normal of T is stored as that, with zero = T(-mn / scale); or refused. A
//         constant below the smallest normal takes this road too.
// Error   safe, u = 2^-11 for f16 and 2^-24 for f32:
//         |x - x'| <= scale (1/2 + L 2^-20) + (1.01 u + 2^-20) (|mn| + |mx|): rounding to a code; then scale and zero
//         were rounded apart from each other, so the extremes may be clamped, by more the farther the row lies from 0.
// Fails   kNonFinite: NaN or Inf. kBeyondRange: scale or zero beyond T, for f16 |L mn / (mx - mn)| > 65504.
// Source  QServe, arXiv 2405.04532; mit-han-lab/omniserve 02b2925; methods.md 8.2-8.5. Differs: constants and small
// scales.
#pragma once

#include <algorithm>
#include <cstdint>

#include "numeric/float_formats.h"
#include "quant/group.h"

namespace livequant {

struct QserveSpec {
  int bits = 4;                     // 2..8; upstream has 4 and 8
  DType qparam = DType::kF16;       // kF16 or kF32
  bool refuse_small_scale = false;  // else floored
  bool wrap = false;                // the named compat mode
  constexpr int levels() const { return (1 << bits) - 1; }
};

struct QserveParams {
  float scale = 1, zero = 0;  // exactly representable in the spec's qparam
};

// REQUIRES x.count >= 1. On a fault `params` is unspecified.
FitFault FitQserve(const QserveSpec& spec, const Group& x, QserveParams* params);

// REQUIRES x finite. In [0, levels].
inline int QserveCode(const QserveSpec& spec, float x, const QserveParams& p) {
  const double t = std::fma(x, 1.0f / p.scale, p.zero);
  if (spec.wrap) return static_cast<int>(RoundHalfEven(std::clamp(t, 0.0, 255.0))) & spec.levels();
  return static_cast<int>(RoundHalfEven(std::clamp(t, 0.0, static_cast<double>(spec.levels()))));
}

// The decode that holds: one f32 difference, one f32 product.
inline float QserveValue(int code, const QserveParams& p) { return (static_cast<float>(code) - p.zero) * p.scale; }

// The released kernel's decode, for comparison with it: one f16 rounding of code * scale + f16(-scale * zero). It is
// not QserveValue: the rounding of scale * zero dominates where |zero| is large. REQUIRES f16 params.
inline float QserveValueFma16(int code, const QserveParams& p) {
  const double offset = RoundToF16(-static_cast<double>(p.scale) * static_cast<double>(p.zero));
  return static_cast<float>(RoundToF16(code * static_cast<double>(p.scale) + offset));  // exact in double, then rounded
}

}  // namespace livequant
