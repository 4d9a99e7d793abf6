// text/template_lexer.h: a template's source to tokens, white space already handled. Private to text/.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace livequant {

struct TemplateToken {
  enum Kind { kText, kOutputBegin, kOutputEnd, kBlockBegin, kBlockEnd, kName, kString, kInt, kFloat, kOperator, kEnd };
  Kind kind;
  int line;
  std::string text;  // of kString: unescaped
};

// kInvalidArgument: a tag, string or comment that does not end, a character that no token begins with (line).
Result<std::vector<TemplateToken>> LexTemplate(std::string_view source);

// White space as Python's str.isspace has it.
bool IsPythonSpace(char32_t c);
// `text` without white space at either end, as str.strip.
std::string_view StripPython(std::string_view text, bool left, bool right);

}  // namespace livequant
