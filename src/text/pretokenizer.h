// text/pretokenizer.h: cuts a normal text into the pieces that the model sees, step by step.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/status.h"
#include "text/regex.h"

namespace livequant {

// What becomes of the matches of a cut, as huggingface/tokenizers names it.
enum class SplitBehavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

// One step: an edit of the piece, then a cut of it; either may be absent.
struct PreTokenizerStep {
  enum Prefix { kNever, kFirst, kAlways };  // kFirst: only the piece that begins the text

  std::string space;   // not empty: stands for each U+0020 (Metaspace)
  std::string prefix;  // put in front of a piece that does not begin with it
  Prefix when = kNever;

  using Predicate = bool (*)(char32_t);
  std::variant<std::monostate, Regex, std::string, Predicate> pattern;  // absent: no cut
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;  // what lies between matches counts as matches, and the other way round
};

// The steps of one call of Encode with their scratch. One thread at a time.
class PreTokenizer {
 public:
  static constexpr size_t kMaxSteps = 32;  // one stack frame each
  // The text of a piece's end; pieces are not empty.
  class Sink {
   public:
    virtual ~Sink() = default;
    virtual Status Piece(std::string_view piece) = 0;
  };

  // REQUIRES: `steps` outlives the object.
  explicit PreTokenizer(const std::vector<PreTokenizerStep>& steps);
  // Hands the pieces of `text` (UTF-8, not empty) to `sink` in order and stops at the first error. `first`: it begins
  // the whole text. kOutOfRange: a pattern beyond its limit, or a piece of 2 GiB.
  Status Split(std::string_view text, bool first, Sink& sink) { return Step(0, text, first, sink); }

 private:
  struct Part {
    size_t begin, end;
    bool match;
  };
  Status Step(size_t index, std::string_view piece, bool first, Sink& sink);
  Status Find(size_t index, std::string_view piece, std::vector<Part>* parts);

  struct Scratch {
    std::optional<Regex::Scanner> scanner;
    std::string edited;
    std::vector<Part> parts;
  };
  const std::vector<PreTokenizerStep>& steps_;
  std::vector<Scratch> scratch_;  // one a step: a step below another never touches it
};

}  // namespace livequant
