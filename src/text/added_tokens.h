// text/added_tokens.h: finds the text of added tokens inside a text.
#pragma once

#include <algorithm>
#include <bitset>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "text/characters.h"

namespace livequant {

inline constexpr size_t kMaxAddedTokenBytes = 512;  // the search costs up to this much a byte of text

// One entry of added_tokens in tokenizer.json.
struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool special = false, single_word = false, lstrip = false, rstrip = false, normalized = false;
};

// Finds added tokens in a text: at each place the longest one that starts there, from left to right without overlap. A
// single_word token counts only where no character of a word touches it; lstrip and rstrip swallow White_Space beside
// it that no earlier token took.
class AddedTokens {
 public:
  void Add(AddedToken token) { tokens_.push_back(std::move(token)); }
  // Call once, before Split. A token whose content is there twice, or null.
  const AddedToken* Freeze() {
    std::sort(tokens_.begin(), tokens_.end(),
              [](const AddedToken& a, const AddedToken& b) { return a.content < b.content; });
    for (const AddedToken& t : tokens_) starts_.set(static_cast<unsigned char>(t.content[0]));
    const auto twice = std::adjacent_find(tokens_.begin(), tokens_.end(), [](const AddedToken& a, const AddedToken& b) {
      return a.content == b.content;
    });
    return twice == tokens_.end() ? nullptr : &*twice;
  }

  // Calls on_text(piece) and on_token(id) in order; pieces are not empty. Stops at the first error.
  template <class OnText, class OnToken>
  Status Split(std::string_view text, OnText&& on_text, OnToken&& on_token) const {
    size_t done = 0;  // everything before it was handed out
    for (size_t at = 0; at < text.size();) {
      const AddedToken* token =
          starts_.test(static_cast<unsigned char>(text[at])) ? LongestAt(text.substr(at)) : nullptr;
      if (token == nullptr) {
        ++at;
        continue;
      }
      size_t begin = at, end = at + token->content.size();
      at = end;
      if (token->single_word && ((begin > 0 && IsWord(LastCharacter(text.substr(0, begin)))) ||
                                 (end < text.size() && IsWord(FirstCharacter(text.substr(end))))))
        continue;
      if (token->lstrip) {
        while (begin > done) {
          const char32_t c = LastCharacter(text.substr(0, begin));
          if (!IsSpace(c)) break;
          begin -= CharacterBytes(c);
        }
      }
      if (token->rstrip) {
        while (end < text.size()) {
          const char32_t c = FirstCharacter(text.substr(end));
          if (!IsSpace(c)) break;
          end += CharacterBytes(c);
        }
      }
      if (begin > done) LQ_RETURN_IF_ERROR(on_text(text.substr(done, begin - done)));
      on_token(token->id);
      done = std::max(done, end);
    }
    if (done < text.size()) LQ_RETURN_IF_ERROR(on_text(text.substr(done)));
    return {};
  }

 private:
  // Narrows the sorted range of tokens that agree with `text` byte by byte.
  const AddedToken* LongestAt(std::string_view text) const {
    const AddedToken* longest = nullptr;
    auto low = tokens_.begin(), high = tokens_.end();
    for (size_t n = 0; low != high; ++n) {
      if (low->content.size() == n) {
        longest = &*low;
        ++low;  // contents differ, so only one ends here
      }
      if (n == text.size()) break;
      const auto byte = static_cast<unsigned char>(text[n]);
      const auto at_n = [n](const AddedToken& t) { return static_cast<unsigned char>(t.content[n]); };
      low = std::lower_bound(low, high, byte, [&](const AddedToken& t, unsigned char b) { return at_n(t) < b; });
      high = std::upper_bound(low, high, byte, [&](unsigned char b, const AddedToken& t) { return b < at_n(t); });
    }
    return longest;
  }

  std::vector<AddedToken> tokens_;  // sorted by content
  std::bitset<256> starts_;         // first bytes
};

}  // namespace livequant
