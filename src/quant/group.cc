#include "quant/group.h"

#include <cstdio>

#include "numeric/float_formats.h"

namespace livequant {

Status FaultStatus(FitFault fault, const Group& values, DType qparam, const std::string& where) {
  LQ_CHECK(fault != FitFault::kNone);
  float lo = values[0], hi = values[0];
  for (int64_t i = 0; i < values.count; ++i) {
    const float v = values[i];
    if (!std::isfinite(v)) {
      return Status(Code::kNonFinite, where + ": value " + std::to_string(i) + " of the group is " + std::to_string(v));
    }
    lo = v < lo ? v : lo;
    hi = v > hi ? v : hi;
  }
  char text[200];
  if (fault == FitFault::kSmallScale) {
    std::snprintf(text, sizeof text, ": values %.9g to %.9g need a scale below %.9g, the smallest normal %s; refused",
                  lo, hi, SmallestNormal(qparam), DTypeName(qparam));
    return Status(Code::kOutOfRange, where + text);
  }
  std::snprintf(text, sizeof text, ": values %.9g to %.9g need a scale, minimum or offset beyond %.9g, the largest %s",
                lo, hi, MaxFinite(qparam), DTypeName(qparam));
  return Status(Code::kNonFinite, where + text);
}

}  // namespace livequant
