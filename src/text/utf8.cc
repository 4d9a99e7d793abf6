// text/utf8.cc: table 3-7 of the Unicode Standard as code.
#include "text/utf8.h"

#include <cstdint>

#include "base/check.h"

namespace livequant {

Utf8Step NextUtf8(std::string_view text) {
  LQ_CHECK(!text.empty());
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {Utf8Step::kCharacter, 1, lead};
  if (lead < 0xC2 || lead > 0xF4)
    return {Utf8Step::kImpossible, 1, 0};  // a stray trail byte, an overlong form, or too large
  const int length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte alone decides about overlong forms, surrogates and code points beyond U+10FFFF.
  uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  char32_t code_point = lead & (0x7F >> length);
  for (int i = 1; i < length; ++i) {
    if (static_cast<size_t>(i) == text.size()) return {Utf8Step::kIncomplete, i, 0};
    const uint8_t trail = byte(static_cast<size_t>(i));
    if (trail < low || trail > high) return {Utf8Step::kImpossible, i, 0};
    code_point = (code_point << 6) | (trail & 0x3F);
    low = 0x80;
    high = 0xBF;
  }
  return {Utf8Step::kCharacter, length, code_point};
}

size_t InvalidUtf8At(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = NextUtf8(text.substr(at));
    if (step.kind != Utf8Step::kCharacter) return at;
    at += static_cast<size_t>(step.bytes);
  }
  return std::string_view::npos;
}

void DrainUtf8(std::string* held, std::string* out) {
  size_t at = 0;
  while (at < held->size()) {
    const Utf8Step step = NextUtf8(std::string_view(*held).substr(at));
    if (step.kind == Utf8Step::kIncomplete) break;
    if (step.kind == Utf8Step::kCharacter) {
      out->append(*held, at, static_cast<size_t>(step.bytes));
    } else {
      out->append("\xEF\xBF\xBD");
    }
    at += static_cast<size_t>(step.bytes);
  }
  held->erase(0, at);
}

}  // namespace livequant
