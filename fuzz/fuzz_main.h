// fuzz/fuzz_main.h: what every target shares. A target states properties with LQ_CHECK; libFuzzer reports the abort.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace livequant {
inline std::string_view AsText(const uint8_t* data, size_t size) { return {reinterpret_cast<const char*>(data), size}; }
// Whatever a parser says about a document stays printable ASCII, so that it may go into a reply or a terminal.
inline void CheckPrintable(std::string_view message) {
  LQ_CHECK(!message.empty());
  for (const char c : message) LQ_CHECK(c >= 0x20 && c < 0x7F);
}
}  // namespace livequant
