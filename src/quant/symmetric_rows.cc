#include "quant/symmetric_rows.h"

namespace livequant {

FitFault FitSymmetric(const SymmetricSpec& spec, const Group& x, SymmetricParams* params) {
  LQ_CHECK(spec.bits >= 2 && spec.bits <= 8 && (spec.qparam == DType::kF16 || spec.qparam == DType::kF32) &&
           x.count >= 1);
  float lo, hi;
  if (!FiniteRange(x, &lo, &hi)) return FitFault::kNonFinite;
  const double amax = std::max(-static_cast<double>(lo), static_cast<double>(hi));
  if (amax == 0) {
    params->scale = 1;
    return FitFault::kNone;
  }
  double scale = RoundTo(spec.qparam, amax / spec.qmax());
  if (scale > MaxFinite(spec.qparam)) return FitFault::kBeyondRange;
  if (scale < SmallestNormal(spec.qparam)) {
    if (spec.refuse_small_scale) return FitFault::kSmallScale;
    scale = SmallestNormal(spec.qparam);
  }
  params->scale = static_cast<float>(scale);
  return FitFault::kNone;
}

}  // namespace livequant
