// text/template_value.h: what a chat template computes with: Python's values as Jinja sees them. Private to text/.
//
// Invariant: lists and dicts never hold a namespace, macro or loop and are at most kMaxDepth deep, so that values are
// trees of bounded height; only a namespace is ever changed after it was made.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "text/template_ast.h"

namespace livequant {

struct TemplateValue;
struct TemplateList {
  std::vector<TemplateValue> items;
  bool tuple = false;
  int depth = 1;
};
struct TemplateDict {
  std::vector<std::pair<std::string, TemplateValue>> items;  // in order
  std::unordered_map<std::string, size_t> index;
  int depth = 1;

  // The value of a key, or null.
  const TemplateValue* Find(const std::string& key) const;
  // Adds a key at the end, or replaces its value in place.
  void Set(const std::string& key, TemplateValue value);
};

struct TemplateValue {
  enum Kind { kUndefined, kNone, kBool, kInt, kFloat, kString, kList, kDict, kNamespace, kMacro };
  Kind kind = kUndefined;
  int64_t integer = 0;  // kBool: 0 or 1
  double real = 0;
  std::shared_ptr<const std::string> text;  // kString; kUndefined: what is undefined; kMacro: its name
  std::shared_ptr<TemplateList> list;
  std::shared_ptr<TemplateDict> dict;  // kDict, kNamespace
  const TemplateNode* node = nullptr;  // kMacro
  const void* scope = nullptr;         // kMacro: what caller() sees, alive while it may be called; null: the top level

  static TemplateValue Undefined(std::string what);  // says what is missing
  static TemplateValue None();                       // Python's None
  static TemplateValue Bool(bool v);                 // True or False
  static TemplateValue Int(int64_t v);               // 64 bits
  static TemplateValue Float(double v);              // a double
  static TemplateValue String(std::string v);        // UTF-8
  // kOutOfRange: too deep; kUnsupported: a namespace or macro inside.
  static Result<TemplateValue> List(std::vector<TemplateValue> items, bool tuple = false);
  static Result<TemplateValue> Dict(std::shared_ptr<TemplateDict> dict);
  // kInvalidArgument: a string that is not UTF-8; kOutOfRange: too deep.
  static Result<TemplateValue> FromJson(const nlohmann::ordered_json& v, int depth = 0);

  // bool, int or float.
  bool IsNumber() const { return kind == kBool || kind == kInt || kind == kFloat; }
  // REQUIRES: IsNumber().
  double AsDouble() const { return kind == kFloat ? real : static_cast<double>(integer); }
  // Python's bool().
  bool Truth() const;
  // Python's name of the type, for messages.
  const char* TypeName() const;
};

// Python's str() or repr() of a value, appended. False: *out grew beyond `limit` bytes.
bool AppendPython(const TemplateValue& v, bool repr, size_t limit, std::string* out);
// Python's json.dumps(v, ensure_ascii=False, indent=indent); indent < 0: none. False also for
// what JSON does not have: *out is then within the limit.
bool AppendJson(const TemplateValue& v, int indent, int level, size_t limit, std::string* out);
// Reading so many bytes of text is one step.
inline constexpr size_t kTemplateBytesAStep = 16;
// Python's ==. *steps is charged for each pair of values, texts by their length.
bool PythonEqual(const TemplateValue& a, const TemplateValue& b, int64_t* steps);

}  // namespace livequant
