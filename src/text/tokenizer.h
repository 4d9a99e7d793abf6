// text/tokenizer.h: tokenizer.json (BPE over bytes or characters, unigram) with its normalizer, pre-tokenizer and
// decoder, and a streaming detokenizer.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace livequant {

class DecodedText;

// Immutable once parsed; copies share it; any number of threads may use one.
class Tokenizer {
 public:
  // The text of tokenizer.json. Unknown model, pre-tokenizer, normalizer, post-processor or decoder types, and fields
  // that nobody here knows, are kUnsupported and named; never guessed. kInvalidArgument: malformed (names the field).
  // Known models: BPE (merges as strings or pairs, ignore_merges, byte_fallback, unk with fuse_unk) and Unigram
  // (byte_fallback). Normalizers: NFC, NFD, NFKC, NFKD, Prepend, Replace, Lowercase, Strip, StripAccents, Nmt,
  // Precompiled. Pre-tokenizers: none, Split, ByteLevel (last), Metaspace, Digits, Punctuation, WhitespaceSplit.
  // Post-processors of one text: TemplateProcessing, BertProcessing, RobertaProcessing. Decoders: ByteLevel, Metaspace,
  // Replace, ByteFallback, Fuse, Strip. Sequences of each. Source: huggingface/tokenizers.
  static Result<Tokenizer> Parse(std::string_view json);
  static Result<Tokenizer> Load(const std::string& path);  // kNotFound, kIo besides

  // Token ids of `text`. The text of an added token, special or not, is parsed as that token: at each place the
  // longest. add_special_tokens puts what the post-processor says in front and behind. kInvalidArgument: not UTF-8
  // (names the byte offset). kUnsupported: a byte or character without a token in a file without unk. kOutOfRange: 2
  // GiB or more, a pattern beyond its backtracking limit, or a text that its normalizer makes 64 times as long.
  Result<std::vector<int32_t>> Encode(std::string_view text, bool add_special_tokens) const;
  // Bytes of a token where it does not begin a text; empty for special tokens when skip_special is set. kOutOfRange:
  // not an id.
  Result<std::string> TokenBytes(int32_t id, bool skip_special = true) const;
  // Ids to text; bytes that are not UTF-8 become U+FFFD, one for each maximal subpart (text/utf8.h). (In a run of byte
  // tokens that holds one wrong byte huggingface/tokenizers gives U+FFFD for every byte of the run, whole characters
  // too: that can't be known while the run still grows. And
  // under ByteLevel it reads the text of an added token as a spelling of bytes, here it is text.) kOutOfRange: not an
  // id.
  Result<std::string> Decode(std::span<const int32_t> ids, bool skip_special = true) const;

  int32_t vocab_size() const;         // largest id + 1; there may be gaps below
  const std::string& digest() const;  // SHA-256 of the file, hex

  struct Impl;  // private to text/ (tokenizer_impl.h)
  // A tokenizer that text/ made otherwise than from tokenizer.json.
  static Tokenizer Of(std::shared_ptr<const Impl> impl);

 private:
  friend class StreamingDetokenizer;
  Tokenizer() = default;
  std::shared_ptr<const Impl> impl_;
};

// Turns a stream of tokens into text that never ends inside a character: incomplete UTF-8 is held back until it is
// whole or impossible. What Push and Finish gave, put together, is Decode of all ids.
class StreamingDetokenizer {
 public:
  explicit StreamingDetokenizer(const Tokenizer& tokenizer);
  ~StreamingDetokenizer();
  StreamingDetokenizer(StreamingDetokenizer&&) noexcept;
  // Text that became certain with this token; may be empty, and is for special tokens. kOutOfRange: not an id; nothing
  // changed.
  Result<std::string> Push(int32_t id);
  // What was held back, a character that never became whole, as U+FFFD. A new stream may follow.
  std::string Finish();

 private:
  Tokenizer tokenizer_;
  std::unique_ptr<DecodedText> state_;
};

}  // namespace livequant
