// text/regex.cc: PCRE2 behind text/regex.h.
#include "text/regex.h"

#include <fmt/format.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>
#include <cctype>
#include <utility>

#include "io/json.h"

namespace livequant {
namespace {

constexpr size_t kMaxPatternBytes = 64 << 10;
// Steps of backtracking. Nearly every match needs a few; one that needs more than kFirstLimit is tried again with a
// limit 16 times as high, which is charged to the scanner's budget. So a text of n bytes costs at most 1064 n + 16 M
// steps under any pattern, and a run of k spaces, at one step each, is charged less than 20 k.
constexpr uint32_t kFirstLimit = 1000, kLastLimit = 4'096'000;
constexpr int64_t kBudget = 16'000'000, kBudgetPerByte = 64;
constexpr size_t kJitStackBytes = size_t{1} << 20;

Status Differs(std::string_view pattern, size_t at, std::string_view what) {
  return Status(Code::kUnsupported, fmt::format("pattern {}: {} at byte {} reads differently in Oniguruma",
                                                Excerpt(pattern, 200), what, at));
}

// White_Space, as Oniguruma's \s reads it; PCRE2's holds U+180E too.
constexpr std::string_view kSpace = "\\x09-\\x0D\\x85\\p{Z}";

// Copies \p{Name} or \P{Name} at pattern[*i] and moves *i to its last byte. A name longer than a general category is a
// script: it means the script itself in Oniguruma, but the script's extensions in PCRE2 unless spelled sc:.
void TranslateProperty(std::string_view pattern, size_t* i, std::string* out) {
  const size_t close = pattern.find('}', *i);
  if (pattern[*i + 2] != '{' || close == pattern.npos) {  // PCRE2 names what is wrong
    out->append(pattern.substr(*i, 2));
    *i += 1;
    return;
  }
  std::string_view name = pattern.substr(*i + 3, close - *i - 3);
  out->append(pattern.substr(*i, 3));
  if (name.starts_with('^')) {
    *out += '^';
    name.remove_prefix(1);
  }
  if (name.size() > 2 && name != "Any" && name.find_first_of(":=") == name.npos) *out += "sc:";
  out->append(name).append("}");
  *i = close;
}

bool HexDigits(std::string_view text, size_t count) {
  return text.size() >= count && text.substr(0, count).find_first_not_of("0123456789abcdefABCDEF") == text.npos;
}

// Oniguruma's reading in PCRE2's spelling. What the two have in common is copied, \s \u and scripts are rewritten, and
// the rest is refused: \w \b \h \v \G \K and others mean different sets, classes inside classes and && are literals in
// PCRE2,
// (?m) is another option, (?i) inside an alternation reaches another end, {n}+ is possessive only in PCRE2.
Result<std::string> Translate(std::string_view pattern) {
  std::string out;
  bool in_class = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    const std::string_view rest = pattern.substr(i + 1);
    const char next = rest.empty() ? '\0' : rest[0];
    if (c == '\\') {
      if ((next == 'p' || next == 'P') && rest.size() > 1) {
        TranslateProperty(pattern, &i, &out);
      } else if (next == 's') {
        out.append(in_class ? "" : "[").append(kSpace).append(in_class ? "" : "]");
        ++i;
      } else if (next == 'S' && !in_class) {
        out.append("[^").append(kSpace).append("]");
        ++i;
      } else if (next == 'u' && HexDigits(rest.substr(1), 4)) {
        out.append("\\x{").append(rest.substr(1, 4)).append("}");
        i += 5;
      } else if (next == 'x' && (rest.starts_with("x{") || (HexDigits(rest.substr(1), 2) && rest[1] < '8'))) {
        out.append("\\x");
        ++i;
      } else if (std::string_view("rntfaedDAz").find(next) != std::string_view::npos ||
                 (next > ' ' && next < 0x7F && !std::isalnum(next))) {
        out.append(pattern.substr(i, 2));
        ++i;
      } else {
        return Differs(pattern, i, "this escape");
      }
      continue;
    }
    if (in_class) {
      if (c == '[') return Differs(pattern, i, "a class inside a class");
      if (c == '&' && next == '&') return Differs(pattern, i, "&& inside a class");
      in_class = c != ']';
    } else if (c == '[') {
      in_class = true;
      if (next == ']' || rest.starts_with("^]")) return Differs(pattern, i, "] as the first of a class");
    } else if (c == '(' && next == '*') {
      return Differs(pattern, i, "(*");
    } else if (c == '(' && next == '?') {
      bool common = i == 0 && rest.starts_with("?i)");
      for (const std::string_view known : {"?:", "?=", "?!", "?<=", "?<!", "?>", "?i:", "?-i:"})
        common = common || rest.starts_with(known);
      if (!common) return Differs(pattern, i, "this kind of group");
    } else if ((c == '{' && next == ',') || (c == '}' && next == '+')) {
      return Differs(pattern, i, "this repeat");
    }
    out += c;
  }
  return out;
}

std::string PcreMessage(int error) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(error, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

}  // namespace

struct Regex::Code {
  pcre2_code* code = nullptr;
  std::string excerpt;
  Code() = default;
  Code(const Code&) = delete;
  Code& operator=(const Code&) = delete;
  ~Code() { pcre2_code_free(code); }
};

Result<Regex> Regex::Compile(std::string_view pattern) {
  if (pattern.size() > kMaxPatternBytes)
    return Status(livequant::Code::kOutOfRange,
                  fmt::format("pattern of {} bytes, limit {}", pattern.size(), kMaxPatternBytes));
  LQ_ASSIGN_OR_RETURN(const std::string translated, Translate(pattern));
  const std::unique_ptr<pcre2_compile_context, void (*)(pcre2_compile_context*)> context(
      pcre2_compile_context_create(nullptr), pcre2_compile_context_free);
  LQ_CHECK(context != nullptr);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  auto code = std::make_shared<Code>();
  // Oniguruma's ^ and $ hold at every line.
  code->code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &error, &offset, context.get());
  code->excerpt = Excerpt(pattern, 200);
  if (code->code == nullptr)
    return Status(livequant::Code::kInvalidArgument,
                  fmt::format("pattern {}: {} near byte {}", code->excerpt, PcreMessage(error), offset));
  // Where there is no JIT the interpreter gives the same matches.
  (void)pcre2_jit_compile(code->code, PCRE2_JIT_COMPLETE);
  Regex regex;
  regex.code_ = std::move(code);
  return regex;
}

