// text/charsmap.h: SentencePiece's precompiled_charsmap, the table of replacements that T5, XLM-R and ALBERT normalize
// by.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace livequant {

// A double array (darts-clone) from UTF-8 keys to offsets into a blob of NUL-terminated replacements. Immutable.
class Charsmap {
 public:
  // `base64`: as in tokenizer.json: a 32-bit little-endian count of bytes, that many bytes of 32-bit units, the blob.
  // kInvalidArgument: not base64 (offset), lengths that disagree with the bytes present, a blob that is not UTF-8.
  // Source: google/sentencepiece (normalizer.cc), s-yata/darts-clone.
  static Result<Charsmap> Parse(std::string_view base64);

  // Appends the normal form of `text` (UTF-8): an extended grapheme cluster of fewer than 6 bytes is replaced as a
  // whole by its shortest key, else each character is, else it stays (as huggingface/tokenizers does).
  // kInvalidArgument: a damaged table that leads outside itself. kOutOfRange: more than `limit` bytes.
  Status Apply(std::string_view text, size_t limit, std::string* out) const;

 private:
  // Whether a key begins `chunk`; then *value is what the shortest one is replaced with.
  Result<bool> Find(std::string_view chunk, std::string_view* value) const;

  std::vector<uint32_t> units_;
  std::string blob_;
};

}  // namespace livequant
