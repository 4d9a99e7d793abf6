// text/gguf_sentencepiece.cc: pieces with scores become merges: a pair is merged if what it spells is a piece, and the
// piece of the highest score comes first, of equal ones the leftmost. Nothing goes through tokenizer.json, which can
// say neither of the two: there each pair has a rank of its own, and both halves have to be tokens.
#include "text/gguf_sentencepiece.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <span>

#include "io/file.h"
#include "io/json.h"
#include "text/characters.h"
#include "text/utf8.h"

namespace livequant {
namespace {

constexpr std::string_view kTokens = "tokenizer.ggml.tokens", kTypes = "tokenizer.ggml.token_type",
                           kScores = "tokenizer.ggml.scores";
constexpr size_t kMaxTokenBytes = 256;  // each is cut everywhere
// Ways to put two symbols together: real vocabularies have about 2 a token.
constexpr size_t kMergesAToken = 6, kMergesBesides = size_t{1} << 16;

std::string Replaced(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    if (text.substr(at).starts_with(from)) {
      out += to;
      at += from.size();
    } else {
      out += text[at++];
    }
  }
  return out;
}

class Reader {
 public:
  Reader(const GgufFields& fields, Tokenizer::Impl* out) : fields_(fields), out_(*out) {}

  Status Read() {
    LQ_RETURN_IF_ERROR(ReadSettings());
    LQ_ASSIGN_OR_RETURN(tokens_, fields_.Tokens());
    LQ_ASSIGN_OR_RETURN(types_, fields_.TokenTypes(tokens_->count));
    LQ_ASSIGN_OR_RETURN(scores_, fields_.Scores(tokens_->count));
    LQ_RETURN_IF_ERROR(ReadTokens());
    LQ_RETURN_IF_ERROR(ReadUnknown());
    LQ_RETURN_IF_ERROR(ReadAdded());
    LQ_RETURN_IF_ERROR(MakeMerges());
    return ReadEdges();
  }

 private:
  std::string_view Text(size_t id) const { return tokens_->strings[id]; }
  int64_t Type(size_t id) const { return GgufInteger(*types_, id); }
  // SentencePiece merges to these; to the others it never does.
  bool IsPiece(size_t id) const {
    const int64_t type = Type(id);
    return type == kNormal || type == kUserDefined || type == kUnused;
  }
  // What the file says is what a cached row depends on.
  void Identify(std::string_view part) { identity_ += fmt::format("{}:{}\n", part.size(), part); }

  Status ReadSettings() {
    Identify("sentencepiece bpe");
    if (fields_.Has("tokenizer.ggml.pre")) {
      LQ_ASSIGN_OR_RETURN(const std::string_view pre, fields_.String("tokenizer.ggml.pre"));
      if (pre != "default")
        return fields_.Bad(Code::kUnsupported, "tokenizer.ggml.pre",
                           fmt::format("is {}; with model llama it is default or absent", Excerpt(pre)));
    }
    LQ_ASSIGN_OR_RETURN(prefix_, fields_.Flag("tokenizer.ggml.add_space_prefix", true));
    for (const char* key : {"tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.escape_whitespaces",
                            "tokenizer.ggml.treat_whitespace_as_suffix", "tokenizer.ggml.add_sep_token"}) {
      const bool usual = std::string_view(key) == "tokenizer.ggml.escape_whitespaces";
      LQ_ASSIGN_OR_RETURN(const bool on, fields_.Flag(key, usual));
      if (on != usual)
        return fields_.Bad(Code::kUnsupported, key, fmt::format("is {}; only {} is known here", on, usual));
    }
    if (fields_.Has("tokenizer.ggml.precompiled_charsmap"))
      return fields_.Bad(Code::kUnsupported, "tokenizer.ggml.precompiled_charsmap",
                         "is there; models that normalize their text are not read");
    Identify(prefix_ ? "prefix" : "no prefix");
    return {};
  }

