// io/json.h: JSON in, total: any bytes in, a value or an error out.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/status.h"

namespace livequant {

struct JsonLimits {
  int max_depth = 64;                      // objects and arrays inside each other
  int64_t max_bytes = int64_t{256} << 20;  // of text
  int64_t max_values = int64_t{16} << 20;  // of every kind: a value costs up to 100 bytes of memory for 2 of text
};

// Strict: UTF-8, no byte order mark, no comments, no trailing bytes, no repeated key in an object, numbers finite,
// depth and size bounded. kInvalidArgument says what and where (byte offset), kOutOfRange which limit was passed;
// `what` names the document in messages ("config.json"). Integers beyond 64 bits become doubles. Never throws. Source:
// RFC 8259.
Result<nlohmann::json> ParseJson(std::string_view text, std::string_view what, const JsonLimits& limits = {});

// `text` in double quotes for a message: at most max_bytes of it, every byte but printable ASCII as \xNN. Whatever
// comes from a file goes through here, so that a message is short, printable and valid UTF-8.
std::string Excerpt(std::string_view text, size_t max_bytes = 64);
// The same without quotes, for a key inside a path ("layers[0].bass").
std::string ExcerptOfKey(std::string_view key, size_t max_bytes = 64);
// The same of a value: its JSON in printable ASCII, \uXXXX where the file has anything else, at most max_bytes of it.
std::string ExcerptOfValue(const nlohmann::json& value, size_t max_bytes = 80);

}  // namespace livequant
