// text/tokenizer_json.cc: every field of tokenizer.json is taken and checked, or the file is refused by that field's
// name.
#include "text/tokenizer_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include "io/file.h"
#include "io/json.h"
#include "text/characters.h"
#include "text/utf8.h"

namespace livequant {
namespace {

using nlohmann::json;

constexpr size_t kMaxContentBytes = 512;  // of what an edit puts into the text
// GPT-2's own pattern, which ByteLevel with use_regex stands for.
constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

bool ById(const Token& a, const Token& b) { return a.id < b.id; }

Status Bad(std::string_view where, std::string_view what) {
  return Status(Code::kInvalidArgument, fmt::format("tokenizer.json: {}: {}", where, what));
}
Status Unsupported(std::string_view where, const json& value, std::string_view nearest) {
  return Status(
      Code::kUnsupported,
      fmt::format("tokenizer.json: {} = {}: not supported, {}", where,
                  Excerpt(value.is_string() ? value.get_ref<const std::string&>() : value.dump(-1, ' ', true), 80),
                  nearest));
}

// An object of tokenizer.json, for reading typed fields. Every field has to be taken: one that nobody knows is refused.
class Fields {
 public:
  static Result<Fields> Of(const json& value, std::string where) {
    if (!value.is_object()) return Bad(where, fmt::format("{}, not an object", value.type_name()));
    return Fields(value, std::move(where));
  }
  const std::string& where() const { return where_; }
  // The value of a field, null where it is absent.
  const json& Take(std::string_view name) {
    static const json kNull;
    taken_.emplace_back(name);
    const auto at = value_->find(name);
    return at == value_->end() ? kNull : *at;
  }
  bool Has(std::string_view name) const { return value_->contains(name); }
  Result<bool> Bool(std::string_view name, bool if_absent) {
    const json& v = Take(name);
    if (v.is_null()) return if_absent;
    if (!v.is_boolean()) return Bad(Path(name), fmt::format("{}, not a boolean", v.type_name()));
    return v.get<bool>();
  }
  Result<std::string> String(std::string_view name) {
    const json& v = Take(name);
    if (!v.is_string()) return Bad(Path(name), fmt::format("{}, not a string", v.type_name()));
    return v.get<std::string>();
  }
  Result<int32_t> Id(std::string_view name) { return ParseId(Take(name), Path(name)); }
  static Result<int32_t> ParseId(const json& v, const std::string& where) {
    if (!v.is_number_unsigned() || v.get<uint64_t>() >= uint64_t{std::numeric_limits<int32_t>::max()})
      return Bad(where, fmt::format("{} is no token id (0..2147483646)", Excerpt(v.dump(-1, ' ', true), 32)));
    return static_cast<int32_t>(v.get<uint64_t>());
  }
  std::string Path(std::string_view name) const {
    return where_.empty() ? std::string(name) : fmt::format("{}.{}", where_, name);
  }
  // Refuses a field that was never taken.
  Status Done() const {
    for (const auto& [name, value] : value_->items()) {
      if (std::find(taken_.begin(), taken_.end(), name) == taken_.end())
        return Status(Code::kUnsupported, fmt::format("tokenizer.json: {}: unknown field {}",
                                                      where_.empty() ? "top level" : where_, Excerpt(name)));
    }
    return {};
  }

 private:
  Fields(const json& value, std::string where) : value_(&value), where_(std::move(where)) {}
  const json* value_;
  std::string where_;
  std::vector<std::string> taken_;
};

// A pattern of tokenizer.json: {"Regex": ...} or {"String": ...}.
struct Pattern {
  std::string literal;
  std::optional<Regex> regex;
};

class Parser {
 public:
  explicit Parser(Tokenizer::Impl* out) : out_(*out) {}
  Status Parse(std::string_view text);

 private:
  Status Model(const json& value);
  Status Bpe(Fields& model);
  Status Unigram(Fields& model);
  Status Merges(const json& value, BpeModel* model);
  Status SortTokens();
  Status Added(const json& value);
  Status Normalizer(const json& value, const std::string& where);
  Status PreTokenizer(const json& value, const std::string& where);
  Status ByteLevel(Fields& fields);
  Status PostProcessor(const json& value, const std::string& where);
  Status Decoder(const json& value, const std::string& where);
  Status DecoderStep(const json& type, Fields& fields);
  Status DecodeTokens();
  static Result<Pattern> ParsePattern(Fields& fields);
  static Result<std::string> Content(Fields& fields, const char* name);
  // Replacement, and whether spaces go in front, under both spellings.
  static Status Metaspace(Fields& fields, std::string* replacement, PreTokenizerStep::Prefix* when, bool* split);
  // Calls each(element, where) for every element of the array field `name`.
  template <class Each>
  Status ForEach(Fields& fields, std::string_view name, Each&& each);

