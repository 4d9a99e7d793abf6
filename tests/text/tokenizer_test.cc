// tests/text/tokenizer_test.cc: the embedded model's goldens, and every sentence of text/tokenizer.h on small
// vocabularies.
#include "text/tokenizer.h"

#include <gmock/gmock.h>

#include <array>
#include <nlohmann/json.hpp>
#include <string>

#include "io/file.h"
#include "io/json.h"
#include "support/property.h"
#include "text/utf8.h"

namespace livequant {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

constexpr char kModel[] = LIVEQUANT_SOURCE_DIR "/models/books-7m";

const Tokenizer& Books() {
  static const Tokenizer tokenizer = *Tokenizer::Load(std::string(kModel) + "/tokenizer.json");
  return tokenizer;
}

std::vector<int32_t> Ids(const Tokenizer& tokenizer, std::string_view text, bool special = false) {
  Result<std::vector<int32_t>> ids = tokenizer.Encode(text, special);
  EXPECT_TRUE(ids.ok()) << ids.status().ToString();
  return ids.ok() ? *std::move(ids) : std::vector<int32_t>{};
}

// --- the embedded model
// -----------------------------------------------------------------------------------------------

TEST(BooksTokenizer, EveryGoldenIsEqual) {
  const json reference = *ParseJson(*ReadFile(std::string(kModel) + "/eval/reference.json"), "reference.json");
  const json& cases = reference["tokenization"]["cases"];
  ASSERT_EQ(cases.size(), 44u);
  for (const json& c : cases) {
    const std::string text = c["text"];
    const auto expected = c["ids"].get<std::vector<int32_t>>();
    EXPECT_THAT(Ids(Books(), text), ElementsAreArray(expected)) << text;
    std::vector<int32_t> with_bos = expected;
    with_bos.insert(with_bos.begin(), 0);
    EXPECT_THAT(Ids(Books(), text, true), ElementsAreArray(with_bos)) << text;
    EXPECT_EQ(*Books().Decode(expected, false) == text, c["round_trip"].get<bool>()) << text;
  }
}

TEST(BooksTokenizer, HeldOutBooks) {
  const std::string text = *ReadFile(std::string(kModel) + "/eval/heldout_books.txt");
  ASSERT_EQ(text.size(), 1005509u);
  const std::vector<int32_t> ids = Ids(Books(), text);
  EXPECT_EQ(ids.size(), 268586u);
  EXPECT_EQ(*Books().Decode(ids), text);
}

TEST(BooksTokenizer, SpecialTokens) {
  EXPECT_EQ(Books().vocab_size(), 4096);
  EXPECT_EQ(Books().digest().size(), 64u);
  EXPECT_THAT(Ids(Books(), "", true), ElementsAre(0));
  EXPECT_THAT(Ids(Books(), ""), ElementsAre());
  EXPECT_THAT(Ids(Books(), "<|eos|><|bos|>"), ElementsAre(1, 0));
  EXPECT_EQ(*Books().TokenBytes(0), "");
  EXPECT_EQ(*Books().TokenBytes(0, false), "<|bos|>");
  EXPECT_EQ(*Books().Decode(std::array<int32_t, 2>{0, 1}), "");
  EXPECT_EQ(*Books().Decode(std::array<int32_t, 2>{0, 1}, false), "<|bos|><|eos|>");
  for (const int32_t id : {-1, 4096, INT32_MAX, INT32_MIN}) {
    EXPECT_EQ(Books().TokenBytes(id).status().code(), Code::kOutOfRange);
    EXPECT_EQ(Books().Decode(std::array<int32_t, 1>{id}).status().code(), Code::kOutOfRange);
  }
}

TEST(BooksTokenizer, RefusesInvalidUtf8WithItsPlace) {
  const auto ids = Books().Encode("ab\xFF", false);
  EXPECT_EQ(ids.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(ids.status().message(), HasSubstr("byte 2 of 3"));
  EXPECT_FALSE(Books().Encode("\xED\xA0\x80", false).ok());
  EXPECT_FALSE(Books().Encode("caf\xC3", false).ok());
}

// A megabyte without a boundary: one piece, so that the merges are what is measured (a quadratic loop would take
// hours).
TEST(BooksTokenizer, LongPieces) {
  for (const char* unit : {"a", " ", "\n", "\xE4\xB8\xAD", "the", "!", "' "}) {
    std::string text;
    while (text.size() < (1 << 20)) text += unit;
    EXPECT_EQ(*Books().Decode(Ids(Books(), text)), text) << unit;
  }
}

std::string RandomText(Rng& rng, int64_t most) {
  constexpr std::string_view kParts[] = {"a",
                                         "the",
                                         " ",
                                         "  ",
                                         "\n",
                                         "\r\n",
                                         "\t",
                                         "'s",
                                         "don't",
                                         "1",
                                         "42",
                                         "!",
                                         "...",
                                         "\xC3\xA9",
                                         "e\xCC\x81",
                                         "\xE4\xB8\xAD",
                                         "\xF0\x9F\x98\x80",
                                         "\xF0\x9F\x91\xA8\xE2\x80\x8D\xF0\x9F\x91\xA9",
                                         "<|bos|>",
                                         "<|",
                                         "\xC2\xA0",
                                         "\xE2\x80\x83",
                                         "\xE3\x80\x80",
                                         "\xC5\xBF",
                                         "\xEF\xBB\xBF",
                                         "A",
                                         "I'M",
                                         "\x01",
                                         "_",
                                         "-",
                                         "Hello",
                                         " World",
                                         "\xD8\xA7",
                                         "\xF0\x9D\x95\x8F"};
  std::string text;
  for (int64_t n = rng.Range(0, most); n > 0; --n) text += kParts[rng.Range(0, std::size(kParts) - 1)];
  return text;
}

TEST(BooksTokenizer, TextRoundTrips) {
  ForAll(3000, [](Rng& rng) {
    const std::string text = RandomText(rng, 30);
    EXPECT_EQ(*Books().Decode(Ids(Books(), text), false), text);
  });
}

// Streaming gives Decode's text for any ids at all, and never text that ends inside a character.
TEST(BooksTokenizer, StreamingIsDecode) {
  ForAll(3000, [](Rng& rng) {
    std::vector<int32_t> ids;
    if (rng.Chance(0.5)) ids = Ids(Books(), RandomText(rng, 12));
    for (int64_t n = rng.Range(0, 30); n > 0; --n) {
      // Tokens 2..257 are single bytes: most of them are no characters.
      const int64_t id = rng.Chance(0.6) ? rng.Range(2, 257) : rng.Range(0, 4095);
      ids.insert(ids.begin() + rng.Range(0, static_cast<int64_t>(ids.size())), static_cast<int32_t>(id));
    }
    StreamingDetokenizer stream(Books());
    std::string text;
    for (const int32_t id : ids) {
      const std::string piece = *stream.Push(id);
      EXPECT_EQ(InvalidUtf8At(piece), std::string::npos);
      text += piece;
    }
    text += stream.Finish();
    EXPECT_EQ(text, *Books().Decode(ids));
    EXPECT_EQ(stream.Finish(), "");
  });
}

TEST(BooksTokenizer, StreamingHoldsACharacterUntilItIsWhole) {
  const std::vector<int32_t> ids = Ids(Books(), "\xF0\x9F\x98\x80\xE4\xB8\xAD");
  ASSERT_GE(ids.size(), 4u) << "the vocabulary has whole emoji or CJK tokens; take another character";
  StreamingDetokenizer stream(Books());
  std::vector<std::string> pieces;
  for (const int32_t id : ids) {
    std::string piece = *stream.Push(id);
    if (!piece.empty()) pieces.push_back(piece);
  }
  EXPECT_THAT(pieces, ElementsAre("\xF0\x9F\x98\x80", "\xE4\xB8\xAD"));
  EXPECT_EQ(stream.Finish(), "");
  ASSERT_TRUE(stream.Push(ids[0]).ok());
  EXPECT_FALSE(stream.Push(4096).ok());  // changes nothing
  EXPECT_EQ(stream.Finish(), "\xEF\xBF\xBD");
  EXPECT_EQ(*stream.Push(ids.back()), "\xEF\xBF\xBD") << "a trail byte without its lead";
}

// --- small vocabularies
// -----------------------------------------------------------------------------------------------

std::string Utf8(char32_t c) {
  if (c < 0x80) return std::string(1, static_cast<char>(c));
  return {static_cast<char>(0xC0 | c >> 6), static_cast<char>(0x80 | (c & 63))};
}

// GPT-2's spelling of a byte, by the rule as that project states it: printable Latin-1 as it is, the rest from U+0100
// on.
std::string Spell(std::string_view bytes) {
  std::string out;
  for (const char b : bytes) {
    const int byte = static_cast<unsigned char>(b);
    const auto printable = [](int x) {
      return (x >= '!' && x <= '~') || (x >= 0xA1 && x <= 0xAC) || (x >= 0xAE && x <= 0xFF);
    };
    int others = 0;
    for (int x = 0; x < byte; ++x) others += printable(x) ? 0 : 1;
    out += Utf8(static_cast<char32_t>(printable(byte) ? byte : 0x100 + others));
  }
  return out;
}

// All bytes as ids 0..255, then `words` (raw bytes) from 256 on, merged in the order of `merges`.
json Tiny(const std::vector<std::string>& words = {},
          const std::vector<std::pair<std::string, std::string>>& merges = {}) {
  json vocab = json::object(), merge_list = json::array();
  for (int b = 0; b < 256; ++b) vocab[Spell(std::string(1, static_cast<char>(b)))] = b;
  for (size_t i = 0; i < words.size(); ++i) vocab[Spell(words[i])] = 256 + i;
  for (const auto& [left, right] : merges) merge_list.push_back({Spell(left), Spell(right)});
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", json::array()},
          {"normalizer", nullptr},
          {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}},
          {"post_processor", nullptr},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", merge_list}}}};
}

json Added(int id, const std::string& content) {
  return {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", false}};
}

Tokenizer Made(const json& file) {
  Result<Tokenizer> tokenizer = Tokenizer::Parse(file.dump());
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().ToString();
  return tokenizer.ok() ? *std::move(tokenizer) : Books();
}

std::string Why(const json& file) {
  const Result<Tokenizer> tokenizer = Tokenizer::Parse(file.dump());
  return tokenizer.ok() ? "accepted" : tokenizer.status().ToString();
}

json Patched(json file, const std::string& pointer, const json& value) {
  file[json::json_pointer(pointer)] = value;
  return file;
}

TEST(Tokenizer, MergesByRankThenLeftmost) {
  const Tokenizer t = Made(Tiny({"bc", "ab", "abc", "aa"}, {{"b", "c"}, {"a", "b"}, {"ab", "c"}, {"a", "a"}}));
  EXPECT_THAT(Ids(t, "abc"), ElementsAre('a', 256));  // bc first, and then nothing joins a and bc
  EXPECT_THAT(Ids(t, "ab"), ElementsAre(257));
  EXPECT_THAT(Ids(t, "aaa"), ElementsAre(259, 'a'));
  EXPECT_THAT(Ids(t, "aaaa"), ElementsAre(259, 259));
  EXPECT_THAT(Ids(t, std::string("\0\xC3\xA9", 3)), ElementsAre(0, 0xC3, 0xA9));
}

// A merged token longer than what a string holds in place: its spelling must live as long as it is looked up.
TEST(Tokenizer, MergesOfLongTokens) {
  std::vector<std::string> words;
  std::vector<std::pair<std::string, std::string>> merges;
  for (std::string word = "ab"; word.size() <= 256; word += word) {
    words.push_back(word);
    merges.emplace_back(word.substr(0, word.size() / 2), word.substr(word.size() / 2));
    if (word.size() == 2) merges.back() = {"a", "b"};
  }
  const Tokenizer t = Made(Tiny(words, merges));
  for (size_t i = 0; i < words.size(); ++i) EXPECT_THAT(Ids(t, words[i]), ElementsAre(static_cast<int32_t>(256 + i)));
}

// The definition: join the pair of the lowest rank, the leftmost of several, over and over.
TEST(Tokenizer, MergesLikeTheDefinition) {
  ForAll(300, [](Rng& rng) {
    std::vector<std::string> words;
    std::vector<std::pair<std::string, std::string>> merges;
    std::vector<std::string> known = {"a", "b", "c"};
    for (int64_t n = rng.Range(1, 25); n > 0; --n) {
      const auto pick = [&] {
        return known[static_cast<size_t>(rng.Range(0, static_cast<int64_t>(known.size()) - 1))];
      };
      const std::pair<std::string, std::string> merge(pick(), pick());
      const std::string word = merge.first + merge.second;
      if (word.size() > 9 || std::find(merges.begin(), merges.end(), merge) != merges.end()) continue;
      merges.push_back(merge);
      if (std::find(words.begin(), words.end(), word) != words.end()) continue;
      words.push_back(word);
      known.push_back(word);
    }
    const Tokenizer t = Made(Tiny(words, merges));
    for (int round = 0; round < 10; ++round) {
      std::vector<std::string> symbols;
      for (int64_t n = rng.Range(0, 60); n > 0; --n) symbols.push_back(rng.Pick({"a", "b", "c", "d"}));
      std::string text;
      for (const std::string& s : symbols) text += s;
      for (;;) {
        size_t best = merges.size(), where = 0;
        for (size_t i = 0; i + 1 < symbols.size(); ++i) {
          const auto rank = static_cast<size_t>(
              std::find(merges.begin(), merges.end(), std::pair(symbols[i], symbols[i + 1])) - merges.begin());
          if (rank < best) best = rank, where = i;
        }
        if (best == merges.size()) break;
        symbols[where] += symbols[where + 1];
        symbols.erase(symbols.begin() + static_cast<int64_t>(where) + 1);
      }
      std::vector<int32_t> expected;
      for (const std::string& s : symbols)
        expected.push_back(
            s.size() == 1 ? s[0]
                          : static_cast<int32_t>(256 + (std::find(words.begin(), words.end(), s) - words.begin())));
      ASSERT_THAT(Ids(t, text), ElementsAreArray(expected)) << text;
    }
  });
}

TEST(Tokenizer, MergesAsStringsAndPairs) {
  json file = Tiny({"a b", "ab"});
  file["model"]["merges"] = {"a b"};
  EXPECT_THAT(Ids(Made(file), "ab"), ElementsAre(257));
  file["model"]["merges"] = json::array({json::array({"a", "b"})});
  EXPECT_THAT(Ids(Made(file), "ab"), ElementsAre(257));
}

TEST(Tokenizer, IgnoreMergesTakesAWholePiece) {
  json file = Tiny({"ab", "abc", " abc"}, {{"a", "b"}});
  EXPECT_THAT(Ids(Made(file), "abc"), ElementsAre(256, 'c'));
  file["model"]["ignore_merges"] = true;
  EXPECT_THAT(Ids(Made(file), "abc"), ElementsAre(257));
  EXPECT_THAT(Ids(Made(file), " abc"), ElementsAre(258));
  EXPECT_THAT(Ids(Made(file), "abcd"), ElementsAre(256, 'c', 'd'));
}

TEST(Tokenizer, AddedTokensLongestFirst) {
  json file = Tiny();
  file["added_tokens"] = {Added(300, "<a"), Added(301, "<ab>"), Added(302, "<ab"), Added(303, "b>c")};
  const Tokenizer t = Made(file);
  EXPECT_THAT(Ids(t, "<ab>c"), ElementsAre(301, 'c'));
  EXPECT_THAT(Ids(t, "<ab"), ElementsAre(302));
  EXPECT_THAT(Ids(t, "<ax<a"), ElementsAre(300, 'x', 300));
  EXPECT_THAT(Ids(t, "<<ab>>"), ElementsAre('<', 301, '>'));
  EXPECT_EQ(t.vocab_size(), 304);
  EXPECT_EQ(*t.Decode(std::array<int32_t, 2>{301, 'x'}), "<ab>x");
  EXPECT_EQ(t.TokenBytes(299).status().code(), Code::kOutOfRange);  // a gap
}

TEST(Tokenizer, AddedTokensStripAndStandAlone) {
  json file = Tiny();
  file["added_tokens"] = {Patched(Added(300, "<l>"), "/lstrip", true), Patched(Added(301, "<r>"), "/rstrip", true),
                          Patched(Added(302, "word"), "/single_word", true)};
  const Tokenizer t = Made(file);
  EXPECT_THAT(Ids(t, "a \n<l> b"), ElementsAre('a', 300, ' ', 'b'));
  EXPECT_THAT(Ids(t, "a <r>\xE3\x80\x80 b"), ElementsAre('a', ' ', 301, 'b'));
  EXPECT_THAT(Ids(t, "<r>  <l>"), ElementsAre(301, 300));
  EXPECT_THAT(Ids(t, "  <l>"), ElementsAre(300));
  EXPECT_THAT(Ids(t, "word-word"), ElementsAre(302, '-', 302));
  EXPECT_THAT(Ids(t, "words"), ElementsAre('w', 'o', 'r', 'd', 's'));
  EXPECT_THAT(Ids(t, "_word"), ElementsAre('_', 'w', 'o', 'r', 'd'));
  EXPECT_THAT(Ids(t, "\xC3\xA9word"), ElementsAre(0xC3, 0xA9, 'w', 'o', 'r', 'd'));
}

TEST(Tokenizer, NormalizerAndNormalizedAddedTokens) {
  json file = Tiny();
  EXPECT_THAT(Ids(Made(file), "e\xCC\x81"), ElementsAre('e', 0xCC, 0x81));
  file["normalizer"] = {{"type", "NFC"}};
  EXPECT_THAT(Ids(Made(file), "e\xCC\x81"), ElementsAre(0xC3, 0xA9));
  EXPECT_THAT(Ids(Made(file), "\xEF\xAC\x81"), ElementsAre(0xEF, 0xAC, 0x81));
  file["added_tokens"] = {Added(300, "e\xCC\x81"), Patched(Added(301, "<e\xCC\x81>"), "/normalized", true)};
  EXPECT_THAT(Ids(Made(file), "e\xCC\x81|\xC3\xA9"), ElementsAre(300, '|', 0xC3, 0xA9));
  EXPECT_THAT(Ids(Made(file), "<\xC3\xA9>"), ElementsAre(301));
  file["normalizer"] = {{"type", "Sequence"}, {"normalizers", {{{"type", "NFKC"}}}}};
  EXPECT_THAT(Ids(Made(file), "\xEF\xAC\x81"), ElementsAre('f', 'i'));
}

TEST(Tokenizer, PreTokenizersCutBeforeMerging) {
  json file = Tiny({"ab", "a1", " a"}, {{"a", "b"}, {"a", "1"}, {" ", "a"}});
  const auto with = [&](const json& steps) {
    json copy = file;
    copy["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", steps}};
    return Made(copy);
  };
  const json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  const json digits = {
      {"type", "Split"}, {"pattern", {{"Regex", "\\p{N}"}}}, {"behavior", "Isolated"}, {"invert", false}};
  const json on_b = {{"type", "Split"}, {"pattern", {{"String", "b"}}}, {"behavior", "Isolated"}, {"invert", false}};
  EXPECT_THAT(Ids(with(json::array({byte_level})), "aba1"), ElementsAre(256, 257));
  EXPECT_THAT(Ids(with({digits, byte_level}), "aba1"), ElementsAre(256, 'a', '1'));
  EXPECT_THAT(Ids(with({digits, on_b, byte_level}), "aba1"), ElementsAre('a', 'b', 'a', '1'));
  EXPECT_THAT(Ids(with({on_b, byte_level}), "bb"), ElementsAre('b', 'b'));
  // GPT-2's pattern keeps a space with the word behind it; add_prefix_space puts one in front of every piece without.
  const json gpt2 = {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"use_regex", true}};
  EXPECT_THAT(Ids(with(json::array({gpt2})), "a a"), ElementsAre(258, 258));
  EXPECT_THAT(Ids(with(json::array({gpt2})), " a"), ElementsAre(258));
  EXPECT_THAT(Ids(with({digits, gpt2}), "1a"), ElementsAre(' ', '1', 258));
}

