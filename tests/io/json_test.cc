// tests/io/json_test.cc: what io/json.h promises: a value for JSON, an error with a place for everything else.
#include "io/json.h"

#include <gmock/gmock.h>

#include <string>

#include "support/property.h"

namespace livequant {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string Why(std::string_view text, const JsonLimits& limits = {}) {
  const Result<nlohmann::json> result = ParseJson(text, "doc.json", limits);
  return result.ok() ? "accepted" : result.status().ToString();
}

TEST(Json, BuildsTheValue) {
  const auto v = ParseJson(R"( {"a": [1, -2, 2.5, true, false, null, "x\u00e9\ud83d\ude00"], "b": {"c": {}}, "": []} )",
                           "doc.json");
  ASSERT_TRUE(v.ok()) << v.status().ToString();
  EXPECT_EQ((*v)["a"][0].get<uint64_t>(), 1u);
  EXPECT_EQ((*v)["a"][1], -2);
  EXPECT_EQ((*v)["a"][2], 2.5);
  EXPECT_EQ((*v)["a"][6], "x\xC3\xA9\xF0\x9F\x98\x80");
  EXPECT_TRUE((*v)["b"]["c"].empty());
  EXPECT_TRUE(v->contains(""));
  EXPECT_EQ(v->size(), 3u);
  for (const char* scalar : {"1", "\"x\"", "null", " true\n"})
    EXPECT_TRUE(ParseJson(scalar, "doc.json").ok()) << scalar;
}

TEST(Json, RefusesRepeatedKeysWithPlace) {
  EXPECT_THAT(Why(R"({"a":1,"b":2,"a":3})"),
              AllOf(HasSubstr("doc.json"), HasSubstr("key \"a\" is repeated"), HasSubstr("at byte 16")));
  EXPECT_THAT(Why(R"({"x":{"a":1},"y":[{"a":1,"\u0061":1}]})"), HasSubstr("repeated"));
  EXPECT_EQ(Why(R"([{"a":1},{"a":1},{"b":{"a":1},"a":2}])"), "accepted");
}

TEST(Json, RefusesWhatIsNotJson) {
  const std::string_view texts[] = {"",
                                    " ",
                                    "{",
                                    "}",
                                    "[1,]",
                                    "{\"a\":1,}",
                                    "{'a':1}",
                                    "[1] x",
                                    "[1][2]",
                                    "01",
                                    "+1",
                                    "1.",
                                    ".5",
                                    "0x1",
                                    "NaN",
                                    "Infinity",
                                    "nul",
                                    "\"",
                                    "\"\n\"",
                                    "\"\\x\"",
                                    "\"\\ud800\"",
                                    "\"\\udc00\\ud800\"",
                                    "// c\n1",
                                    "/* c */ 1",
                                    "\xEF\xBB\xBF{}",
                                    "{\"a\" 1}",
                                    "{1:2}",
                                    "[1 2]",
                                    "\"\x01\""};
  for (const std::string_view text : texts) {
    const auto result = ParseJson(text, "doc.json");
    ASSERT_FALSE(result.ok()) << text;
    EXPECT_EQ(result.status().code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(result.status().message(), AllOf(HasSubstr("doc.json"), HasSubstr("at byte "))) << text;
  }
}

TEST(Json, NamesTheByteOfASyntaxError) {
  EXPECT_THAT(Why("[1, 2, x]"), HasSubstr("at byte 7"));
  EXPECT_THAT(Why("[1, 2"), HasSubstr("at byte 5"));
}

TEST(Json, RefusesBytesBehindANul) {
  EXPECT_THAT(Why(std::string_view("{}\0garbage", 10)), HasSubstr("NUL byte at byte 2"));
}

TEST(Json, RefusesInvalidUtf8) {
  for (const char* text :
       {"\"\xff\"", "\"\xc3\"", "\"\xc0\xaf\"", "\"\xed\xa0\x80\"", "\"\xf4\x90\x80\x80\"", "{\"\x80\":1}"})
    EXPECT_THAT(Why(text), HasSubstr("UTF-8")) << text;
}

TEST(Json, RefusesNumbersBeyondADouble) {
  EXPECT_THAT(Why("[1e999]"), HasSubstr("beyond the range"));
  EXPECT_THAT(Why("[-1e999]"), HasSubstr("beyond the range"));
  const auto v = ParseJson("[18446744073709551616, 18446744073709551615]", "doc.json");
  ASSERT_TRUE(v.ok());
  EXPECT_TRUE((*v)[0].is_number_float());
  EXPECT_EQ((*v)[1].get<uint64_t>(), 18446744073709551615u);
}

TEST(Json, HoldsItsLimits) {
  const std::string at_limit = std::string(64, '[') + std::string(64, ']');
  EXPECT_EQ(Why(at_limit), "accepted");
  EXPECT_THAT(Why("[" + at_limit + "]"),
              AllOf(HasSubstr("out_of_range"), HasSubstr("deeper than 64"), HasSubstr("at byte 65")));
  EXPECT_THAT(Why(std::string(1 << 20, '[')), HasSubstr("deeper than 64"));
  EXPECT_THAT(Why(std::string(1 << 20, '{')), HasSubstr("at byte"));
  EXPECT_EQ(Why("[1, 2]", {.max_bytes = 6}), "accepted");
  EXPECT_THAT(Why("[1, 2] ", {.max_bytes = 6}), AllOf(HasSubstr("7 bytes"), HasSubstr("limit 6")));
  EXPECT_EQ(Why("[1, 2]", {.max_values = 3}), "accepted");
  EXPECT_THAT(Why("[1, 2, []]", {.max_values = 3}), HasSubstr("more than 3 values"));
}

// Messages go into JSON replies and terminals: short, printable ASCII, whatever the document holds.
TEST(Json, MessagesArePrintableAndShort) {
  ForAll(3000, [](Rng& rng) {
    std::string text = R"({"key":[1,2.5,"text \u00e9",{"a":null}],"key2":true})";
    for (int64_t edits = rng.Range(1, 4); edits > 0; --edits) {
      const auto at = static_cast<size_t>(rng.Range(0, static_cast<int64_t>(text.size()) - 1));
      if (rng.Chance(0.5)) {
        text[at] = static_cast<char>(rng.Range(0, 255));
      } else {
        text.insert(at, std::string(static_cast<size_t>(rng.Range(1, 400)), static_cast<char>(rng.Range(0, 255))));
      }
    }
    const auto result = ParseJson(text, "doc.json");
    if (result.ok()) return;
    EXPECT_LE(result.status().message().size(), 512u);
    for (const char c : result.status().message()) EXPECT_TRUE(c >= 0x20 && c < 0x7F) << static_cast<int>(c);
  });
}

TEST(Json, ExcerptIsPrintableAndBounded) {
  EXPECT_EQ(Excerpt("abc"), "\"abc\"");
  EXPECT_EQ(Excerpt("a\n\xff"), "\"a\\x0a\\xff\"");
  EXPECT_EQ(Excerpt("abcdef", 3), "\"abc...\"");
  EXPECT_EQ(ExcerptOfKey("a\n\xff"), "a\\x0a\\xff");
  EXPECT_EQ(ExcerptOfKey("abcdef", 3), "abc...");
  EXPECT_EQ(ExcerptOfValue({{"k", "\x1b\x7f\xC3\xA9"}}), "{\"k\":\"\\u001b\\u007f\\u00e9\"}");
  EXPECT_EQ(ExcerptOfValue("\xC3\xA9\xC3\xA9", 4), "\"\\u0...");
}

}  // namespace
}  // namespace livequant
