// numeric/parse_dtype.h: a dtype from its name.
#pragma once

#include <string_view>

#include "base/status.h"
#include "numeric/dtype.h"

namespace livequant {

// "f32" "f16" "bf16" "fp8_e4m3" "fp8_e5m2", as DTypeName writes them. kUnsupported: an FNUZ format, whose bytes mean
// half of the same bytes in FN, so it is never taken for it (methods.md 9.1). kInvalidArgument: any other name.
Result<DType> ParseDType(std::string_view name);

}  // namespace livequant
