// text/tokenizer.cc: byte-level BPE as Hugging Face's tokenizers does it, over raw bytes.
//
// tokenizer.json spells each byte as a printable character (GPT-2's alphabet); that spelling is undone once, in Parse,
// so that all later work is on bytes. A text goes: added tokens out -> normalizer -> splits -> merges.
#include "text/tokenizer.h"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <limits>
#include <optional>
#include <unordered_map>
#include <utility>
#include <variant>

#include "base/rng.h"
#include "io/file.h"
#include "io/json.h"
#include "text/regex.h"
#include "text/utf8.h"

namespace livequant {
namespace {

using nlohmann::json;

constexpr size_t kMaxAddedTokenBytes = 512;  // the search for added tokens costs up to this much a byte of text
constexpr size_t kMaxSplits = 32;            // one stack frame each
constexpr int64_t kMaxTextBytes = std::numeric_limits<int32_t>::max();
// GPT-2's own pattern, which ByteLevel with use_regex stands for.
constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// --- GPT-2's alphabet
// -------------------------------------------------------------------------------------------------

// Printable Latin-1 bytes stand for themselves, the other 68 for U+0100 onwards in rising order.
constexpr bool StandsForItself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}
constexpr std::array<int16_t, 0x144> kByteOfCharacter = [] {
  std::array<int16_t, 0x144> table{};
  for (int16_t& b : table) b = -1;
  size_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte)
    table[StandsForItself(byte) ? static_cast<size_t>(byte) : next++] = static_cast<int16_t>(byte);
  return table;
}();

// The bytes that `text` (UTF-8) spells, or nothing if a character lies outside the alphabet.
std::optional<std::string> BytesOfSpelling(std::string_view text) {
  std::string bytes;
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = NextUtf8(text.substr(at));
    if (step.kind != Utf8Step::kCharacter || step.code_point >= kByteOfCharacter.size() ||
        kByteOfCharacter[step.code_point] < 0)
      return std::nullopt;
    bytes += static_cast<char>(kByteOfCharacter[step.code_point]);
    at += static_cast<size_t>(step.bytes);
  }
  return bytes;
}

// --- character classes of added tokens (Rust regex's \s and \w)
// -------------------------------------------------------

bool IsSpace(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool IsWord(char32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:  // Join_Control, and the symbols that are Alphabetic
      return c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) ||
             (c >= 0x1F150 && c <= 0x1F169) || (c >= 0x1F170 && c <= 0x1F189);
  }
}

char32_t FirstCharacter(std::string_view text) { return NextUtf8(text).code_point; }

char32_t LastCharacter(std::string_view text) {
  size_t at = text.size() - 1;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  return NextUtf8(text.substr(at)).code_point;
}

size_t CharacterBytes(char32_t c) { return c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4; }

// --- added tokens
// -----------------------------------------------------------------------------------------------------

struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool special = false, single_word = false, lstrip = false, rstrip = false, normalized = false;
};

// Finds added tokens in a text: at each place the longest one that starts there.
class AddedTokens {
 public:
  void Add(AddedToken token) { tokens_.push_back(std::move(token)); }
  // Call once, before Split. A token whose content is there twice, or null.
  const AddedToken* Freeze() {
    std::sort(tokens_.begin(), tokens_.end(),
              [](const AddedToken& a, const AddedToken& b) { return a.content < b.content; });
    for (const AddedToken& t : tokens_) starts_.set(static_cast<unsigned char>(t.content[0]));
    const auto twice = std::adjacent_find(tokens_.begin(), tokens_.end(), [](const AddedToken& a, const AddedToken& b) {
      return a.content == b.content;
    });
    return twice == tokens_.end() ? nullptr : &*twice;
  }

