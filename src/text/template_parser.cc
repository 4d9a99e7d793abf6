// text/template_parser.cc: tokens to a tree, by recursive descent with Jinja's order of operators.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <initializer_list>
#include <utility>

#include "io/json.h"
#include "text/template_ast.h"
#include "text/template_lexer.h"

namespace livequant {
namespace {

using Expr = TemplateExpr;
using ExprPtr = TemplateExprPtr;
using Node = TemplateNode;
using T = TemplateToken;

class Parser {
 public:
  explicit Parser(std::vector<TemplateToken> tokens) : tokens_(std::move(tokens)) {}

  Status Run(TemplateBody* body) {
    std::string end;
    LQ_RETURN_IF_ERROR(Body({}, body, &end));
    return {};
  }

 private:
  // Counts nesting, of statements and expressions together.
  struct Nest {
    explicit Nest(int* depth) : depth(depth) { ++*depth; }
    ~Nest() { --*depth; }
    Nest(const Nest&) = delete;
    Nest& operator=(const Nest&) = delete;
    int* depth;
  };
  Status Deep() const {
    if (depth_ <= ChatTemplateLimits::kMaxDepth) return {};
    return TemplateError(Code::kOutOfRange, Line(),
                         fmt::format("nesting deeper than {}", ChatTemplateLimits::kMaxDepth));
  }

  const TemplateToken& Peek(size_t ahead = 0) const { return tokens_[std::min(at_ + ahead, tokens_.size() - 1)]; }
  int Line() const { return Peek().line; }
  TemplateToken Take() {
    TemplateToken token = Peek();
    if (at_ + 1 < tokens_.size()) ++at_;
    return token;
  }
  bool Is(T::Kind kind, std::string_view text) const { return Peek().kind == kind && Peek().text == text; }
  bool Operator(std::string_view text) {
    if (!Is(T::kOperator, text)) return false;
    Take();
    return true;
  }
  bool Name(std::string_view text) {
    if (!Is(T::kName, text)) return false;
    Take();
    return true;
  }
  Status Expected(std::string_view what) const {
    const TemplateToken& token = Peek();
    const std::string seen = token.kind == T::kEnd         ? "the end"
                             : token.kind == T::kBlockEnd  ? "%}"
                             : token.kind == T::kOutputEnd ? "}}"
                                                           : (token.text.empty() ? "a tag" : Excerpt(token.text, 40));
    return TemplateError(Code::kInvalidArgument, token.line, fmt::format("{} where {} belongs", seen, what));
  }
  Status Need(std::string_view op) { return Operator(op) ? Status() : Expected(op); }
  Status NeedName(std::string_view name) { return Name(name) ? Status() : Expected(name); }
  Status BlockEnd() {
    if (Peek().kind != T::kBlockEnd) return Expected("%}");
    Take();
    return {};
  }
  Result<std::string> Identifier() {
    if (Peek().kind != T::kName) return Expected("a name");
    return Take().text;
  }
  static ExprPtr Make(Expr::Kind kind, int line, std::string text = {}) {
    auto e = std::make_unique<Expr>();
    e->kind = kind;
    e->line = line;
    e->text = std::move(text);
    return e;
  }

  // Call when a node has its kids. A tree is never too high to walk or to free by recursion.
  static Status Grown(Expr* e) {
    for (const ExprPtr& kid : e->kids)
      if (kid != nullptr) e->height = std::max(e->height, kid->height + 1);
    if (e->height <= kMaxHeight) return {};
    return TemplateError(Code::kOutOfRange, e->line, fmt::format("an expression deeper than {}", kMaxHeight));
  }

  // Statements up to a tag whose name is in `ends`, which is taken (its %} is not); at the top level up to the end.
  Status Body(std::initializer_list<std::string_view> ends, TemplateBody* body, std::string* end) {
    const Nest nest(&depth_);
    LQ_RETURN_IF_ERROR(Deep());
    for (;;) {
      const TemplateToken token = Take();
      if (token.kind == T::kEnd) {
        if (ends.size() == 0) return {};
        return TemplateError(Code::kInvalidArgument, token.line,
                             fmt::format("the end where {} belongs", *ends.begin()));
      }
      if (token.kind == T::kText) {
        Node node{Node::kText, token.line, token.text, {}, {}, {}, {}, {}, {}, {}, {}};
        body->push_back(std::move(node));
      } else if (token.kind == T::kOutputBegin) {
        Node node{Node::kOutput, token.line, {}, {}, {}, {}, {}, {}, {}, {}, {}};
        LQ_ASSIGN_OR_RETURN(node.expr, Tuple(true));
        if (Peek().kind != T::kOutputEnd) return Expected("}}");
        Take();
        body->push_back(std::move(node));
      } else {
        for (const std::string_view name : ends) {
          if (Name(name)) {
            *end = name;
            return {};
          }
        }
        LQ_RETURN_IF_ERROR(Statement(body));
      }
    }
  }

