// tests/text/gguf_sentencepiece_test.cc: SentencePiece models inside GGUF files: against the same vocabulary as
// tokenizer.json, against a slow definition, and each thing that a file can get wrong. The real vocabularies and
// Google's library: tools/sentencepiece_compare.py.
#include <gmock/gmock.h>

#include <algorithm>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "io/file.h"
#include "io/gguf.h"
#include "io/json.h"
#include "support/gguf_builder.h"
#include "support/property.h"
#include "text/gguf_tokenizer.h"
#include "text/utf8.h"

namespace livequant {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using B = GgufBuilder;

enum Type : int32_t { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6 };
struct Piece {
  std::string text;
  float score = 0;
  int32_t type = kNormal;
};

B Builder(const std::vector<Piece>& pieces) {
  B b;
  std::vector<std::string> texts;
  std::vector<float> scores;
  std::vector<int32_t> types;
  for (const Piece& p : pieces) {
    texts.push_back(p.text);
    scores.push_back(p.score);
    types.push_back(p.type);
  }
  b.pairs = {{"tokenizer.ggml.model", B::String("llama")},
             {"tokenizer.ggml.tokens", B::Strings(texts)},
             {"tokenizer.ggml.scores", B::Floats(scores)},
             {"tokenizer.ggml.token_type", B::Integers(types)},
             {"tokenizer.ggml.bos_token_id", B::U32(1)}};
  return b;
}
Result<Tokenizer> Read(const B& b) {
  const std::string bytes = b.Bytes();
  const auto gguf = Gguf::Parse(std::as_bytes(std::span(bytes)), "m.gguf");
  EXPECT_TRUE(gguf.ok()) << gguf.status().ToString();
  return GgufTokenizer(*gguf, "m.gguf");
}
Tokenizer Loaded(const B& b) {
  Result<Tokenizer> t = Read(b);
  EXPECT_TRUE(t.ok()) << t.status().ToString();
  return *std::move(t);
}
std::vector<int32_t> IdsOf(const Tokenizer& t, std::string_view text, bool special = false) {
  const auto ids = t.Encode(text, special);
  EXPECT_TRUE(ids.ok()) << ids.status().ToString();
  return ids.ok() ? *ids : std::vector<int32_t>();
}

const std::vector<Piece>& Small() {
  static const std::vector<Piece> pieces = {{"<unk>", 0, kUnknown},
                                            {"<s>", 0, kControl},
                                            {"</s>", 0, kControl},
                                            {"\u2581", -9},
                                            {"a", -9},
                                            {"b", -9},
                                            {"ab", -1},
                                            {"\u2581a", -2},
                                            {"\u2581ab", -3}};
  return pieces;
}

TEST(GgufSentencePiece, EqualsTheTokenizerJsonOfItsVocabulary) {
  const json goldens =
      *ParseJson(*ReadFile(LIVEQUANT_SOURCE_DIR "/tests/text/tokenizer_goldens.json"), "tokenizer_goldens.json");
  const json& golden = goldens["llama_legacy"];
  const json &file = golden["json"], &model = file["model"];
  std::vector<Piece> pieces(model["vocab"].size());
  for (const auto& [text, id] : model["vocab"].items()) {
    const bool byte = text.size() == 6 && text.starts_with("<0x");
    pieces[id.get<size_t>()] = {text, -1000, byte ? kByte : kNormal};
  }
  for (size_t i = model["merges"].size(); i-- > 0;) {  // the first merge that makes a piece has the last word
    const std::string merge = model["merges"][i];
    const size_t space = merge.find(' ');
    const json& id = model["vocab"][merge.substr(0, space) + merge.substr(space + 1)];
    pieces[id.get<size_t>()].score = -static_cast<float>(i);
  }
  for (const json& added : file["added_tokens"])
    pieces[added["id"].get<size_t>()].type = added["content"] == model["unk_token"] ? kUnknown : kControl;
  const Tokenizer t = Loaded(Builder(pieces)), directory = *Tokenizer::Parse(file.dump());
  ASSERT_EQ(golden["cases"].size(), 30u);
  for (const json& c : golden["cases"]) {
    const std::string text = c["text"];
    EXPECT_THAT(IdsOf(t, text), ElementsAreArray(c["ids"].get<std::vector<int32_t>>())) << c["text"];
    for (const bool skip : {false, true})
      EXPECT_EQ(*t.Decode(IdsOf(t, text), skip), *directory.Decode(IdsOf(t, text), skip)) << text;
  }
}

TEST(GgufSentencePiece, EdgesAndPrefix) {
  B b = Builder(Small());
  EXPECT_THAT(IdsOf(Loaded(b), "ab", true), ElementsAre(1, 8));  // add_bos_token is true where absent
  EXPECT_THAT(IdsOf(Loaded(b), "ab</s>ab"), ElementsAre(8, 2, 8));
  EXPECT_EQ(*Loaded(b).Decode(std::vector<int32_t>{1, 8, 8}), "ab ab");
  b.Set("tokenizer.ggml.add_bos_token", B::Bool(0));
  b.Set("tokenizer.ggml.add_eos_token", B::Bool(1));
  b.Set("tokenizer.ggml.eos_token_id", B::U32(2));
  EXPECT_THAT(IdsOf(Loaded(b), "ab", true), ElementsAre(8, 2));
  const std::string before = Loaded(b).digest();
  b.Set("tokenizer.ggml.add_space_prefix", B::Bool(0));
  EXPECT_THAT(IdsOf(Loaded(b), "ab ab"), ElementsAre(6, 8));
  EXPECT_EQ(*Loaded(b).Decode(std::vector<int32_t>{8, 6}), " abab");
  EXPECT_NE(Loaded(b).digest(), before);
  EXPECT_EQ(Loaded(b).vocab_size(), 9);
}

TEST(GgufSentencePiece, OfEqualScoresTheLeftmost) {
  std::vector<Piece> pieces = Small();
  pieces.insert(pieces.end(), {{"aa", -4}, {"aaa", -5}, {"ba", -1}});  // "ab" and "ba" have the same score
  B b = Builder(pieces);
  b.Set("tokenizer.ggml.add_space_prefix", B::Bool(0));
  const Tokenizer t = Loaded(b);
  EXPECT_THAT(IdsOf(t, "aba"), ElementsAre(6, 4));
  EXPECT_THAT(IdsOf(t, "bab"), ElementsAre(11, 5));
  EXPECT_THAT(IdsOf(t, "aaaaa"), ElementsAre(9, 10));
}

TEST(GgufSentencePiece, CharactersThatAreNoTokens) {
  std::vector<Piece> pieces = Small();
  pieces.push_back({"xy", -1});  // neither x nor y is
  EXPECT_THAT(IdsOf(Loaded(Builder(pieces)), "axyxb"), ElementsAre(7, 9, 0, 5));
  EXPECT_THAT(IdsOf(Loaded(Builder(pieces)), "xxzzxx"), ElementsAre(3, 0));  // one unk a run
  for (int byte = 0; byte < 256; ++byte) {
    constexpr char kDigits[] = "0123456789ABCDEF";
    pieces.push_back({std::string("<0x") + kDigits[byte / 16] + kDigits[byte % 16] + ">", 0, kByte});
  }
  const Tokenizer t = Loaded(Builder(pieces));
  EXPECT_THAT(IdsOf(t, "axy\xC3\xA9x"), ElementsAre(7, 9, 10 + 0xC3, 10 + 0xA9, 10 + 'x'));
  EXPECT_EQ(*t.Decode(IdsOf(t, "axy\xC3\xA9x")), "axy\xC3\xA9x");
  EXPECT_EQ(IdsOf(t, "<0x41>").size(), 7u);  // the name of a byte is no byte

  pieces[0].type = kNormal;  // no unknown token
  pieces.resize(10);
  EXPECT_THAT(Loaded(Builder(pieces)).Encode("x", false).status().message(), HasSubstr("U+0078"));
  EXPECT_THAT(Loaded(Builder(pieces)).Encode("q", false).status().message(), HasSubstr("U+0071"));
}

TEST(GgufSentencePiece, UserDefinedTokensAreFoundWithSpacesOrTheirSign) {
  for (const char* spelled : {"  ", "\u2581\u2581"}) {
    std::vector<Piece> pieces = Small();
    pieces.push_back({spelled, 0, kUserDefined});
    pieces.push_back({"<user>", 0, kUserDefined});
    B b = Builder(pieces);
    b.Set("tokenizer.ggml.add_space_prefix", B::Bool(0));
    const Tokenizer t = Loaded(b);
    EXPECT_THAT(IdsOf(t, "ab   ab<user>ab"), ElementsAre(6, 9, 8, 10, 6)) << spelled;
    EXPECT_THAT(IdsOf(t,
                      "ab\u2581\u2581\u2581"
                      "ab"),
                ElementsAre(6, 9, 8))
        << spelled;
    EXPECT_THAT(IdsOf(t, "ab \u2581 ab"), ElementsAre(6, 9, 8)) << spelled;
    EXPECT_EQ(*t.Decode(IdsOf(t, "ab   ab<user>ab")), "ab   ab<user>ab");
    b.Remove("tokenizer.ggml.add_space_prefix");  // true: in front of the text, and behind a token without spaces
    EXPECT_THAT(IdsOf(Loaded(b), " ab  ab<user>ab"), ElementsAre(9, 6, 9, 6, 10, 8)) << spelled;
  }
}

// SentencePiece's algorithm as a list of strings: quadratic, and with nothing in common but the rules.
std::vector<int32_t> Slow(const std::vector<Piece>& pieces, const std::string& text) {
  std::map<std::string, int32_t> known, unused;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i].type == kNormal || pieces[i].type == kUnused) known[pieces[i].text] = static_cast<int32_t>(i);
    if (pieces[i].type == kUnused) unused[pieces[i].text] = static_cast<int32_t>(i);
  }
  std::vector<std::string> symbols;
  std::map<std::string, std::pair<std::string, std::string>> made_of;
  for (size_t at = 0; at < text.size();) {
    const auto bytes = static_cast<size_t>(NextUtf8(std::string_view(text).substr(at)).bytes);
    symbols.push_back(text.substr(at, bytes));
    at += bytes;
  }
  const auto saw = [&](size_t i) {  // the pair at i, i + 1
    if (i + 1 < symbols.size() && unused.contains(symbols[i] + symbols[i + 1]))
      made_of[symbols[i] + symbols[i + 1]] = {symbols[i], symbols[i + 1]};
  };
  for (size_t i = 0; i + 1 < symbols.size(); ++i) saw(i);
  for (;;) {
    size_t best = symbols.size();
    float score = 0;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto piece = known.find(symbols[i] + symbols[i + 1]);
      if (piece == known.end()) continue;
      const float s = pieces[static_cast<size_t>(piece->second)].score;
      if (best == symbols.size() || s > score) {
        best = i;
        score = s;
      }
    }
    if (best == symbols.size()) break;
    symbols[best] += symbols[best + 1];
    symbols.erase(symbols.begin() + static_cast<int64_t>(best) + 1);
    if (best > 0) saw(best - 1);
    saw(best);
  }
  std::vector<int32_t> ids;
  const std::function<void(const std::string&)> give = [&](const std::string& symbol) {
    if (unused.contains(symbol) && made_of.contains(symbol)) {
      const auto [left, right] = made_of[symbol];
      give(left);
      return give(right);
    }
    const auto piece = known.find(symbol);
    const int32_t id = piece == known.end() ? 0 : piece->second;
    if (id != 0 || ids.empty() || ids.back() != 0) ids.push_back(id);
  };
  for (const std::string& s : symbols) give(s);
  return ids;
}