  Tokenizer::Impl& out_;
  StringToId vocab_;               // model tokens as the file spells them
  std::set<int32_t> as_they_are_;  // added tokens that the model does not have: ByteLevel leaves their text alone
  bool byte_level_ = false, template_ = false;
  bool fused_ = false, fallback_ = false, metaspace_ = false;  // of the decoder, so far
};

template <class Each>
Status Parser::ForEach(Fields& fields, std::string_view name, Each&& each) {
  const json& array = fields.Take(name);
  const std::string where = fields.Path(name);
  if (!array.is_array()) return Bad(where, fmt::format("{}, not an array", array.type_name()));
  for (size_t i = 0; i < array.size(); ++i) LQ_RETURN_IF_ERROR(each(array[i], fmt::format("{}[{}]", where, i)));
  return {};
}

Status Parser::Parse(std::string_view text) {
  LQ_ASSIGN_OR_RETURN(const json document, ParseJson(text, "tokenizer.json"));
  LQ_ASSIGN_OR_RETURN(Fields top, Fields::Of(document, ""));
  if (const json& v = top.Take("version"); !v.is_null() && v != "1.0") return Unsupported("version", v, "1.0 is");
  for (const char* name : {"truncation", "padding"})
    if (const json& v = top.Take(name); !v.is_null()) return Unsupported(name, v, "only null is");
  if (const json& pre = top.Take("pre_tokenizer"); !pre.is_null())
    LQ_RETURN_IF_ERROR(PreTokenizer(pre, "pre_tokenizer"));
  LQ_RETURN_IF_ERROR(Model(top.Take("model")));
  LQ_RETURN_IF_ERROR(Normalizer(top.Take("normalizer"), "normalizer"));
  LQ_RETURN_IF_ERROR(Added(top.Take("added_tokens")));
  LQ_RETURN_IF_ERROR(PostProcessor(top.Take("post_processor"), "post_processor"));
  LQ_RETURN_IF_ERROR(Decoder(top.Take("decoder"), "decoder"));
  LQ_RETURN_IF_ERROR(top.Done());
  LQ_RETURN_IF_ERROR(DecodeTokens());
  out_.digest = Sha256Hex(std::as_bytes(std::span(text.data(), text.size())));
  return {};
}

Status Parser::Model(const json& value) {
  LQ_ASSIGN_OR_RETURN(Fields model, Fields::Of(value, "model"));
  // Files from before the field existed: only BPE has merges, only unigram a list of pairs.
  const bool named = model.Has("type");
  const json& type = model.Take("type");
  if (type == "BPE" || (!named && model.Has("merges"))) {
    LQ_RETURN_IF_ERROR(Bpe(model));
  } else if (type == "Unigram" || (!named && model.Has("vocab") && model.Take("vocab").is_array())) {
    LQ_RETURN_IF_ERROR(Unigram(model));
  } else {
    return Unsupported("model.type", type, "BPE and Unigram are");
  }
  return model.Done();
}

Status Parser::SortTokens() {
  std::sort(out_.tokens.begin(), out_.tokens.end(), ById);
  const auto twice = std::adjacent_find(out_.tokens.begin(), out_.tokens.end(),
                                        [](const Token& a, const Token& b) { return a.id == b.id; });
  if (twice != out_.tokens.end()) return Bad("model.vocab", fmt::format("id {} is given twice", twice->id));
  return {};
}

Status Parser::Bpe(Fields& model) {
  BpeModel& bpe = out_.model.emplace<BpeModel>();
  bpe.byte_level = byte_level_;
  if (const json& v = model.Take("dropout"); !v.is_null()) return Unsupported(model.Path("dropout"), v, "only null is");
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (const json& v = model.Take(name); !v.is_null() && v != "")
      return Unsupported(model.Path(name), v, "only null is");
  LQ_ASSIGN_OR_RETURN(bpe.byte_fallback, model.Bool("byte_fallback", false));
  if (bpe.byte_fallback && byte_level_) return Unsupported("model.byte_fallback", true, "with ByteLevel only false is");
  LQ_ASSIGN_OR_RETURN(bpe.fuse_unk, model.Bool("fuse_unk", false));
  LQ_ASSIGN_OR_RETURN(bpe.ignore_merges, model.Bool("ignore_merges", false));

  const json& vocab = model.Take("vocab");
  if (!vocab.is_object() || vocab.empty()) return Bad("model.vocab", "no object with tokens");
  bpe.byte_id.fill(-1);
  for (const auto& [spelling, id_value] : vocab.items()) {
    LQ_ASSIGN_OR_RETURN(const int32_t id, Fields::ParseId(id_value, fmt::format("model.vocab[{}]", Excerpt(spelling))));
    vocab_.emplace(spelling, id);
    out_.tokens.push_back({id, false, spelling, {}, {}});
    if (byte_level_) {
      // A token outside the alphabet is its own text, and no merge leads to it.
      const std::optional<std::string> bytes = BytesOfSpelling(spelling);
      if (bytes && bytes->size() == 1) bpe.byte_id[static_cast<unsigned char>((*bytes)[0])] = id;
      if (bytes && bpe.ignore_merges) bpe.whole_pieces.emplace(*bytes, id);
      continue;
    }
    if (bpe.ignore_merges) bpe.whole_pieces.emplace(spelling, id);
    if (spelling.empty()) continue;
    const Utf8Step step = NextUtf8(spelling);
    if (static_cast<size_t>(step.bytes) != spelling.size()) continue;
    if (step.code_point >= bpe.character_id.size()) bpe.character_id.resize(step.code_point + 1, -1);
    bpe.character_id[step.code_point] = id;
  }
  LQ_RETURN_IF_ERROR(SortTokens());
  if (bpe.byte_fallback) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const auto fallback = vocab_.find(fmt::format("<0x{:02X}>", byte));
      if (fallback != vocab_.end()) bpe.byte_id[byte] = fallback->second;
    }
  }
  if (const json& unk = model.Take("unk_token"); !unk.is_null()) {
    LQ_ASSIGN_OR_RETURN(const std::string token, model.String("unk_token"));
    const auto known = vocab_.find(token);
    if (known == vocab_.end()) return Bad("model.unk_token", fmt::format("{} is not in model.vocab", Excerpt(token)));
    bpe.unk = known->second;
  }
  bpe.cut_at_words = !byte_level_ && !bpe.ignore_merges && vocab_.contains(BpeModel::kWordStart);
  return Merges(model.Take("merges"), &bpe);
}

