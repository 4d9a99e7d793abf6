// tests/text/regex_test.cc: matches, and what happens with patterns that mean something else in Oniguruma or never end.
#include "text/regex.h"

#include <gmock/gmock.h>

#include <string>
#include <vector>

namespace livequant {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> Matches(std::string_view pattern, std::string_view text) {
  const Result<Regex> regex = Regex::Compile(pattern);
  if (!regex.ok()) return {regex.status().ToString()};
  Regex::Scanner scanner(*regex);
  scanner.Start(text);
  std::vector<std::string> found;
  for (size_t begin = 0, end = 0;;) {
    const Result<bool> more = scanner.Next(&begin, &end);
    if (!more.ok()) return {more.status().ToString()};
    if (!*more) return found;
    found.emplace_back(text.substr(begin, end - begin));
  }
}

std::string Why(std::string_view pattern) {
  const Result<Regex> regex = Regex::Compile(pattern);
  return regex.ok() ? "accepted" : regex.status().ToString();
}

TEST(Regex, FindsMatchesInOrder) {
  EXPECT_THAT(Matches("\\p{L}+", "ab 1 \xC3\xA9\xE4\xB8\xAD x"), ElementsAre("ab", "\xC3\xA9\xE4\xB8\xAD", "x"));
  EXPECT_THAT(Matches("a|b", "cab"), ElementsAre("a", "b"));
  EXPECT_THAT(Matches("z", ""), ElementsAre());
  EXPECT_THAT(Matches("^.$", "a\nb"), ElementsAre("a", "b"));  // Oniguruma's ^ and $ are those of lines
  EXPECT_THAT(Matches("(?i:'S|'T)", "'s'T"), ElementsAre("'s", "'T"));
  EXPECT_THAT(Matches("\\s+(?!\\S)|\\s+", "a   b"), ElementsAre("  ", " "));
}

TEST(Regex, EmptyMatchesAdvanceByCharacters) {
  EXPECT_THAT(Matches("x*", "\xC3\xA9xx\xE4\xB8\xAD"), ElementsAre("", "xx", ""));
  EXPECT_THAT(Matches("(?=\\p{L})", "a\xC3\xA9"), ElementsAre("", ""));
  EXPECT_THAT(Matches("$", ""), ElementsAre(""));
}

TEST(Regex, SpaceIsWhiteSpace) {
  for (const char* space : {"\t", "\n", "\v", "\f", "\r", " ", "\xC2\x85", "\xC2\xA0", "\xE1\x9A\x80", "\xE2\x80\x80",
                            "\xE2\x80\xA8", "\xE3\x80\x80"}) {
    EXPECT_EQ(Matches("\\s", space).size(), 1u) << space;
    EXPECT_EQ(Matches("\\S", space).size(), 0u) << space;
    EXPECT_EQ(Matches("[^\\s]", space).size(), 0u) << space;
  }
  for (const char* other :
       {"\x1C", "\xE1\xA0\x8E", "\xE2\x80\x8B", "\xEF\xBB\xBF", "a"}) {  // U+180E, U+200B, U+FEFF are no spaces
    EXPECT_EQ(Matches("\\s", other).size(), 0u) << other;
    EXPECT_EQ(Matches("\\S", other).size(), 1u) << other;
    EXPECT_EQ(Matches("[\\s]", other).size(), 0u) << other;
  }
}

TEST(Regex, AScriptIsTheScriptItself) {
  EXPECT_THAT(Matches("\\p{Han}", "\xE4\xB8\xAD"), ElementsAre("\xE4\xB8\xAD"));
  EXPECT_THAT(Matches("\\p{Han}", "\xE3\x80\x81"), ElementsAre());  // U+3001 only has Han among its extensions
  EXPECT_THAT(Matches("\\P{Han}", "\xE3\x80\x81"), ElementsAre("\xE3\x80\x81"));
  EXPECT_THAT(Matches("[\\u4e00-\\u9fa5]", "\xE4\xB8\xAD"), ElementsAre("\xE4\xB8\xAD"));
}

TEST(Regex, RefusesWhatReadsDifferently) {
  for (const char* pattern : {"\\w",    "\\b",     "\\h",    "\\v",    "\\G",  "\\K",   "\\R",     "\\X",    "\\1",
                              "\\k<a>", "[\\S]",   "[a[b]]", "[a&&b]", "[]a]", "[^]a]", "(*UCP)a", "(?m:a)", "(?x)a",
                              "a(?i)b", "(?<n>a)", "(?R)",   "(?1)",   "(?C)", "a{,3}", "a{2}+",   "\\x80"})
    EXPECT_THAT(Why(pattern), HasSubstr("Oniguruma")) << pattern;
}

TEST(Regex, RefusesWhatIsNoPattern) {
  for (const char* pattern : {"(", "a)", "[a", "*", "\\p{Nonsense}", "\\p{L", "a{99999}", "(?<=a*)b", "[b-a]"})
    EXPECT_THAT(Why(pattern), ::testing::StartsWith("invalid_argument: pattern")) << pattern;
  EXPECT_THAT(Why("\\"), HasSubstr("at byte 0"));
  EXPECT_THAT(Why("\\p"), HasSubstr("at byte 0"));
  EXPECT_THAT(Why("\xFF"), HasSubstr("invalid_argument"));
  EXPECT_THAT(Why(std::string((64 << 10) + 1, 'a')), HasSubstr("limit 65536"));
  EXPECT_THAT(Why(std::string(5000, '(')), HasSubstr("invalid_argument"));
}

TEST(Regex, BacktrackingEndsWithAnError) {
  const std::string text(200, 'a');
  const auto found = Matches("(?:a|aa)+\\p{N}", text);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_THAT(found[0], HasSubstr("out_of_range"));
  EXPECT_THAT(found[0], HasSubstr("limit"));
}

// A long run of spaces is no attack, and many of them are none either; a pattern that is slow at every place is one.
TEST(Regex, TheBudgetTellsLongRunsFromSlowPatterns) {
  std::string runs;
  for (int i = 0; i < 50; ++i) runs += std::string(20000, ' ') + "x";
  EXPECT_EQ(Matches("\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+", runs).size(), 100u);
  const auto found = Matches("(?:a|aa){1,24}\\p{N}|a", std::string(1 << 20, 'a'));
  ASSERT_EQ(found.size(), 1u);
  EXPECT_THAT(found[0], HasSubstr("out_of_range"));
}

}  // namespace
}  // namespace livequant
