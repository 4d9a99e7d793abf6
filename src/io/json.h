// io/json.h: JSON in, total: any bytes in, a value or an error out.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

#include "base/status.h"

namespace livequant {

struct JsonLimits {
  int max_depth = 64;
  int64_t max_bytes = int64_t{256} << 20;
};

// Strict: UTF-8, no comments, no trailing bytes, no repeated key in an object, numbers finite, depth and size bounded.
// kInvalidArgument says what and where (byte offset); `what` names the document in messages ("config.json").
Result<nlohmann::json> ParseJson(std::string_view text, std::string_view what, const JsonLimits& limits = {});

}  // namespace livequant
