#include "quant/fp8_scaled.h"

#include <cstdio>

namespace livequant {

Status CheckFp8Scale(const Fp8Spec& spec) {
  if (spec.dtype != DType::kFp8E4M3 && spec.dtype != DType::kFp8E5M2) {
    return Status(Code::kInvalidArgument,
                  std::string("a scaled fp8 coding of ") + DTypeName(spec.dtype) + "; it is fp8_e4m3 or fp8_e5m2");
  }
  const double largest = MaxFinite(DType::kF32) / MaxFinite(spec.dtype);
  if (!(spec.scale >= SmallestNormal(DType::kF32) && spec.scale <= largest)) {
    char text[128];
    std::snprintf(text, sizeof text, "%s scale %.9g; it must be a normal f32 and at most %.9g", DTypeName(spec.dtype),
                  static_cast<double>(spec.scale), largest);
    return Status(Code::kOutOfRange, text);
  }
  return {};
}

}  // namespace livequant
