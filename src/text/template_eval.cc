// text/template_eval.cc: runs the tree of a chat template. Depth of recursion, steps and bytes are all counted.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <ctime>
#include <limits>

#include "io/json.h"
#include "text/template_ast.h"
#include "text/template_builtins.h"
#include "text/template_value.h"
#include "text/utf8.h"

namespace livequant {
namespace {

using V = TemplateValue;
using Expr = TemplateExpr;
using Node = TemplateNode;

constexpr int kMaxEvalDepth = 500;
constexpr int64_t kMaxRange = 100000;  // as Jinja's sandbox

struct Loop {
  const std::vector<V>* items;
  size_t at;
};

// Variables of one block; a loop's body has its loop beside them.
struct Scope {
  const Scope* parent = nullptr;
  std::vector<std::pair<std::string, V>> variables;
  const Loop* loop = nullptr;

  const V* Find(const std::string& name) const {
    for (auto at = variables.rbegin(); at != variables.rend(); ++at)
      if (at->first == name) return &at->second;
    return nullptr;
  }
  void Set(const std::string& name, V value) {
    for (auto& [key, old] : variables) {
      if (key != name) continue;
      old = std::move(value);
      return;
    }
    variables.emplace_back(name, std::move(value));
  }
};

enum class Flow { kOn, kBreak, kContinue };

class Evaluator {
 public:
  Evaluator(std::optional<int64_t> now, const ChatTemplateLimits& limits)
      : budget_{limits.max_steps, limits.max_bytes, now}, times_(limits.max_times) {}

  // A long conversation may be copied so many times more.
  void AllowFor(int64_t bytes) {
    budget_.bytes += times_ * bytes;
    budget_.steps += times_ * bytes / static_cast<int64_t>(kTemplateBytesAStep);
  }

  Status Define(const nlohmann::ordered_json& variables) {
    for (const auto& [name, json] : variables.items()) {
      Result<V> value = V::FromJson(json);
      if (!value.ok())
        return Status(value.status().code(),
                      fmt::format("chat template: variable {}: {}", Excerpt(name), value.status().message()));
      root_.Set(name, *std::move(value));
    }
    return {};
  }

  Result<std::string> Run(const TemplateBody& body) {
    std::string out;
    LQ_RETURN_IF_ERROR(Body(body, root_, &out).status());
    return out;
  }

 private:
  struct Nest {
    explicit Nest(int* depth) : depth(depth) { ++*depth; }
    ~Nest() { --*depth; }
    Nest(const Nest&) = delete;
    Nest& operator=(const Nest&) = delete;
    int* depth;
  };
  static Status Wrong(int line, std::string_view what) { return TemplateError(Code::kInvalidArgument, line, what); }
  Status Step(int line) {
    if (depth_ > kMaxEvalDepth)
      return TemplateError(Code::kOutOfRange, line, fmt::format("calls and expressions deeper than {}", kMaxEvalDepth));
    return budget_.Charge(line, 1, 0);
  }

  // --- statements

  Result<Flow> Body(const TemplateBody& body, Scope& scope, std::string* out) {
    for (const Node& node : body) {
      const Nest nest(&depth_);
      LQ_RETURN_IF_ERROR(Step(node.line));
      LQ_ASSIGN_OR_RETURN(const Flow flow, Statement(node, scope, out));
      if (flow != Flow::kOn) return flow;
    }
    return Flow::kOn;
  }

  Status Put(int line, std::string_view text, std::string* out) {
    LQ_RETURN_IF_ERROR(budget_.Charge(line, 0, text.size()));
    out->append(text);
    return {};
  }

