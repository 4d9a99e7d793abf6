// text/characters.cc: general categories from utf8proc, GPT-2's alphabet as a table.
#include "text/characters.h"

#include <utf8proc.h>

#include <array>
#include <cstdint>

#include "text/utf8.h"

namespace livequant {
namespace {

utf8proc_category_t Category(char32_t c) { return utf8proc_category(static_cast<utf8proc_int32_t>(c)); }

constexpr bool StandsForItself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}
constexpr std::array<int16_t, 0x144> kByteOfCharacter = [] {
  std::array<int16_t, 0x144> table{};
  for (int16_t& b : table) b = -1;
  size_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte)
    table[StandsForItself(byte) ? static_cast<size_t>(byte) : next++] = static_cast<int16_t>(byte);
  return table;
}();

int HexDigit(char c) {
  return c >= '0' && c <= '9'   ? c - '0'
         : c >= 'A' && c <= 'F' ? c - 'A' + 10
         : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                : -1;
}

}  // namespace

bool IsSpace(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool IsWord(char32_t c) {
  switch (Category(c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:  // Join_Control, and the symbols that are Alphabetic
      return c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) ||
             (c >= 0x1F150 && c <= 0x1F169) || (c >= 0x1F170 && c <= 0x1F189);
  }
}

bool IsNumeric(char32_t c) {
  const utf8proc_category_t category = Category(c);
  return category == UTF8PROC_CATEGORY_ND || category == UTF8PROC_CATEGORY_NL || category == UTF8PROC_CATEGORY_NO;
}

bool IsPunctuation(char32_t c) {
  if (c < 0x80)
    return (c >= '!' && c <= '/') || (c >= ':' && c <= '@') || (c >= '[' && c <= '`') || (c >= '{' && c <= '~');
  switch (Category(c)) {
    case UTF8PROC_CATEGORY_PC:
    case UTF8PROC_CATEGORY_PD:
    case UTF8PROC_CATEGORY_PS:
    case UTF8PROC_CATEGORY_PE:
    case UTF8PROC_CATEGORY_PI:
    case UTF8PROC_CATEGORY_PF:
    case UTF8PROC_CATEGORY_PO:
      return true;
    default:
      return false;
  }
}

bool IsMark(char32_t c) {
  const utf8proc_category_t category = Category(c);
  return category == UTF8PROC_CATEGORY_MN || category == UTF8PROC_CATEGORY_MC || category == UTF8PROC_CATEGORY_ME;
}

char32_t FirstCharacter(std::string_view text) { return NextUtf8(text).code_point; }

char32_t LastCharacter(std::string_view text) {
  size_t at = text.size() - 1;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  return NextUtf8(text.substr(at)).code_point;
}

size_t CharacterBytes(char32_t c) { return c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4; }

void AppendUtf8(char32_t c, std::string* out) {
  if (c < 0x80) {
    *out += static_cast<char>(c);
    return;
  }
  const size_t length = CharacterBytes(c);
  *out += static_cast<char>((length == 2 ? 0xC0 : length == 3 ? 0xE0 : 0xF0) | c >> (6 * (length - 1)));
  for (size_t i = length - 1; i-- > 0;) *out += static_cast<char>(0x80 | ((c >> (6 * i)) & 0x3F));
}

std::optional<std::string> BytesOfSpelling(std::string_view text) {
  std::string bytes;
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = NextUtf8(text.substr(at));
    if (step.kind != Utf8Step::kCharacter || step.code_point >= kByteOfCharacter.size() ||
        kByteOfCharacter[step.code_point] < 0)
      return std::nullopt;
    bytes += static_cast<char>(kByteOfCharacter[step.code_point]);
    at += static_cast<size_t>(step.bytes);
  }
  return bytes;
}

int ByteOfFallback(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  const int high = HexDigit(token[3]), low = HexDigit(token[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

}  // namespace livequant