  // Calls on_text(piece) and on_token(id) in order; pieces are not empty. Stops at the first error.
  template <class OnText, class OnToken>
  Status Split(std::string_view text, OnText&& on_text, OnToken&& on_token) const {
    size_t done = 0;  // everything before it was handed out
    for (size_t at = 0; at < text.size();) {
      const AddedToken* token =
          starts_.test(static_cast<unsigned char>(text[at])) ? LongestAt(text.substr(at)) : nullptr;
      if (token == nullptr) {
        ++at;
        continue;
      }
      size_t begin = at, end = at + token->content.size();
      at = end;
      if (token->single_word && ((begin > 0 && IsWord(LastCharacter(text.substr(0, begin)))) ||
                                 (end < text.size() && IsWord(FirstCharacter(text.substr(end))))))
        continue;
      if (token->lstrip) {
        while (begin > done) {
          const char32_t c = LastCharacter(text.substr(0, begin));
          if (!IsSpace(c)) break;
          begin -= CharacterBytes(c);
        }
      }
      if (token->rstrip) {
        while (end < text.size()) {
          const char32_t c = FirstCharacter(text.substr(end));
          if (!IsSpace(c)) break;
          end += CharacterBytes(c);
        }
      }
      if (begin > done) LQ_RETURN_IF_ERROR(on_text(text.substr(done, begin - done)));
      on_token(token->id);
      done = std::max(done, end);
    }
    if (done < text.size()) LQ_RETURN_IF_ERROR(on_text(text.substr(done)));
    return {};
  }

 private:
  // Narrows the sorted range of tokens that agree with `text` byte by byte.
  const AddedToken* LongestAt(std::string_view text) const {
    const AddedToken* longest = nullptr;
    auto low = tokens_.begin(), high = tokens_.end();
    for (size_t n = 0; low != high; ++n) {
      if (low->content.size() == n) {
        longest = &*low;
        ++low;  // contents differ, so only one ends here
      }
      if (n == text.size()) break;
      const auto byte = static_cast<unsigned char>(text[n]);
      const auto at_n = [n](const AddedToken& t) { return static_cast<unsigned char>(t.content[n]); };
      low = std::lower_bound(low, high, byte, [&](const AddedToken& t, unsigned char b) { return at_n(t) < b; });
      high = std::upper_bound(low, high, byte, [&](unsigned char b, const AddedToken& t) { return b < at_n(t); });
    }
    return longest;
  }

  std::vector<AddedToken> tokens_;  // sorted by content
  std::bitset<256> starts_;         // first bytes
};

// --- merges
// -----------------------------------------------------------------------------------------------------------

struct Merge {
  int32_t left, right, result;
};

// (left, right) -> rank, open addressing.
class MergeTable {
 public:
  static constexpr uint32_t kNone = ~uint32_t{0};

  explicit MergeTable(size_t merges = 0) {
    size_t slots = 16;
    while (slots < 2 * merges) slots *= 2;
    slots_.assign(slots, {0, kNone});
  }
  // False: the pair is there already.
  bool Add(int32_t left, int32_t right, uint32_t rank) {
    const uint64_t key = Key(left, right);
    size_t i = Mix64(key) & (slots_.size() - 1);
    for (; slots_[i].rank != kNone; i = (i + 1) & (slots_.size() - 1))
      if (slots_[i].key == key) return false;
    slots_[i] = {key, rank};
    return true;
  }
  uint32_t Rank(int32_t left, int32_t right) const {
    const uint64_t key = Key(left, right);
    size_t i = Mix64(key) & (slots_.size() - 1);
    while (slots_[i].rank != kNone && slots_[i].key != key) i = (i + 1) & (slots_.size() - 1);
    return slots_[i].rank;
  }

 private:
  struct Slot {
    uint64_t key;
    uint32_t rank;
  };
  static uint64_t Key(int32_t left, int32_t right) {
    return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
  }
  std::vector<Slot> slots_;
};

// --- normalizer and pre-tokenizer
// -------------------------------------------------------------------------------------

// Applies utf8proc options in order. The text is valid UTF-8, so only size can fail.
Result<std::string> Normalize(const std::vector<int>& normalizers, std::string_view text) {
  std::string normal(text);
  for (const int options : normalizers) {
    utf8proc_uint8_t* mapped = nullptr;
    const utf8proc_ssize_t n =
        utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(normal.data()),
                     static_cast<utf8proc_ssize_t>(normal.size()), &mapped, static_cast<utf8proc_option_t>(options));
    if (n < 0)
      return Status(Code::kOutOfRange, fmt::format("normalizing {} bytes: {}", normal.size(), utf8proc_errmsg(n)));
    normal.assign(reinterpret_cast<const char*>(mapped), static_cast<size_t>(n));
    std::free(mapped);
  }
  return normal;
}

struct SplitOn {  // behaviour Isolated: matches and what lies between them are pieces of their own
  std::variant<Regex, std::string> pattern;
};

