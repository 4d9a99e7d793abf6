// text/template_builtins.cc: Jinja's filters and tests and Python's methods, those that chat templates use.
#include "text/template_builtins.h"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "io/json.h"
#include "text/characters.h"
#include "text/find.h"
#include "text/template_lexer.h"
#include "text/utf8.h"

namespace livequant {
namespace {

using V = TemplateValue;
using Args = TemplateArguments;
using Budget = TemplateBudget;

constexpr size_t kItemBytes = 128;  // what a value in a list costs, about

Status Wrong(int line, std::string_view what) { return TemplateError(Code::kInvalidArgument, line, what); }
Status Unknown(int line, std::string_view kind, std::string_view name) {
  return TemplateError(Code::kUnsupported, line, fmt::format("{} {} is not known here", kind, Excerpt(name, 40)));
}

Result<V> Text(Budget& budget, int line, std::string text) {
  LQ_RETURN_IF_ERROR(budget.Charge(line, 1, text.size()));
  return V::String(std::move(text));
}
Result<V> List(Budget& budget, int line, std::vector<V> items, bool tuple = false) {
  LQ_RETURN_IF_ERROR(budget.Charge(line, items.size(), items.size() * kItemBytes));
  Result<V> list = V::List(std::move(items), tuple);
  if (!list.ok()) return TemplateError(list.status().code(), line, list.status().message());
  return list;
}

// Changes each character of a text; `upper` of the first of a word is the caller's.
std::string Case(std::string_view text, bool upper) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = NextUtf8(text.substr(at));
    at += static_cast<size_t>(step.bytes);
    const auto c = static_cast<utf8proc_int32_t>(step.code_point);
    if (upper && c == 0xDF) {
      out += "SS";
    } else if (!upper && c == 0x130) {
      out += "i\xCC\x87";
    } else {
      AppendUtf8(static_cast<char32_t>(upper ? utf8proc_toupper(c) : utf8proc_tolower(c)), &out);
    }
  }
  return out;
}
bool IsLetter(char32_t c) {
  const utf8proc_category_t category = utf8proc_category(static_cast<utf8proc_int32_t>(c));
  return category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LT;
}
// Capitals behind `starts(c)` (and at the beginning), small letters elsewhere.
template <class Starts>
std::string Titled(std::string_view text, Starts&& starts) {
  std::string out;
  bool begin = true;
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = NextUtf8(text.substr(at));
    out += Case(text.substr(at, static_cast<size_t>(step.bytes)), begin);
    at += static_cast<size_t>(step.bytes);
    begin = starts(step.code_point);
  }
  return out;
}

std::string_view StripCharacters(std::string_view text, const V* chars, bool left, bool right) {
  if (chars == nullptr || chars->kind != V::kString) return StripPython(text, left, right);
  const std::string_view set = *chars->text;
  const auto holds = [&](std::string_view c) {
    for (size_t at = 0; at < set.size();) {
      const auto n = static_cast<size_t>(NextUtf8(set.substr(at)).bytes);
      if (set.substr(at, n) == c) return true;
      at += n;
    }
    return false;
  };
  while (left && !text.empty()) {
    const size_t n = CharacterBytes(FirstCharacter(text));
    if (!holds(text.substr(0, n))) break;
    text.remove_prefix(n);
  }
  while (right && !text.empty()) {
    const size_t n = CharacterBytes(LastCharacter(text));
    if (!holds(text.substr(text.size() - n))) break;
    text.remove_suffix(n);
  }
  return text;
}

// Where `what` begins for the last time. Both turned round, so that this too is linear.
size_t FindLast(std::string_view text, std::string_view what) {
  const std::string back(text.rbegin(), text.rend());
  const size_t at = FindText(back, std::string(what.rbegin(), what.rend()));
  return at == text.npos ? text.npos : text.size() - at - what.size();
}

Result<V> Replace(Budget& budget, int line, std::string_view text, std::string_view from, std::string_view to,
                  int64_t count) {
  std::string out;
  size_t done = 0;
  const auto fits = [&] { return out.size() <= budget.bytes_left(); };
  if (from.empty()) {  // between all characters, as in Python
    for (size_t at = 0; fits();) {
      if (count-- != 0)
        out.append(to);
      else {
        out.append(text.substr(at));
        break;
      }
      if (at >= text.size()) break;
      const auto n = static_cast<size_t>(NextUtf8(text.substr(at)).bytes);
      out.append(text.substr(at, n));
      at += n;
    }
    return Text(budget, line, std::move(out));
  }
  for (size_t at = 0; fits() && count != 0 && (at = FindText(text, from, done)) != text.npos; --count) {
    out.append(text.substr(done, at - done)).append(to);
    done = at + from.size();
  }
  out.append(text.substr(done));
  return Text(budget, line, std::move(out));
}

Result<const std::string*> StringArgument(const Args& args, size_t i, std::string_view name, std::string_view what) {
  const V* v = args.Get(i, name);
  if (v == nullptr || v->kind != V::kString)
    return Wrong(args.line, fmt::format("{} needs a string, not {}", what, v == nullptr ? "nothing" : v->TypeName()));
  return v->text.get();
}