  Result<Flow> Statement(const Node& node, Scope& scope, std::string* out) {
    switch (node.kind) {
      case Node::kText:
        LQ_RETURN_IF_ERROR(Put(node.line, node.text, out));
        return Flow::kOn;
      case Node::kOutput: {
        LQ_ASSIGN_OR_RETURN(const V value, Eval(*node.expr, scope));
        LQ_ASSIGN_OR_RETURN(const std::string text, TemplateString(budget_, node.line, value));
        out->append(text);
        return Flow::kOn;
      }
      case Node::kIf:
        for (const auto& [condition, body] : node.branches) {
          if (condition != nullptr) {
            LQ_ASSIGN_OR_RETURN(const V value, Eval(*condition, scope));
            if (!value.Truth()) continue;
          }
          return Body(body, scope, out);
        }
        return Flow::kOn;
      case Node::kFor:
        return For(node, scope, out);
      case Node::kSet:
        LQ_RETURN_IF_ERROR(Set(node, scope));
        return Flow::kOn;
      case Node::kMacro: {
        V macro;
        macro.kind = V::kMacro;
        macro.node = &node;
        macro.text = std::make_shared<const std::string>(node.text);
        scope.Set(node.text, std::move(macro));
        return Flow::kOn;
      }
      case Node::kCall: {
        V caller;
        caller.kind = V::kMacro;
        caller.node = &node;
        caller.scope = &scope;
        caller.text = std::make_shared<const std::string>("caller");
        LQ_ASSIGN_OR_RETURN(const V value, Call(*node.expr, scope, &caller));
        LQ_ASSIGN_OR_RETURN(const std::string text, TemplateString(budget_, node.line, value));
        out->append(text);
        return Flow::kOn;
      }
      case Node::kFilter: {
        LQ_ASSIGN_OR_RETURN(const V value, Filtered(node, scope));
        LQ_ASSIGN_OR_RETURN(const std::string text, TemplateString(budget_, node.line, value));
        out->append(text);
        return Flow::kOn;
      }
      case Node::kWith: {
        Scope inner{&scope, {}, nullptr};
        for (size_t i = 0; i < node.names.size(); ++i) {
          LQ_ASSIGN_OR_RETURN(V value, Eval(*node.values[i], scope));
          inner.Set(node.names[i], std::move(value));
        }
        return Body(node.body, inner, out);
      }
      case Node::kScope:
        return Body(node.body, scope, out);
      case Node::kBreak:
        return Flow::kBreak;
      case Node::kContinue:
        return Flow::kContinue;
    }
    LQ_CHECK(false);
    return Flow::kOn;
  }

  // The text of a body through the filters of its block, which begin at the name "".
  Result<V> Filtered(const Node& node, Scope& scope) {
    std::string text;
    Scope inner{&scope, {}, nullptr};
    LQ_RETURN_IF_ERROR(Body(node.body, inner, &text).status());
    if (node.expr == nullptr) return V::String(std::move(text));
    Scope around{&scope, {}, nullptr};
    around.Set("", V::String(std::move(text)));
    return Eval(*node.expr, around);
  }

  Status Assign(const Expr& target, V value, Scope& scope) {
    if (target.kind == Expr::kName) {
      scope.Set(target.text, std::move(value));
      return {};
    }
    if (target.kind == Expr::kAttribute) {
      const V* space = Find(target.kids[0]->text, scope);
      if (space == nullptr || space->kind != V::kNamespace)
        return Wrong(target.line, fmt::format("{} is no namespace", Excerpt(target.kids[0]->text, 40)));
      if (value.kind == V::kNamespace || value.kind == V::kMacro)
        return TemplateError(Code::kUnsupported, target.line, "a namespace or macro inside a namespace");
      space->dict->Set(target.text, std::move(value));
      return {};
    }
    LQ_ASSIGN_OR_RETURN(std::vector<V> parts, TemplateItems(budget_, target.line, value));
    if (parts.size() != target.kids.size())
      return Wrong(target.line, fmt::format("{} values for {} names", parts.size(), target.kids.size()));
    for (size_t i = 0; i < parts.size(); ++i) LQ_RETURN_IF_ERROR(Assign(*target.kids[i], std::move(parts[i]), scope));
    return {};
  }

  Status Set(const Node& node, Scope& scope) {
    V value;
    if (node.body.empty() && node.expr != nullptr) {
      LQ_ASSIGN_OR_RETURN(value, Eval(*node.expr, scope));
    } else {
      LQ_ASSIGN_OR_RETURN(value, Filtered(node, scope));
    }
    return Assign(*node.target, std::move(value), scope);
  }