struct Token {
  int32_t id;
  bool special;
  std::string bytes;
};
bool ById(const Token& a, const Token& b) { return a.id < b.id; }

struct StringHash {  // lets a map of strings be searched by a view
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};

}  // namespace

struct Tokenizer::Impl {
  std::string digest;
  std::vector<Token> tokens;         // by id, which need not be without gaps
  std::array<int32_t, 256> byte_id;  // -1: no token
  std::vector<Merge> merges;         // by rank
  MergeTable ranks;
  bool ignore_merges = false;  // a piece that is a token of the model is not merged but found here
  std::unordered_map<std::string, int32_t, StringHash, std::equal_to<>> whole_pieces;
  AddedTokens raw_added, normalized_added;  // looked for before and after the normalizer
  std::vector<int> normalizers;             // utf8proc options, applied in order
  std::vector<SplitOn> splits;
  bool add_prefix_space = false;
  std::optional<Regex> byte_level_pattern;
  std::vector<int32_t> before, after;  // what the post-processor adds

  const Token* Find(int32_t id) const {
    if (id >= 0 && static_cast<size_t>(id) < tokens.size() && tokens[static_cast<size_t>(id)].id == id)
      return &tokens[static_cast<size_t>(id)];
    const auto at =
        std::lower_bound(tokens.begin(), tokens.end(), id, [](const Token& t, int32_t i) { return t.id < i; });
    return at != tokens.end() && at->id == id ? &*at : nullptr;
  }
};

namespace {

// One call of Encode: the scratch of every stage.
class Encoder {
 public:
  Encoder(const Tokenizer::Impl& model, std::vector<int32_t>* ids);
  Status Text(std::string_view text);  // `text` is UTF-8

 private:
  Status Normalized(std::string_view text);
  Status Piece(size_t split, std::string_view piece);
  Status ByteLevel(std::string_view piece);
  Status Merged(std::string_view piece);
  template <class Next>
  Status Isolate(Regex::Scanner& scanner, std::string_view text, Next&& next);

