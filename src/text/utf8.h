// text/utf8.h: UTF-8 one character at a time, with the two ways in which bytes can fail to be one kept apart.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace livequant {

struct Utf8Step {
  enum Kind {
    kCharacter,   // `bytes` of them are one character
    kImpossible,  // no character begins with these bytes: one U+FFFD stands for all of them
    kIncomplete,  // the text ends inside what may become a character
  };
  Kind kind;
  int bytes;            // 1..4
  char32_t code_point;  // of a character, else 0
};

// What `text` begins with. REQUIRES: not empty. An impossible step is the longest beginning of a well-formed sequence,
// or one byte (the maximal subpart): so does Python's errors="replace". Source: The Unicode Standard, table 3-7 and
// section 3.9.
Utf8Step NextUtf8(std::string_view text);

// Byte offset of the first thing in `text` that is no character; npos where all of it is UTF-8.
size_t InvalidUtf8At(std::string_view text);

// Moves what is certain from `held` to the end of `out`, impossible bytes as U+FFFD; an incomplete end stays held.
void DrainUtf8(std::string* held, std::string* out);

}  // namespace livequant