// The value under "a.b.0" of an item.
Result<V> Attribute(int line, const V& item, const std::string& path) {
  V v = item;
  for (size_t at = 0; at <= path.size();) {
    const size_t dot = std::min(path.find('.', at), path.size());
    const std::string part = path.substr(at, dot - at);
    const bool digits = !part.empty() && part.size() < 10 && part.find_first_not_of("0123456789") == part.npos;
    LQ_ASSIGN_OR_RETURN(v, TemplateItem(line, v, digits ? V::Int(std::stoll(part)) : V::String(part)));
    at = dot + 1;
  }
  return v;
}

Result<V> SplitText(Budget& budget, const Args& args, std::string_view text, bool from_right) {
  const V* separator = args.Get(0, "sep");
  const V* most = args.Get(1, "maxsplit");
  int64_t left = most != nullptr && most->IsNumber() ? most->integer : -1;
  std::vector<V> parts;
  const auto put = [&](std::string_view part) -> Status {
    parts.push_back(V::String(std::string(part)));
    return budget.Charge(args.line, 1, part.size() + kItemBytes);
  };
  if (separator == nullptr || separator->kind == V::kNone) {
    if (from_right && left >= 0) return Unknown(args.line, "method", "rsplit of white space");
    text = StripPython(text, true, false);
    while (!text.empty() && left-- != 0) {
      size_t end = 0;
      while (end < text.size() && !IsPythonSpace(FirstCharacter(text.substr(end))))
        end += CharacterBytes(FirstCharacter(text.substr(end)));
      LQ_RETURN_IF_ERROR(put(text.substr(0, end)));
      text = StripPython(text.substr(end), true, false);
    }
    if (!text.empty()) LQ_RETURN_IF_ERROR(put(text));
  } else {
    LQ_ASSIGN_OR_RETURN(const std::string* sep, StringArgument(args, 0, "sep", "split"));
    if (sep->empty()) return Wrong(args.line, "split by an empty separator");
    if (from_right) {
      const std::string back(text.rbegin(), text.rend()), what(sep->rbegin(), sep->rend());
      size_t done = 0;  // bytes of `back` that are parts
      for (size_t at = 0; left-- != 0 && (at = FindText(back, what, done)) != back.npos; done = at + what.size())
        LQ_RETURN_IF_ERROR(put(text.substr(text.size() - at, at - done)));
      text.remove_suffix(done);
      LQ_RETURN_IF_ERROR(put(text));
      std::reverse(parts.begin(), parts.end());
    } else {
      for (size_t at = 0; left-- != 0 && (at = FindText(text, *sep)) != text.npos; text = text.substr(at + sep->size()))
        LQ_RETURN_IF_ERROR(put(text.substr(0, at)));
      LQ_RETURN_IF_ERROR(put(text));
    }
  }
  return List(budget, args.line, std::move(parts));
}

