// text/normalizer.cc: Unicode forms by utf8proc's tables, in linear time: utf8proc's own reordering of marks is
// quadratic in the length of a run of them.
#include "text/normalizer.h"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <tuple>

#include "text/characters.h"
#include "text/find.h"
#include "text/utf8.h"

namespace livequant {
namespace {

constexpr size_t kMaxGrowth = 64, kFreeGrowth = 1024;

// The reference library reads normalization tables of Unicode 9, and models are trained behind it. Characters that came
// later are left where they are (their combining class counts as 0) and as they are (no compatibility form). The lists
// were found by asking that library about every character; U+11935 U+11930 alone still composes here and not there.
struct Range {
  int32_t first, last;
};
constexpr Range kLaterMarks[] = {{0x7FD, 0x7FD},     {0x898, 0x89F},     {0x8CA, 0x8D3},     {0x9FE, 0x9FE},
                                 {0xC3C, 0xC3C},     {0xD3B, 0xD3C},     {0xEBA, 0xEBA},     {0x1715, 0x1715},
                                 {0x1ABF, 0x1ACE},   {0x1DF6, 0x1DFA},   {0xA82C, 0xA82C},   {0x10D24, 0x10D27},
                                 {0x10EAB, 0x10EAC}, {0x10EFD, 0x10EFF}, {0x10F46, 0x10F50}, {0x10F82, 0x10F85},
                                 {0x11070, 0x11070}, {0x1133B, 0x1133B}, {0x1145E, 0x1145E}, {0x11839, 0x1183A},
                                 {0x1193D, 0x1193E}, {0x11943, 0x11943}, {0x119E0, 0x119E0}, {0x11A34, 0x11A34},
                                 {0x11A47, 0x11A47}, {0x11A99, 0x11A99}, {0x11D42, 0x11D42}, {0x11D44, 0x11D45},
                                 {0x11D97, 0x11D97}, {0x11F41, 0x11F42}, {0x16FF0, 0x16FF1}, {0x1E08F, 0x1E08F},
                                 {0x1E130, 0x1E136}, {0x1E2AE, 0x1E2AE}, {0x1E2EC, 0x1E2EF}, {0x1E4EC, 0x1E4EF}};
constexpr Range kLaterForms[] = {{0x32FF, 0x32FF},   {0xA7F2, 0xA7F4},   {0xAB69, 0xAB69},   {0x10781, 0x10785},
                                 {0x10787, 0x107B0}, {0x107B2, 0x107BA}, {0x11938, 0x11938}, {0x1E030, 0x1E06D},
                                 {0x1F16C, 0x1F16C}, {0x1FBF0, 0x1FBF9}};

// Characters that are marks here and not there, or the other way round.
constexpr Range kOtherMarks[] = {
    {0x7FD, 0x7FD},     {0x898, 0x89F},     {0x8CA, 0x8D3},     {0x9FE, 0x9FE},     {0xAFA, 0xAFF},
    {0xB55, 0xB55},     {0xC04, 0xC04},     {0xC3C, 0xC3C},     {0xCF3, 0xCF3},     {0xD00, 0xD00},
    {0xD3B, 0xD3C},     {0xD81, 0xD81},     {0xEBA, 0xEBA},     {0xECE, 0xECE},     {0x1715, 0x1715},
    {0x180F, 0x180F},   {0x1ABF, 0x1ACE},   {0x1CF2, 0x1CF3},   {0x1CF7, 0x1CF7},   {0x1DF6, 0x1DFA},
    {0xA82C, 0xA82C},   {0xA8FF, 0xA8FF},   {0x10D24, 0x10D27}, {0x10EAB, 0x10EAC}, {0x10EFD, 0x10EFF},
    {0x10F46, 0x10F50}, {0x10F82, 0x10F85}, {0x11070, 0x11070}, {0x11073, 0x11074}, {0x110C2, 0x110C2},
    {0x11145, 0x11146}, {0x111C9, 0x111C9}, {0x111CE, 0x111CF}, {0x11241, 0x11241}, {0x1133B, 0x1133B},
    {0x1145E, 0x1145E}, {0x1182C, 0x1183A}, {0x11930, 0x11935}, {0x11937, 0x11938}, {0x1193B, 0x1193E},
    {0x11940, 0x11940}, {0x11942, 0x11943}, {0x119D1, 0x119D7}, {0x119DA, 0x119E0}, {0x119E4, 0x119E4},
    {0x11A01, 0x11A0A}, {0x11A33, 0x11A39}, {0x11A3B, 0x11A3E}, {0x11A47, 0x11A47}, {0x11A51, 0x11A5B},
    {0x11A8A, 0x11A99}, {0x11D31, 0x11D36}, {0x11D3A, 0x11D3A}, {0x11D3C, 0x11D3D}, {0x11D3F, 0x11D45},
    {0x11D47, 0x11D47}, {0x11D8A, 0x11D8E}, {0x11D90, 0x11D91}, {0x11D93, 0x11D97}, {0x11EF3, 0x11EF6},
    {0x11F00, 0x11F01}, {0x11F03, 0x11F03}, {0x11F34, 0x11F3A}, {0x11F3E, 0x11F42}, {0x13440, 0x13440},
    {0x13447, 0x13455}, {0x16F4F, 0x16F4F}, {0x16F7F, 0x16F87}, {0x16FE4, 0x16FE4}, {0x16FF0, 0x16FF1},
    {0x1CF00, 0x1CF2D}, {0x1CF30, 0x1CF46}, {0x1E08F, 0x1E08F}, {0x1E130, 0x1E136}, {0x1E2AE, 0x1E2AE},
    {0x1E2EC, 0x1E2EF}, {0x1E4EC, 0x1E4EF}};

template <size_t kCount>
bool IsIn(const Range (&ranges)[kCount], int32_t c) {
  const Range* at = std::lower_bound(std::begin(ranges), std::end(ranges), c,
                                     [](const Range& range, int32_t x) { return range.last < x; });
  return at != std::end(ranges) && at->first <= c;
}

bool IsAccent(char32_t c) { return IsMark(c) != IsIn(kOtherMarks, static_cast<int32_t>(c)); }

// Every character below U+0300 is its own NFC, and every one below U+0080 its own NFKC, NFD and NFKD.
bool IsNormal(std::string_view text, bool compose, bool compat) {
  const unsigned char limit = compose && !compat ? 0xCC : 0x80;
  return std::all_of(text.begin(), text.end(), [&](char c) { return static_cast<unsigned char>(c) < limit; });
}

std::string UnicodeForm(std::string_view text, bool compose, bool compat) {
  if (IsNormal(text, compose, compat)) return std::string(text);
  const int options =
      UTF8PROC_STABLE | (compose ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) | (compat ? UTF8PROC_COMPAT : 0);
  std::vector<utf8proc_int32_t> points;
  points.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = NextUtf8(text.substr(at));
    if (IsIn(kLaterForms, static_cast<int32_t>(step.code_point))) {
      points.push_back(static_cast<utf8proc_int32_t>(step.code_point));
      at += static_cast<size_t>(step.bytes);
      continue;
    }
    std::array<utf8proc_int32_t, 32> parts{};
    int boundary = 0;
    const utf8proc_ssize_t n =
        utf8proc_decompose_char(static_cast<utf8proc_int32_t>(step.code_point), parts.data(), parts.size(),
                                static_cast<utf8proc_option_t>(options), &boundary);
    LQ_CHECK(n >= 0 && n <= static_cast<utf8proc_ssize_t>(parts.size()));  // 18 is the longest (U+FDFA)
    points.insert(points.end(), parts.begin(), parts.begin() + n);
    at += static_cast<size_t>(step.bytes);
  }
  const auto combining = [](utf8proc_int32_t c) -> int {
    const int combining_class = utf8proc_get_property(c)->combining_class;
    return combining_class != 0 && IsIn(kLaterMarks, c) ? 0 : combining_class;
  };
  std::vector<std::tuple<int, size_t, utf8proc_int32_t>> order;
  for (size_t at = 0; at < points.size();) {
    size_t end = at;
    while (end < points.size() && combining(points[end]) != 0) ++end;
    if (end - at > 1) {  // stable: by class, then by place
      order.clear();
      for (size_t i = at; i < end; ++i) order.emplace_back(combining(points[i]), i, points[i]);
      std::sort(order.begin(), order.end());
      for (size_t i = at; i < end; ++i) points[i] = std::get<2>(order[i - at]);
    }
    at = end + 1;
  }
  auto n = static_cast<utf8proc_ssize_t>(points.size());
  if (compose) n = utf8proc_normalize_utf32(points.data(), n, static_cast<utf8proc_option_t>(options));
  LQ_CHECK(n >= 0);
  std::string out;
  for (utf8proc_ssize_t i = 0; i < n; ++i) AppendUtf8(static_cast<char32_t>(points[static_cast<size_t>(i)]), &out);
  return out;
}

// Calls each(code point, bytes) for every character.
template <class Each>
void ForEachCharacter(std::string_view text, Each&& each) {
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = NextUtf8(text.substr(at));
    each(step.code_point, text.substr(at, static_cast<size_t>(step.bytes)));
    at += static_cast<size_t>(step.bytes);
  }
}

