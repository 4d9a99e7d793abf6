// text/template_lexer.cc: tags, and what `-`, `+`, trim_blocks and lstrip_blocks do to the text between them.
#include "text/template_lexer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <utility>

#include "io/json.h"
#include "text/characters.h"
#include "text/template_ast.h"
#include "text/utf8.h"

namespace livequant {
namespace {

bool IsNameStart(char c) { return std::isalpha(static_cast<unsigned char>(c)) || c == '_'; }
bool IsNamePart(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }
bool IsDigit(char c) { return c >= '0' && c <= '9'; }

class Lexer {
 public:
  explicit Lexer(std::string source) : source_(std::move(source)) {}

  Result<std::vector<TemplateToken>> Run() {
    while (at_ < source_.size()) {
      const size_t open = NextTag();
      LQ_RETURN_IF_ERROR(Text(open));
      if (at_ < source_.size()) LQ_RETURN_IF_ERROR(Tag());
    }
    Add(TemplateToken::kEnd, "");
    return std::move(tokens_);
  }

 private:
  std::string_view Rest() const { return std::string_view(source_).substr(at_); }
  void Add(TemplateToken::Kind kind, std::string text) { tokens_.push_back({kind, line_, std::move(text)}); }
  void Advance(size_t n) {
    line_ += static_cast<int>(
        std::count(source_.begin() + static_cast<int64_t>(at_), source_.begin() + static_cast<int64_t>(at_ + n), '\n'));
    at_ += n;
  }
  Status Error(std::string_view what) const { return TemplateError(Code::kInvalidArgument, line_, what); }

  size_t NextTag() const {
    size_t open = at_;
    while ((open = source_.find('{', open)) != std::string::npos) {
      if (open + 1 < source_.size() && std::string_view("{%#").find(source_[open + 1]) != std::string_view::npos)
        return open;
      ++open;
    }
    return source_.size();
  }

  // The text up to the tag at `open`, cut as that tag says.
  Status Text(size_t open) {
    std::string_view text = std::string_view(source_).substr(at_, open - at_);
    const size_t whole = text.size();
    const char kind = open < source_.size() ? source_[open + 1] : '\0';
    const char sign = open + 2 < source_.size() ? source_[open + 2] : '\0';
    if (kind != '\0' && sign == '-') {
      text = StripPython(text, false, true);
    } else if (kind != '\0' && kind != '{' && sign != '+') {
      const size_t line_begin = text.rfind('\n') + 1;  // npos + 1 is 0
      if ((line_begin > 0 || line_start_) && StripPython(text.substr(line_begin), true, true).empty())
        text = text.substr(0, line_begin);
    }
    if (!text.empty()) Add(TemplateToken::kText, std::string(text));
    if (whole > 0) line_start_ = source_[at_ + whole - 1] == '\n';
    Advance(whole);
    return {};
  }

  // Moves behind the end of a tag; `-` takes all white space with it, a block or comment its first newline.
  void EndTag(size_t mark, char sign, bool trim) {
    Advance(mark);
    line_start_ = false;
    if (sign == '-') {
      const std::string_view rest = Rest();
      const size_t space = rest.size() - StripPython(rest, true, false).size();
      if (space > 0) line_start_ = rest[space - 1] == '\n';
      Advance(space);
    } else if (trim && sign != '+' && Rest().starts_with('\n')) {
      line_start_ = true;
      Advance(1);
    }
  }

  Status Tag() {
    const char kind = source_[at_ + 1];
    const bool sign = at_ + 2 < source_.size() && (source_[at_ + 2] == '-' || source_[at_ + 2] == '+');
    if (kind == '#') {
      const size_t close = source_.find("#}", at_ + 2);
      if (close == std::string::npos) return Error("a comment without an end");
      EndTag(close - at_ + 2, source_[close - 1], true);
      return {};
    }
    const bool block = kind == '%';
    if (block && Raw(sign)) return RawText();
    Add(block ? TemplateToken::kBlockBegin : TemplateToken::kOutputBegin, "");
    Advance(sign ? 3 : 2);
    const std::string_view close = block ? "%}" : "}}";
    int braces = 0;  // a dict's } is no end
    for (;;) {
      const std::string_view rest = Rest();
      const size_t space = rest.size() - StripPython(rest, true, false).size();
      Advance(space);
      if (at_ >= source_.size()) return Error("a tag without an end");
      const char c = source_[at_];
      const bool signed_end = (c == '-' || c == '+') && Rest().substr(1).starts_with(close);
      if (signed_end || (braces == 0 && Rest().starts_with(close))) {
        Add(block ? TemplateToken::kBlockEnd : TemplateToken::kOutputEnd, "");
        EndTag(signed_end ? 3 : 2, signed_end ? c : '\0', block);
        return {};
      }
      if (c == '{') ++braces;
      if (c == '}' && braces > 0) --braces;
      LQ_RETURN_IF_ERROR(Token());
    }
  }

  // Whether the block at at_ is {% raw %}; then moves behind it.
  bool Raw(bool sign) {
    std::string_view rest = StripPython(Rest().substr(sign ? 3 : 2), true, false);
    if (!rest.starts_with("raw")) return false;
    rest = StripPython(rest.substr(3), true, false);
    const bool signed_end = rest.starts_with("-%}") || rest.starts_with("+%}");
    if (!signed_end && !rest.starts_with("%}")) return false;
    EndTag(static_cast<size_t>(rest.data() - (source_.data() + at_)) + (signed_end ? 3 : 2),
           signed_end ? rest[0] : '\0', true);
    return true;
  }