Result<V> StringMethod(Budget& budget, const std::string& name, const std::string& text, const Args& args) {
  const int line = args.line;
  if (name == "strip" || name == "lstrip" || name == "rstrip")
    return Text(budget, line,
                std::string(StripCharacters(text, args.Get(0, "chars"), name != "rstrip", name != "lstrip")));
  if (name == "split" || name == "rsplit") return SplitText(budget, args, text, name == "rsplit");
  if (name == "upper" || name == "lower") return Text(budget, line, Case(text, name == "upper"));
  if (name == "title") return Text(budget, line, Titled(text, [](char32_t c) { return !IsLetter(c); }));
  if (name == "capitalize") return Text(budget, line, Titled(text, [](char32_t) { return false; }));
  if (name == "startswith" || name == "endswith") {
    const V* what = args.Get(0, "prefix");
    std::vector<V> all;
    if (what != nullptr && what->kind == V::kList && what->list->tuple) {
      all = what->list->items;
    } else if (what != nullptr) {
      all.push_back(*what);
    }
    bool found = false;
    for (const V& v : all) {
      if (v.kind != V::kString) return Wrong(line, fmt::format("{} of {}", name, v.TypeName()));
      found = found || (name == "startswith" ? text.starts_with(*v.text) : text.ends_with(*v.text));
    }
    if (all.empty()) return Wrong(line, name + " of nothing");
    return V::Bool(found);
  }
  if (name == "replace") {
    LQ_ASSIGN_OR_RETURN(const std::string* from, StringArgument(args, 0, "old", "replace"));
    LQ_ASSIGN_OR_RETURN(const std::string* to, StringArgument(args, 1, "new", "replace"));
    const V* count = args.Get(2, "count");
    return Replace(budget, line, text, *from, *to, count != nullptr && count->IsNumber() ? count->integer : -1);
  }
  if (name == "find" || name == "rfind" || name == "count" || name == "removeprefix" || name == "removesuffix") {
    LQ_ASSIGN_OR_RETURN(const std::string* what, StringArgument(args, 0, "sub", name));
    if (args.positional.size() > 1) return Unknown(line, "argument", "start");
    if (name == "removeprefix") return Text(budget, line, text.starts_with(*what) ? text.substr(what->size()) : text);
    if (name == "removesuffix")
      return Text(budget, line, text.ends_with(*what) ? text.substr(0, text.size() - what->size()) : text);
    if (name == "count") {
      if (what->empty()) return V::Int(static_cast<int64_t>(CountCharacters(text)) + 1);
      int64_t n = 0;
      for (size_t at = 0; (at = FindText(text, *what, at)) != text.npos; at += what->size()) ++n;
      return V::Int(n);
    }
    const size_t at = name == "find" ? FindText(text, *what) : FindLast(text, *what);
    if (at == text.npos) return V::Int(-1);
    return V::Int(static_cast<int64_t>(CountCharacters(std::string_view(text).substr(0, at))));
  }
  if (name == "join") {
    if (args.positional.size() != 1) return Wrong(line, "join needs one list");
    LQ_ASSIGN_OR_RETURN(const std::vector<V> items, TemplateItems(budget, line, args.positional[0]));
    std::string out;
    for (size_t i = 0; i < items.size(); ++i) {
      if (items[i].kind != V::kString) return Wrong(line, fmt::format("join of {}", items[i].TypeName()));
      if (i > 0) out += text;
      out += *items[i].text;
      if (out.size() > budget.bytes_left()) break;
    }
    return Text(budget, line, std::move(out));
  }
  if (name == "isdigit" || name == "isspace" || name == "isalpha" || name == "isupper" || name == "islower") {
    bool all = !text.empty(), cased = false;
    for (size_t at = 0; at < text.size();) {
      const Utf8Step step = NextUtf8(std::string_view(text).substr(at));
      at += static_cast<size_t>(step.bytes);
      const utf8proc_category_t category = utf8proc_category(static_cast<utf8proc_int32_t>(step.code_point));
      const bool upper = category == UTF8PROC_CATEGORY_LU, lower = category == UTF8PROC_CATEGORY_LL;
      cased = cased || upper || lower;
      all = all && (name == "isdigit"   ? category == UTF8PROC_CATEGORY_ND
                    : name == "isspace" ? IsPythonSpace(step.code_point)
                    : name == "isalpha" ? category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO
                    : name == "isupper" ? !lower
                                        : !upper);
    }
    return V::Bool(all && (cased || (name != "isupper" && name != "islower")));
  }
  if (name == "splitlines") {
    std::vector<V> lines;
    std::string_view rest = text;
    while (!rest.empty()) {
      const size_t end = std::min(rest.find_first_of("\n\r"), rest.size());
      lines.push_back(V::String(std::string(rest.substr(0, end))));
      rest = rest.substr(std::min(rest.size(), end + (rest.substr(end).starts_with("\r\n") ? 2 : 1)));
    }
    LQ_RETURN_IF_ERROR(budget.Charge(line, 1, text.size()));
    return List(budget, line, std::move(lines));
  }
  return Unknown(line, "method of a string", name);
}

constexpr std::string_view kStringMethods[] = {
    "strip",        "lstrip",     "rstrip",   "split",   "rsplit",  "upper",   "lower",   "title",
    "capitalize",   "startswith", "endswith", "replace", "find",    "rfind",   "count",   "removeprefix",
    "removesuffix", "join",       "isdigit",  "isspace", "isalpha", "isupper", "islower", "splitlines"};
constexpr std::string_view kDictMethods[] = {"items", "keys", "values", "get"};
constexpr std::string_view kListMethods[] = {"index", "count"};

Result<V> DictMethod(Budget& budget, const std::string& name, const V& object, const Args& args) {
  const int line = args.line;
  if (name == "get") {
    const V* key = args.Get(0, "key");
    const V* other = args.Get(1, "default");
    if (key == nullptr) return Wrong(line, "get without a key");
    const V* found = key->kind == V::kString ? object.dict->Find(*key->text) : nullptr;
    return found != nullptr ? *found : other != nullptr ? *other : V::None();
  }
  std::vector<V> items;
  for (const auto& [key, value] : object.dict->items) {
    if (name == "values") {
      items.push_back(value);
      continue;
    }
    LQ_ASSIGN_OR_RETURN(V text, Text(budget, line, key));
    if (name == "items") {
      LQ_ASSIGN_OR_RETURN(text, List(budget, line, {text, value}, true));
    }
    items.push_back(std::move(text));
  }
  return List(budget, line, std::move(items));
}

// select, reject and their attr forms: the items that pass a test.
Result<V> Select(Budget& budget, const std::string& name, const std::vector<V>& items, const Args& args) {
  const bool attribute = name.ends_with("attr");
  const bool keep = name.starts_with("select");
  const size_t skip = attribute ? 1 : 0;
  std::string path;
  if (attribute) {
    LQ_ASSIGN_OR_RETURN(const std::string* text, StringArgument(args, 0, "", name));
    path = *text;
  }
  Args inner{args.line, {}, {}};
  std::string test;
  if (args.positional.size() > skip) {
    LQ_ASSIGN_OR_RETURN(const std::string* text, StringArgument(args, skip, "", name));
    test = *text;
    inner.positional.assign(args.positional.begin() + static_cast<int64_t>(skip) + 1, args.positional.end());
  }
  std::vector<V> out;
  for (const V& item : items) {
    V v = item;
    if (attribute) {
      LQ_ASSIGN_OR_RETURN(v, Attribute(args.line, item, path));
    }
    bool passes = v.Truth();
    if (!test.empty()) {
      LQ_ASSIGN_OR_RETURN(passes, ApplyTemplateTest(budget, test, v, inner));
    }
    if (passes == keep) out.push_back(item);
  }
  return List(budget, args.line, std::move(out));
}