bool IsNmtControl(char32_t c) {
  return (c >= 0x1 && c <= 0x8) || c == 0xB || (c >= 0xE && c <= 0x1F) || c == 0x7F || c == 0x8F || c == 0x9F;
}
bool IsNmtSpace(char32_t c) {
  return c == 0x9 || c == 0xA || c == 0xC || c == 0xD || c == 0x1680 || (c >= 0x200B && c <= 0x200F) || c == 0x2028 ||
         c == 0x2029 || c == 0x2581 || c == 0xFEFF || c == 0xFFFD;
}

Result<std::string> Replace(const NormalizerStep& step, std::string_view text, size_t limit, bool* begins) {
  std::string out;
  size_t done = 0;
  const auto put = [&](size_t begin, size_t end) -> Status {
    // What is put in stems from the last character of the match.
    if (begin == 0 && (step.content.empty() || CharacterBytes(FirstCharacter(text)) < end)) *begins = false;
    out.append(text.substr(done, begin - done)).append(step.content);
    done = end;
    if (out.size() <= limit) return {};
    return Status(Code::kOutOfRange, fmt::format("normalizing {} bytes: more than {}", text.size(), limit));
  };
  if (step.regex) {
    Regex::Scanner scanner(*step.regex);
    scanner.Start(text);
    for (size_t begin = 0, end = 0;;) {
      LQ_ASSIGN_OR_RETURN(const bool found, scanner.Next(&begin, &end));
      if (!found) break;
      if (begin == end)
        return Status(Code::kUnsupported, fmt::format("a Replace pattern matches nothing at byte {}", begin));
      LQ_RETURN_IF_ERROR(put(begin, end));
    }
  } else {
    for (size_t at = 0; (at = FindText(text, step.literal, at)) != text.npos; at += step.literal.size())
      LQ_RETURN_IF_ERROR(put(at, at + step.literal.size()));
  }
  out.append(text.substr(done));
  return out;
}

