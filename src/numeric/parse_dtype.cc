#include "numeric/parse_dtype.h"

#include <string>

namespace livequant {

Result<DType> ParseDType(std::string_view name) {
  for (DType t : {DType::kF32, DType::kF16, DType::kBF16, DType::kFp8E4M3, DType::kFp8E5M2}) {
    if (name == DTypeName(t)) return t;
  }
  const std::string seen(name.substr(0, 64));
  if (name.find("fnuz") != std::string_view::npos || name.find("FNUZ") != std::string_view::npos) {
    return Status(Code::kUnsupported, "dtype \"" + seen +
                                          "\": FNUZ formats have another bias, so the same byte means half the value; "
                                          "convert to fp8_e4m3 (FN) or fp8_e5m2 and double the scale");
  }
  return Status(Code::kInvalidArgument,
                "dtype \"" + seen + "\" is unknown; it is one of f32, f16, bf16, fp8_e4m3, fp8_e5m2");
}

}  // namespace livequant