TEST(GgufSentencePiece, RandomVocabulariesGiveTheIdsOfTheSlowDefinition) {
  ForAll(300, [](Rng& rng) {
    const auto below = [&](size_t n) { return static_cast<size_t>(rng.Range(0, static_cast<int64_t>(n) - 1)); };
    std::vector<Piece> pieces = {{"<unk>", 0, kUnknown}, {"<s>", 0, kControl}};
    const std::vector<std::string> letters = {"a", "b", "\u00e9", "\u2581", "q"};
    const auto word = [&](size_t most) {
      std::string out;
      for (size_t n = 1 + below(most); n > 0; --n) out += letters[below(letters.size())];
      return out;
    };
    const size_t scores = 1 + below(12);  // few: many are equal
    const bool with_unused = below(2) == 0;
    for (size_t n = 1 + below(40); n > 0; --n) {
      Piece p{word(1 + below(5)), -static_cast<float>(below(scores)), kNormal};
      if (with_unused && below(4) == 0) p.type = kUnused;
      if (std::none_of(pieces.begin(), pieces.end(), [&](const Piece& q) { return q.text == p.text; }))
        pieces.push_back(p);
    }
    B b = Builder(pieces);
    b.Set("tokenizer.ggml.add_space_prefix", B::Bool(0));
    const Tokenizer t = Loaded(b);
    for (int i = 0; i < 8; ++i) {
      const std::string text = word(24);
      EXPECT_THAT(IdsOf(t, text), ElementsAreArray(Slow(pieces, text))) << text;
    }
  });
}