  const Tokenizer::Impl& model_;
  std::vector<int32_t>* ids_;
  std::vector<std::optional<Regex::Scanner>> scanners_;  // one a split; empty for literal patterns
  std::optional<Regex::Scanner> byte_level_scanner_;
  std::string prefixed_;
  struct Symbol {
    int32_t id;  // -1: merged into the one before
    uint32_t previous, next;
  };
  std::vector<Symbol> symbols_;
  std::vector<uint64_t> heap_;  // rank << 32 | index of the left symbol: the smallest first
};

constexpr uint32_t kEnd = ~uint32_t{0};

Encoder::Encoder(const Tokenizer::Impl& model, std::vector<int32_t>* ids) : model_(model), ids_(ids) {
  for (const SplitOn& split : model.splits) {
    scanners_.emplace_back();
    if (const Regex* regex = std::get_if<Regex>(&split.pattern)) scanners_.back().emplace(*regex);
  }
  if (model.byte_level_pattern) byte_level_scanner_.emplace(*model.byte_level_pattern);
}

Status Encoder::Text(std::string_view text) {
  const auto token = [&](int32_t id) { ids_->push_back(id); };
  return model_.raw_added.Split(
      text,
      [&](std::string_view raw) -> Status {
        std::string normal;
        if (!model_.normalizers.empty()) {
          LQ_ASSIGN_OR_RETURN(normal, Normalize(model_.normalizers, raw));
          raw = normal;
        }
        return model_.normalized_added.Split(raw, [&](std::string_view piece) { return Piece(0, piece); }, token);
      },
      token);
}

template <class Next>
Status Encoder::Isolate(Regex::Scanner& scanner, std::string_view text, Next&& next) {
  scanner.Start(text);
  size_t done = 0;
  for (;;) {
    size_t begin = text.size(), end = text.size();
    LQ_ASSIGN_OR_RETURN(const bool found, scanner.Next(&begin, &end));
    if (begin > done) LQ_RETURN_IF_ERROR(next(text.substr(done, begin - done)));
    if (!found) return {};
    if (end > begin) LQ_RETURN_IF_ERROR(next(text.substr(begin, end - begin)));
    done = end;
  }
}

Status Encoder::Piece(size_t split, std::string_view piece) {
  if (split == model_.splits.size()) return ByteLevel(piece);
  const auto next = [&](std::string_view part) { return Piece(split + 1, part); };
  if (scanners_[split]) return Isolate(*scanners_[split], piece, next);
  const auto& literal = std::get<std::string>(model_.splits[split].pattern);
  for (size_t done = 0; done < piece.size();) {
    const size_t at = std::min(piece.find(literal, done), piece.size());
    if (at > done) LQ_RETURN_IF_ERROR(next(piece.substr(done, at - done)));
    if (at < piece.size()) LQ_RETURN_IF_ERROR(next(literal));
    done = at + literal.size();
  }
  return {};
}

Status Encoder::ByteLevel(std::string_view piece) {
  if (model_.add_prefix_space && !piece.starts_with(' ')) {
    prefixed_.assign(" ").append(piece);
    piece = prefixed_;
  }
  if (!byte_level_scanner_) return Merged(piece);
  return Isolate(*byte_level_scanner_, piece, [&](std::string_view part) { return Merged(part); });
}

// Merges the pair of the lowest rank, the leftmost of several, until none is left: O(n log n).
Status Encoder::Merged(std::string_view piece) {
  if (model_.ignore_merges) {
    if (const auto whole = model_.whole_pieces.find(piece); whole != model_.whole_pieces.end()) {
      ids_->push_back(whole->second);
      return {};
    }
  }
  const auto n = static_cast<uint32_t>(piece.size());
  symbols_.resize(n);
  heap_.clear();
  for (uint32_t i = 0; i < n; ++i) {
    const auto byte = static_cast<unsigned char>(piece[i]);
    const int32_t id = model_.byte_id[byte];
    if (id < 0) return Status(Code::kUnsupported, fmt::format("tokenizer.json: no token for byte 0x{:02x}", byte));
    symbols_[i] = {id, i == 0 ? kEnd : i - 1, i + 1 == n ? kEnd : i + 1};
    if (i == 0) continue;
    const uint32_t rank = model_.ranks.Rank(symbols_[i - 1].id, id);
    if (rank != MergeTable::kNone) heap_.push_back(uint64_t{rank} << 32 | (i - 1));
  }
  std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
  const auto push = [&](uint32_t left, uint32_t right) {
    const uint32_t rank = model_.ranks.Rank(symbols_[left].id, symbols_[right].id);
    if (rank == MergeTable::kNone) return;
    heap_.push_back(uint64_t{rank} << 32 | left);
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
  };
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
    const Merge& merge = model_.merges[heap_.back() >> 32];
    const auto at = static_cast<uint32_t>(heap_.back());
    heap_.pop_back();
    Symbol& left = symbols_[at];
    // An entry is stale once either symbol has been merged into something else.
    if (left.id != merge.left || left.next == kEnd || symbols_[left.next].id != merge.right) continue;
    Symbol& right = symbols_[left.next];
    left.id = merge.result;
    left.next = right.next;
    right.id = -1;
    if (left.next != kEnd) {
      symbols_[left.next].previous = at;
      push(at, left.next);
    }
    if (left.previous != kEnd) push(left.previous, at);
  }
  for (uint32_t i = 0; i != kEnd && i < n; i = symbols_[i].next) ids_->push_back(symbols_[i].id);
  return {};
}

// --- tokenizer.json
// ---------------------------------------------------------------------------------------------------

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

class Parser {
 public:
  explicit Parser(Tokenizer::Impl* out) : out_(*out) {}
  Status Parse(std::string_view text);

 private:
  Status Model(const json& value);
  Status Merges(const json& value);
  Status Added(const json& value);
  Status Normalizer(const json& value, const std::string& where);
  Status PreTokenizer(const json& value, const std::string& where);
  Status PostProcessor(const json& value, const std::string& where);
  Status Decoder(const json& value, const std::string& where);
  // Calls each(element, where) for every element of the array field `name`.
  template <class Each>
  Status ForEach(Fields& fields, std::string_view name, Each&& each);

