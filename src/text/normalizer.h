// text/normalizer.h: what is done to a text before it is cut: Unicode forms and the small edits that tokenizer.json
// knows.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/status.h"
#include "text/charsmap.h"
#include "text/regex.h"

namespace livequant {

// One step; which fields count is said beside the kind.
struct NormalizerStep {
  enum Kind {
    kUnicode,       // compose, compat: NFC, NFD, NFKC, NFKD
    kPrepend,       // content, in front of a text that is not empty
    kReplace,       // regex or literal -> content
    kLowercase,     // character by character
    kStrip,         // White_Space, left and right
    kStripAccents,  // drops marks
    kNmt,           // drops controls, spaces of other kinds become spaces
    kCharsmap,      // charsmap
  };
  Kind kind;
  bool compose = false, compat = false;
  bool left = false, right = false;
  std::string literal, content;
  std::optional<Regex> regex;
  std::optional<Charsmap> charsmap;
};

// Steps in order. Immutable.
class Normalizer {
 public:
  // REQUIRES: fewer than kMaxSteps were added.
  void Add(NormalizerStep step) { steps_.push_back(std::move(step)); }
  size_t size() const { return steps_.size(); }
  // The normal form of `text` (UTF-8), itself UTF-8. kOutOfRange: more than 64 times as long as the text and 1 KiB, or
  // a pattern beyond its limit. kUnsupported: a Replace pattern that matches nothing at all somewhere.
  // *begins becomes false where the first character of the normal form does not stem from the first of the text: the
  // reference library then takes it for a piece inside the text (Metaspace's "first").
  Result<std::string> Apply(std::string_view text, bool* begins) const;

  static constexpr size_t kMaxSteps = 32;

 private:
  std::vector<NormalizerStep> steps_;
};

}  // namespace livequant