  Status Statement(TemplateBody* body) {
    const int line = Line();
    LQ_ASSIGN_OR_RETURN(const std::string name, Identifier());
    Node node{Node::kIf, line, {}, {}, {}, {}, {}, {}, {}, {}, {}};
    std::string end;
    if (name == "if") {
      for (std::string which = "if";;) {
        ExprPtr condition;
        if (which != "else") {
          LQ_ASSIGN_OR_RETURN(condition, Tuple(true));
        }
        LQ_RETURN_IF_ERROR(BlockEnd());
        TemplateBody branch;
        if (which == "else") {
          LQ_RETURN_IF_ERROR(Body({"endif"}, &branch, &end));
        } else {
          LQ_RETURN_IF_ERROR(Body({"endif", "elif", "else"}, &branch, &end));
        }
        node.branches.emplace_back(std::move(condition), std::move(branch));
        if (end == "endif") break;
        which = end;
      }
    } else if (name == "for") {
      node.kind = Node::kFor;
      LQ_ASSIGN_OR_RETURN(node.target, Target(false));
      LQ_RETURN_IF_ERROR(NeedName("in"));
      LQ_ASSIGN_OR_RETURN(node.expr, Tuple(false));
      if (Name("if")) {
        LQ_ASSIGN_OR_RETURN(node.condition, Condition());
      }
      if (Is(T::kName, "recursive")) return Unsupported("recursive loops are not known here");
      LQ_RETURN_IF_ERROR(BlockEnd());
      ++loops_;
      LQ_RETURN_IF_ERROR(Body({"endfor", "else"}, &node.body, &end));
      --loops_;
      if (end == "else") {
        LQ_RETURN_IF_ERROR(BlockEnd());
        LQ_RETURN_IF_ERROR(Body({"endfor"}, &node.else_body, &end));
      }
    } else if (name == "set") {
      node.kind = Node::kSet;
      LQ_ASSIGN_OR_RETURN(node.target, Target(true));
      if (Operator("=")) {
        LQ_ASSIGN_OR_RETURN(node.expr, Tuple(true));
      } else {
        if (Is(T::kOperator, "|")) {
          LQ_ASSIGN_OR_RETURN(node.expr, Filters(Make(Expr::kName, line)));
        }
        LQ_RETURN_IF_ERROR(BlockEnd());
        LQ_RETURN_IF_ERROR(Body({"endset"}, &node.body, &end));
      }
    } else if (name == "macro") {
      node.kind = Node::kMacro;
      LQ_ASSIGN_OR_RETURN(node.text, Identifier());
      LQ_RETURN_IF_ERROR(Signature(&node));
      LQ_RETURN_IF_ERROR(BlockEnd());
      const int loops = std::exchange(loops_, 0);
      LQ_RETURN_IF_ERROR(Body({"endmacro"}, &node.body, &end));
      loops_ = loops;
    } else if (name == "call") {
      node.kind = Node::kCall;
      if (Is(T::kOperator, "(")) LQ_RETURN_IF_ERROR(Signature(&node));
      LQ_ASSIGN_OR_RETURN(node.expr, Condition());
      if (node.expr->kind != Expr::kCall) return Expected("a call");
      LQ_RETURN_IF_ERROR(BlockEnd());
      LQ_RETURN_IF_ERROR(Body({"endcall"}, &node.body, &end));
    } else if (name == "filter") {
      node.kind = Node::kFilter;
      LQ_ASSIGN_OR_RETURN(node.expr, OneFilter(Make(Expr::kName, line)));
      LQ_ASSIGN_OR_RETURN(node.expr, Filters(std::move(node.expr)));
      LQ_RETURN_IF_ERROR(BlockEnd());
      LQ_RETURN_IF_ERROR(Body({"endfilter"}, &node.body, &end));
    } else if (name == "with") {
      node.kind = Node::kWith;
      while (Peek().kind != T::kBlockEnd) {
        if (!node.names.empty()) LQ_RETURN_IF_ERROR(Need(","));
        LQ_ASSIGN_OR_RETURN(std::string variable, Identifier());
        LQ_RETURN_IF_ERROR(Need("="));
        LQ_ASSIGN_OR_RETURN(ExprPtr value, Condition());
        node.names.push_back(std::move(variable));
        node.values.push_back(std::move(value));
      }
      LQ_RETURN_IF_ERROR(BlockEnd());
      LQ_RETURN_IF_ERROR(Body({"endwith"}, &node.body, &end));
    } else if (name == "generation") {
      node.kind = Node::kScope;
      LQ_RETURN_IF_ERROR(BlockEnd());
      LQ_RETURN_IF_ERROR(Body({"endgeneration"}, &node.body, &end));
    } else if (name == "break" || name == "continue") {
      if (loops_ == 0) return TemplateError(Code::kInvalidArgument, line, name + " outside of a loop");
      node.kind = name == "break" ? Node::kBreak : Node::kContinue;
    } else {
      return TemplateError(Code::kUnsupported, line, fmt::format("statement {} is not known here", Excerpt(name, 40)));
    }
    LQ_RETURN_IF_ERROR(BlockEnd());
    body->push_back(std::move(node));
    return {};
  }