TEST(Tokenizer, PostProcessorPutsTokensAround) {
  json file = Tiny();
  file["added_tokens"] = {Added(300, "<s>"), Added(301, "</s>")};
  file["post_processor"] = {{"type", "Sequence"},
                            {"processors",
                             {{{"type", "ByteLevel"}, {"trim_offsets", true}},
                              {{"type", "TemplateProcessing"},
                               {"single",
                                {{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}},
                                 {{"Sequence", {{"id", "A"}, {"type_id", 0}}}},
                                 {{"SpecialToken", {{"id", "</s>"}, {"type_id", 0}}}}}},
                               {"pair", json::array()},
                               {"special_tokens",
                                {{"<s>", {{"id", "<s>"}, {"ids", {300, 300}}, {"tokens", {"<s>", "<s>"}}}},
                                 {"</s>", {{"id", "</s>"}, {"ids", {301}}, {"tokens", {"</s>"}}}}}}}}}};
  EXPECT_THAT(Ids(Made(file), "x", true), ElementsAre(300, 300, 'x', 301));
  EXPECT_THAT(Ids(Made(file), "x", false), ElementsAre('x'));
}

TEST(Tokenizer, AMissingByteIsNamedWhenItIsMet) {
  json file = Tiny();
  file["model"]["vocab"].erase(Spell("q"));
  const Tokenizer t = Made(file);
  EXPECT_THAT(Ids(t, "abc"), ElementsAre('a', 'b', 'c'));
  EXPECT_THAT(t.Encode("aqc", false).status().ToString(), AllOf(HasSubstr("unsupported"), HasSubstr("0x71")));
}

