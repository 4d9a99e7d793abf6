// text/gguf_tokenizer.cc: see gguf_tokenizer.h.
#include "text/gguf_tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "io/file.h"
#include "io/json.h"
#include "text/utf8.h"

namespace livequant {
namespace {

using nlohmann::json;

// What tokenizer.ggml.pre stands for.
struct NamedPreTokenizer {
  std::string_view names[6];
  std::string_view pattern;  // of a Split, Isolated, before ByteLevel
  bool nfc;                  // the normalizer of the original tokenizer.json
  bool ignore_merges;
  bool adds_bos;  // where the file does not say
};
constexpr std::string_view kContractions = "(?i:'s|'t|'re|'ve|'m|'ll|'d)";
constexpr NamedPreTokenizer kPreTokenizers[] = {
    {{"gpt-2", "gpt2"},
     "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
     false,
     false,
     false},
    {{"llama-bpe", "llama3", "llama-v3"},
     "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| "
     "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|"
     "\\s+(?!\\S)|\\s+",
     false,
     true,
     true},
    {{"qwen2", "deepseek-r1-qwen"},
     "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|"
     "\\s+(?!\\S)|\\s+",
     true,
     false,
     false},
};
static_assert(kPreTokenizers[1].pattern.starts_with(kContractions));

// token_type of the file.
enum : int64_t { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6 };

class Reader {
 public:
  Reader(const Gguf& gguf, std::string_view what) : gguf_(gguf), what_(what) {}

  Result<std::string> Read() {
    LQ_ASSIGN_OR_RETURN(const std::string_view model, String("tokenizer.ggml.model"));
    if (model != "gpt2")
      return Bad(Code::kUnsupported, "tokenizer.ggml.model",
                 fmt::format("is {}; only gpt2 (byte-level BPE) is read", Excerpt(model)));
    LQ_ASSIGN_OR_RETURN(const std::string_view pre, String("tokenizer.ggml.pre"));
    for (const NamedPreTokenizer& p : kPreTokenizers)
      if (std::find(std::begin(p.names), std::end(p.names), pre) != std::end(p.names)) pre_ = &p;
    if (pre_ == nullptr || pre.empty())
      return Bad(Code::kUnsupported, "tokenizer.ggml.pre",
                 fmt::format("is {}; gpt-2, llama-bpe and qwen2 are known here", Excerpt(pre)));
    LQ_RETURN_IF_ERROR(ReadTokens());
    LQ_RETURN_IF_ERROR(ReadMerges());
    LQ_RETURN_IF_ERROR(ReadTemplate());
    return Text();
  }