  Status Unsupported(std::string_view what) const { return TemplateError(Code::kUnsupported, Line(), what); }

  // Names, or tuples of names; for set also name.attribute.
  Result<ExprPtr> Target(bool attributes) {
    const Nest nest(&depth_);
    LQ_RETURN_IF_ERROR(Deep());
    const int line = Line();
    const auto one = [&]() -> Result<ExprPtr> {
      if (Operator("(")) {
        LQ_ASSIGN_OR_RETURN(ExprPtr inner, Target(false));
        LQ_RETURN_IF_ERROR(Need(")"));
        return inner;
      }
      LQ_ASSIGN_OR_RETURN(const std::string name, Identifier());
      ExprPtr target = Make(Expr::kName, line, name);
      if (attributes && Operator(".")) {
        LQ_ASSIGN_OR_RETURN(const std::string attribute, Identifier());
        ExprPtr whole = Make(Expr::kAttribute, line, attribute);
        whole->kids.push_back(std::move(target));
        return whole;
      }
      return target;
    };
    LQ_ASSIGN_OR_RETURN(ExprPtr first, one());
    if (!Is(T::kOperator, ",")) return first;
    ExprPtr tuple = Make(Expr::kTuple, line);
    tuple->kids.push_back(std::move(first));
    while (Operator(",")) {
      if (Is(T::kName, "in") || Is(T::kOperator, "=") || Is(T::kOperator, ")")) break;
      LQ_ASSIGN_OR_RETURN(ExprPtr next, one());
      tuple->kids.push_back(std::move(next));
    }
    return tuple;
  }

  // (name, name=default, ...)
  Status Signature(Node* node) {
    LQ_RETURN_IF_ERROR(Need("("));
    while (!Operator(")")) {
      if (!node->names.empty()) LQ_RETURN_IF_ERROR(Need(","));
      LQ_ASSIGN_OR_RETURN(std::string name, Identifier());
      ExprPtr value;
      if (Operator("=")) {
        LQ_ASSIGN_OR_RETURN(value, Condition());
      } else if (!node->values.empty() && node->values.back() != nullptr) {
        return Expected("a default");
      }
      node->names.push_back(std::move(name));
      node->values.push_back(std::move(value));
    }
    return {};
  }

  // One expression, or several with commas between them: a tuple.
  Result<ExprPtr> Tuple(bool conditions) {
    const int line = Line();
    LQ_ASSIGN_OR_RETURN(ExprPtr first, conditions ? Condition() : Or());
    if (!Is(T::kOperator, ",")) return first;
    ExprPtr tuple = Make(Expr::kTuple, line);
    tuple->kids.push_back(std::move(first));
    while (Operator(",")) {
      if (Peek().kind == T::kBlockEnd || Peek().kind == T::kOutputEnd || Is(T::kOperator, ")")) break;
      LQ_ASSIGN_OR_RETURN(ExprPtr next, conditions ? Condition() : Or());
      tuple->kids.push_back(std::move(next));
    }
    LQ_RETURN_IF_ERROR(Grown(tuple.get()));
    return tuple;
  }