Status Parser::Unigram(Fields& model) {
  if (byte_level_) return Unsupported("pre_tokenizer", json("ByteLevel"), "with Unigram, all others are");
  LQ_ASSIGN_OR_RETURN(const bool byte_fallback, model.Bool("byte_fallback", false));
  int32_t unk = -1;
  if (const json& v = model.Take("unk_id"); !v.is_null()) {
    LQ_ASSIGN_OR_RETURN(unk, Fields::ParseId(v, "model.unk_id"));
  }
  const json& vocab = model.Take("vocab");
  if (!vocab.is_array() || vocab.empty()) return Bad("model.vocab", "no array with tokens");
  std::vector<std::pair<std::string, double>> tokens;
  tokens.reserve(vocab.size());
  for (size_t i = 0; i < vocab.size(); ++i) {
    const json& entry = vocab[i];
    if (!entry.is_array() || entry.size() != 2 || !entry[0].is_string() || !entry[1].is_number())
      return Bad(fmt::format("model.vocab[{}]", i), "not [token, score]");
    tokens.emplace_back(entry[0].get<std::string>(), entry[1].get<double>());
    vocab_.emplace(tokens.back().first, static_cast<int32_t>(i));
    out_.tokens.push_back({static_cast<int32_t>(i), false, tokens.back().first, {}, {}});
  }
  Result<UnigramModel> built = UnigramModel::Build(tokens, unk, byte_fallback);
  if (!built.ok())
    return Status(built.status().code(), fmt::format("tokenizer.json: model.{}", built.status().message()));
  out_.model = *std::move(built);
  return {};
}

Status Parser::Merges(const json& value, BpeModel* model) {
  if (!value.is_array()) return Bad("model.merges", fmt::format("{}, not an array", value.type_name()));
  model->merges = MergeTable(value.size());
  for (size_t i = 0; i < value.size(); ++i) {
    const json& entry = value[i];
    const auto where = [&] { return fmt::format("model.merges[{}]", i); };
    std::string left, right;
    if (entry.is_string()) {
      const std::string& both = entry.get_ref<const std::string&>();
      const size_t space = both.find(' ');
      if (space == both.npos || both.find(' ', space + 1) != both.npos)
        return Bad(where(), fmt::format("{} is not \"left right\"", Excerpt(both)));
      left = both.substr(0, space);
      right = both.substr(space + 1);
    } else if (entry.is_array() && entry.size() == 2 && entry[0].is_string() && entry[1].is_string()) {
      left = entry[0].get<std::string>();
      right = entry[1].get<std::string>();
    } else {
      return Bad(where(), "neither \"left right\" nor [\"left\", \"right\"]");
    }
    if (left.empty() || right.empty()) return Bad(where(), "merges an empty token");
    const std::string both = left + right;  // outlives the pairs below, which refer to it
    int32_t left_id = 0, right_id = 0, result = 0;
    for (const auto& [spelling, id] :
         {std::pair<const std::string&, int32_t*>(left, &left_id), {right, &right_id}, {both, &result}}) {
      const auto at = vocab_.find(spelling);
      if (at == vocab_.end()) return Bad(where(), fmt::format("{} is not in model.vocab", Excerpt(spelling)));
      *id = at->second;
    }
    if (!model->merges.Add(left_id, right_id, {static_cast<uint32_t>(i), result}))
      return Bad(where(), fmt::format("{} {} is merged twice", Excerpt(left), Excerpt(right)));
    model->cut_at_words = model->cut_at_words && !BpeModel::SpansWords(both);
  }
  return {};
}