Result<V> Map(Budget& budget, const std::vector<V>& items, const Args& args) {
  std::vector<V> out;
  const V* attribute = args.Get(SIZE_MAX, "attribute");
  const V* other = args.Get(SIZE_MAX, "default");
  Args inner{args.line, {}, args.named};
  std::string filter;
  if (attribute == nullptr) {
    LQ_ASSIGN_OR_RETURN(const std::string* text, StringArgument(args, 0, "", "map"));
    filter = *text;
    inner.positional.assign(args.positional.begin() + 1, args.positional.end());
  } else if (attribute->kind != V::kString) {
    return Wrong(args.line, "map needs the name of an attribute");
  }
  for (const V& item : items) {
    V v;
    if (attribute != nullptr) {
      LQ_ASSIGN_OR_RETURN(v, Attribute(args.line, item, *attribute->text));
      if (v.kind == V::kUndefined && other != nullptr) v = *other;
    } else {
      LQ_ASSIGN_OR_RETURN(v, ApplyTemplateFilter(budget, filter, item, inner));
    }
    out.push_back(std::move(v));
  }
  return List(budget, args.line, std::move(out));
}

bool Flag(const Args& args, size_t i, std::string_view name, bool if_absent) {
  const V* v = args.Get(i, name);
  return v == nullptr ? if_absent : v->Truth();
}

// Keys to order by: an attribute, small letters.
Result<std::vector<V>> SortKeys(const std::vector<V>& items, const Args& args, const V* attribute,
                                bool case_sensitive) {
  std::vector<V> keys;
  for (const V& item : items) {
    V key = item;
    if (attribute != nullptr && attribute->kind == V::kString) {
      LQ_ASSIGN_OR_RETURN(key, Attribute(args.line, item, *attribute->text));
    }
    if (key.kind == V::kString && !case_sensitive) key = V::String(Case(*key.text, false));
    keys.push_back(std::move(key));
  }
  return keys;
}

// Indices of `keys` in stable order; equal keys stay, also under `reverse`.
Result<std::vector<size_t>> Order(Budget& budget, int line, const std::vector<V>& keys, bool reverse) {
  std::vector<size_t> order(keys.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  LQ_RETURN_IF_ERROR(budget.Charge(line, keys.size() * 16, 0));
  for (size_t i = 0; i + 1 < keys.size(); ++i) LQ_RETURN_IF_ERROR(TemplateLess(line, keys[i], keys[i + 1]).status());
  const auto less = [&](size_t a, size_t b) {
    const Result<bool> is = TemplateLess(line, keys[a], keys[b]);
    return is.ok() && *is;
  };
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    if (reverse ? less(b, a) : less(a, b)) return true;
    return a < b && !(reverse ? less(a, b) : less(b, a));
  });
  return order;
}

