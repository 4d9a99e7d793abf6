#include "quant/affine_group.h"

namespace livequant {

FitFault FitAffine(const AffineSpec& spec, const Group& x, AffineParams* params) {
  LQ_CHECK(spec.bits >= 2 && spec.bits <= 8 && (spec.qparam == DType::kF16 || spec.qparam == DType::kF32) &&
           x.count >= 1);
  float lo, hi;
  if (!FiniteRange(x, &lo, &hi)) return FitFault::kNonFinite;
  // Rounding is monotonic: the extremes of the rounded values are the rounded extremes.
  const double mn = RoundTo(spec.qparam, lo), mx = RoundTo(spec.qparam, hi), limit = MaxFinite(spec.qparam);
  if (mn < -limit || mx > limit) return FitFault::kBeyondRange;
  params->min = static_cast<float>(mn);
  if (mn == mx) {
    params->scale = 1;
    return FitFault::kNone;
  }
  const bool f16 = spec.qparam == DType::kF16;
  // f32: operations on floats, one rounding each. f16: exact in double, then rounded once.
  const double range = f16 ? RoundToF16(mx - mn) : static_cast<float>(mx) - static_cast<float>(mn);
  if (range > limit) return FitFault::kBeyondRange;
  double scale =
      f16 ? RoundToF16(range / spec.levels()) : static_cast<float>(range) / static_cast<float>(spec.levels());
  if (scale < SmallestNormal(spec.qparam)) {
    if (spec.refuse_small_scale) return FitFault::kSmallScale;
    scale = SmallestNormal(spec.qparam);
  }
  params->scale = static_cast<float>(scale);
  return FitFault::kNone;
}

}  // namespace livequant