Status Parser::Added(const json& value) {
  if (value.is_null()) return {};
  if (!value.is_array()) return Bad("added_tokens", fmt::format("{}, not an array", value.type_name()));
  std::vector<Token> fresh;
  for (size_t i = 0; i < value.size(); ++i) {
    LQ_ASSIGN_OR_RETURN(Fields fields, Fields::Of(value[i], fmt::format("added_tokens[{}]", i)));
    AddedToken token;
    LQ_ASSIGN_OR_RETURN(token.id, fields.Id("id"));
    LQ_ASSIGN_OR_RETURN(token.content, fields.String("content"));
    LQ_ASSIGN_OR_RETURN(token.special, fields.Bool("special", false));
    LQ_ASSIGN_OR_RETURN(token.single_word, fields.Bool("single_word", false));
    LQ_ASSIGN_OR_RETURN(token.lstrip, fields.Bool("lstrip", false));
    LQ_ASSIGN_OR_RETURN(token.rstrip, fields.Bool("rstrip", false));
    LQ_ASSIGN_OR_RETURN(token.normalized, fields.Bool("normalized", !token.special));
    LQ_RETURN_IF_ERROR(fields.Done());
    if (token.content.empty()) return Bad(fields.Path("content"), "empty");
    if (token.content.size() > kMaxAddedTokenBytes)
      return Status(Code::kOutOfRange, fmt::format("tokenizer.json: {}: {} bytes, limit {}", fields.Path("content"),
                                                   token.content.size(), kMaxAddedTokenBytes));
    if (const auto model = vocab_.find(token.content); model != vocab_.end()) {
      if (model->second != token.id)
        return Bad(fields.Path("id"),
                   fmt::format("{} is {} here and {} in model.vocab", Excerpt(token.content), token.id, model->second));
      std::lower_bound(out_.tokens.begin(), out_.tokens.end(), Token{token.id, false, {}, {}, {}}, ById)->special =
          token.special;
    } else {
      if (out_.Find(token.id) != nullptr)
        return Bad(fields.Path("id"), fmt::format("{} is another token in model.vocab", token.id));
      fresh.push_back({token.id, token.special, token.content, {}, {}});
    }
    if (token.normalized) {
      bool begins = true;
      LQ_ASSIGN_OR_RETURN(token.content, out_.normalizer.Apply(token.content, &begins));
      if (token.content.empty()) return Bad(fields.Path("content"), "empty once normalized");
    }
    (token.normalized ? out_.normalized_added : out_.raw_added).Add(std::move(token));
  }
  for (AddedTokens* set : {&out_.raw_added, &out_.normalized_added}) {
    if (const AddedToken* twice = set->Freeze())
      return Bad("added_tokens", fmt::format("{} is there twice", Excerpt(twice->content)));
  }
  for (const Token& token : fresh) as_they_are_.insert(token.id);
  std::move(fresh.begin(), fresh.end(), std::back_inserter(out_.tokens));
  std::sort(out_.tokens.begin(), out_.tokens.end(), ById);
  const auto twice = std::adjacent_find(out_.tokens.begin(), out_.tokens.end(),
                                        [](const Token& a, const Token& b) { return a.id == b.id; });
  if (twice != out_.tokens.end()) return Bad("added_tokens", fmt::format("id {} is given twice", twice->id));
  return {};
}