  Result<Flow> For(const Node& node, Scope& scope, std::string* out) {
    LQ_ASSIGN_OR_RETURN(const V value, Eval(*node.expr, scope));
    LQ_ASSIGN_OR_RETURN(std::vector<V> items, TemplateItems(budget_, node.line, value));
    if (node.condition != nullptr) {
      std::vector<V> kept;
      for (V& item : items) {
        Scope inner{&scope, {}, nullptr};
        LQ_RETURN_IF_ERROR(Assign(*node.target, item, inner));
        LQ_ASSIGN_OR_RETURN(const V keeps, Eval(*node.condition, inner));
        if (keeps.Truth()) kept.push_back(std::move(item));
      }
      items = std::move(kept);
    }
    Loop loop{&items, 0};
    for (; loop.at < items.size(); ++loop.at) {
      LQ_RETURN_IF_ERROR(Step(node.line));
      Scope inner{&scope, {}, &loop};
      LQ_RETURN_IF_ERROR(Assign(*node.target, items[loop.at], inner));
      LQ_ASSIGN_OR_RETURN(const Flow flow, Body(node.body, inner, out));
      if (flow == Flow::kBreak) return Flow::kOn;
    }
    if (!items.empty()) return Flow::kOn;
    Scope inner{&scope, {}, nullptr};
    return Body(node.else_body, inner, out);
  }

  // --- names

  const V* Find(const std::string& name, const Scope& scope) const {
    for (const Scope* s = &scope; s != nullptr; s = s->parent)
      if (const V* found = s->Find(name)) return found;
    return nullptr;
  }
  const Loop* FindLoop(const Scope& scope) const {
    for (const Scope* s = &scope; s != nullptr; s = s->parent)
      if (s->loop != nullptr) return s->loop;
    return nullptr;
  }
  bool IsLoop(const Expr& e, const Scope& scope) const {
    return e.kind == Expr::kName && e.text == "loop" && Find("loop", scope) == nullptr && FindLoop(scope) != nullptr;
  }
  static Result<V> LoopAttribute(int line, const Loop& loop, const std::string& name) {
    const auto n = static_cast<int64_t>(loop.items->size()), at = static_cast<int64_t>(loop.at);
    if (name == "index") return V::Int(at + 1);
    if (name == "index0") return V::Int(at);
    if (name == "first") return V::Bool(at == 0);
    if (name == "last") return V::Bool(at + 1 == n);
    if (name == "length") return V::Int(n);
    if (name == "revindex") return V::Int(n - at);
    if (name == "revindex0") return V::Int(n - at - 1);
    if (name == "previtem") return at == 0 ? V::Undefined("there is no previous item") : (*loop.items)[loop.at - 1];
    if (name == "nextitem") return at + 1 == n ? V::Undefined("there is no next item") : (*loop.items)[loop.at + 1];
    return TemplateError(Code::kUnsupported, line, fmt::format("loop.{} is not known here", Excerpt(name, 40)));
  }

  // --- expressions

