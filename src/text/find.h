// text/find.h: finds one text in another in time linear in the other. std::string's find compares the whole needle at
// each place that begins like it, which a text of one letter makes quadratic.
#pragma once

#include <cstring>
#include <string_view>

namespace livequant {

// Where `what` begins in `text` at or behind `from`; npos: nowhere. An empty `what` is found at once.
inline size_t FindText(std::string_view text, std::string_view what, size_t from = 0) {
  if (from > text.size()) return text.npos;
  if (what.empty()) return from;
  // glibc's memmem is the two-way algorithm for what is longer than 256 bytes.
  const void* at = ::memmem(text.data() + from, text.size() - from, what.data(), what.size());
  return at == nullptr ? text.npos : static_cast<size_t>(static_cast<const char*>(at) - text.data());
}

}  // namespace livequant