  Status RawText() {
    for (size_t open = at_; (open = source_.find("{%", open)) != std::string::npos; open += 2) {
      std::string_view rest = std::string_view(source_).substr(open + 2);
      if (rest.starts_with('-') || rest.starts_with('+')) rest.remove_prefix(1);
      rest = StripPython(rest, true, false);
      if (!rest.starts_with("endraw")) continue;
      rest = StripPython(rest.substr(6), true, false);
      const bool signed_end = rest.starts_with("-%}") || rest.starts_with("+%}");
      if (!signed_end && !rest.starts_with("%}")) continue;
      LQ_RETURN_IF_ERROR(Text(open));
      EndTag(static_cast<size_t>(rest.data() - (source_.data() + at_)) + (signed_end ? 3 : 2),
             signed_end ? rest[0] : '\0', true);
      return {};
    }
    return Error("raw without endraw");
  }

  Status Token() {
    const std::string_view rest = Rest();
    const char c = rest[0];
    size_t n = 1;
    if (IsNameStart(c)) {
      while (n < rest.size() && IsNamePart(rest[n])) ++n;
      Add(TemplateToken::kName, std::string(rest.substr(0, n)));
    } else if (IsDigit(c)) {
      bool real = false;
      while (n < rest.size() && (IsDigit(rest[n]) || rest[n] == '_')) ++n;
      if (n + 1 < rest.size() && rest[n] == '.' && IsDigit(rest[n + 1])) {
        real = true;
        for (++n; n < rest.size() && IsDigit(rest[n]);) ++n;
      }
      if (n < rest.size() && (rest[n] == 'e' || rest[n] == 'E')) {
        size_t m = n + 1;
        if (m < rest.size() && (rest[m] == '+' || rest[m] == '-')) ++m;
        if (m < rest.size() && IsDigit(rest[m])) {
          real = true;
          for (n = m; n < rest.size() && IsDigit(rest[n]);) ++n;
        }
      }
      std::string digits(rest.substr(0, n));
      std::erase(digits, '_');
      Add(real ? TemplateToken::kFloat : TemplateToken::kInt, std::move(digits));
    } else if (c == '\'' || c == '"') {
      return String(c);
    } else {
      for (const std::string_view two : {"==", "!=", "<=", ">=", "//", "**"})
        if (rest.starts_with(two)) n = 2;
      if (n == 1 && std::string_view("+-*/%~<>=()[]{},.:|").find(c) == std::string_view::npos)
        return Error(fmt::format("{} begins no token", Excerpt(rest.substr(0, 1))));
      Add(TemplateToken::kOperator, std::string(rest.substr(0, n)));
    }
    Advance(n);
    return {};
  }

  Status String(char quote) {
    const std::string_view rest = Rest();
    std::string text;
    size_t i = 1;
    for (; i < rest.size() && rest[i] != quote; ++i) {
      if (rest[i] != '\\' || i + 1 == rest.size()) {
        text += rest[i];
        continue;
      }
      const char e = rest[++i];
      constexpr std::string_view kFrom = "ntrabfv\\'\"", kTo = "\n\t\r\a\b\f\v\\'\"";
      if (const size_t known = kFrom.find(e); known != kFrom.npos) {
        text += kTo[known];
      } else if (e == '\n') {
      } else if (e == 'x' || e == 'u' || e == 'U') {
        const size_t digits = e == 'x' ? 2 : e == 'u' ? 4 : 8;
        const std::string_view hex = rest.substr(std::min(i + 1, rest.size()), digits);
        if (hex.size() < digits ||
            !std::all_of(hex.begin(), hex.end(), [](unsigned char d) { return std::isxdigit(d); }))
          return Error("an escape without its digits");
        const auto point = static_cast<char32_t>(std::stoul(std::string(hex), nullptr, 16));
        if (point > 0x10FFFF || (point >= 0xD800 && point < 0xE000)) return Error("an escape that is no character");
        AppendUtf8(point, &text);
        i += digits;
      } else if (e >= '0' && e <= '7') {
        uint32_t value = 0;
        size_t n = 0;
        for (; n < 3 && i + n < rest.size() && rest[i + n] >= '0' && rest[i + n] <= '7'; ++n)
          value = value * 8 + static_cast<uint32_t>(rest[i + n] - '0');
        AppendUtf8(static_cast<char32_t>(value), &text);
        i += n - 1;
      } else {
        text += '\\';
        text += e;
      }
    }
    if (i >= rest.size()) return Error("a string without an end");
    Add(TemplateToken::kString, std::move(text));
    Advance(i + 1);
    return {};
  }

  std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_start_ = true;
  std::vector<TemplateToken> tokens_;
};

}  // namespace

bool IsPythonSpace(char32_t c) { return IsSpace(c) || (c >= 0x1C && c <= 0x1F); }

std::string_view StripPython(std::string_view text, bool left, bool right) {
  while (left && !text.empty() && IsPythonSpace(FirstCharacter(text)))
    text.remove_prefix(CharacterBytes(FirstCharacter(text)));
  while (right && !text.empty() && IsPythonSpace(LastCharacter(text)))
    text.remove_suffix(CharacterBytes(LastCharacter(text)));
  return text;
}

Result<std::vector<TemplateToken>> LexTemplate(std::string_view source) {
  std::string normal;
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      normal += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    } else {
      normal += source[i];
    }
  }
  if (normal.ends_with('\n')) normal.pop_back();
  return Lexer(std::move(normal)).Run();
}

}  // namespace livequant
