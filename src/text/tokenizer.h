// text/tokenizer.h: tokenizer.json (byte-level BPE) with its real pre-tokenizer regex, and a streaming detokenizer.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace livequant {

class Tokenizer {
 public:
  // The text of tokenizer.json. Unknown model, pre-tokenizer, normalizer or decoder types are kUnsupported and named; never guessed.
  static Result<Tokenizer> Parse(std::string_view json);
  static Result<Tokenizer> Load(const std::string& path);

  // Token ids of `text`. The text of a special token is parsed as that token. add_special_tokens puts what the post-processor says in
  // front and behind. kInvalidArgument: not UTF-8 (names the byte offset).
  Result<std::vector<int32_t>> Encode(std::string_view text, bool add_special_tokens) const;
  // Bytes of a token; empty for special tokens when skip_special is set. kOutOfRange: not an id.
  Result<std::string> TokenBytes(int32_t id, bool skip_special = true) const;
  // Ids to text; bytes that are not UTF-8 become U+FFFD.
  Result<std::string> Decode(std::span<const int32_t> ids, bool skip_special = true) const;

  int32_t vocab_size() const;      // largest id + 1
  const std::string& digest() const;  // SHA-256 of the file, hex

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

// Turns a stream of tokens into text that never ends inside a character: incomplete UTF-8 is held back until it is whole or impossible.
class StreamingDetokenizer {
 public:
  explicit StreamingDetokenizer(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  // Text that became certain with this token; may be empty.
  Result<std::string> Push(int32_t id);
  // What was held back, bytes that never became a character replaced by U+FFFD.
  std::string Finish();

 private:
  Tokenizer tokenizer_;
  std::string held_;
};

}  // namespace livequant