  Status ReadTokens() {
    bpe_.fuse_unk = true;
    bpe_.byte_id.fill(-1);
    bpe_.unused.assign(tokens_->strings.size(), false);
    size_t bytes = 0;
    for (size_t i = 0; i < tokens_->strings.size(); ++i) {
      const std::string_view text = Text(i);
      const int64_t type = Type(i);
      const float score = GgufFloat(*scores_, i);
      if (type < kNormal || type > kByte)
        return fields_.Bad(Code::kUnsupported, kTypes,
                           fmt::format("is {} at index {}; types 1 to 6 are known here", type, i));
      if (!std::isfinite(score))
        return fields_.Bad(Code::kOutOfRange, kScores, fmt::format("is {} at index {}", score, i));
      if (text.size() > kMaxTokenBytes)
        return fields_.Bad(Code::kOutOfRange, kTokens,
                           fmt::format("has {} bytes at index {}, limit {}", text.size(), i, kMaxTokenBytes));
      const auto [at, fresh] = ids_.emplace(text, static_cast<int32_t>(i));
      if (!fresh)
        return fields_.Bad(Code::kInvalidArgument, kTokens,
                           fmt::format("holds {} at index {} and at {}", Excerpt(text), at->second, i));
      Token token{static_cast<int32_t>(i), type == kControl || type == kUnknown, {}, {}, {}};
      token.bytes = Replaced(text, BpeModel::kWordStart, " ");
      if (type == kByte) {
        const int byte = ByteOfFallback(text);
        if (byte < 0)
          return fields_.Bad(
              Code::kInvalidArgument, kTokens,
              fmt::format("holds {} at index {}, where the type says <0x00> to <0xFF>", Excerpt(text), i));
        if (bpe_.byte_id[static_cast<size_t>(byte)] >= 0)
          return fields_.Bad(Code::kInvalidArgument, kTokens, fmt::format("holds byte {} twice, at index {}", byte, i));
        bpe_.byte_id[static_cast<size_t>(byte)] = token.id;
        token.bytes = std::string(1, static_cast<char>(byte));
        ++bytes;
      }
      out_.tokens.push_back(std::move(token));
      Identify(text);
      Identify(fmt::format("{} {}", type, score));
    }
    if (bytes != 0 && bytes != 256)
      return fields_.Bad(Code::kInvalidArgument, kTypes,
                         fmt::format("is 6 for {} tokens; bytes are 256 or none", bytes));
    bpe_.byte_fallback = bytes != 0;
    return {};
  }

  Status ReadUnknown() {
    constexpr std::string_view kKey = "tokenizer.ggml.unknown_token_id";
    LQ_ASSIGN_OR_RETURN(const std::optional<int32_t> given, fields_.Id(kKey, tokens_->count));
    if (given) {
      bpe_.unk = *given;
    } else {
      for (size_t i = 0; i < tokens_->strings.size(); ++i) {
        if (Type(i) != kUnknown) continue;
        if (bpe_.unk >= 0)
          return fields_.Bad(Code::kInvalidArgument, kKey,
                             fmt::format("is missing, and tokens {} and {} are both unknown", bpe_.unk, i));
        bpe_.unk = static_cast<int32_t>(i);
      }
    }
    Identify(fmt::format("unk {}", bpe_.unk));
    return {};
  }

  // Control and unknown tokens are found in the text as it is, and each begins a text of its own. User-defined ones
  // are SentencePiece's: looked for once spaces are U+2581, as they may be written with either. Where there is a space
  // prefix, those without spaces are looked for with the first kind, and one stands behind them too: what was added to
  // a vocabulary later is of this kind (gguf_tokenizer.h).
  Status ReadAdded() {
    for (size_t i = 0; i < tokens_->strings.size(); ++i) {
      const int64_t type = Type(i);
      if (type != kControl && type != kUnknown && type != kUserDefined) continue;
      AddedToken token;
      token.id = static_cast<int32_t>(i);
      token.content = type == kUserDefined ? Replaced(Text(i), " ", BpeModel::kWordStart) : std::string(Text(i));
      if (token.content.size() > kMaxAddedTokenBytes)
        return fields_.Bad(Code::kOutOfRange, kTokens,
                           fmt::format("has {} bytes at index {} with U+2581 for spaces, limit {}",
                                       token.content.size(), i, kMaxAddedTokenBytes));
      const bool raw =
          type != kUserDefined || (prefix_ && token.content.find(BpeModel::kWordStart) == std::string::npos);
      (raw ? out_.raw_added : out_.normalized_added).Add(std::move(token));
    }
    for (AddedTokens* set : {&out_.raw_added, &out_.normalized_added})
      if (const AddedToken* twice = set->Freeze())
        return fields_.Bad(Code::kInvalidArgument, kTokens,
                           fmt::format("holds {} with spaces and with U+2581", Excerpt(twice->content)));
    if (prefix_) {
      NormalizerStep prepend{};
      prepend.kind = NormalizerStep::kPrepend;
      prepend.content = " ";
      out_.normalizer.Add(std::move(prepend));
      out_.decoder.strip_character = " ";
      out_.decoder.strip_start = 1;
    }
    NormalizerStep escape{};
    escape.kind = NormalizerStep::kReplace;
    escape.literal = " ";
    escape.content = BpeModel::kWordStart;
    out_.normalizer.Add(std::move(escape));
    return {};
  }

