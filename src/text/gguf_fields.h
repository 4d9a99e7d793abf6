// text/gguf_fields.h: tokenizer metadata of a GGUF file, each key read once with its type checked. Private to text/.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/status.h"
#include "io/gguf.h"

namespace livequant {

// token_type of the file, numbered as SentencePiece does.
enum GgufTokenType : int64_t { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6 };

// Errors name the file (`what`) and the key. REQUIRES: `gguf` and `what` outlive the object.
class GgufFields {
 public:
  GgufFields(const Gguf& gguf, std::string_view what) : gguf_(gguf), what_(what) {}

  // "WHAT: metadata KEY SAYS".
  Status Bad(Code code, std::string_view key, const std::string& says) const;
  bool Has(std::string_view key) const { return gguf_.Find(key) != nullptr; }
  Result<std::string_view> String(std::string_view key) const;
  // Strings, each valid UTF-8.
  Result<const GgufArray*> Strings(std::string_view key) const;
  // tokenizer.ggml.tokens: 1 to 2^22 of them.
  Result<const GgufArray*> Tokens() const;
  // tokenizer.ggml.token_type, as many as there are tokens; read it with GgufInteger.
  Result<const GgufArray*> TokenTypes(uint64_t tokens) const;
  // tokenizer.ggml.scores, as many as there are tokens; read it with GgufFloat.
  Result<const GgufArray*> Scores(uint64_t tokens) const;
  // A bool, `absent` where the file has none.
  Result<bool> Flag(std::string_view key, bool absent) const;
  // A token id below `tokens`; nothing where the file has none.
  Result<std::optional<int32_t>> Id(std::string_view key, uint64_t tokens) const;
  // The id that is put at an edge of every text: nothing where `flag` is off, an error where it is on without an id.
  Result<std::optional<int32_t>> Edge(std::string_view flag, bool absent, std::string_view id, uint64_t tokens) const;

 private:
  Result<const GgufArray*> Numbers(std::string_view key, bool floats, uint64_t tokens) const;

  const Gguf& gguf_;
  std::string_view what_;
};

}  // namespace livequant