Result<Pattern> Parser::ParsePattern(Fields& fields) {
  LQ_ASSIGN_OR_RETURN(Fields pattern, Fields::Of(fields.Take("pattern"), fields.Path("pattern")));
  const json& regex = pattern.Take("Regex");
  const json& literal = pattern.Take("String");
  if (regex.is_null() == literal.is_null()) return Bad(pattern.where(), "neither just a Regex nor just a String");
  LQ_RETURN_IF_ERROR(pattern.Done());
  LQ_ASSIGN_OR_RETURN(std::string text, pattern.String(regex.is_null() ? "String" : "Regex"));
  if (text.empty()) return Bad(pattern.where(), "empty");
  Pattern out;
  if (regex.is_null()) {
    out.literal = std::move(text);
    return out;
  }
  Result<Regex> compiled = Regex::Compile(text);
  if (!compiled.ok())
    return Status(compiled.status().code(),
                  fmt::format("tokenizer.json: {}: {}", pattern.where(), compiled.status().message()));
  out.regex = *std::move(compiled);
  return out;
}

Result<std::string> Parser::Content(Fields& fields, const char* name) {
  LQ_ASSIGN_OR_RETURN(std::string content, fields.String(name));
  if (content.size() > kMaxContentBytes)
    return Status(Code::kOutOfRange, fmt::format("tokenizer.json: {}: {} bytes, limit {}", fields.Path(name),
                                                 content.size(), kMaxContentBytes));
  return content;
}

Status Parser::Normalizer(const json& value, const std::string& where) {
  if (value.is_null()) return {};
  LQ_ASSIGN_OR_RETURN(Fields fields, Fields::Of(value, where));
  const json& type = fields.Take("type");
  if (type == "Sequence") {
    LQ_RETURN_IF_ERROR(
        ForEach(fields, "normalizers", [&](const json& v, const std::string& w) { return Normalizer(v, w); }));
    return fields.Done();
  }
  if (out_.normalizer.size() == Normalizer::kMaxSteps)
    return Status(Code::kOutOfRange,
                  fmt::format("tokenizer.json: {}: more than {} steps", where, Normalizer::kMaxSteps));
  NormalizerStep step{};
  if (type == "NFC" || type == "NFD" || type == "NFKC" || type == "NFKD") {
    step.kind = NormalizerStep::kUnicode;
    step.compose = type == "NFC" || type == "NFKC";
    step.compat = type == "NFKC" || type == "NFKD";
  } else if (type == "Prepend") {
    step.kind = NormalizerStep::kPrepend;
    LQ_ASSIGN_OR_RETURN(step.content, Content(fields, "prepend"));
  } else if (type == "Replace") {
    step.kind = NormalizerStep::kReplace;
    LQ_ASSIGN_OR_RETURN(Pattern pattern, ParsePattern(fields));
    step.literal = std::move(pattern.literal);
    step.regex = std::move(pattern.regex);
    LQ_ASSIGN_OR_RETURN(step.content, Content(fields, "content"));
  } else if (type == "Lowercase") {
    step.kind = NormalizerStep::kLowercase;
  } else if (type == "Strip") {
    step.kind = NormalizerStep::kStrip;
    LQ_ASSIGN_OR_RETURN(step.left, fields.Bool("strip_left", true));
    LQ_ASSIGN_OR_RETURN(step.right, fields.Bool("strip_right", true));
  } else if (type == "StripAccents") {
    step.kind = NormalizerStep::kStripAccents;
  } else if (type == "Nmt") {
    step.kind = NormalizerStep::kNmt;
  } else if (type == "Precompiled") {
    step.kind = NormalizerStep::kCharsmap;
    LQ_ASSIGN_OR_RETURN(const std::string base64, fields.String("precompiled_charsmap"));
    Result<Charsmap> map = Charsmap::Parse(base64);
    if (!map.ok())
      return Status(map.status().code(), fmt::format("tokenizer.json: {}: {}", where, map.status().message()));
    step.charsmap = *std::move(map);
  } else {
    return Unsupported(fields.Path("type"), type,
                       "null, NFC, NFD, NFKC, NFKD, Prepend, Replace, Lowercase, Strip, StripAccents, Nmt, Precompiled "
                       "and Sequence are");
  }
  out_.normalizer.Add(std::move(step));
  return fields.Done();
}

Status Parser::Metaspace(Fields& fields, std::string* replacement, PreTokenizerStep::Prefix* when, bool* split) {
  LQ_ASSIGN_OR_RETURN(*replacement, fields.String("replacement"));
  if (replacement->empty() || static_cast<size_t>(NextUtf8(*replacement).bytes) != replacement->size())
    return Bad(fields.Path("replacement"), fmt::format("{} is not one character", Excerpt(*replacement)));
  if (const json& spelled = fields.Take("str_rep"); !spelled.is_null() && spelled != *replacement)
    return Bad(fields.Path("str_rep"), "not the replacement");
  const json& scheme = fields.Take("prepend_scheme");
  LQ_ASSIGN_OR_RETURN(const bool legacy, fields.Bool("add_prefix_space", true));
  if (scheme.is_null()) {
    *when = legacy ? PreTokenizerStep::kAlways : PreTokenizerStep::kNever;
  } else if (scheme == "always") {
    *when = PreTokenizerStep::kAlways;
  } else if (scheme == "first") {
    *when = PreTokenizerStep::kFirst;
  } else if (scheme == "never") {
    *when = PreTokenizerStep::kNever;
  } else {
    return Unsupported(fields.Path("prepend_scheme"), scheme, "always, first and never are");
  }
  LQ_ASSIGN_OR_RETURN(*split, fields.Bool("split", true));
  return {};
}