  Result<ExprPtr> Condition() {
    const Nest nest(&depth_);
    LQ_RETURN_IF_ERROR(Deep());
    LQ_ASSIGN_OR_RETURN(ExprPtr value, Or());
    for (int chain = 0; Is(T::kName, "if"); ++chain) {
      if (chain > ChatTemplateLimits::kMaxDepth) return Expected("fewer conditions");
      ExprPtr choice = Make(Expr::kIfElse, Line());
      Take();
      choice->kids.push_back(std::move(value));
      LQ_ASSIGN_OR_RETURN(ExprPtr condition, Or());
      choice->kids.push_back(std::move(condition));
      ExprPtr other;
      if (Name("else")) {
        LQ_ASSIGN_OR_RETURN(other, Condition());
      }
      choice->kids.push_back(std::move(other));
      LQ_RETURN_IF_ERROR(Grown(choice.get()));
      value = std::move(choice);
    }
    return value;
  }

  // A chain of left-associative operators grows one level of the tree each: its length is bounded too.
  template <class Operand>
  Result<ExprPtr> Chain(Expr::Kind kind, std::initializer_list<std::string_view> operators, T::Kind token,
                        Operand&& operand) {
    LQ_ASSIGN_OR_RETURN(ExprPtr left, operand());
    for (int links = 0;; ++links) {
      std::string_view found;
      for (const std::string_view op : operators)
        if (Is(token, op)) found = op;
      if (found.empty()) return left;
      if (links >= kMaxChain)
        return TemplateError(Code::kOutOfRange, Line(), fmt::format("more than {} operators in a row", kMaxChain));
      ExprPtr whole = Make(kind, Line(), std::string(found));
      Take();
      whole->kids.push_back(std::move(left));
      LQ_ASSIGN_OR_RETURN(ExprPtr right, operand());
      whole->kids.push_back(std::move(right));
      LQ_RETURN_IF_ERROR(Grown(whole.get()));
      left = std::move(whole);
    }
  }

  Result<ExprPtr> Or() {
    return Chain(Expr::kBinary, {"or"}, T::kName, [&] { return And(); });
  }
  Result<ExprPtr> And() {
    return Chain(Expr::kBinary, {"and"}, T::kName, [&] { return Not(); });
  }
  Result<ExprPtr> Not() {
    const int line = Line();
    if (!Name("not")) return Compare();
    const Nest nest(&depth_);
    LQ_RETURN_IF_ERROR(Deep());
    ExprPtr e = Make(Expr::kUnary, line, "not");
    LQ_ASSIGN_OR_RETURN(ExprPtr inner, Not());
    e->kids.push_back(std::move(inner));
    LQ_RETURN_IF_ERROR(Grown(e.get()));
    return e;
  }

  Result<ExprPtr> Compare() {
    LQ_ASSIGN_OR_RETURN(ExprPtr left, Sum());
    ExprPtr whole = Make(Expr::kCompare, left->line);
    for (;;) {
      std::string op;
      for (const std::string_view known : {"==", "!=", "<", ">", "<=", ">="})
        if (Is(T::kOperator, known)) op = known;
      if (Is(T::kName, "in")) op = "in";
      if (Is(T::kName, "not") && Peek(1).kind == T::kName && Peek(1).text == "in") {
        Take();
        op = "not in";
      }
      if (op.empty()) break;
      Take();
      if (whole->kids.empty()) whole->kids.push_back(std::move(left));
      LQ_ASSIGN_OR_RETURN(ExprPtr right, Sum());
      whole->kids.push_back(std::move(right));
      whole->names.push_back(op);
    }
    if (whole->kids.empty()) return left;
    LQ_RETURN_IF_ERROR(Grown(whole.get()));
    return whole;
  }

  Result<ExprPtr> Sum() {
    return Chain(Expr::kBinary, {"+", "-"}, T::kOperator, [&] {
      return Chain(Expr::kBinary, {"~"}, T::kOperator, [&] {
        return Chain(Expr::kBinary, {"*", "/", "//", "%"}, T::kOperator,
                     [&] { return Chain(Expr::kBinary, {"**"}, T::kOperator, [&] { return Unary(true); }); });
      });
    });
  }

  Result<ExprPtr> Unary(bool with_filters) {
    const Nest nest(&depth_);
    LQ_RETURN_IF_ERROR(Deep());
    const int line = Line();
    ExprPtr e;
    if (Is(T::kOperator, "-") || Is(T::kOperator, "+")) {
      e = Make(Expr::kUnary, line, Take().text);
      LQ_ASSIGN_OR_RETURN(ExprPtr inner, Unary(false));
      e->kids.push_back(std::move(inner));
      LQ_RETURN_IF_ERROR(Grown(e.get()));
    } else {
      LQ_ASSIGN_OR_RETURN(e, Primary());
    }
    LQ_ASSIGN_OR_RETURN(e, Postfix(std::move(e)));
    if (!with_filters) return e;
    return Filters(std::move(e));
  }