TEST(GgufSentencePiece, RefusesByKeyValueAndLimit) {
  struct Case {
    const char* key;
    std::string value;  // empty: removed
    const char* says;
  };
  const auto texts = [](std::vector<std::string> t) {
    t.resize(9, "x");
    for (size_t i = 0; i < t.size(); ++i)
      if (t[i] == "x") t[i] += std::to_string(i);
    return B::Strings(t);
  };
  const Case cases[] = {
      {"tokenizer.ggml.pre", B::String("llama-bpe"), "with model llama"},
      {"tokenizer.ggml.tokens", "", "is missing"},
      {"tokenizer.ggml.tokens", B::Strings({}), "has 0 tokens"},
      {"tokenizer.ggml.tokens", texts({"<unk>", "<unk>"}), "at index 0 and at 1"},
      {"tokenizer.ggml.tokens", texts({"<unk>", ""}), "is empty at index 1"},
      {"tokenizer.ggml.tokens", texts({"\xff"}), "no UTF-8"},
      {"tokenizer.ggml.tokens", texts({std::string(257, 'a')}), "has 257 bytes at index 0, limit 256"},
      {"tokenizer.ggml.scores", "", "is missing"},
      {"tokenizer.ggml.scores", B::Integers({0}), "no array of 32-bit floats"},
      {"tokenizer.ggml.scores", B::Floats({0}), "has 1 entries; tokenizer.ggml.tokens has 9"},
      {"tokenizer.ggml.scores", B::Floats({0, 0, NAN, 0, 0, 0, 0, 0, 0}), "is nan at index 2"},
      {"tokenizer.ggml.token_type", "", "is missing"},
      {"tokenizer.ggml.token_type", B::Integers({2, 3, 3, 1, 1, 7, 1, 1, 1}), "is 7 at index 5"},
      {"tokenizer.ggml.token_type", B::Integers({2, 3, 3, 1, 1, 0, 1, 1, 1}), "is 0 at index 5"},
      {"tokenizer.ggml.tokens", texts({"<unk>", "<s>", "<0x41>"}), "is 6 for 1 tokens"},
      {"tokenizer.ggml.tokens", texts({"<unk>", "<s>", "<0x4G>"}), "type says <0x00> to <0xFF>"},
      {"tokenizer.ggml.unknown_token_id", B::U32(9), "is 9; it must be one of 9"},
      {"tokenizer.ggml.unknown_token_id", B::F32(0), "is no id"},
      {"tokenizer.ggml.bos_token_id", "", "is missing, but"},
      {"tokenizer.ggml.bos_token_id", B::U32(9), "is 9; it must be one of 9"},
      {"tokenizer.ggml.add_eos_token", B::Bool(1), "\"tokenizer.ggml.eos_token_id\" is missing"},
      {"tokenizer.ggml.add_space_prefix", B::U32(1), "is no bool"},
      {"tokenizer.ggml.remove_extra_whitespaces", B::Bool(1), "only false"},
      {"tokenizer.ggml.escape_whitespaces", B::Bool(0), "only true"},
      {"tokenizer.ggml.precompiled_charsmap", B::Array(0, 1, "x"), "normalize"},
  };
  for (const Case& c : cases) {
    B b = Builder(Small());
    if (c.value.empty())
      b.Remove(c.key);
    else
      b.Set(c.key, c.value);
    if (std::string_view(c.says).find("<0x00>") != std::string_view::npos ||
        std::string_view(c.says).find("is 6") != std::string_view::npos)
      b.Set("tokenizer.ggml.token_type", B::Integers({2, 3, 6, 1, 1, 1, 1, 1, 1}));
    const auto t = Read(b);
    ASSERT_FALSE(t.ok()) << c.key << " " << c.says;
    EXPECT_THAT(t.status().message(), ::testing::AllOf(HasSubstr("m.gguf"), HasSubstr(c.says))) << c.key;
  }
  B b = Builder(Small());
  b.Set("tokenizer.ggml.token_type", B::Integers({2, 3, 2, 1, 1, 1, 1, 1, 1}));
  EXPECT_THAT(Read(b).status().message(), HasSubstr("tokens 0 and 2 are both unknown"));
  b.Set("tokenizer.ggml.unknown_token_id", B::U32(2));
  EXPECT_THAT(IdsOf(Loaded(b), "z"), ElementsAre(3, 2));
  std::vector<Piece> long_user = Small();
  long_user.push_back({std::string(200, ' '), 0, kUserDefined});
  EXPECT_THAT(Read(Builder(long_user)).status().message(), HasSubstr("limit 512"));
  std::vector<Piece> two_ways = Small();
  two_ways.insert(two_ways.end(), {{"  ", 0, kUserDefined}, {"\u2581\u2581", 0, kUserDefined}});
  EXPECT_THAT(Read(Builder(two_ways)).status().message(), HasSubstr("with spaces and with U+2581"));
  b.Set("tokenizer.ggml.pre", B::String("default"));
  b.Set("tokenizer.ggml.remove_extra_whitespaces", B::Bool(0));
  EXPECT_TRUE(Read(b).ok());
}

}  // namespace
}  // namespace livequant