  Result<V> Eval(const Expr& e, Scope& scope) {
    const Nest nest(&depth_);
    LQ_RETURN_IF_ERROR(Step(e.line));
    switch (e.kind) {
      case Expr::kName: {
        if (const V* found = Find(e.text, scope)) return *found;
        if (IsLoop(e, scope)) return TemplateError(Code::kUnsupported, e.line, "loop by itself is not known here");
        for (const char* name : {"raise_exception", "namespace", "dict", "range", "strftime_now"}) {
          if (e.text != name) continue;
          V function;
          function.kind = V::kMacro;  // without a node: called by its name
          function.text = std::make_shared<const std::string>(e.text);
          return function;
        }
        return V::Undefined(e.text);
      }
      case Expr::kString:
        return V::String(e.text);
      case Expr::kInt:
        return V::Int(e.integer);
      case Expr::kFloat:
        return V::Float(e.real);
      case Expr::kBool:
        return V::Bool(e.integer != 0);
      case Expr::kNone:
        return V::None();
      case Expr::kList:
      case Expr::kTuple: {
        std::vector<V> items;
        for (const auto& kid : e.kids) {
          LQ_ASSIGN_OR_RETURN(V item, Eval(*kid, scope));
          items.push_back(std::move(item));
        }
        return Made(e.line, V::List(std::move(items), e.kind == Expr::kTuple), e.kids.size());
      }
      case Expr::kDict: {
        auto dict = std::make_shared<TemplateDict>();
        for (size_t i = 0; i < e.kids.size(); i += 2) {
          LQ_ASSIGN_OR_RETURN(const V key, Eval(*e.kids[i], scope));
          LQ_ASSIGN_OR_RETURN(V value, Eval(*e.kids[i + 1], scope));
          if (key.kind != V::kString)
            return TemplateError(Code::kUnsupported, e.line, fmt::format("a {} as key of a dict", key.TypeName()));
          dict->Set(*key.text, std::move(value));
        }
        return Made(e.line, V::Dict(std::move(dict)), e.kids.size());
      }
      case Expr::kAttribute: {
        if (IsLoop(*e.kids[0], scope)) return LoopAttribute(e.line, *FindLoop(scope), e.text);
        LQ_ASSIGN_OR_RETURN(const V object, Eval(*e.kids[0], scope));
        if (HasTemplateMethod(object, e.text))
          return TemplateError(Code::kUnsupported, e.line, fmt::format("method {} without a call", e.text));
        return TemplateItem(e.line, object, V::String(e.text));
      }
      case Expr::kItem: {
        LQ_ASSIGN_OR_RETURN(const V object, Eval(*e.kids[0], scope));
        LQ_ASSIGN_OR_RETURN(const V key, Eval(*e.kids[1], scope));
        LQ_RETURN_IF_ERROR(budget_.Look(e.line, object));
        LQ_RETURN_IF_ERROR(budget_.Look(e.line, key));
        return TemplateItem(e.line, object, key);
      }
      case Expr::kSlice:
        return Slice(e, scope);
      case Expr::kCall:
        return Call(e, scope, nullptr);
      case Expr::kFilter: {
        LQ_ASSIGN_OR_RETURN(const V value, Eval(*e.kids[0], scope));
        LQ_ASSIGN_OR_RETURN(const TemplateArguments arguments, Arguments(e, scope));
        return ApplyTemplateFilter(budget_, e.text, value, arguments);
      }
      case Expr::kTest: {
        LQ_ASSIGN_OR_RETURN(const V value, Eval(*e.kids[0], scope));
        LQ_ASSIGN_OR_RETURN(const TemplateArguments arguments, Arguments(e, scope));
        LQ_ASSIGN_OR_RETURN(const bool passes, ApplyTemplateTest(budget_, e.text, value, arguments));
        return V::Bool(passes);
      }
      case Expr::kUnary:
        return Unary(e, scope);
      case Expr::kBinary:
        return Binary(e, scope);
      case Expr::kCompare:
        return Compare(e, scope);
      case Expr::kIfElse: {
        LQ_ASSIGN_OR_RETURN(const V condition, Eval(*e.kids[1], scope));
        if (condition.Truth()) return Eval(*e.kids[0], scope);
        if (e.kids[2] != nullptr) return Eval(*e.kids[2], scope);
        return V::Undefined("the other side of an if");
      }
    }
    LQ_CHECK(false);
    return V();
  }

  Result<V> Made(int line, Result<V> made, size_t items) {
    if (!made.ok()) return TemplateError(made.status().code(), line, made.status().message());
    LQ_RETURN_IF_ERROR(budget_.Charge(line, items, items * 128));
    return made;
  }

  // Of a call, filter or test: kids behind the first, the last of them named.
  Result<TemplateArguments> Arguments(const Expr& e, Scope& scope) {
    TemplateArguments arguments{e.line, {}, {}};
    const size_t positional = e.kids.size() - 1 - e.names.size();
    for (size_t i = 1; i < e.kids.size(); ++i) {
      LQ_ASSIGN_OR_RETURN(V value, Eval(*e.kids[i], scope));
      if (i <= positional) {
        arguments.positional.push_back(std::move(value));
      } else {
        arguments.named.emplace_back(e.names[i - 1 - positional], std::move(value));
      }
    }
    return arguments;
  }