struct Regex::Scanner::State {
  pcre2_match_data* data;
  pcre2_match_context* context;
  pcre2_jit_stack* stack;
  std::string_view subject;
  size_t at = 0;  // where the next search begins
  int64_t budget = kBudget;
  size_t last_end = SIZE_MAX;  // end of the match before; SIZE_MAX: none
  State()
      : data(pcre2_match_data_create(1, nullptr)),
        context(pcre2_match_context_create(nullptr)),
        stack(pcre2_jit_stack_create(32 << 10, kJitStackBytes, nullptr)) {
    LQ_CHECK(data != nullptr && context != nullptr);
    pcre2_jit_stack_assign(context, nullptr, stack);  // null (no JIT, or no memory): the small default
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() {
    pcre2_match_context_free(context);
    pcre2_jit_stack_free(stack);
    pcre2_match_data_free(data);
  }
};

Regex::Scanner::Scanner(const Regex& regex) : regex_(&regex), state_(std::make_unique<State>()) {}
Regex::Scanner::~Scanner() = default;
Regex::Scanner::Scanner(Scanner&& other) noexcept = default;

void Regex::Scanner::Start(std::string_view subject) {
  state_->subject = subject;
  state_->budget += kBudgetPerByte * static_cast<int64_t>(subject.size());
  state_->at = 0;
  state_->last_end = SIZE_MAX;
}

Result<bool> Regex::Scanner::Next(size_t* begin, size_t* end) {
  State& s = *state_;
  const auto skip_character = [&] {  // UTF-8: to the next byte that is no trail byte
    ++s.at;
    while (s.at < s.subject.size() && (static_cast<unsigned char>(s.subject[s.at]) & 0xC0) == 0x80) ++s.at;
  };
  while (s.at <= s.subject.size()) {
    int found = PCRE2_ERROR_MATCHLIMIT;
    for (uint32_t limit = kFirstLimit; limit <= kLastLimit; limit *= 16) {
      if (limit > kFirstLimit && (s.budget -= limit) < 0) break;
      pcre2_set_match_limit(s.context, limit);
      found = pcre2_match(regex_->code_->code, reinterpret_cast<PCRE2_SPTR>(s.subject.data()), s.subject.size(), s.at,
                          PCRE2_NO_UTF_CHECK, s.data, s.context);
      if (found != PCRE2_ERROR_MATCHLIMIT) break;
    }
    if (found == PCRE2_ERROR_NOMATCH) break;
    if (found < 0)
      return Status(livequant::Code::kOutOfRange,
                    fmt::format("pattern {}: {} at byte {} of a text of {} (limit {} steps a match)",
                                regex_->code_->excerpt, PcreMessage(found), s.at, s.subject.size(), kLastLimit));
    const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(s.data);
    *begin = bounds[0];
    *end = bounds[1];
    LQ_CHECK(s.at <= *begin && *begin <= *end && *end <= s.subject.size());
    s.at = *end;
    if (*begin == *end) {
      const bool repeats = s.last_end == *end;
      skip_character();
      if (repeats) continue;
    }
    s.last_end = *end;
    return true;
  }
  s.at = s.subject.size() + 1;
  return false;
}

}  // namespace livequant