  Tokenizer::Impl& out_;
  std::unordered_map<std::string, int32_t> vocab_;  // model tokens as the file spells them
  bool byte_level_ = false, template_ = false, decodes_ = false;
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
  LQ_RETURN_IF_ERROR(Model(top.Take("model")));
  LQ_RETURN_IF_ERROR(Normalizer(top.Take("normalizer"), "normalizer"));
  LQ_RETURN_IF_ERROR(Added(top.Take("added_tokens")));
  const json& pre = top.Take("pre_tokenizer");
  if (!pre.is_null()) LQ_RETURN_IF_ERROR(PreTokenizer(pre, "pre_tokenizer"));
  if (!byte_level_)
    return Unsupported("pre_tokenizer", pre.is_null() ? pre : json("without ByteLevel"), "only byte-level BPE is");
  LQ_RETURN_IF_ERROR(PostProcessor(top.Take("post_processor"), "post_processor"));
  LQ_RETURN_IF_ERROR(Decoder(top.Take("decoder"), "decoder"));
  LQ_RETURN_IF_ERROR(top.Done());
  out_.digest = Sha256Hex(std::as_bytes(std::span(text.data(), text.size())));
  return {};
}

Status Parser::Model(const json& value) {
  LQ_ASSIGN_OR_RETURN(Fields model, Fields::Of(value, "model"));
  if (const json& type = model.Take("type"); type != "BPE") return Unsupported("model.type", type, "BPE is");
  for (const char* name : {"dropout", "unk_token"})
    if (const json& v = model.Take(name); !v.is_null()) return Unsupported(model.Path(name), v, "only null is");
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (const json& v = model.Take(name); !v.is_null() && v != "")
      return Unsupported(model.Path(name), v, "only null is");
  LQ_ASSIGN_OR_RETURN(const bool byte_fallback, model.Bool("byte_fallback", false));
  if (byte_fallback) return Unsupported("model.byte_fallback", true, "only false is");
  LQ_ASSIGN_OR_RETURN(const bool fuse_unk, model.Bool("fuse_unk", false));
  if (fuse_unk) return Unsupported("model.fuse_unk", true, "only false is");
  LQ_ASSIGN_OR_RETURN(out_.ignore_merges, model.Bool("ignore_merges", false));

  const json& vocab = model.Take("vocab");
  if (!vocab.is_object() || vocab.empty()) return Bad("model.vocab", "no object with tokens");
  out_.byte_id.fill(-1);
  for (const auto& [spelling, id_value] : vocab.items()) {
    LQ_ASSIGN_OR_RETURN(const int32_t id, Fields::ParseId(id_value, fmt::format("model.vocab[{}]", Excerpt(spelling))));
    vocab_.emplace(spelling, id);
    const std::optional<std::string> bytes = BytesOfSpelling(spelling);
    // A token outside the alphabet is its own text, and no merge leads to it.
    out_.tokens.push_back({id, false, bytes.value_or(spelling)});
    if (bytes && bytes->size() == 1) out_.byte_id[static_cast<unsigned char>((*bytes)[0])] = id;
    if (bytes && out_.ignore_merges) out_.whole_pieces.emplace(*bytes, id);
  }
  std::sort(out_.tokens.begin(), out_.tokens.end(), ById);
  const auto twice = std::adjacent_find(out_.tokens.begin(), out_.tokens.end(),
                                        [](const Token& a, const Token& b) { return a.id == b.id; });
  if (twice != out_.tokens.end()) return Bad("model.vocab", fmt::format("id {} is given twice", twice->id));
  LQ_RETURN_IF_ERROR(Merges(model.Take("merges")));
  return model.Done();
}