  Result<V> Call(const Expr& e, Scope& scope, const V* caller) {
    const Expr& callee = *e.kids[0];
    if (callee.kind == Expr::kAttribute) {
      if (IsLoop(*callee.kids[0], scope) && callee.text == "cycle") {
        LQ_ASSIGN_OR_RETURN(const TemplateArguments arguments, Arguments(e, scope));
        if (arguments.positional.empty()) return Wrong(e.line, "cycle of nothing");
        return arguments.positional[FindLoop(scope)->at % arguments.positional.size()];
      }
      LQ_ASSIGN_OR_RETURN(const V object, Eval(*callee.kids[0], scope));
      if (object.kind == V::kUndefined) return Wrong(e.line, fmt::format("{} is undefined", Excerpt(*object.text, 80)));
      LQ_ASSIGN_OR_RETURN(const TemplateArguments arguments, Arguments(e, scope));
      return CallTemplateMethod(budget_, callee.text, object, arguments);
    }
    if (callee.kind != Expr::kName) return TemplateError(Code::kUnsupported, e.line, "a call of no name");
    LQ_ASSIGN_OR_RETURN(TemplateArguments arguments, Arguments(e, scope));
    if (const V* found = Find(callee.text, scope)) {
      if (found->kind != V::kMacro)
        return Wrong(e.line, fmt::format("{} is a {} and no macro", Excerpt(callee.text, 40), found->TypeName()));
      const V macro = *found;
      if (macro.node == nullptr) return Function(*macro.text, arguments);
      return CallMacro(macro, std::move(arguments), caller);
    }
    return Function(callee.text, arguments);
  }

  Result<V> CallMacro(const V& macro, TemplateArguments arguments, const V* caller) {
    const Node& node = *macro.node;
    Scope scope{macro.scope != nullptr ? static_cast<const Scope*>(macro.scope) : &root_, {}, nullptr};
    if (arguments.positional.size() > node.names.size())
      return Wrong(arguments.line, fmt::format("macro {} takes {} arguments, not {}", Excerpt(*macro.text, 40),
                                               node.names.size(), arguments.positional.size()));
    for (const auto& [name, value] : arguments.named)
      if (std::find(node.names.begin(), node.names.end(), name) == node.names.end())
        return Wrong(arguments.line,
                     fmt::format("macro {} has no argument {}", Excerpt(*macro.text, 40), Excerpt(name, 40)));
    for (size_t i = 0; i < node.names.size(); ++i) {
      V value = V::Undefined("parameter " + node.names[i]);
      if (const V* given = arguments.Get(i, node.names[i])) {
        value = *given;
      } else if (node.values[i] != nullptr) {
        LQ_ASSIGN_OR_RETURN(value, Eval(*node.values[i], scope));
      }
      scope.Set(node.names[i], std::move(value));
    }
    if (caller != nullptr) scope.Set("caller", *caller);
    std::string text;
    LQ_RETURN_IF_ERROR(Body(node.body, scope, &text).status());
    return V::String(std::move(text));
  }

  Result<V> Function(const std::string& name, const TemplateArguments& arguments) {
    const int line = arguments.line;
    const std::vector<V>& given = arguments.positional;
    if (name == "raise_exception") {
      std::string text;
      if (!given.empty()) AppendPython(given[0], false, 400, &text);
      return Wrong(line, fmt::format("raised: {}", Excerpt(text, 400)));
    }
    if (name == "namespace" || name == "dict") {
      auto dict = std::make_shared<TemplateDict>();
      if (!given.empty() && given[0].kind == V::kDict) *dict = *given[0].dict;
      if (!given.empty() && given[0].kind != V::kDict)
        return Wrong(line, fmt::format("{} of {}", name, given[0].TypeName()));
      for (const auto& [key, value] : arguments.named) dict->Set(key, value);
      const size_t items = dict->items.size();
      LQ_ASSIGN_OR_RETURN(V made, Made(line, V::Dict(std::move(dict)), items));
      if (name == "namespace") made.kind = V::kNamespace;
      return made;
    }
    if (name == "range") {
      int64_t bounds[3] = {0, 0, 1};
      if (given.empty() || given.size() > 3) return Wrong(line, "range needs 1 to 3 integers");
      for (const V& v : given)
        if (v.kind != V::kInt) return Wrong(line, fmt::format("range of {}", v.TypeName()));
      if (given.size() == 1) {
        bounds[1] = given[0].integer;
      } else {
        for (size_t i = 0; i < given.size(); ++i) bounds[i] = given[i].integer;
      }
      if (bounds[2] == 0) return Wrong(line, "range with step 0");
      std::vector<V> items;
      for (int64_t i = bounds[0]; bounds[2] > 0 ? i < bounds[1] : i > bounds[1];) {
        items.push_back(V::Int(i));
        if (static_cast<int64_t>(items.size()) > kMaxRange)
          return TemplateError(Code::kOutOfRange, line, fmt::format("a range of more than {}", kMaxRange));
        if (__builtin_add_overflow(i, bounds[2], &i)) break;
      }
      const size_t n = items.size();
      return Made(line, V::List(std::move(items)), n);
    }
    if (name == "strftime_now") {
      if (given.size() != 1 || given[0].kind != V::kString || given[0].text->empty() || given[0].text->size() > 256)
        return Wrong(line, "strftime_now needs a format of 1 to 256 bytes");
      if (!budget_.now) return Wrong(line, "strftime_now, and no date was given");
      const std::time_t seconds = *budget_.now;
      std::tm date{};
      if (gmtime_r(&seconds, &date) == nullptr) return Wrong(line, "a date beyond all years");
      std::array<char, 4096> text{};
      const size_t n = std::strftime(text.data(), text.size(), given[0].text->c_str(), &date);
      return V::String(std::string(text.data(), n));
    }
    return Wrong(line, fmt::format("{} is undefined", Excerpt(name, 40)));
  }