  Result<ExprPtr> Primary() {
    const TemplateToken token = Take();
    switch (token.kind) {
      case T::kName: {
        if (token.text == "true" || token.text == "True" || token.text == "false" || token.text == "False") {
          ExprPtr e = Make(Expr::kBool, token.line);
          e->integer = token.text == "true" || token.text == "True" ? 1 : 0;
          return e;
        }
        if (token.text == "none" || token.text == "None") return Make(Expr::kNone, token.line);
        return Make(Expr::kName, token.line, token.text);
      }
      case T::kString: {
        ExprPtr e = Make(Expr::kString, token.line, token.text);
        while (Peek().kind == T::kString) e->text += Take().text;
        return e;
      }
      case T::kInt: {
        ExprPtr e = Make(Expr::kInt, token.line);
        const auto [end, error] = std::from_chars(token.text.data(), token.text.data() + token.text.size(), e->integer);
        if (error != std::errc() || end != token.text.data() + token.text.size())
          return TemplateError(Code::kOutOfRange, token.line,
                               fmt::format("{} has more than 63 bits", Excerpt(token.text, 40)));
        return e;
      }
      case T::kFloat: {
        ExprPtr e = Make(Expr::kFloat, token.line);
        e->real = std::strtod(token.text.c_str(), nullptr);
        return e;
      }
      case T::kOperator:
        if (token.text == "(") {
          if (Operator(")")) return Make(Expr::kTuple, token.line);
          LQ_ASSIGN_OR_RETURN(ExprPtr e, Tuple(true));
          LQ_RETURN_IF_ERROR(Need(")"));
          return e;
        }
        if (token.text == "[" || token.text == "{") {
          const bool list = token.text == "[";
          const std::string_view close = list ? "]" : "}";
          ExprPtr e = Make(list ? Expr::kList : Expr::kDict, token.line);
          while (!Operator(close)) {
            if (!e->kids.empty()) {
              LQ_RETURN_IF_ERROR(Need(","));
              if (Operator(close)) break;
            }
            LQ_ASSIGN_OR_RETURN(ExprPtr item, Condition());
            e->kids.push_back(std::move(item));
            if (list) continue;
            LQ_RETURN_IF_ERROR(Need(":"));
            LQ_ASSIGN_OR_RETURN(ExprPtr value, Condition());
            e->kids.push_back(std::move(value));
          }
          LQ_RETURN_IF_ERROR(Grown(e.get()));
          return e;
        }
        [[fallthrough]];
      default:
        --at_;
        return Expected("an expression");
    }
  }

  Result<ExprPtr> Postfix(ExprPtr e) {
    for (int links = 0;; ++links) {
      if (links >= kMaxChain)
        return TemplateError(Code::kOutOfRange, Line(), fmt::format("more than {} operators in a row", kMaxChain));
      const int line = Line();
      if (Operator(".")) {
        ExprPtr whole;
        if (Peek().kind == T::kInt) {
          whole = Make(Expr::kItem, line);
          whole->kids.push_back(std::move(e));
          LQ_ASSIGN_OR_RETURN(ExprPtr index, Primary());
          whole->kids.push_back(std::move(index));
        } else {
          LQ_ASSIGN_OR_RETURN(const std::string name, Identifier());
          whole = Make(Expr::kAttribute, line, name);
          whole->kids.push_back(std::move(e));
        }
        LQ_RETURN_IF_ERROR(Grown(whole.get()));
        e = std::move(whole);
      } else if (Operator("[")) {
        ExprPtr part[3];
        int parts = 0;
        bool slice = false;
        for (;; ++parts) {
          if (!Is(T::kOperator, ":") && !Is(T::kOperator, "]")) {
            LQ_ASSIGN_OR_RETURN(part[parts], Condition());
          }
          if (parts == 2 || !Operator(":")) break;
          slice = true;
        }
        LQ_RETURN_IF_ERROR(Need("]"));
        if (!slice && part[0] == nullptr) return Expected("an index");
        ExprPtr whole = Make(slice ? Expr::kSlice : Expr::kItem, line);
        whole->kids.push_back(std::move(e));
        whole->kids.push_back(std::move(part[0]));
        if (slice) {
          whole->kids.push_back(std::move(part[1]));
          whole->kids.push_back(std::move(part[2]));
        }
        LQ_RETURN_IF_ERROR(Grown(whole.get()));
        e = std::move(whole);
      } else if (Is(T::kOperator, "(")) {
        ExprPtr call = Make(Expr::kCall, line);
        call->kids.push_back(std::move(e));
        LQ_RETURN_IF_ERROR(Arguments(call.get()));
        LQ_RETURN_IF_ERROR(Grown(call.get()));
        e = std::move(call);
      } else {
        return e;
      }
    }
  }

