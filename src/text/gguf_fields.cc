// text/gguf_fields.cc: see gguf_fields.h.
#include "text/gguf_fields.h"

#include <fmt/format.h>

#include <variant>

#include "io/json.h"
#include "text/utf8.h"

namespace livequant {

Status GgufFields::Bad(Code code, std::string_view key, const std::string& says) const {
  return Status(code, fmt::format("{}: metadata {} {}", what_, Excerpt(key), says));
}

Result<std::string_view> GgufFields::String(std::string_view key) const {
  const GgufValue* v = gguf_.Find(key);
  const std::string_view* s = v == nullptr ? nullptr : std::get_if<std::string_view>(&v->value);
  if (s == nullptr) return Bad(Code::kInvalidArgument, key, v == nullptr ? "is missing" : "is no string");
  return *s;
}

Result<const GgufArray*> GgufFields::Strings(std::string_view key) const {
  const GgufValue* v = gguf_.Find(key);
  const GgufArray* a = v == nullptr ? nullptr : std::get_if<GgufArray>(&v->value);
  if (a == nullptr || a->element != GgufType::kString)
    return Bad(Code::kInvalidArgument, key, v == nullptr ? "is missing" : "is no array of strings");
  for (size_t i = 0; i < a->strings.size(); ++i)
    if (InvalidUtf8At(a->strings[i]) != std::string_view::npos)
      return Bad(Code::kInvalidArgument, key,
                 fmt::format("holds {} at index {}, which is no UTF-8", Excerpt(a->strings[i]), i));
  return a;
}

Result<const GgufArray*> GgufFields::Tokens() const {
  constexpr std::string_view kKey = "tokenizer.ggml.tokens";
  constexpr size_t kMostTokens = size_t{1} << 22;
  LQ_ASSIGN_OR_RETURN(const GgufArray* tokens, Strings(kKey));
  if (tokens->strings.empty() || tokens->strings.size() > kMostTokens)
    return Bad(Code::kOutOfRange, kKey,
               fmt::format("has {} tokens; 1 to {} are allowed", tokens->strings.size(), kMostTokens));
  for (size_t i = 0; i < tokens->strings.size(); ++i)
    if (tokens->strings[i].empty()) return Bad(Code::kInvalidArgument, kKey, fmt::format("is empty at index {}", i));
  return tokens;
}

Result<const GgufArray*> GgufFields::Numbers(std::string_view key, bool floats, uint64_t tokens) const {
  const GgufValue* v = gguf_.Find(key);
  const GgufArray* a = v == nullptr ? nullptr : std::get_if<GgufArray>(&v->value);
  const bool right = a != nullptr && (floats ? a->element == GgufType::kF32
                                             : a->element == GgufType::kI32 || a->element == GgufType::kU32);
  if (!right)
    return Bad(
        Code::kInvalidArgument, key,
        v == nullptr ? "is missing" : fmt::format("is no array of {}", floats ? "32-bit floats" : "32-bit integers"));
  if (a->count != tokens)
    return Bad(Code::kInvalidArgument, key,
               fmt::format("has {} entries; tokenizer.ggml.tokens has {}", a->count, tokens));
  return a;
}

Result<const GgufArray*> GgufFields::TokenTypes(uint64_t tokens) const {
  return Numbers("tokenizer.ggml.token_type", false, tokens);
}
Result<const GgufArray*> GgufFields::Scores(uint64_t tokens) const {
  return Numbers("tokenizer.ggml.scores", true, tokens);
}

Result<bool> GgufFields::Flag(std::string_view key, bool absent) const {
  const GgufValue* v = gguf_.Find(key);
  if (v == nullptr) return absent;
  const bool* b = std::get_if<bool>(&v->value);
  if (b == nullptr) return Bad(Code::kInvalidArgument, key, "is no bool");
  return *b;
}

Result<std::optional<int32_t>> GgufFields::Id(std::string_view key, uint64_t tokens) const {
  std::optional<int32_t> out;
  const GgufValue* v = gguf_.Find(key);
  if (v == nullptr) return out;
  const uint64_t* id = std::get_if<uint64_t>(&v->value);
  if (id == nullptr) return Bad(Code::kInvalidArgument, key, "is no id");
  if (*id >= tokens)
    return Bad(Code::kOutOfRange, key, fmt::format("is {}; it must be one of {} tokens in use", *id, tokens));
  out = static_cast<int32_t>(*id);
  return out;
}

Result<std::optional<int32_t>> GgufFields::Edge(std::string_view flag, bool absent, std::string_view id,
                                                uint64_t tokens) const {
  LQ_ASSIGN_OR_RETURN(const bool on, Flag(flag, absent));
  if (!on) return std::optional<int32_t>();
  if (!Has(id)) return Bad(Code::kInvalidArgument, id, fmt::format("is missing, but {} asks for it", flag));
  return Id(id, tokens);
}

}  // namespace livequant