Result<std::string> ApplyStep(const NormalizerStep& step, std::string text, size_t limit, bool* begins) {
  std::string out;
  switch (step.kind) {
    case NormalizerStep::kUnicode:
      return UnicodeForm(text, step.compose, step.compat);
    case NormalizerStep::kPrepend:
      return text.empty() ? text : step.content + text;
    case NormalizerStep::kReplace:
      return Replace(step, text, limit, begins);
    case NormalizerStep::kLowercase:
      ForEachCharacter(text, [&](char32_t c, std::string_view) {
        AppendUtf8(static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c == 0x130 ? 'I' : c))), &out);
        if (c == 0x130) AppendUtf8(0x307, &out);  // the one character whose small form is two
      });
      return out;
    case NormalizerStep::kStrip: {
      std::string_view rest = text;
      while (step.left && !rest.empty() && IsSpace(FirstCharacter(rest)))
        rest.remove_prefix(CharacterBytes(FirstCharacter(rest)));
      if (rest.data() != text.data()) *begins = false;
      while (step.right && !rest.empty() && IsSpace(LastCharacter(rest)))
        rest.remove_suffix(CharacterBytes(LastCharacter(rest)));
      return std::string(rest);
    }
    case NormalizerStep::kStripAccents:
      ForEachCharacter(text, [&](char32_t c, std::string_view bytes) {
        if (!IsAccent(c)) out.append(bytes);
      });
      if (!text.empty() && IsAccent(FirstCharacter(text))) *begins = false;
      return out;
    case NormalizerStep::kNmt:
      ForEachCharacter(text, [&](char32_t c, std::string_view bytes) {
        if (!IsNmtControl(c)) out.append(IsNmtSpace(c) ? " " : bytes);
      });
      if (!text.empty() && IsNmtControl(FirstCharacter(text))) *begins = false;
      return out;
    case NormalizerStep::kCharsmap:
      LQ_RETURN_IF_ERROR(step.charsmap->Apply(text, limit, &out));
      return out;
  }
  LQ_CHECK(false);
  return out;
}

}  // namespace

Result<std::string> Normalizer::Apply(std::string_view text, bool* begins) const {
  const size_t limit = kFreeGrowth + kMaxGrowth * text.size();
  std::string normal(text);
  for (const NormalizerStep& step : steps_) {
    LQ_ASSIGN_OR_RETURN(normal, ApplyStep(step, std::move(normal), limit, begins));
    if (normal.size() > limit)
      return Status(Code::kOutOfRange,
                    fmt::format("normalizing {} bytes: {} bytes, limit {}", text.size(), normal.size(), limit));
  }
  return normal;
}

}  // namespace livequant