  // The symbol of what a piece is made of, or -1: a piece, or any one character.
  int32_t SymbolOf(std::string_view text) {
    const auto known = ids_.find(text);
    if (known != ids_.end() && IsPiece(static_cast<size_t>(known->second))) return known->second;
    const Utf8Step c = NextUtf8(text);
    if (static_cast<size_t>(c.bytes) != text.size()) return -1;
    if (c.code_point >= bpe_.character_id.size()) bpe_.character_id.resize(c.code_point + 1, -1);
    int32_t& symbol = bpe_.character_id[c.code_point];
    if (symbol < 0) {
      symbol = bpe_.first_spelled + static_cast<int32_t>(bpe_.spelled.size());
      bpe_.spelled.emplace_back(text);
    }
    return symbol;
  }

  Status MakeMerges() {
    bpe_.first_spelled = static_cast<int32_t>(tokens_->strings.size());
    std::vector<float> order;  // distinct scores, the highest first
    for (size_t i = 0; i < tokens_->strings.size(); ++i) {
      if (!IsPiece(i)) continue;
      order.push_back(GgufFloat(*scores_, i));
      const Utf8Step c = NextUtf8(Text(i));
      if (static_cast<size_t>(c.bytes) != Text(i).size()) continue;
      if (c.code_point >= bpe_.character_id.size()) bpe_.character_id.resize(c.code_point + 1, -1);
      bpe_.character_id[c.code_point] = static_cast<int32_t>(i);
    }
    std::sort(order.begin(), order.end(), std::greater<>());
    order.erase(std::unique(order.begin(), order.end()), order.end());

    struct Pair {
      int32_t left, right, result;
    };
    std::deque<Pair> pairs;  // grows without a second copy
    const size_t most = kMergesAToken * tokens_->strings.size() + kMergesBesides;
    bool across_words = false, falls_apart = false;
    for (size_t i = 0; i < tokens_->strings.size(); ++i) {
      if (!IsPiece(i)) continue;
      const std::string_view text = Text(i);
      const size_t before = pairs.size();
      for (size_t cut = static_cast<size_t>(NextUtf8(text).bytes); cut < text.size();
           cut += static_cast<size_t>(NextUtf8(text.substr(cut)).bytes)) {
        const int32_t left = SymbolOf(text.substr(0, cut));
        if (left < 0) continue;
        const int32_t right = SymbolOf(text.substr(cut));
        if (right >= 0) pairs.push_back({left, right, static_cast<int32_t>(i)});
      }
      if (pairs.size() > most)
        return fields_.Bad(Code::kOutOfRange, kTokens,
                           fmt::format("has over {} pairs that merge, by index {}, limit of {} tokens", most, i,
                                       tokens_->strings.size()));
      if (pairs.size() == before) continue;
      across_words = across_words || BpeModel::SpansWords(text);
      if (Type(i) != kUnused) continue;
      bpe_.unused[i] = true;
      falls_apart = true;
    }
    if (!falls_apart) bpe_.unused.clear();
    bpe_.merges = MergeTable(pairs.size());
    for (const Pair& p : pairs) {
      const auto rank = std::lower_bound(order.begin(), order.end(), GgufFloat(*scores_, static_cast<size_t>(p.result)),
                                         std::greater<>());
      // A pair spells one text, which is one piece.
      LQ_CHECK(bpe_.merges.Add(p.left, p.right, {static_cast<uint32_t>(rank - order.begin()), p.result}));
    }
    const auto start = ids_.find(BpeModel::kWordStart);
    bpe_.cut_at_words =
        !across_words && !falls_apart && start != ids_.end() && IsPiece(static_cast<size_t>(start->second));
    return {};
  }

  Status ReadEdges() {
    const auto bos = fields_.Edge("tokenizer.ggml.add_bos_token", true, "tokenizer.ggml.bos_token_id", tokens_->count);
    LQ_RETURN_IF_ERROR(bos.status());
    const auto eos = fields_.Edge("tokenizer.ggml.add_eos_token", false, "tokenizer.ggml.eos_token_id", tokens_->count);
    LQ_RETURN_IF_ERROR(eos.status());
    if (*bos) out_.before.push_back(**bos);
    if (*eos) out_.after.push_back(**eos);
    Identify(fmt::format("bos {} eos {}", bos->value_or(-1), eos->value_or(-1)));
    out_.digest = Sha256Hex(std::as_bytes(std::span(identity_.data(), identity_.size())));
    out_.model = std::move(bpe_);
    return {};
  }

  const GgufFields& fields_;
  Tokenizer::Impl& out_;
  const GgufArray *tokens_ = nullptr, *types_ = nullptr, *scores_ = nullptr;
  bool prefix_ = true;
  StringToId ids_;
  BpeModel bpe_;
  std::string identity_;
};

}  // namespace

Status ReadGgufSentencePiece(const GgufFields& fields, Tokenizer::Impl* out) { return Reader(fields, out).Read(); }

}  // namespace livequant