Status Parser::Merges(const json& value) {
  if (!value.is_array()) return Bad("model.merges", fmt::format("{}, not an array", value.type_name()));
  out_.ranks = MergeTable(value.size());
  out_.merges.reserve(value.size());
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
    Merge merge{};
    for (const auto& [spelling, id] :
         {std::pair<const std::string&, int32_t*>(left, &merge.left), {right, &merge.right}, {both, &merge.result}}) {
      const auto at = vocab_.find(spelling);
      if (at == vocab_.end()) return Bad(where(), fmt::format("{} is not in model.vocab", Excerpt(spelling)));
      *id = at->second;
    }
    if (!out_.ranks.Add(merge.left, merge.right, static_cast<uint32_t>(i)))
      return Bad(where(), fmt::format("{} {} is merged twice", Excerpt(left), Excerpt(right)));
    out_.merges.push_back(merge);
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
      std::lower_bound(out_.tokens.begin(), out_.tokens.end(), Token{token.id, false, {}}, ById)->special =
          token.special;
    } else {
      if (out_.Find(token.id) != nullptr)
        return Bad(fields.Path("id"), fmt::format("{} is another token in model.vocab", token.id));
      fresh.push_back({token.id, token.special, token.content});
    }
    if (token.normalized) {
      LQ_ASSIGN_OR_RETURN(token.content, Normalize(out_.normalizers, token.content));
      if (token.content.empty()) return Bad(fields.Path("content"), "empty once normalized");
    }
    (token.normalized ? out_.normalized_added : out_.raw_added).Add(std::move(token));
  }
  for (AddedTokens* set : {&out_.raw_added, &out_.normalized_added}) {
    if (const AddedToken* twice = set->Freeze())
      return Bad("added_tokens", fmt::format("{} is there twice", Excerpt(twice->content)));
  }
  std::move(fresh.begin(), fresh.end(), std::back_inserter(out_.tokens));
  std::sort(out_.tokens.begin(), out_.tokens.end(), ById);
  const auto twice = std::adjacent_find(out_.tokens.begin(), out_.tokens.end(),
                                        [](const Token& a, const Token& b) { return a.id == b.id; });
  if (twice != out_.tokens.end()) return Bad("added_tokens", fmt::format("id {} is given twice", twice->id));
  return {};
}

Status Parser::Normalizer(const json& value, const std::string& where) {
  if (value.is_null()) return {};
  LQ_ASSIGN_OR_RETURN(Fields fields, Fields::Of(value, where));
  const json& type = fields.Take("type");
  if (type == "Sequence") {
    LQ_RETURN_IF_ERROR(
        ForEach(fields, "normalizers", [&](const json& v, const std::string& w) { return Normalizer(v, w); }));
  } else if (type == "NFC" || type == "NFKC") {
    if (out_.normalizers.size() == kMaxSplits)
      return Status(Code::kOutOfRange, fmt::format("tokenizer.json: {}: more than {} steps", where, kMaxSplits));
    out_.normalizers.push_back(UTF8PROC_STABLE | UTF8PROC_COMPOSE | (type == "NFKC" ? UTF8PROC_COMPAT : 0));
  } else {
    return Unsupported(fields.Path("type"), type, "null, NFC, NFKC and Sequence are");
  }
  return fields.Done();
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
  if (type == "Split") {
    if (out_.splits.size() == kMaxSplits)
      return Status(Code::kOutOfRange, fmt::format("tokenizer.json: {}: more than {} splits", where, kMaxSplits));
    LQ_ASSIGN_OR_RETURN(Fields pattern, Fields::Of(fields.Take("pattern"), fields.Path("pattern")));
    const json& regex = pattern.Take("Regex");
    const json& literal = pattern.Take("String");
    if (regex.is_null() == literal.is_null()) return Bad(pattern.where(), "neither just a Regex nor just a String");
    LQ_RETURN_IF_ERROR(pattern.Done());
    LQ_ASSIGN_OR_RETURN(const std::string text, pattern.String(regex.is_null() ? "String" : "Regex"));
    if (text.empty()) return Bad(pattern.where(), "empty");
    if (regex.is_null()) {
      out_.splits.push_back({text});
    } else {
      Result<Regex> compiled = Regex::Compile(text);
      if (!compiled.ok())
        return Status(compiled.status().code(),
                      fmt::format("tokenizer.json: {}: {}", pattern.where(), compiled.status().message()));
      out_.splits.push_back({*std::move(compiled)});
    }
    if (const json& behavior = fields.Take("behavior"); behavior != "Isolated")
      return Unsupported(fields.Path("behavior"), behavior, "Isolated is");
    // Isolated keeps what matches and what does not, so that invert makes no difference.
    LQ_RETURN_IF_ERROR(fields.Bool("invert", false).status());
  } else if (type == "ByteLevel") {
    byte_level_ = true;
    LQ_ASSIGN_OR_RETURN(out_.add_prefix_space, fields.Bool("add_prefix_space", true));
    LQ_RETURN_IF_ERROR(fields.Bool("trim_offsets", true).status());  // about offsets, which nobody asks for here
    LQ_ASSIGN_OR_RETURN(const bool use_regex, fields.Bool("use_regex", true));
    if (use_regex) {
      LQ_ASSIGN_OR_RETURN(out_.byte_level_pattern, Regex::Compile(kGpt2Pattern));
    }
  } else {
    return Unsupported(fields.Path("type"), type, "Sequence, Split and ByteLevel are");
  }
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
  } else if (type == "TemplateProcessing") {
    if (template_) return Bad(where, "a second TemplateProcessing");
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
    return Unsupported(fields.Path("type"), type, "null, ByteLevel, TemplateProcessing and Sequence are");
  }
  return fields.Done();
}