  Result<V> Slice(const Expr& e, Scope& scope) {
    LQ_ASSIGN_OR_RETURN(const V object, Eval(*e.kids[0], scope));
    std::optional<int64_t> part[3];
    for (size_t i = 0; i < 3; ++i) {
      if (e.kids[i + 1] == nullptr) continue;
      LQ_ASSIGN_OR_RETURN(const V v, Eval(*e.kids[i + 1], scope));
      if (v.kind == V::kNone) continue;
      if (v.kind != V::kInt) return Wrong(e.line, fmt::format("a slice by {}", v.TypeName()));
      part[i] = std::clamp<int64_t>(v.integer, -(int64_t{1} << 40), int64_t{1} << 40);
    }
    if (object.kind == V::kUndefined) return Wrong(e.line, fmt::format("{} is undefined", Excerpt(*object.text, 80)));
    if (object.kind != V::kList && object.kind != V::kString)
      return Wrong(e.line, fmt::format("a slice of {}", object.TypeName()));
    const int64_t step = part[2].value_or(1);
    const bool whole = object.kind == V::kString && step == 1;  // a piece of the text, and no list of characters
    LQ_RETURN_IF_ERROR(budget_.Look(e.line, object));
    std::vector<V> items;
    if (!whole) {
      LQ_ASSIGN_OR_RETURN(items, TemplateItems(budget_, e.line, object));
    }
    const auto n = whole ? static_cast<int64_t>(CountCharacters(*object.text)) : static_cast<int64_t>(items.size());
    if (step == 0) return Wrong(e.line, "a slice with step 0");
    const int64_t low = step > 0 ? 0 : -1, high = step > 0 ? n : n - 1;
    const auto bound = [&](std::optional<int64_t> given, int64_t absent) {
      if (!given) return absent;
      return std::clamp(*given < 0 ? *given + n : *given, low, high);
    };
    const int64_t begin = bound(part[0], step > 0 ? low : high), end = bound(part[1], step > 0 ? high : low);
    if (whole) {
      std::string_view text = *object.text;
      const auto skip = [&](int64_t characters) {  // the bytes of so many
        size_t bytes = 0;
        for (int64_t i = 0; i < characters; ++i) bytes += static_cast<size_t>(NextUtf8(text.substr(bytes)).bytes);
        return bytes;
      };
      text.remove_prefix(skip(std::min(begin, n)));
      const std::string cut(text.substr(0, skip(std::max<int64_t>(end - begin, 0))));
      LQ_RETURN_IF_ERROR(budget_.Charge(e.line, 0, cut.size()));
      return V::String(cut);
    }
    std::vector<V> out;
    for (int64_t i = begin; step > 0 ? i < end : i > end; i += step) out.push_back(items[static_cast<size_t>(i)]);
    if (object.kind == V::kList) return Made(e.line, V::List(std::move(out), object.list->tuple), 0);
    std::string text;
    for (const V& c : out) text += *c.text;
    return V::String(std::move(text));
  }