Result<V> ListFilter(Budget& budget, const std::string& name, const V& value, const Args& args) {
  const int line = args.line;
  LQ_ASSIGN_OR_RETURN(std::vector<V> items, TemplateItems(budget, line, value));
  if (name == "list") return List(budget, line, std::move(items));
  if (name == "first" || name == "last") {
    if (items.empty()) return V::Undefined("the " + name + " of nothing");
    return name == "first" ? items.front() : items.back();
  }
  if (name == "map") return Map(budget, items, args);
  if (name == "select" || name == "reject" || name == "selectattr" || name == "rejectattr")
    return Select(budget, name, items, args);
  if (name == "join") {
    const V* attribute = args.Get(1, "attribute");
    std::string separator;
    if (const V* given = args.Get(0, "d"); given != nullptr) {
      LQ_ASSIGN_OR_RETURN(separator, TemplateString(budget, line, *given));
    }
    std::string out;
    for (size_t i = 0; i < items.size(); ++i) {
      V item = items[i];
      if (attribute != nullptr && attribute->kind == V::kString) {
        LQ_ASSIGN_OR_RETURN(item, Attribute(line, item, *attribute->text));
      }
      LQ_ASSIGN_OR_RETURN(const std::string text, TemplateString(budget, line, item));
      if (i > 0) out += separator;
      out += text;
      if (out.size() > budget.bytes_left()) break;
    }
    return Text(budget, line, std::move(out));
  }
  if (name == "reverse") {
    std::reverse(items.begin(), items.end());
    return List(budget, line, std::move(items));
  }
  if (name == "sort") {
    LQ_ASSIGN_OR_RETURN(const std::vector<V> keys,
                        SortKeys(items, args, args.Get(2, "attribute"), Flag(args, 1, "case_sensitive", false)));
    LQ_ASSIGN_OR_RETURN(const std::vector<size_t> order, Order(budget, line, keys, Flag(args, 0, "reverse", false)));
    std::vector<V> out;
    for (const size_t i : order) out.push_back(items[i]);
    return List(budget, line, std::move(out));
  }
  if (name == "unique") {
    LQ_ASSIGN_OR_RETURN(const std::vector<V> keys,
                        SortKeys(items, args, args.Get(1, "attribute"), Flag(args, 0, "case_sensitive", false)));
    std::vector<V> out;
    std::vector<size_t> kept;
    for (size_t i = 0; i < items.size(); ++i) {
      LQ_RETURN_IF_ERROR(budget.Charge(line, kept.size() + 1, 0));
      if (std::any_of(kept.begin(), kept.end(), [&](size_t k) { return PythonEqual(keys[k], keys[i], &budget.steps); }))
        continue;
      kept.push_back(i);
      out.push_back(items[i]);
    }
    return List(budget, line, std::move(out));
  }
  if (name == "min" || name == "max") {
    if (items.empty()) return V::Undefined("the " + name + " of nothing");
    size_t best = 0;
    for (size_t i = 1; i < items.size(); ++i) {
      LQ_ASSIGN_OR_RETURN(const bool less, name == "min" ? TemplateLess(line, items[i], items[best])
                                                         : TemplateLess(line, items[best], items[i]));
      if (less) best = i;
    }
    return items[best];
  }
  if (name == "sum") {
    int64_t total = 0;
    double real = 0;
    bool is_real = false;
    for (const V& item : items) {
      if (!item.IsNumber()) return Wrong(line, fmt::format("sum of {}", item.TypeName()));
      is_real = is_real || item.kind == V::kFloat;
      real += item.AsDouble();
      if (__builtin_add_overflow(total, item.integer, &total))
        return TemplateError(Code::kOutOfRange, line, "a sum beyond 64 bits");
    }
    return is_real ? V::Float(real) : V::Int(total);
  }
  return Unknown(line, "filter", name);
}

Result<V> Indent(Budget& budget, std::string_view text, const Args& args) {
  std::string indent(4, ' ');
  if (const V* width = args.Get(0, "width"); width != nullptr) {
    if (width->kind == V::kString) {
      indent = *width->text;
    } else if (width->integer >= 0 && width->integer <= 1024) {
      indent.assign(static_cast<size_t>(width->integer), ' ');
    } else {
      return Wrong(args.line, "indent by more than 1024");
    }
  }
  const bool first = Flag(args, 1, "first", false), blank = Flag(args, 2, "blank", false);
  std::string out;
  for (size_t at = 0; at <= text.size() && out.size() <= budget.bytes_left();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    if ((at == 0 && first) || (at > 0 && (blank || end > at))) out += indent;
    out.append(text.substr(at, end - at));
    if (end < text.size()) out += '\n';
    at = end + 1;
  }
  return Text(budget, args.line, std::move(out));
}

Result<V> ToJson(Budget& budget, const V& value, const Args& args) {
  int indent = -1;
  if (const V* given = args.Get(1, "indent"); given != nullptr && given->kind != V::kNone) {
    if (given->kind != V::kInt || given->integer < 0 || given->integer > 64)
      return Wrong(args.line, "indent is not 0..64");
    indent = static_cast<int>(given->integer);
  }
  for (const auto& [name, given] : args.named) {
    if (name == "sort_keys" && given.Truth()) return Unknown(args.line, "argument", name);
    if (name == "separators" && given.kind != V::kNone) return Unknown(args.line, "argument", name);
    if (name == "ensure_ascii" && given.Truth()) return Unknown(args.line, "argument", name);
  }
  std::string out;
  if (!AppendJson(value, indent, 0, budget.bytes_left(), &out) && out.size() <= budget.bytes_left())
    return Wrong(args.line, fmt::format("{} (or something in it) has no JSON", value.TypeName()));
  return Text(budget, args.line, std::move(out));
}

Result<V> ToNumber(Budget& budget, const std::string& name, const V& value, const Args& args) {
  LQ_RETURN_IF_ERROR(budget.Charge(args.line, 1, 0));
  const V* given = args.Get(0, "default");
  if (name == "int") {
    const V other = given != nullptr ? *given : V::Int(0);
    if (value.kind == V::kInt || value.kind == V::kBool) return V::Int(value.integer);
    double real = value.real;
    if (value.kind == V::kString) {
      const std::string_view text = StripPython(*value.text, true, true);
      int64_t parsed = 0;
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), parsed);
      if (error == std::errc() && end == text.data() + text.size()) return V::Int(parsed);
      const auto [real_end, real_error] = std::from_chars(text.data(), text.data() + text.size(), real);
      if (real_error != std::errc() || real_end != text.data() + text.size()) return other;
    } else if (value.kind != V::kFloat) {
      return other;
    }
    if (!(std::abs(real) < 9e18)) return other;
    return V::Int(static_cast<int64_t>(real));
  }
  const V other = given != nullptr ? *given : V::Float(0);
  if (value.IsNumber()) return V::Float(value.AsDouble());
  if (value.kind != V::kString) return other;
  const std::string_view text = StripPython(*value.text, true, true);
  double real = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), real);
  return error == std::errc() && end == text.data() + text.size() ? V::Float(real) : other;
}