TEST(Tokenizer, AHostilePatternEndsWithAnError) {
  json file = Tiny();
  file["pre_tokenizer"] = {
      {"type", "Sequence"},
      {"pretokenizers",
       {{{"type", "Split"}, {"pattern", {{"Regex", "(?:a|aa)+\\p{N}"}}}, {"behavior", "Isolated"}, {"invert", false}},
        {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
  EXPECT_THAT(Made(file).Encode(std::string(500, 'a'), false).status().ToString(),
              AllOf(HasSubstr("out_of_range"), HasSubstr("limit")));
}

TEST(Tokenizer, RefusesByName) {
  const json file = Tiny({"ab"}, {{"a", "b"}});
  ASSERT_EQ(Why(file), "accepted");
  const auto split = [](const json& pattern, const char* behavior) -> json {
    return {{"type", "Split"}, {"pattern", pattern}, {"behavior", behavior}, {"invert", false}};
  };
  const struct {
    const char* pointer;
    json value;
    const char* code;
    const char* says;
  } cases[] = {
      {"/more", 1, "unsupported", "unknown field \"more\""},
      {"/version", "2.0", "unsupported", "version = \"2.0\""},
      {"/truncation", {{"max_length", 5}}, "unsupported", "truncation"},
      {"/padding", {{"length", 5}}, "unsupported", "padding"},
      {"/model", 3, "invalid_argument", "model: number"},
      {"/model/type", "WordPiece", "unsupported", "model.type = \"WordPiece\""},
      {"/model/type", "Unigram", "unsupported", "pre_tokenizer = \"ByteLevel\""},
      {"/model/type", nullptr, "unsupported", "model.type"},
      {"/model/dropout", 0.1, "unsupported", "model.dropout = \"0.1\""},
      {"/model/unk_token", "<unk>", "invalid_argument", "model.unk_token: \"<unk>\" is not in model.vocab"},
      {"/model/continuing_subword_prefix", "##", "unsupported", "model.continuing_subword_prefix"},
      {"/model/end_of_word_suffix", "</w>", "unsupported", "model.end_of_word_suffix"},
      {"/model/byte_fallback", true, "unsupported", "model.byte_fallback"},
      {"/model/fuse_unk", 1, "invalid_argument", "model.fuse_unk"},
      {"/model/ignore_merges", 1, "invalid_argument", "model.ignore_merges: number, not a boolean"},
      {"/model/new_field", 1, "unsupported", "model: unknown field \"new_field\""},
      {"/model/vocab", json::array(), "invalid_argument", "model.vocab"},
      {"/model/vocab", json::object(), "invalid_argument", "model.vocab"},
      {"/model/vocab/a", -1, "invalid_argument", "model.vocab[\"a\"]: \"-1\" is no token id"},
      {"/model/vocab/a", 1.5, "invalid_argument", "\"1.5\" is no token id"},
      {"/model/vocab/a", 2147483647, "invalid_argument", "\"2147483647\" is no token id"},
      {"/model/vocab/a", "x", "invalid_argument", "is no token id"},
      {"/model/vocab/a", 98, "invalid_argument", "id 98 is given twice"},
      {"/model/merges", 1, "invalid_argument", "model.merges: number, not an array"},
      {"/model/merges/0", "ab", "invalid_argument", "model.merges[0]: \"ab\" is not"},
      {"/model/merges/0", "a b c", "invalid_argument", "model.merges[0]"},
      {"/model/merges/0", {"a"}, "invalid_argument", "model.merges[0]"},
      {"/model/merges/0", {"a", 1}, "invalid_argument", "model.merges[0]"},
      {"/model/merges/0", {"", "a"}, "invalid_argument", "an empty token"},
      {"/model/merges/0", {"a", "zz"}, "invalid_argument", "\"zz\" is not in model.vocab"},
      {"/model/merges/0", {"a", "c"}, "invalid_argument", "\"ac\" is not in model.vocab"},
      {"/model/merges/1", {"a", "b"}, "invalid_argument", "model.merges[1]: \"a\" \"b\" is merged twice"},
      {"/added_tokens", 1, "invalid_argument", "added_tokens"},
      {"/added_tokens/0", 1, "invalid_argument", "added_tokens[0]"},
      {"/added_tokens/0", Added(-1, "x"), "invalid_argument", "added_tokens[0].id"},
      {"/added_tokens/0", Added(300, ""), "invalid_argument", "added_tokens[0].content: empty"},
      {"/added_tokens/0", Added(300, "a"), "invalid_argument", "\"a\" is 300 here and 97 in model.vocab"},
      {"/added_tokens/0", Added(97, "<x>"), "invalid_argument", "97 is another token"},
      {"/added_tokens/0", Added(300, std::string(513, 'x')), "out_of_range", "513 bytes, limit 512"},
      {"/added_tokens/0", Patched(Added(300, "x"), "/special", 1), "invalid_argument", "added_tokens[0].special"},
      {"/added_tokens/0", Patched(Added(300, "<x>"), "/more", 1), "unsupported", "unknown field"},
      {"/added_tokens", {Added(300, "<x>"), Added(301, "<x>")}, "invalid_argument", "\"<x>\" is there twice"},
      {"/added_tokens", {Added(300, "<x>"), Added(300, "<y>")}, "invalid_argument", "id 300 is given twice"},
      {"/normalizer", {{"type", "BertNormalizer"}}, "unsupported", "normalizer.type = \"BertNormalizer\""},
      {"/normalizer",
       {{"type", "Sequence"}, {"normalizers", {{{"type", "Precompile"}}}}},
       "unsupported",
       "normalizer.normalizers[0].type = \"Precompile\""},
      {"/normalizer", "NFC", "invalid_argument", "normalizer: string, not an object"},
      {"/pre_tokenizer", {{"type", "BertPreTokenizer"}}, "unsupported", "pre_tokenizer.type = \"BertPreTokenizer\""},
      {"/pre_tokenizer", {{"type", "Metaspace"}}, "invalid_argument", "pre_tokenizer.replacement: null"},
      {"/pre_tokenizer",
       {{"type", "Sequence"}, {"pretokenizers", {{{"type", "ByteLevel"}}, split({{"String", "a"}}, "Isolated")}}},
       "unsupported",
       "ByteLevel has to be the last"},
      {"/pre_tokenizer", split({{"String", "a"}}, "Dropped"), "unsupported", "pre_tokenizer.behavior = \"Dropped\""},
      {"/pre_tokenizer", split({{"String", ""}}, "Isolated"), "invalid_argument", "pre_tokenizer.pattern: empty"},
      {"/pre_tokenizer", split({{"Regex", "("}}, "Isolated"), "invalid_argument",
       "pre_tokenizer.pattern: pattern \"(\""},
      {"/pre_tokenizer", split({{"Regex", "\\w"}}, "Isolated"), "unsupported", "Oniguruma"},
      {"/pre_tokenizer", split({{"Regex", "a"}, {"String", "a"}}, "Isolated"), "invalid_argument", "neither just"},
      {"/pre_tokenizer", split("a", "Isolated"), "invalid_argument", "pre_tokenizer.pattern"},
      {"/pre_tokenizer",
       {{"type", "Sequence"}, {"pretokenizers", std::vector<json>(33, split({{"String", "a"}}, "Isolated"))}},
       "out_of_range",
       "more than 32"},
      {"/post_processor", {{"type", "OtherProcessing"}}, "unsupported", "post_processor.type = \"OtherProcessing\""},
      {"/post_processor",
       {{"type", "TemplateProcessing"}, {"single", json::array()}, {"special_tokens", json::object()}},
       "invalid_argument",
       "no sequence A"},
      {"/post_processor",
       {{"type", "TemplateProcessing"},
        {"single", {{{"SpecialToken", {{"id", "<s>"}}}}}},
        {"special_tokens", json::object()}},
       "invalid_argument",
       "\"<s>\" is not in special_tokens"},
      {"/post_processor",
       {{"type", "TemplateProcessing"},
        {"single", {{{"Sequence", {{"id", "B"}}}}}},
        {"special_tokens", json::object()}},
       "invalid_argument",
       "\"B\""},
      {"/post_processor",
       {{"type", "TemplateProcessing"},
        {"single", {{{"SpecialToken", {{"id", "s"}}}}}},
        {"special_tokens", {{"s", {{"id", "s"}, {"ids", {999}}, {"tokens", {"s"}}}}}}},
       "invalid_argument",
       "999 is no token"},
      {"/decoder", nullptr, "unsupported", "decoder"},
      {"/decoder", {{"type", "WordPiece"}}, "unsupported", "decoder.type = \"WordPiece\""},
      {"/decoder",
       {{"type", "Sequence"}, {"decoders", {{{"type", "Fuse"}}, {{"type", "ByteFallback"}}}}},
       "unsupported",
       "behind Fuse"},
  };
  for (const auto& c : cases) {
    EXPECT_THAT(Why(Patched(file, c.pointer, c.value)),
                AllOf(HasSubstr(c.code), HasSubstr("tokenizer.json"), HasSubstr(c.says)))
        << c.pointer << " " << c.value;
  }
}

TEST(Tokenizer, LoadNamesThePath) {
  EXPECT_EQ(Tokenizer::Load("/nowhere/tokenizer.json").status().code(), Code::kNotFound);
  EXPECT_THAT(Tokenizer::Load(std::string(kModel) + "/config.json").status().message(),
              HasSubstr("books-7m/config.json"));
}

// Edits of a good file: a tokenizer that encodes and decodes, or an error; nothing else.
TEST(Tokenizer, EditedFilesAreTotal) {
  json base = Tiny({"ab", "<s>"}, {{"a", "b"}});
  base["added_tokens"] = {Added(257, "<s>"), Added(300, "<t>")};
  base["pre_tokenizer"] = {{"type", "Sequence"},
                           {"pretokenizers",
                            {{{"type", "Split"},
                              {"pattern", {{"Regex", "\\p{N}|[^\\s\\p{L}]+"}}},
                              {"behavior", "Isolated"},
                              {"invert", false}},
                             {{"type", "ByteLevel"}}}}};
  const std::string text = base.dump();
  int accepted = 0;
  ForAll(1500, [&](Rng& rng) {
    std::string edited = text;
    for (int64_t n = rng.Range(1, 3); n > 0; --n) {
      const auto at = static_cast<size_t>(rng.Range(0, static_cast<int64_t>(edited.size()) - 1));
      if (rng.Chance(0.6)) {
        edited[at] = static_cast<char>(rng.Range(0x20, 0x7E));
      } else if (rng.Chance(0.5)) {
        edited.erase(at, static_cast<size_t>(rng.Range(1, 8)));
      } else {
        edited.insert(at, edited.substr(static_cast<size_t>(rng.Range(0, static_cast<int64_t>(edited.size()) - 1)), 8));
      }
    }
    const auto t = Tokenizer::Parse(edited);
    if (!t.ok()) return;
    ++accepted;
    const auto ids = t->Encode("ab1 <s>x<t> \xC3\xA9!", true);
    EXPECT_TRUE(!ids.ok() || t->Decode(*ids).ok());
  });
  EXPECT_GT(accepted, 0);
}

}  // namespace
}  // namespace livequant