  Result<V> Unary(const Expr& e, Scope& scope) {
    LQ_ASSIGN_OR_RETURN(const V value, Eval(*e.kids[0], scope));
    if (e.text == "not") return V::Bool(!value.Truth());
    if (!value.IsNumber()) return Operands(e.line, e.text, value, value);
    if (value.kind == V::kFloat) return V::Float(e.text == "-" ? -value.real : value.real);
    if (value.integer == INT64_MIN) return TemplateError(Code::kOutOfRange, e.line, "a number beyond 64 bits");
    return V::Int(e.text == "-" ? -value.integer : value.integer);
  }

  static Status Operands(int line, const std::string& op, const V& a, const V& b) {
    for (const V* v : {&a, &b})
      if (v->kind == V::kUndefined) return Wrong(line, fmt::format("{} is undefined", Excerpt(*v->text, 80)));
    return Wrong(line, fmt::format("{} {} {}", a.TypeName(), op, b.TypeName()));
  }

  Result<V> Binary(const Expr& e, Scope& scope) {
    LQ_ASSIGN_OR_RETURN(V a, Eval(*e.kids[0], scope));
    if (e.text == "and" || e.text == "or") {
      if (a.Truth() == (e.text == "or")) return a;
      return Eval(*e.kids[1], scope);
    }
    LQ_ASSIGN_OR_RETURN(const V b, Eval(*e.kids[1], scope));
    if (e.text == "~") {
      LQ_ASSIGN_OR_RETURN(std::string left, TemplateString(budget_, e.line, a));
      LQ_ASSIGN_OR_RETURN(const std::string right, TemplateString(budget_, e.line, b));
      return V::String(std::move(left) + right);
    }
    if (a.IsNumber() && b.IsNumber()) return Arithmetic(e, a, b);
    if (e.text == "+" && a.kind == V::kString && b.kind == V::kString) {
      LQ_RETURN_IF_ERROR(budget_.Charge(e.line, 1, a.text->size() + b.text->size()));
      return V::String(*a.text + *b.text);
    }
    if (e.text == "+" && a.kind == V::kList && b.kind == V::kList && a.list->tuple == b.list->tuple) {
      std::vector<V> items = a.list->items;
      items.insert(items.end(), b.list->items.begin(), b.list->items.end());
      const size_t n = items.size();
      return Made(e.line, V::List(std::move(items), a.list->tuple), n);
    }
    if (e.text == "*" && (a.kind == V::kString || a.kind == V::kList) && (b.kind == V::kInt || b.kind == V::kBool)) {
      const size_t unit = a.kind == V::kString ? a.text->size() : a.list->items.size() * 128;
      const auto times = static_cast<size_t>(std::clamp<int64_t>(b.integer, 0, INT32_MAX));
      LQ_RETURN_IF_ERROR(budget_.Charge(e.line, 1 + times / 16, unit * times));
      std::string text;
      std::vector<V> items;
      for (size_t i = 0; unit > 0 && i < times; ++i) {
        if (a.kind == V::kString) {
          text += *a.text;
        } else {
          items.insert(items.end(), a.list->items.begin(), a.list->items.end());
        }
      }
      if (a.kind == V::kString) return V::String(std::move(text));
      return Made(e.line, V::List(std::move(items), a.list->tuple), 0);
    }
    if (e.text == "%" && a.kind == V::kString)
      return TemplateError(Code::kUnsupported, e.line, "formatting by % is not known here");
    return Operands(e.line, e.text, a, b);
  }

