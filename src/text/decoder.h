// text/decoder.h: token spellings back to text. What a token is worth is known once, when the file is read, but for the
// first token of a text and the spaces that a text may lose at its start.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "text/regex.h"

namespace livequant {

// The steps of a decoder in order. Filled by tokenizer_json.cc, immutable after that.
struct DecoderSteps {
  // What a step does to each token apart; steps behind Fuse are `strip_start` alone.
  struct Step {
    enum Kind { kReplace, kByteFallback, kStrip, kByteLevel, kMetaspace };
    Kind kind;
    std::string from, to;        // kReplace: literal -> to; kStrip: the character; kMetaspace: the replacement
    std::vector<Regex> pattern;  // kReplace: none for a literal
    size_t start = 0, stop = 0;  // kStrip: at most so many at either end
    bool first = false;          // kMetaspace: the first token of a text has no spaces in front
  };
  std::vector<Step> steps;
  std::string strip_character;  // behind Fuse
  size_t strip_start = 0;

  // The first token of a text may decode to something else.
  bool first_differs() const { return !steps.empty() && steps.back().kind == Step::kMetaspace && steps.back().first; }
  // Bytes of a token. Bytes need not be UTF-8. kOutOfRange: a pattern beyond its limit, or 1 MiB of text.
  Result<std::string> Token(std::string_view spelling, bool first) const;
};

// The text of a stream of tokens: what was taken and what is still to strip or to complete.
class DecodedText {
 public:
  explicit DecodedText(const DecoderSteps& steps) : strip_(steps.strip_start) {}
  bool first() const { return first_; }  // no token yet
  // Takes the bytes of the next token, Token(spelling, first()), and appends to *text what became certain.
  void Push(const DecoderSteps& steps, std::string_view bytes, std::string* text);
  // Appends what was held back.
  void Finish(std::string* text);

 private:
  std::string held_;  // an incomplete character
  size_t strip_;      // characters that may still be stripped
  bool first_ = true;
};

}  // namespace livequant