Status Parser::Decoder(const json& value, const std::string& where) {
  if (value.is_null()) return Unsupported(where, value, "ByteLevel is");
  LQ_ASSIGN_OR_RETURN(Fields fields, Fields::Of(value, where));
  const json& type = fields.Take("type");
  if (type == "Sequence") {
    LQ_RETURN_IF_ERROR(ForEach(fields, "decoders", [&](const json& v, const std::string& w) { return Decoder(v, w); }));
    if (!decodes_) return Unsupported(where, json("without ByteLevel"), "ByteLevel is");
  } else if (type == "ByteLevel") {
    if (decodes_) return Bad(where, "a second ByteLevel");
    decodes_ = true;
    for (const char* name : {"add_prefix_space", "trim_offsets", "use_regex"})
      LQ_RETURN_IF_ERROR(fields.Bool(name, true).status());
  } else {
    return Unsupported(fields.Path("type"), type, "ByteLevel is");
  }
  return fields.Done();
}

}  // namespace

Result<Tokenizer> Tokenizer::Parse(std::string_view json) {
  auto impl = std::make_shared<Impl>();
  LQ_RETURN_IF_ERROR(Parser(impl.get()).Parse(json));
  Tokenizer tokenizer;
  tokenizer.impl_ = std::move(impl);
  return tokenizer;
}

Result<Tokenizer> Tokenizer::Load(const std::string& path) {
  LQ_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, JsonLimits{}.max_bytes));
  Result<Tokenizer> tokenizer = Parse(text);
  if (!tokenizer.ok())
    return Status(tokenizer.status().code(), fmt::format("{}: {}", path, tokenizer.status().message()));
  return tokenizer;
}

Result<std::vector<int32_t>> Tokenizer::Encode(std::string_view text, bool add_special_tokens) const {
  if (static_cast<int64_t>(text.size()) > kMaxTextBytes)
    return Status(Code::kOutOfRange, fmt::format("text of {} bytes, limit {}", text.size(), kMaxTextBytes));
  if (const size_t at = InvalidUtf8At(text); at != text.npos)
    return Status(Code::kInvalidArgument, fmt::format("text is not UTF-8 at byte {} of {} (0x{:02x})", at, text.size(),
                                                      static_cast<unsigned char>(text[at])));
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 4 + 16);
  if (add_special_tokens) ids = impl_->before;
  LQ_RETURN_IF_ERROR(Encoder(*impl_, &ids).Text(text));
  if (add_special_tokens) ids.insert(ids.end(), impl_->after.begin(), impl_->after.end());
  return ids;
}

Result<std::string> Tokenizer::TokenBytes(int32_t id, bool skip_special) const {
  const Token* token = impl_->Find(id);
  if (token == nullptr)
    return Status(Code::kOutOfRange,
                  fmt::format("token id {} is not in the vocabulary (ids below {})", id, vocab_size()));
  return token->special && skip_special ? std::string() : token->bytes;
}

Result<std::string> Tokenizer::Decode(std::span<const int32_t> ids, bool skip_special) const {
  std::string bytes, text;
  for (const int32_t id : ids) {
    LQ_ASSIGN_OR_RETURN(const std::string piece, TokenBytes(id, skip_special));
    bytes += piece;
  }
  DrainUtf8(&bytes, &text);
  if (!bytes.empty()) text += "\xEF\xBF\xBD";
  return text;
}

int32_t Tokenizer::vocab_size() const { return impl_->tokens.back().id + 1; }
const std::string& Tokenizer::digest() const { return impl_->digest; }

Result<std::string> StreamingDetokenizer::Push(int32_t id) {
  LQ_ASSIGN_OR_RETURN(const std::string bytes, tokenizer_.TokenBytes(id));
  held_ += bytes;
  std::string text;
  DrainUtf8(&held_, &text);
  return text;
}

std::string StreamingDetokenizer::Finish() {
  // Push left at most one incomplete character here.
  const std::string text = held_.empty() ? "" : "\xEF\xBF\xBD";
  held_.clear();
  return text;
}

}  // namespace livequant