  Status Arguments(Expr* call) {
    LQ_RETURN_IF_ERROR(Need("("));
    bool first = true;
    while (!Operator(")")) {
      if (!first) {
        LQ_RETURN_IF_ERROR(Need(","));
        if (Operator(")")) return {};
      }
      first = false;
      if (Is(T::kOperator, "*") || Is(T::kOperator, "**")) return Unsupported("unpacked arguments are not known here");
      if (Peek().kind == T::kName && Peek(1).kind == T::kOperator && Peek(1).text == "=") {
        call->names.push_back(Take().text);
        Take();
      } else if (!call->names.empty()) {
        return Expected("a keyword");
      }
      LQ_ASSIGN_OR_RETURN(ExprPtr value, Condition());
      call->kids.push_back(std::move(value));
    }
    return {};
  }

  Result<ExprPtr> OneFilter(ExprPtr value) {
    const int line = Line();
    LQ_ASSIGN_OR_RETURN(const std::string name, Identifier());
    ExprPtr filter = Make(Expr::kFilter, line, name);
    filter->kids.push_back(std::move(value));
    if (Is(T::kOperator, "(")) LQ_RETURN_IF_ERROR(Arguments(filter.get()));
    LQ_RETURN_IF_ERROR(Grown(filter.get()));
    return filter;
  }

  Result<ExprPtr> Filters(ExprPtr e) {
    for (int links = 0;; ++links) {
      if (links >= kMaxChain)
        return TemplateError(Code::kOutOfRange, Line(), fmt::format("more than {} operators in a row", kMaxChain));
      if (Operator("|")) {
        LQ_ASSIGN_OR_RETURN(e, OneFilter(std::move(e)));
      } else if (Is(T::kName, "is")) {
        const int line = Line();
        Take();
        const bool negated = Name("not");
        LQ_ASSIGN_OR_RETURN(const std::string name, Identifier());
        ExprPtr test = Make(Expr::kTest, line, name);
        test->kids.push_back(std::move(e));
        const TemplateToken& next = Peek();
        const bool word = next.kind == T::kName && next.text != "else" && next.text != "or" && next.text != "and" &&
                          next.text != "is" && next.text != "if" && next.text != "in" && next.text != "not";
        if (Is(T::kOperator, "(")) {
          LQ_RETURN_IF_ERROR(Arguments(test.get()));
        } else if (word || next.kind == T::kString || next.kind == T::kInt || next.kind == T::kFloat ||
                   Is(T::kOperator, "[") || Is(T::kOperator, "{")) {
          LQ_ASSIGN_OR_RETURN(ExprPtr argument, Primary());
          LQ_ASSIGN_OR_RETURN(argument, Postfix(std::move(argument)));
          test->kids.push_back(std::move(argument));
        }
        LQ_RETURN_IF_ERROR(Grown(test.get()));
        if (negated) {
          e = Make(Expr::kUnary, line, "not");
          e->kids.push_back(std::move(test));
          LQ_RETURN_IF_ERROR(Grown(e.get()));
        } else {
          e = std::move(test);
        }
      } else if (Is(T::kOperator, "(")) {
        ExprPtr call = Make(Expr::kCall, Line());
        call->kids.push_back(std::move(e));
        LQ_RETURN_IF_ERROR(Arguments(call.get()));
        LQ_RETURN_IF_ERROR(Grown(call.get()));
        e = std::move(call);
      } else {
        return e;
      }
    }
  }

  static constexpr int kMaxChain = 200, kMaxHeight = 300;
  std::vector<TemplateToken> tokens_;
  size_t at_ = 0;
  int depth_ = 0, loops_ = 0;
};

}  // namespace

Status TemplateError(Code code, int line, std::string_view what) {
  return Status(code, fmt::format("chat template: line {}: {}", line, what));
}

Status ParseTemplate(std::string_view source, TemplateBody* body) {
  LQ_ASSIGN_OR_RETURN(std::vector<TemplateToken> tokens, LexTemplate(source));
  return Parser(std::move(tokens)).Run(body);
}

}  // namespace livequant
