// tests/text/tokenizer_kinds_test.cc: small tokenizers of every kind against the reference library's ids and texts, and
// what only the new kinds can do wrong. Goldens: tools/tokenizer_goldens.mjs.
#include <gmock/gmock.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "io/file.h"
#include "io/json.h"
#include "support/property.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace livequant {
namespace {

using nlohmann::json;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

const json& Goldens() {
  static const json goldens =
      *ParseJson(*ReadFile(LIVEQUANT_SOURCE_DIR "/tests/text/tokenizer_goldens.json"), "tokenizer_goldens.json");
  return goldens;
}

Tokenizer Parsed(const json& file) {
  Result<Tokenizer> tokenizer = Tokenizer::Parse(file.dump());
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().ToString();
  return *std::move(tokenizer);
}

std::string Streamed(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  StreamingDetokenizer stream(tokenizer);
  std::string text;
  for (const int32_t id : ids) {
    const std::string piece = *stream.Push(id);
    EXPECT_EQ(InvalidUtf8At(piece), std::string::npos);
    text += piece;
  }
  return text + stream.Finish();
}

TEST(TokenizerKinds, IdsAndTextsAreTheReferences) {
  ASSERT_EQ(Goldens().size(), 14u);
  for (const auto& [name, golden] : Goldens().items()) {
    const Tokenizer tokenizer = Parsed(golden["json"]);
    ASSERT_EQ(golden["cases"].size(), 30u);
    for (const json& c : golden["cases"]) {
      const std::string text = c["text"];
      const Result<std::vector<int32_t>> ids = tokenizer.Encode(text, false);
      ASSERT_TRUE(ids.ok()) << name << " " << text << " " << ids.status().ToString();
      EXPECT_THAT(*ids, ElementsAreArray(c["ids"].get<std::vector<int32_t>>())) << name << ": " << c["text"];
      // The reference reads an added token's text as GPT-2's spelling of bytes, so that "N\u00e9" decodes to U+FFFD;
      // here it decodes to itself (tokenizer.h).
      if (golden["json"]["decoder"]["type"] == "ByteLevel" && std::find(ids->begin(), ids->end(), 266) != ids->end()) {
        EXPECT_THAT(*tokenizer.Decode(*ids), HasSubstr("N\xC3\xA9")) << name;
        continue;
      }
      // One wrong byte costs the reference the whole run of bytes (tokenizer.h).
      if (name == "unigram_bytes" && text == "<0x41><0xE4>") {
        EXPECT_EQ(*tokenizer.Decode(*ids), "A\xEF\xBF\xBD");
        continue;
      }
      EXPECT_EQ(*tokenizer.Decode(*ids, false), c["all"].get<std::string>()) << name << ": " << c["text"];
      EXPECT_EQ(*tokenizer.Decode(*ids, true), c["plain"].get<std::string>()) << name << ": " << c["text"];
      EXPECT_EQ(Streamed(tokenizer, *ids), c["plain"].get<std::string>()) << name << ": " << c["text"];
    }
  }
}

// Any ids at all: streaming gives Decode's text, whole characters at a time.
TEST(TokenizerKinds, StreamingIsDecode) {
  for (const auto& [name, golden] : Goldens().items()) {
    const Tokenizer tokenizer = Parsed(golden["json"]);
    ForAll(200, [&](Rng& rng) {
      std::vector<int32_t> ids;
      for (int64_t n = rng.Range(0, 20); n > 0; --n) {
        const auto id = static_cast<int32_t>(rng.Range(0, tokenizer.vocab_size() - 1));
        if (tokenizer.TokenBytes(id).ok()) ids.push_back(id);
      }
      EXPECT_EQ(Streamed(tokenizer, ids), *tokenizer.Decode(ids)) << name;
    });
  }
}

TEST(TokenizerKinds, ALeadingSpaceIsStrippedOnceAndOnlyAtTheStart) {
  const Tokenizer tokenizer = Parsed(Goldens()["llama_legacy"]["json"]);
  const std::vector<int32_t> ids = *tokenizer.Encode("  ab ab", false);
  EXPECT_EQ(*tokenizer.Decode(ids), "  ab ab");
  StreamingDetokenizer stream(tokenizer);
  EXPECT_EQ(*stream.Push(1), "");  // <s>: special, not yet the start of the text
  const std::vector<int32_t> word = *tokenizer.Encode("ab", false);
  ASSERT_EQ(word.size(), 1u);
  EXPECT_EQ(*stream.Push(word[0]), "ab");
  EXPECT_EQ(*stream.Push(word[0]), " ab");
  EXPECT_EQ(stream.Finish(), "");
  EXPECT_EQ(*stream.Push(word[0]), "ab") << "a new stream begins anew";
}

TEST(TokenizerKinds, BytesOfOneCharacterWaitForEachOther) {
  const Tokenizer tokenizer = Parsed(Goldens()["llama_legacy"]["json"]);
  StreamingDetokenizer stream(tokenizer);
  EXPECT_EQ(*stream.Push(3 + 0xF0), "");
  EXPECT_EQ(*stream.Push(3 + 0x9F), "");
  EXPECT_EQ(*stream.Push(3 + 0x98), "");
  EXPECT_EQ(*stream.Push(3 + 0x80), "\xF0\x9F\x98\x80");
  EXPECT_EQ(*stream.Push(3 + 0xC3), "");
  EXPECT_EQ(*stream.Push(3 + 'A'),
            "\xEF\xBF\xBD"
            "A");
}

TEST(TokenizerKinds, LongTextsWithoutABoundary) {
  for (const char* name : {"llama_legacy", "gemma", "t5", "unigram_bytes", "next_inverted"}) {
    const Tokenizer tokenizer = Parsed(Goldens()[name]["json"]);
    for (const char* unit : {"a", "ab", " ", "q", "\xCC\x81\xCC\xA3", "\xE4\xB8\xAD"}) {
      std::string text;
      while (text.size() < (256 << 10)) text += unit;
      const Result<std::vector<int32_t>> ids = tokenizer.Encode(text, false);
      ASSERT_TRUE(ids.ok()) << name << " " << unit << " " << ids.status().ToString();
    }
  }
}

TEST(TokenizerKinds, RefusesByName) {
  const auto why = [](const char* kind, const char* pointer, const json& value) {
    json file = Goldens()[kind]["json"];
    file[json::json_pointer(pointer)] = value;
    const Result<Tokenizer> tokenizer = Tokenizer::Parse(file.dump());
    return tokenizer.ok() ? "accepted" : tokenizer.status().ToString();
  };
  const json chars = {{"type", "Precompiled"}, {"precompiled_charsmap", "AAAA"}};
  EXPECT_THAT(why("t5", "/model/unk_id", 99), HasSubstr("unk_id 99 of 17"));
  EXPECT_THAT(why("t5", "/model/vocab/3", {"a"}), HasSubstr("model.vocab[3]: not [token, score]"));
  EXPECT_THAT(why("t5", "/model/vocab/3", {"a", -1}), HasSubstr("\"a\" is there twice"));
  EXPECT_THAT(why("t5", "/model/vocab/3", {"", -1}), HasSubstr("an empty token"));
  EXPECT_THAT(why("t5", "/model/vocab/3", {std::string(2000, 'x'), -1}), HasSubstr("2000 bytes, limit 128"));
  EXPECT_THAT(why("t5", "/normalizer", chars), HasSubstr("3 bytes, not even a length"));
  EXPECT_THAT(why("t5", "/normalizer/normalizers/0/precompiled_charsmap", "A?AA"), HasSubstr("no base64 at byte 1"));
  EXPECT_THAT(why("t5", "/normalizer/normalizers/0/precompiled_charsmap", "/////w=="), HasSubstr("units of"));
  EXPECT_THAT(why("t5", "/normalizer/normalizers/2/pattern", {{"Regex", "("}}), HasSubstr("pattern"));
  EXPECT_THAT(why("t5", "/pre_tokenizer/replacement", "__"), HasSubstr("is not one character"));
  EXPECT_THAT(why("t5", "/pre_tokenizer/prepend_scheme", "second"), HasSubstr("prepend_scheme = \"second\""));
  EXPECT_THAT(why("llama_legacy", "/model/unk_token", "<nope>"), HasSubstr("\"<nope>\" is not in model.vocab"));
  EXPECT_THAT(why("llama_legacy", "/normalizer/normalizers/0/prepend", std::string(600, 'x')), HasSubstr("limit 512"));
  EXPECT_THAT(why("llama_legacy", "/decoder/decoders/3/stop", 1), HasSubstr("behind Fuse only 0"));
  EXPECT_THAT(why("llama_legacy", "/decoder/decoders/3/content", "ab"), HasSubstr("is not one character"));
  EXPECT_THAT(why("llama_legacy", "/decoder/decoders/2", {{"type", "Metaspace"}, {"replacement", "_"}}),
              HasSubstr("behind ByteFallback"));
  EXPECT_THAT(why("gpt2", "/model/byte_fallback", true), HasSubstr("with ByteLevel only false"));
}

// A damaged double array leads to an error or to some text, never outside.
TEST(TokenizerKinds, EditedCharsmapsAreTotal) {
  const json base = Goldens()["t5"]["json"];
  const std::string good = base["normalizer"]["normalizers"][0]["precompiled_charsmap"];
  ForAll(400, [&](Rng& rng) {
    std::string edited = good;
    for (int64_t n = rng.Range(1, 6); n > 0; --n)
      edited[static_cast<size_t>(rng.Range(0, static_cast<int64_t>(edited.size()) - 3))] =
          "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+/"[rng.Range(0, 37)];
    json file = base;
    file["normalizer"]["normalizers"][0]["precompiled_charsmap"] = edited;
    const auto tokenizer = Tokenizer::Parse(file.dump());
    if (!tokenizer.ok()) return;
    const auto ids = tokenizer->Encode("\xEF\xAC\x81 e\xCC\x81 \r\nab \xC2\xAD<s>", false);
    EXPECT_TRUE(!ids.ok() || tokenizer->Decode(*ids).ok());
  });
}

}  // namespace
}  // namespace livequant