Result<V> NumberFilter(const std::string& name, const V& value, const Args& args) {
  if (!value.IsNumber()) return Wrong(args.line, fmt::format("{} of {}", name, value.TypeName()));
  if (name == "abs") {
    if (value.kind == V::kFloat) return V::Float(std::abs(value.real));
    if (value.integer == INT64_MIN) return TemplateError(Code::kOutOfRange, args.line, "abs beyond 64 bits");
    return V::Int(std::abs(value.integer));
  }
  const V* digits = args.Get(0, "precision");
  if (args.Get(1, "method") != nullptr) return Unknown(args.line, "argument", "method");
  const double scale = std::pow(10.0, digits != nullptr && digits->IsNumber()
                                          ? static_cast<double>(std::clamp<int64_t>(digits->integer, -300, 300))
                                          : 0.0);
  const double rounded = std::nearbyint(value.AsDouble() * scale) / scale;
  return V::Float(std::isfinite(rounded) ? rounded : value.AsDouble());
}

}  // namespace

size_t CountCharacters(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

Status TemplateBudget::Charge(int line, size_t n_steps, size_t n_bytes) {
  steps -= static_cast<int64_t>(std::min<size_t>(n_steps, INT32_MAX));
  bytes -= static_cast<int64_t>(std::min<size_t>(n_bytes, INT64_MAX / 4));
  if (steps < 0) return TemplateError(Code::kOutOfRange, line, "more steps than the limit");
  if (bytes < 0) return TemplateError(Code::kOutOfRange, line, "more text and values than the limit");
  return {};
}

Status TemplateBudget::Look(int line, const V& value) {
  return Charge(line, 1 + (value.kind == V::kString ? value.text->size() / kTemplateBytesAStep : 0), 0);
}

Status TemplateBudget::Look(int line, const V& value, const Args& args) {
  LQ_RETURN_IF_ERROR(Look(line, value));
  for (const V& v : args.positional) LQ_RETURN_IF_ERROR(Look(line, v));
  for (const auto& [name, v] : args.named) LQ_RETURN_IF_ERROR(Look(line, v));
  return {};
}

const V* Args::Get(size_t i, std::string_view name) const {
  if (i < positional.size()) return &positional[i];
  for (const auto& [key, value] : named)
    if (key == name) return &value;
  return nullptr;
}

Result<std::string> TemplateString(Budget& budget, int line, const V& value) {
  std::string out;
  if (value.kind == V::kString) {
    out = *value.text;
  } else {
    AppendPython(value, false, budget.bytes_left(), &out);
  }
  LQ_RETURN_IF_ERROR(budget.Charge(line, 1, out.size()));
  return out;
}

Result<std::vector<V>> TemplateItems(Budget& budget, int line, const V& value) {
  std::vector<V> items;
  if (value.kind == V::kUndefined) return items;
  if (value.kind == V::kList) {
    LQ_RETURN_IF_ERROR(budget.Charge(line, value.list->items.size(), value.list->items.size() * kItemBytes));
    return value.list->items;
  }
  if (value.kind == V::kDict) {
    for (const auto& [key, item] : value.dict->items) {
      LQ_RETURN_IF_ERROR(budget.Charge(line, 1, key.size() + kItemBytes));
      items.push_back(V::String(key));
    }
    return items;
  }
  if (value.kind == V::kString) {
    const std::string_view text = *value.text;
    LQ_RETURN_IF_ERROR(budget.Charge(line, text.size(), text.size() * kItemBytes));
    for (size_t at = 0; at < text.size();) {
      const auto n = static_cast<size_t>(NextUtf8(text.substr(at)).bytes);
      items.push_back(V::String(std::string(text.substr(at, n))));
      at += n;
    }
    return items;
  }
  return Wrong(line, fmt::format("{} is not iterable", value.TypeName()));
}

Result<V> TemplateItem(int line, const V& object, const V& key) {
  std::string missing;
  AppendPython(key, true, 80, &missing);
  switch (object.kind) {
    case V::kUndefined:
      return Wrong(line, fmt::format("{} is undefined", Excerpt(*object.text, 80)));
    case V::kDict:
    case V::kNamespace: {
      const V* found = key.kind == V::kString ? object.dict->Find(*key.text) : nullptr;
      if (found != nullptr) return *found;
      break;
    }
    case V::kList:
    case V::kString: {
      if (key.kind != V::kInt) break;
      const auto n =
          static_cast<int64_t>(object.kind == V::kList ? object.list->items.size() : CountCharacters(*object.text));
      const int64_t at = key.integer < 0 ? key.integer + n : key.integer;
      if (at < 0 || at >= n) break;
      if (object.kind == V::kList) return object.list->items[static_cast<size_t>(at)];
      std::string_view text = *object.text;
      for (int64_t i = 0; i < at; ++i) text.remove_prefix(static_cast<size_t>(NextUtf8(text).bytes));
      return V::String(std::string(text.substr(0, static_cast<size_t>(NextUtf8(text).bytes))));
    }
    default:
      break;
  }
  return V::Undefined(fmt::format("{} object has no {}", object.TypeName(), missing));
}

Result<bool> TemplateLess(int line, const V& a, const V& b) {
  if (a.IsNumber() && b.IsNumber())
    return a.kind == V::kFloat || b.kind == V::kFloat ? a.AsDouble() < b.AsDouble() : a.integer < b.integer;
  if (a.kind == V::kString && b.kind == V::kString) return *a.text < *b.text;
  return Wrong(line, fmt::format("{} and {} have no order", a.TypeName(), b.TypeName()));
}

Result<bool> TemplateContains(Budget& budget, int line, const V& haystack, const V& needle) {
  switch (haystack.kind) {
    case V::kUndefined:
      return false;
    case V::kString:
      if (needle.kind != V::kString) return Wrong(line, fmt::format("{} in a string", needle.TypeName()));
      LQ_RETURN_IF_ERROR(budget.Look(line, haystack));
      return FindText(*haystack.text, *needle.text) != std::string::npos;
    case V::kDict:
      LQ_RETURN_IF_ERROR(budget.Look(line, needle));
      return needle.kind == V::kString && haystack.dict->Find(*needle.text) != nullptr;
    case V::kList: {
      const auto& items = haystack.list->items;
      const bool found = std::any_of(items.begin(), items.end(),
                                     [&](const V& item) { return PythonEqual(item, needle, &budget.steps); });
      LQ_RETURN_IF_ERROR(budget.Charge(line, 1, 0));
      return found;
    }
    default:
      return Wrong(line, fmt::format("{} holds nothing", haystack.TypeName()));
  }
}

bool HasTemplateMethod(const V& object, std::string_view name) {
  const auto among = [&](const auto& names) {
    return std::find(std::begin(names), std::end(names), name) != std::end(names);
  };
  return object.kind == V::kString ? among(kStringMethods)
         : object.kind == V::kDict ? among(kDictMethods)
                                   : object.kind == V::kList && among(kListMethods);
}

Result<V> CallTemplateMethod(Budget& budget, const std::string& name, const V& object, const Args& args) {
  LQ_RETURN_IF_ERROR(budget.Look(args.line, object, args));
  if (!HasTemplateMethod(object, name))
    return Unknown(args.line, fmt::format("method of a {}", object.TypeName()), name);
  if (object.kind == V::kString) return StringMethod(budget, name, *object.text, args);
  if (object.kind == V::kDict) return DictMethod(budget, name, object, args);
  const V* what = args.Get(0, "");
  if (what == nullptr) return Wrong(args.line, name + " of nothing");
  int64_t count = 0;
  for (size_t i = 0; i < object.list->items.size(); ++i) {
    if (!PythonEqual(object.list->items[i], *what, &budget.steps)) continue;
    if (name == "index") return V::Int(static_cast<int64_t>(i));
    ++count;
  }
  LQ_RETURN_IF_ERROR(budget.Charge(args.line, 1, 0));
  if (name == "index") return Wrong(args.line, "index of what is not in the list");
  return V::Int(count);
}

Result<V> ApplyTemplateFilter(Budget& budget, const std::string& name, const V& value, const Args& args) {
  const int line = args.line;
  LQ_RETURN_IF_ERROR(budget.Look(line, value, args));
  if (name == "default" || name == "d") {
    if (value.kind == V::kUndefined || (Flag(args, 1, "boolean", false) && !value.Truth())) {
      const V* other = args.Get(0, "default_value");
      return other != nullptr ? *other : V::String("");
    }
    return value;
  }
  if (name == "length" || name == "count") {
    switch (value.kind) {
      case V::kUndefined:
        return V::Int(0);
      case V::kString:
        return V::Int(static_cast<int64_t>(CountCharacters(*value.text)));
      case V::kList:
        return V::Int(static_cast<int64_t>(value.list->items.size()));
      case V::kDict:
        return V::Int(static_cast<int64_t>(value.dict->items.size()));
      default:
        return Wrong(line, fmt::format("{} has no length", value.TypeName()));
    }
  }
  if (name == "tojson") return ToJson(budget, value, args);
  if (name == "int" || name == "float") return ToNumber(budget, name, value, args);
  if (name == "abs" || name == "round") return NumberFilter(name, value, args);
  if (name == "items" || name == "dictsort") {
    if (value.kind == V::kUndefined && name == "items") return List(budget, line, {});
    if (value.kind != V::kDict) return Wrong(line, fmt::format("{} of {}", name, value.TypeName()));
    LQ_ASSIGN_OR_RETURN(const V items, DictMethod(budget, "items", value, {line, {}, {}}));
    if (name == "items") return items;
    Args order{line,
               {},
               {{"attribute", V::String("0")},
                {"case_sensitive", V::Bool(Flag(args, 0, "case_sensitive", false))},
                {"reverse", V::Bool(Flag(args, 2, "reverse", false))}}};
    if (args.Get(1, "by") != nullptr) return Unknown(line, "argument", "by");
    return ListFilter(budget, "sort", items, order);
  }
  if (name == "trim" || name == "upper" || name == "lower" || name == "capitalize" || name == "title" ||
      name == "string" || name == "safe" || name == "indent" || name == "replace" || name == "escape" || name == "e") {
    LQ_ASSIGN_OR_RETURN(const std::string text, TemplateString(budget, line, value));
    if (name == "trim") return Text(budget, line, std::string(StripCharacters(text, args.Get(0, "chars"), true, true)));
    if (name == "upper" || name == "lower") return Text(budget, line, Case(text, name == "upper"));
    if (name == "capitalize") return Text(budget, line, Titled(text, [](char32_t) { return false; }));
    if (name == "title")
      return Text(budget, line, Titled(text, [](char32_t c) {
                    return IsPythonSpace(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<';
                  }));
    if (name == "indent") return Indent(budget, text, args);
    if (name == "replace") {
      LQ_ASSIGN_OR_RETURN(const std::string* from, StringArgument(args, 0, "old", "replace"));
      LQ_ASSIGN_OR_RETURN(const std::string* to, StringArgument(args, 1, "new", "replace"));
      const V* count = args.Get(2, "count");
      return Replace(budget, line, text, *from, *to, count != nullptr && count->kind == V::kInt ? count->integer : -1);
    }
    if (name == "escape" || name == "e") {
      std::string out;
      for (const char c : text) {
        if (c == '&')
          out += "&amp;";
        else if (c == '<')
          out += "&lt;";
        else if (c == '>')
          out += "&gt;";
        else if (c == '\'')
          out += "&#39;";
        else if (c == '"')
          out += "&#34;";
        else
          out += c;
      }
      return Text(budget, line, std::move(out));
    }
    return V::String(text);
  }
  if (name == "reverse" && value.kind == V::kString) {
    LQ_ASSIGN_OR_RETURN(const V reversed, ListFilter(budget, name, value, args));
    return ListFilter(budget, "join", reversed, {line, {}, {}});
  }
  return ListFilter(budget, name, value, args);
}

Result<bool> ApplyTemplateTest(Budget& budget, const std::string& name, const V& value, const Args& args) {
  const int line = args.line;
  LQ_RETURN_IF_ERROR(budget.Look(line, value, args));
  if (name == "defined") return value.kind != V::kUndefined;
  if (name == "undefined") return value.kind == V::kUndefined;
  if (name == "none") return value.kind == V::kNone;
  if (name == "string") return value.kind == V::kString;
  if (name == "mapping") return value.kind == V::kDict;
  if (name == "sequence" || name == "iterable")
    return value.kind == V::kString || value.kind == V::kList || value.kind == V::kDict || value.kind == V::kUndefined;
  if (name == "number") return value.IsNumber();
  if (name == "integer") return value.kind == V::kInt;
  if (name == "float") return value.kind == V::kFloat;
  if (name == "boolean") return value.kind == V::kBool;
  if (name == "true" || name == "false") return value.kind == V::kBool && value.integer == (name == "true" ? 1 : 0);
  if (name == "callable") return value.kind == V::kMacro;
  if (name == "odd" || name == "even") {
    if (value.kind != V::kInt) return Wrong(line, fmt::format("{} of {}", name, value.TypeName()));
    return (value.integer % 2 != 0) == (name == "odd");
  }
  if (name == "lower" || name == "upper") {
    LQ_ASSIGN_OR_RETURN(const std::string text, TemplateString(budget, line, value));
    LQ_ASSIGN_OR_RETURN(const V is, StringMethod(budget, "is" + name, text, args));
    return is.Truth();
  }
  const V* other = args.Get(0, "");
  const bool known = name == "eq" || name == "equalto" || name == "ne" || name == "sameas" || name == "in" ||
                     name == "lt" || name == "lessthan" || name == "gt" || name == "greaterthan" || name == "le" ||
                     name == "ge" || name == "divisibleby" || name == "==" || name == "!=";
  if (!known) return Unknown(line, "test", name);
  if (other == nullptr) return Wrong(line, fmt::format("test {} needs a value", name));
  if (name == "eq" || name == "equalto" || name == "==" || name == "ne" || name == "!=" || name == "sameas") {
    const bool same_kind = name != "sameas" || value.kind == other->kind;
    const bool equal = same_kind && PythonEqual(value, *other, &budget.steps);
    LQ_RETURN_IF_ERROR(budget.Charge(line, 0, 0));
    return equal == (name != "ne" && name != "!=");
  }
  if (name == "in") return TemplateContains(budget, line, *other, value);
  if (name == "divisibleby") {
    if (value.kind != V::kInt || other->kind != V::kInt || other->integer == 0 || other->integer == -1)
      return Wrong(line, "divisibleby needs integers other than 0 and -1");
    return value.integer % other->integer == 0;
  }
  if (name == "lt" || name == "lessthan") return TemplateLess(line, value, *other);
  if (name == "gt" || name == "greaterthan") return TemplateLess(line, *other, value);
  LQ_ASSIGN_OR_RETURN(const bool less,
                      name == "ge" ? TemplateLess(line, value, *other) : TemplateLess(line, *other, value));
  return !less;
}

}  // namespace livequant