  static Result<V> Arithmetic(const Expr& e, const V& a, const V& b) {
    const std::string& op = e.text;
    const bool real = a.kind == V::kFloat || b.kind == V::kFloat || op == "/" || (op == "**" && b.integer < 0);
    if ((op == "/" || op == "//" || op == "%") && b.AsDouble() == 0) return Wrong(e.line, "division by zero");
    if (real) {
      const double x = a.AsDouble(), y = b.AsDouble();
      if (op == "+") return V::Float(x + y);
      if (op == "-") return V::Float(x - y);
      if (op == "*") return V::Float(x * y);
      if (op == "/") return V::Float(x / y);
      if (op == "//") return V::Float(std::floor(x / y));
      if (op == "%") return V::Float(x - std::floor(x / y) * y);
      const double power = std::pow(x, y);
      if (!std::isfinite(power)) return TemplateError(Code::kOutOfRange, e.line, "a power beyond all numbers");
      return V::Float(power);
    }
    const int64_t x = a.integer, y = b.integer;
    int64_t out = 0;
    bool beyond = false;
    if (op == "+") {
      beyond = __builtin_add_overflow(x, y, &out);
    } else if (op == "-") {
      beyond = __builtin_sub_overflow(x, y, &out);
    } else if (op == "*") {
      beyond = __builtin_mul_overflow(x, y, &out);
    } else if (op == "**") {
      out = 1;
      if (x == 0 || x == 1) {
        out = y == 0 ? 1 : x;
      } else if (x == -1) {
        out = y % 2 == 0 ? 1 : -1;
      } else {
        beyond = y > 63;
        for (int64_t i = 0; i < y && !beyond; ++i) beyond = __builtin_mul_overflow(out, x, &out);
      }
    } else if (y == -1) {
      if (op == "//") beyond = __builtin_sub_overflow(int64_t{0}, x, &out);
    } else {
      const int64_t quotient = x / y - ((x % y != 0 && (x < 0) != (y < 0)) ? 1 : 0);
      out = op == "//" ? quotient : x - quotient * y;
    }
    if (beyond) return TemplateError(Code::kOutOfRange, e.line, "a number beyond 64 bits");
    return V::Int(out);
  }

  Result<V> Compare(const Expr& e, Scope& scope) {
    LQ_ASSIGN_OR_RETURN(V left, Eval(*e.kids[0], scope));
    for (size_t i = 0; i < e.names.size(); ++i) {
      LQ_ASSIGN_OR_RETURN(V right, Eval(*e.kids[i + 1], scope));
      const std::string& op = e.names[i];
      bool holds = false;
      if (op == "==" || op == "!=") {
        holds = PythonEqual(left, right, &budget_.steps) == (op == "==");
        LQ_RETURN_IF_ERROR(budget_.Charge(e.line, 0, 0));
      } else if (op == "in" || op == "not in") {
        LQ_ASSIGN_OR_RETURN(holds, TemplateContains(budget_, e.line, right, left));
        holds = holds == (op == "in");
      } else {
        if (left.kind == V::kUndefined || right.kind == V::kUndefined) return Operands(e.line, op, left, right);
        LQ_RETURN_IF_ERROR(budget_.Look(e.line, left));
        const bool swap = op == ">" || op == "<=";
        LQ_ASSIGN_OR_RETURN(holds, TemplateLess(e.line, swap ? right : left, swap ? left : right));
        if (op == "<=" || op == ">=") holds = !holds;
      }
      if (!holds) return V::Bool(false);
      left = std::move(right);
    }
    return V::Bool(true);
  }

  TemplateBudget budget_;
  int64_t times_;
  Scope root_;
  int depth_ = 0;
};

int64_t TextBytes(const nlohmann::ordered_json& v) {
  if (v.is_string()) return static_cast<int64_t>(v.get_ref<const std::string&>().size());
  int64_t bytes = 0;
  if (v.is_structured())
    for (const auto& item : v) bytes += TextBytes(item);
  return bytes;
}

}  // namespace

Result<std::string> RenderTemplate(const ChatTemplate::Program& program, const nlohmann::ordered_json& variables,
                                   std::optional<int64_t> now, const ChatTemplateLimits& limits) {
  if (!variables.is_object())
    return Status(Code::kInvalidArgument,
                  fmt::format("chat template: variables are {}, not an object", variables.type_name()));
  Evaluator evaluator(now, limits);
  LQ_RETURN_IF_ERROR(evaluator.Define(program.globals));
  LQ_RETURN_IF_ERROR(evaluator.Define(variables));  // refuses what is nested deeper than TextBytes could go
  evaluator.AllowFor(TextBytes(variables));
  return evaluator.Run(program.body);
}

}  // namespace livequant