Status Parser::ByteLevel(Fields& fields) {
  byte_level_ = true;
  LQ_ASSIGN_OR_RETURN(const bool add_prefix_space, fields.Bool("add_prefix_space", true));
  LQ_RETURN_IF_ERROR(fields.Bool("trim_offsets", true).status());  // about offsets, which nobody asks for here
  LQ_ASSIGN_OR_RETURN(const bool use_regex, fields.Bool("use_regex", true));
  PreTokenizerStep step;
  if (add_prefix_space) {
    step.prefix = " ";
    step.when = PreTokenizerStep::kAlways;
  }
  if (use_regex) {
    LQ_ASSIGN_OR_RETURN(step.pattern, Regex::Compile(kGpt2Pattern));
  }
  out_.pre_tokenizer.push_back(std::move(step));
  return {};
}

Status Parser::PreTokenizer(const json& value, const std::string& where) {
  LQ_ASSIGN_OR_RETURN(Fields fields, Fields::Of(value, where));
  const json& type = fields.Take("type");
  if (type == "Sequence") {
    LQ_RETURN_IF_ERROR(
        ForEach(fields, "pretokenizers", [&](const json& v, const std::string& w) { return PreTokenizer(v, w); }));
    return fields.Done();
  }
  // After ByteLevel the text is spelled in GPT-2's alphabet, and a pattern would see that spelling.
  if (byte_level_) return Unsupported(fields.Path("type"), type, "ByteLevel has to be the last step");
  if (out_.pre_tokenizer.size() == PreTokenizer::kMaxSteps)
    return Status(Code::kOutOfRange,
                  fmt::format("tokenizer.json: {}: more than {} steps", where, PreTokenizer::kMaxSteps));
  const auto behavior = [&](const char* if_absent) -> Result<SplitBehavior> {
    const json& named = fields.Take("behavior");
    const json& v = named.is_null() ? json(if_absent) : named;
    constexpr std::pair<const char*, SplitBehavior> kKnown[] = {
        {"Removed", SplitBehavior::kRemoved},
        {"Isolated", SplitBehavior::kIsolated},
        {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
        {"MergedWithNext", SplitBehavior::kMergedWithNext},
        {"Contiguous", SplitBehavior::kContiguous}};
    for (const auto& [name, known] : kKnown)
      if (v == name) return known;
    return Unsupported(fields.Path("behavior"), v,
                       "Removed, Isolated, MergedWithPrevious, MergedWithNext and Contiguous are");
  };
  PreTokenizerStep step;
  if (type == "ByteLevel") {
    LQ_RETURN_IF_ERROR(ByteLevel(fields));
    return fields.Done();
  }
  if (type == "Split") {
    LQ_ASSIGN_OR_RETURN(Pattern pattern, ParsePattern(fields));
    if (pattern.regex) {
      step.pattern = *std::move(pattern.regex);
    } else {
      step.pattern = std::move(pattern.literal);
    }
    LQ_ASSIGN_OR_RETURN(step.behavior, behavior(""));
    LQ_ASSIGN_OR_RETURN(step.invert, fields.Bool("invert", false));
  } else if (type == "Digits") {
    LQ_ASSIGN_OR_RETURN(const bool individual, fields.Bool("individual_digits", false));
    step.pattern = &IsNumeric;
    step.behavior = individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous;
  } else if (type == "Punctuation") {
    step.pattern = &IsPunctuation;
    LQ_ASSIGN_OR_RETURN(step.behavior, behavior("Isolated"));
  } else if (type == "WhitespaceSplit") {
    step.pattern = &IsSpace;
    step.behavior = SplitBehavior::kRemoved;
  } else if (type == "Metaspace") {
    bool split = true;
    LQ_RETURN_IF_ERROR(Metaspace(fields, &step.space, &step.when, &split));
    step.prefix = step.space;
    if (split) step.pattern = step.space;
    step.behavior = SplitBehavior::kMergedWithNext;
  } else {
    return Unsupported(fields.Path("type"), type,
                       "Sequence, Split, ByteLevel, Metaspace, Digits, Punctuation and WhitespaceSplit are");
  }
  out_.pre_tokenizer.push_back(std::move(step));
  return fields.Done();
}

Status Parser::PostProcessor(const json& value, const std::string& where) {
  if (value.is_null()) return {};
  LQ_ASSIGN_OR_RETURN(Fields fields, Fields::Of(value, where));
  const json& type = fields.Take("type");
  if (type == "Sequence") {
    LQ_RETURN_IF_ERROR(
        ForEach(fields, "processors", [&](const json& v, const std::string& w) { return PostProcessor(v, w); }));
  } else if (type == "ByteLevel") {  // about offsets only
    for (const char* name : {"add_prefix_space", "trim_offsets", "use_regex"})
      LQ_RETURN_IF_ERROR(fields.Bool(name, true).status());
  } else if (type == "BertProcessing" || type == "RobertaProcessing") {
    if (template_) return Bad(where, "a second template");
    template_ = true;
    for (const char* name : {"trim_offsets", "add_prefix_space"}) LQ_RETURN_IF_ERROR(fields.Bool(name, true).status());
    for (const auto& [name, ids] : {std::pair("cls", &out_.before), std::pair("sep", &out_.after)}) {
      const json& pair = fields.Take(name);
      if (!pair.is_array() || pair.size() != 2 || !pair[0].is_string())
        return Bad(fields.Path(name), "not [token, id]");
      LQ_ASSIGN_OR_RETURN(const int32_t id, Fields::ParseId(pair[1], fields.Path(name)));
      if (out_.Find(id) == nullptr) return Bad(fields.Path(name), fmt::format("{} is no token", id));
      ids->push_back(id);
    }
  } else if (type == "TemplateProcessing") {
    if (template_) return Bad(where, "a second template");
    template_ = true;
    const json& known = fields.Take("special_tokens");
    fields.Take("pair");  // a pair of texts is never encoded here
    bool seen = false;
    const auto piece = [&](const json& v, const std::string& w) -> Status {
      LQ_ASSIGN_OR_RETURN(Fields item, Fields::Of(v, w));
      const json& special = item.Take("SpecialToken");
      const json& sequence = item.Take("Sequence");
      LQ_RETURN_IF_ERROR(item.Done());
      if (special.is_null() == sequence.is_null()) return Bad(w, "neither just a SpecialToken nor just a Sequence");
      LQ_ASSIGN_OR_RETURN(Fields inner, Fields::Of(special.is_null() ? sequence : special, w));
      LQ_ASSIGN_OR_RETURN(const std::string name, inner.String("id"));
      inner.Take("type_id");
      LQ_RETURN_IF_ERROR(inner.Done());
      if (special.is_null()) {
        if (name != "A" || seen) return Bad(w, fmt::format("sequence {}, where A may stand once", Excerpt(name)));
        seen = true;
        return {};
      }
      if (!known.is_object() || !known.contains(name))
        return Bad(w, fmt::format("{} is not in special_tokens", Excerpt(name)));
      LQ_ASSIGN_OR_RETURN(Fields token,
                          Fields::Of(known[name], fmt::format("{}.special_tokens[{}]", where, Excerpt(name))));
      token.Take("id");
      token.Take("tokens");
      LQ_RETURN_IF_ERROR(ForEach(token, "ids", [&](const json& id_value, const std::string& id_where) -> Status {
        LQ_ASSIGN_OR_RETURN(const int32_t id, Fields::ParseId(id_value, id_where));
        if (out_.Find(id) == nullptr) return Bad(id_where, fmt::format("{} is no token", id));
        (seen ? out_.after : out_.before).push_back(id);
        return {};
      }));
      return token.Done();
    };
    LQ_RETURN_IF_ERROR(ForEach(fields, "single", piece));
    if (!seen) return Bad(fields.Path("single"), "no sequence A");
  } else {
    return Unsupported(fields.Path("type"), type,
                       "null, ByteLevel, TemplateProcessing, BertProcessing, RobertaProcessing and Sequence are");
  }
  return fields.Done();
}

Status Parser::Decoder(const json& value, const std::string& where) {
  if (value.is_null())
    return Unsupported(where, value, "ByteLevel, Metaspace, Replace, ByteFallback, Fuse, Strip and Sequence are");
  LQ_ASSIGN_OR_RETURN(Fields fields, Fields::Of(value, where));
  const json& type = fields.Take("type");
  if (type == "Sequence") {
    LQ_RETURN_IF_ERROR(ForEach(fields, "decoders", [&](const json& v, const std::string& w) { return Decoder(v, w); }));
  } else {
    if (out_.decoder.steps.size() == PreTokenizer::kMaxSteps)
      return Status(Code::kOutOfRange,
                    fmt::format("tokenizer.json: {}: more than {} steps", where, PreTokenizer::kMaxSteps));
    LQ_RETURN_IF_ERROR(DecoderStep(type, fields));
  }
  return fields.Done();
}

// What a step does to a token apart from its neighbours is taken; a step that would see several joined is not.
Status Parser::DecoderStep(const json& type, Fields& fields) {
  const auto behind = [&](bool flag, const char* what) -> Status {
    return flag ? Unsupported(fields.Path("type"), type, fmt::format("behind {} it is not", what)) : Status();
  };
  using Step = DecoderSteps::Step;
  Step step{};
  if (type == "Fuse") {
    fused_ = true;
    return {};
  }
  if (type == "Strip") {
    LQ_ASSIGN_OR_RETURN(step.from, fields.String("content"));
    if (step.from.empty() || static_cast<size_t>(NextUtf8(step.from).bytes) != step.from.size())
      return Bad(fields.Path("content"), fmt::format("{} is not one character", Excerpt(step.from)));
    LQ_ASSIGN_OR_RETURN(const int32_t start, fields.Id("start"));
    LQ_ASSIGN_OR_RETURN(const int32_t stop, fields.Id("stop"));
    step.kind = Step::kStrip;
    step.start = static_cast<size_t>(start);
    step.stop = static_cast<size_t>(stop);
    if (fused_) {
      if (step.stop != 0) return Unsupported(fields.Path("stop"), stop, "behind Fuse only 0 is");
      if (!out_.decoder.strip_character.empty()) return Bad(fields.where(), "a second Strip behind Fuse");
      out_.decoder.strip_character = step.from;
      out_.decoder.strip_start = step.start;
      return {};
    }
    LQ_RETURN_IF_ERROR(behind(fallback_, "ByteFallback"));
  } else if (type == "ByteLevel") {
    LQ_RETURN_IF_ERROR(behind(fused_, "Fuse"));
    LQ_RETURN_IF_ERROR(behind(!out_.decoder.steps.empty(), "another step"));
    for (const char* name : {"add_prefix_space", "trim_offsets", "use_regex"})
      LQ_RETURN_IF_ERROR(fields.Bool(name, true).status());
    step.kind = Step::kByteLevel;
    fused_ = true;
  } else if (type == "ByteFallback") {
    LQ_RETURN_IF_ERROR(behind(fused_, "Fuse"));
    step.kind = Step::kByteFallback;
    fallback_ = true;
  } else if (type == "Replace") {
    LQ_RETURN_IF_ERROR(behind(fused_, "Fuse"));
    LQ_RETURN_IF_ERROR(behind(fallback_, "ByteFallback"));
    LQ_ASSIGN_OR_RETURN(Pattern pattern, ParsePattern(fields));
    step.kind = Step::kReplace;
    step.from = std::move(pattern.literal);
    if (pattern.regex) step.pattern.push_back(*std::move(pattern.regex));
    LQ_ASSIGN_OR_RETURN(step.to, Content(fields, "content"));
  } else if (type == "Metaspace") {
    LQ_RETURN_IF_ERROR(behind(fused_, "Fuse"));
    PreTokenizerStep::Prefix when{};
    bool split = true;
    LQ_RETURN_IF_ERROR(Metaspace(fields, &step.from, &when, &split));
    step.kind = Step::kMetaspace;
    step.first = when != PreTokenizerStep::kNever;
  } else {
    return Unsupported(fields.Path("type"), type,
                       "ByteLevel, Metaspace, Replace, ByteFallback, Fuse, Strip and Sequence are");
  }
  LQ_RETURN_IF_ERROR(behind(metaspace_, "Metaspace"));
  metaspace_ = step.kind == Step::kMetaspace;
  out_.decoder.steps.push_back(std::move(step));
  return {};
}

Status Parser::DecodeTokens() {
  const DecoderSteps& decoder = out_.decoder;
  const bool byte_level = !decoder.steps.empty() && decoder.steps[0].kind == DecoderSteps::Step::kByteLevel;
  for (Token& token : out_.tokens) {
    if (byte_level && as_they_are_.contains(token.id)) {
      token.bytes = token.spelling;
    } else {
      LQ_ASSIGN_OR_RETURN(token.bytes, decoder.Token(token.spelling, false));
    }
    if (decoder.first_differs()) {
      LQ_ASSIGN_OR_RETURN(token.first, decoder.Token(token.spelling, true));
    }
    token.spelling = {};
  }
  return {};
}

}  // namespace

Status ParseTokenizerJson(std::string_view text, Tokenizer::Impl* out) { return Parser(out).Parse(text); }

}  // namespace livequant