 private:
  Status Bad(Code code, std::string_view key, const std::string& says) const {
    return Status(code, fmt::format("{}: metadata {} {}", what_, Excerpt(key), says));
  }
  Result<std::string_view> String(std::string_view key) const {
    const GgufValue* v = gguf_.Find(key);
    const std::string_view* s = v == nullptr ? nullptr : std::get_if<std::string_view>(&v->value);
    if (s == nullptr) return Bad(Code::kInvalidArgument, key, v == nullptr ? "is missing" : "is no string");
    return *s;
  }
  // Strings, each valid UTF-8.
  Result<const GgufArray*> Strings(std::string_view key) const {
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
  Result<bool> Flag(std::string_view key, bool absent) const {
    const GgufValue* v = gguf_.Find(key);
    if (v == nullptr) return absent;
    const bool* b = std::get_if<bool>(&v->value);
    if (b == nullptr) return Bad(Code::kInvalidArgument, key, "is no bool");
    return *b;
  }

  Status ReadTokens() {
    LQ_ASSIGN_OR_RETURN(const GgufArray* tokens, Strings("tokenizer.ggml.tokens"));
    constexpr size_t kMostTokens = size_t{1} << 22;
    if (tokens->strings.empty() || tokens->strings.size() > kMostTokens)
      return Bad(Code::kOutOfRange, "tokenizer.ggml.tokens",
                 fmt::format("has {} tokens; 1 to {} are allowed", tokens->strings.size(), kMostTokens));
    tokens_ = tokens;
    const GgufValue* v = gguf_.Find("tokenizer.ggml.token_type");
    const GgufArray* types = v == nullptr ? nullptr : std::get_if<GgufArray>(&v->value);
    if (types == nullptr || (types->element != GgufType::kI32 && types->element != GgufType::kU32))
      return Bad(Code::kInvalidArgument, "tokenizer.ggml.token_type",
                 v == nullptr ? "is missing" : "is no array of 32-bit integers");
    if (types->count != tokens->count)
      return Bad(Code::kInvalidArgument, "tokenizer.ggml.token_type",
                 fmt::format("has {} entries; tokenizer.ggml.tokens has {}", types->count, tokens->count));
    vocab_ = json::object();
    added_ = json::array();
    for (size_t i = 0; i < tokens->strings.size(); ++i) {
      const std::string token(tokens->strings[i]);
      const int64_t type = GgufInteger(*types, i);
      if (type == kUnused) continue;
      if (type != kNormal && type != kControl && type != kUserDefined)
        return Bad(Code::kUnsupported, "tokenizer.ggml.token_type",
                   fmt::format("is {} at index {}; byte-level BPE has types 1, 3, 4 and 5", type, i));
      if (token.empty())
        return Bad(Code::kInvalidArgument, "tokenizer.ggml.tokens", fmt::format("is empty at index {}", i));
      if (vocab_.contains(token))
        return Bad(Code::kInvalidArgument, "tokenizer.ggml.tokens",
                   fmt::format("holds {} at index {} and at {}", Excerpt(token), vocab_[token].get<size_t>(), i));
      vocab_[token] = i;
      if (type != kNormal)
        added_.push_back({{"id", i},
                          {"content", token},
                          {"single_word", false},
                          {"lstrip", false},
                          {"rstrip", false},
                          {"normalized", false},
                          {"special", type == kControl}});
    }
    return {};
  }

  Status ReadMerges() {
    LQ_ASSIGN_OR_RETURN(const GgufArray* merges, Strings("tokenizer.ggml.merges"));
    merges_ = json::array();
    for (const std::string_view m : merges->strings) merges_.push_back(std::string(m));
    return {};
  }

  // The token of a flag, if it is on: its id and text.
  Result<std::optional<std::pair<int64_t, std::string>>> Edge(std::string_view flag, std::string_view id_key,
                                                              bool absent) const {
    std::optional<std::pair<int64_t, std::string>> none;
    LQ_ASSIGN_OR_RETURN(const bool on, Flag(flag, absent));
    if (!on) return none;
    const GgufValue* v = gguf_.Find(id_key);
    const uint64_t* id = v == nullptr ? nullptr : std::get_if<uint64_t>(&v->value);
    if (id == nullptr)
      return Bad(Code::kInvalidArgument, id_key,
                 fmt::format("is {}, but {} asks for it", v == nullptr ? "missing" : "no id", flag));
    if (*id >= tokens_->strings.size() || !vocab_.contains(std::string(tokens_->strings[*id])))
      return Bad(Code::kOutOfRange, id_key,
                 fmt::format("is {}; it must be one of {} tokens in use", *id, tokens_->strings.size()));
    return std::optional(std::pair(static_cast<int64_t>(*id), std::string(tokens_->strings[*id])));
  }

  Status ReadTemplate() {
    LQ_ASSIGN_OR_RETURN(const auto bos,
                        Edge("tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id", pre_->adds_bos));
    LQ_ASSIGN_OR_RETURN(const auto eos, Edge("tokenizer.ggml.add_eos_token", "tokenizer.ggml.eos_token_id", false));
    for (const char* key : {"tokenizer.ggml.add_space_prefix", "tokenizer.ggml.add_sep_token"}) {
      LQ_ASSIGN_OR_RETURN(const bool on, Flag(key, false));
      if (on) return Bad(Code::kUnsupported, key, "is true; only false is known here");
    }
    if (!bos && !eos) return {};
    json single = json::array(), special = json::object();
    const auto token = [&](const std::pair<int64_t, std::string>& t) {
      single.push_back({{"SpecialToken", {{"id", t.second}, {"type_id", 0}}}});
      special[t.second] = {{"id", t.second}, {"ids", {t.first}}, {"tokens", {t.second}}};
    };
    if (bos) token(*bos);
    single.push_back({{"Sequence", {{"id", "A"}, {"type_id", 0}}}});
    if (eos) token(*eos);
    json pair = single;
    pair.push_back({{"Sequence", {{"id", "B"}, {"type_id", 0}}}});
    processor_ = {{"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", special}};
    return {};
  }

  std::string Text() const {
    const json byte_level = {
        {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}};
    const json split = {{"type", "Split"},
                        {"pattern", {{"Regex", std::string(pre_->pattern)}}},
                        {"behavior", "Isolated"},
                        {"invert", false}};
    return json{{"version", "1.0"},
                {"truncation", nullptr},
                {"padding", nullptr},
                {"added_tokens", added_},
                {"normalizer", pre_->nfc ? json{{"type", "NFC"}} : json()},
                {"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {split, byte_level}}}},
                {"post_processor", processor_},
                {"decoder", byte_level},
                {"model",
                 {{"type", "BPE"},
                  {"dropout", nullptr},
                  {"unk_token", nullptr},
                  {"continuing_subword_prefix", nullptr},
                  {"end_of_word_suffix", nullptr},
                  {"fuse_unk", false},
                  {"byte_fallback", false},
                  {"ignore_merges", pre_->ignore_merges},
                  {"vocab", vocab_},
                  {"merges", merges_}}}}
        .dump();
  }

  const Gguf& gguf_;
  std::string_view what_;
  const NamedPreTokenizer* pre_ = nullptr;
  const GgufArray* tokens_ = nullptr;
  json vocab_, added_, merges_, processor_;
};

}  // namespace

Result<std::string> GgufTokenizerJson(const Gguf& gguf, std::string_view what) { return Reader(gguf, what).Read(); }

Result<Tokenizer> LoadGgufTokenizer(const std::string& path) {
  LQ_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  LQ_ASSIGN_OR_RETURN(const Gguf gguf, Gguf::Parse(file.bytes(), path));
  LQ_ASSIGN_OR_RETURN(const std::string json, GgufTokenizerJson(gguf, path));
  Result<Tokenizer> tokenizer = Tokenizer::Parse(json);
  if (tokenizer.ok()) return tokenizer;
  return Status(tokenizer.status().code(),
                fmt::format("{}: its tokenizer as tokenizer.json: {}", path, tokenizer.status().message()));
}

}  // namespace livequant
