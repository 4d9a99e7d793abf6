// text/template_ast.h: the tree of a chat template. Private to text/.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "text/chat_template.h"

namespace livequant {

struct TemplateExpr {
  enum Kind {
    kName,       // text
    kString,     // text
    kInt,        // integer
    kFloat,      // real
    kBool,       // integer: 0 or 1
    kNone,       //
    kList,       // kids
    kTuple,      // kids
    kDict,       // kids: key, value, key, value...
    kAttribute,  // kids[0] . text
    kItem,       // kids[0] [ kids[1] ]
    kSlice,      // kids[0] [ kids[1] : kids[2] : kids[3] ], null where left out
    kCall,       // kids[0] ( rest; keywords beside the last of them )
    kFilter,     // kids[0] | text ( rest )
    kTest,       // kids[0] is text ( rest )
    kUnary,      // text: not + -
    kBinary,     // text: + - * / // % ** ~ and or
    kCompare,    // kids, operators between them
    kIfElse,     // kids: value, condition, other (null: undefined)
  };
  Kind kind;
  int line;
  std::string text;
  int height = 1;  // of the tree below
  int64_t integer = 0;
  double real = 0;
  std::vector<std::unique_ptr<TemplateExpr>> kids;
  std::vector<std::string> names;  // of keyword arguments: they belong to the last kids; operators of kCompare
};
using TemplateExprPtr = std::unique_ptr<TemplateExpr>;

struct TemplateNode;
using TemplateBody = std::vector<TemplateNode>;
struct TemplateNode {
  enum Kind {
    kText,    // text
    kOutput,  // expr
    kIf,      // branches; a branch without a condition is else
    kFor,     // target in expr (if condition): body, else_body
    kSet,     // target = expr, or = body without expr; filters of a block are in expr over a name ""
    kMacro,   // text (parameters = defaults): body
    kCall,    // expr is a call; body is what caller() gives
    kFilter,  // expr is a chain of filters over the name "", which stands for the body
    kWith,    // names and values: body
    kScope,   // body (generation)
    kBreak,
    kContinue,
  };
  Kind kind;
  int line;
  std::string text;
  TemplateExprPtr target, expr, condition;
  std::vector<std::pair<TemplateExprPtr, TemplateBody>> branches;
  TemplateBody body, else_body;
  std::vector<std::string> names;       // parameters
  std::vector<TemplateExprPtr> values;  // defaults (null: none), one a name
};

struct ChatTemplate::Program {
  std::string source;
  TemplateBody body;
  nlohmann::ordered_json globals = nlohmann::ordered_json::object();
};

// The tree of a source. Errors as ChatTemplate::Parse.
Status ParseTemplate(std::string_view source, TemplateBody* body);
// Runs a tree. Errors as ChatTemplate::Render.
Result<std::string> RenderTemplate(const ChatTemplate::Program& program, const nlohmann::ordered_json& variables,
                                   std::optional<int64_t> now, const ChatTemplateLimits& limits);

// "chat template: line 3: what".
Status TemplateError(Code code, int line, std::string_view what);

}  // namespace livequant
