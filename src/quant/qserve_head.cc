#include "quant/qserve_head.h"

namespace livequant {

FitFault FitQserve(const QserveSpec& spec, const Group& x, QserveParams* params) {
  LQ_CHECK(spec.bits >= 2 && spec.bits <= 8 && (spec.qparam == DType::kF16 || spec.qparam == DType::kF32) &&
           x.count >= 1);
  float lo, hi;
  if (!FiniteRange(x, &lo, &hi)) return FitFault::kNonFinite;
  const double mn = lo, mx = hi, limit = MaxFinite(spec.qparam);
  if (mn == 0 && mx == 0) {
    *params = {.scale = 1, .zero = 0};
    return FitFault::kNone;
  }
  const bool constant = mn == mx;
  const double range = mx - mn;
  double scale = RoundTo(spec.qparam, constant ? std::fabs(mn) : range / spec.levels());
  // The offset of the unrounded range, as upstream has it: min then need not land exactly on code 0 (methods.md 8.5).
  double zero = constant ? (mn > 0 ? 0 : 2) : RoundTo(spec.qparam, -spec.levels() * mn / range);
  if (scale < SmallestNormal(spec.qparam)) {
    if (spec.refuse_small_scale) return FitFault::kSmallScale;
    scale = SmallestNormal(spec.qparam);
    zero = RoundTo(spec.qparam, -mn / scale);
  }
  if (scale > limit || std::fabs(zero) > limit) return FitFault::kBeyondRange;
  *params = {.scale = static_cast<float>(scale), .zero = static_cast<float>(zero)};
  return FitFault::kNone;
}

}  // namespace livequant
