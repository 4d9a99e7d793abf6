// text/characters.h: questions about one character, and GPT-2's printable spelling of bytes.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace livequant {

// White_Space of the Unicode Standard.
bool IsSpace(char32_t c);
// A character of a word as Rust's regex \w reads it: letters, marks, decimal digits, connectors, joiners.
bool IsWord(char32_t c);
// General category N: decimal digits, letter-like and other numbers.
bool IsNumeric(char32_t c);
// General category P, or a punctuation character of ASCII ($ + < = > ^ ` | ~ besides).
bool IsPunctuation(char32_t c);
// General category M.
bool IsMark(char32_t c);

// The character that `text` begins or ends with. REQUIRES: not empty, UTF-8.
char32_t FirstCharacter(std::string_view text);
char32_t LastCharacter(std::string_view text);

// Bytes of a character in UTF-8, 1..4.
size_t CharacterBytes(char32_t c);
// Appends a character as UTF-8. REQUIRES: a scalar value.
void AppendUtf8(char32_t c, std::string* out);

// The bytes that `text` (UTF-8) spells in GPT-2's alphabet, or nothing if a character lies outside it: printable
// Latin-1 bytes stand for themselves, the other 68 for U+0100 onwards in rising order. Source: openai/gpt-2.
std::optional<std::string> BytesOfSpelling(std::string_view text);

// The byte that a fallback token ("<0x0A>") stands for, or -1.
int ByteOfFallback(std::string_view token);

}  // namespace livequant
