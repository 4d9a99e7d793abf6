// text/gguf_tokenizer.cc: see gguf_tokenizer.h.
#include "text/gguf_tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "io/file.h"
#include "io/json.h"
#include "text/gguf_fields.h"
#include "text/gguf_sentencepiece.h"

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

class ByteLevelReader {
 public:
  explicit ByteLevelReader(const GgufFields& fields) : fields_(fields) {}

  // The text of the tokenizer.json that the file was made from.
  Result<std::string> Read() {
    constexpr std::string_view kPre = "tokenizer.ggml.pre";
    LQ_ASSIGN_OR_RETURN(const std::string_view pre, fields_.String(kPre));
    for (const NamedPreTokenizer& p : kPreTokenizers)
      if (std::find(std::begin(p.names), std::end(p.names), pre) != std::end(p.names)) pre_ = &p;
    if (pre_ == nullptr || pre.empty())
      return fields_.Bad(Code::kUnsupported, kPre,
                         fmt::format("is {}; gpt-2, llama-bpe and qwen2 are known here", Excerpt(pre)));
    LQ_RETURN_IF_ERROR(ReadTokens());
    LQ_RETURN_IF_ERROR(ReadMerges());
    LQ_RETURN_IF_ERROR(ReadTemplate());
    return Text();
  }

 private:
  Status ReadTokens() {
    constexpr std::string_view kTokens = "tokenizer.ggml.tokens";
    LQ_ASSIGN_OR_RETURN(tokens_, fields_.Tokens());
    LQ_ASSIGN_OR_RETURN(const GgufArray* types, fields_.TokenTypes(tokens_->count));
    vocab_ = json::object();
    added_ = json::array();
    for (size_t i = 0; i < tokens_->strings.size(); ++i) {
      const std::string token(tokens_->strings[i]);
      const int64_t type = GgufInteger(*types, i);
      if (type == kUnused) continue;
      if (type != kNormal && type != kControl && type != kUserDefined)
        return fields_.Bad(Code::kUnsupported, "tokenizer.ggml.token_type",
                           fmt::format("is {} at index {}; byte-level BPE has types 1, 3, 4 and 5", type, i));
      if (vocab_.contains(token))
        return fields_.Bad(
            Code::kInvalidArgument, kTokens,
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
    LQ_ASSIGN_OR_RETURN(const GgufArray* merges, fields_.Strings("tokenizer.ggml.merges"));
    merges_ = json::array();
    for (const std::string_view m : merges->strings) merges_.push_back(std::string(m));
    return {};
  }

  // The token of a flag, if it is on: its id and text.
  Result<std::optional<std::pair<int64_t, std::string>>> Edge(std::string_view flag, std::string_view id_key,
                                                              bool absent) const {
    std::optional<std::pair<int64_t, std::string>> none;
    LQ_ASSIGN_OR_RETURN(const std::optional<int32_t> id, fields_.Edge(flag, absent, id_key, tokens_->count));
    if (!id) return none;
    std::string token(tokens_->strings[static_cast<size_t>(*id)]);
    if (!vocab_.contains(token))
      return fields_.Bad(Code::kOutOfRange, id_key,
                         fmt::format("is {}; it must be one of {} tokens in use", *id, tokens_->count));
    return std::optional(std::pair(int64_t{*id}, std::move(token)));
  }

  Status ReadTemplate() {
    LQ_ASSIGN_OR_RETURN(const auto bos,
                        Edge("tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id", pre_->adds_bos));
    LQ_ASSIGN_OR_RETURN(const auto eos, Edge("tokenizer.ggml.add_eos_token", "tokenizer.ggml.eos_token_id", false));
    for (const char* key : {"tokenizer.ggml.add_space_prefix", "tokenizer.ggml.add_sep_token"}) {
      LQ_ASSIGN_OR_RETURN(const bool on, fields_.Flag(key, false));
      if (on) return fields_.Bad(Code::kUnsupported, key, "is true; only false is known here");
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

  const GgufFields& fields_;
  const NamedPreTokenizer* pre_ = nullptr;
  const GgufArray* tokens_ = nullptr;
  json vocab_, added_, merges_, processor_;
};

}  // namespace

Result<Tokenizer> GgufTokenizer(const Gguf& gguf, std::string_view what) {
  const GgufFields fields(gguf, what);
  constexpr std::string_view kModel = "tokenizer.ggml.model";
  LQ_ASSIGN_OR_RETURN(const std::string_view model, fields.String(kModel));
  if (model == "llama") {
    auto impl = std::make_shared<Tokenizer::Impl>();
    LQ_RETURN_IF_ERROR(ReadGgufSentencePiece(fields, impl.get()));
    return Tokenizer::Of(std::move(impl));
  }
  if (model != "gpt2")
    return fields.Bad(
        Code::kUnsupported, kModel,
        fmt::format("is {}; gpt2 (byte-level BPE) and llama (SentencePiece BPE) are read", Excerpt(model)));
  LQ_ASSIGN_OR_RETURN(const std::string json, ByteLevelReader(fields).Read());
  Result<Tokenizer> tokenizer = Tokenizer::Parse(json);
  if (tokenizer.ok()) return tokenizer;
  return Status(tokenizer.status().code(),
                fmt::format("{}: its tokenizer as tokenizer.json: {}", what, tokenizer.status().message()));
}

Result<Tokenizer> LoadGgufTokenizer(const std::string& path) {
  LQ_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  LQ_ASSIGN_OR_RETURN(const Gguf gguf, Gguf::Parse(file.bytes(), path));
  return GgufTokenizer(gguf, path);
}

}  // namespace livequant
