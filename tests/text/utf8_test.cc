// tests/text/utf8_test.cc: every string of up to two bytes, and the cases of the Unicode Standard's chapter 3.
#include "text/utf8.h"

#include "support/property.h"

namespace livequant {
namespace {

std::string Lossy(std::string bytes) {
  std::string out;
  DrainUtf8(&bytes, &out);
  return bytes.empty() ? out : out + "\xEF\xBF\xBD";
}

std::string Encoded(char32_t c) {
  std::string s;
  if (c < 0x80) {
    s += static_cast<char>(c);
  } else if (c < 0x800) {
    s += static_cast<char>(0xC0 | c >> 6);
    s += static_cast<char>(0x80 | (c & 63));
  } else if (c < 0x10000) {
    s += static_cast<char>(0xE0 | c >> 12);
    s += static_cast<char>(0x80 | ((c >> 6) & 63));
    s += static_cast<char>(0x80 | (c & 63));
  } else {
    s += static_cast<char>(0xF0 | c >> 18);
    s += static_cast<char>(0x80 | ((c >> 12) & 63));
    s += static_cast<char>(0x80 | ((c >> 6) & 63));
    s += static_cast<char>(0x80 | (c & 63));
  }
  return s;
}

TEST(Utf8, EveryCodePointAndNothingElse) {
  for (char32_t c = 0; c < 0x110000; ++c) {
    const std::string bytes = Encoded(c);
    const Utf8Step step = NextUtf8(bytes + "x");
    if (c >= 0xD800 && c <= 0xDFFF) {
      ASSERT_EQ(step.kind, Utf8Step::kImpossible) << static_cast<uint32_t>(c);
      ASSERT_EQ(step.bytes, 1);
      continue;
    }
    ASSERT_EQ(step.kind, Utf8Step::kCharacter) << static_cast<uint32_t>(c);
    ASSERT_EQ(step.bytes, static_cast<int>(bytes.size()));
    ASSERT_EQ(step.code_point, c);
    for (size_t n = 1; n < bytes.size(); ++n) {
      const Utf8Step cut = NextUtf8(std::string_view(bytes).substr(0, n));
      ASSERT_EQ(cut.kind, Utf8Step::kIncomplete);
      ASSERT_EQ(cut.bytes, static_cast<int>(n));
    }
  }
  EXPECT_EQ(NextUtf8("\xF4\x90\x80\x80").kind, Utf8Step::kImpossible);
  EXPECT_EQ(NextUtf8("\xC0\x80").kind, Utf8Step::kImpossible);
  EXPECT_EQ(NextUtf8("\xE0\x9F\xBF").kind, Utf8Step::kImpossible);
  EXPECT_EQ(NextUtf8("\xF0\x8F\xBF\xBF").kind, Utf8Step::kImpossible);
}

// The Unicode Standard 15, tables 3-8 to 3-11; Python's bytes.decode("utf-8", "replace") gives the same.
TEST(Utf8, OneReplacementForEachMaximalSubpart) {
  const std::string r = "\xEF\xBF\xBD";
  EXPECT_EQ(Lossy("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41"), r + r + r + r + r + r + r + r + "A");
  EXPECT_EQ(Lossy("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41"), r + r + r + r + r + r + r + r + "A");
  EXPECT_EQ(Lossy("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42"), r + r + r + r + r + "A" + r + r + "B");
  EXPECT_EQ(Lossy("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41"), r + r + r + r + "A");
  EXPECT_EQ(Lossy("\xF0\x9F\x98"), r);
}

TEST(Utf8, NamesTheFirstInvalidByte) {
  EXPECT_EQ(InvalidUtf8At(""), std::string::npos);
  EXPECT_EQ(InvalidUtf8At("h\xC3\xA9llo \xF0\x9F\x98\x80"), std::string::npos);
  EXPECT_EQ(InvalidUtf8At("ab\xFF"), 2u);
  EXPECT_EQ(InvalidUtf8At("ab\xC3"), 2u);
  EXPECT_EQ(InvalidUtf8At(std::string_view("a\0\x80", 3)), 2u);
}

// Draining piece by piece, whatever the pieces, is draining at once; what stays held is at most three bytes.
TEST(Utf8, PiecesDoNotMatter) {
  ForAll(3000, [](Rng& rng) {
    std::string bytes, held, out;
    for (int64_t n = rng.Range(0, 40); n > 0; --n) {
      if (rng.Chance(0.5)) {
        const std::string c =
            Encoded(static_cast<char32_t>(rng.Pick<int64_t>({0x41, 0xE9, 0x4E2D, 0x1F600, 0xD800, 0xFFFF})));
        bytes +=
            c.substr(0, rng.Chance(0.8) ? c.size() : static_cast<size_t>(rng.Range(1, static_cast<int64_t>(c.size()))));
      } else {
        bytes += static_cast<char>(rng.Pick<int>({0x00, 0x7F, 0x80, 0xBF, 0xC2, 0xE0, 0xED, 0xF0, 0xF4, 0xFF}));
      }
    }
    for (size_t at = 0; at < bytes.size();) {
      const auto n = static_cast<size_t>(rng.Range(1, 5));
      held += bytes.substr(at, n);
      at += n;
      DrainUtf8(&held, &out);
      ASSERT_LE(held.size(), 3u);
      ASSERT_EQ(InvalidUtf8At(out), std::string::npos);
    }
    if (!held.empty()) out += "\xEF\xBF\xBD";
    EXPECT_EQ(out, Lossy(bytes));
  });
}

}  // namespace
}  // namespace livequant
