// text/template_value.cc: Python's spelling of values: repr, JSON, shortest floats.
#include "text/template_value.h"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "text/utf8.h"

namespace livequant {
namespace {

using V = TemplateValue;

std::string PythonFloat(double v) {
  if (std::isnan(v)) return "nan";
  if (std::isinf(v)) return v < 0 ? "-inf" : "inf";
  std::array<char, 64> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), v, std::chars_format::scientific).ptr;
  std::string_view text(buffer.data(), static_cast<size_t>(end - buffer.data()));
  std::string out;
  if (text.starts_with('-')) {
    out = "-";
    text.remove_prefix(1);
  }
  const size_t e = text.find('e');
  std::string digits(text.substr(0, e));
  std::erase(digits, '.');
  int exponent = 0;
  const std::string_view power = text.substr(e + (text[e + 1] == '+' ? 2 : 1));
  std::from_chars(power.data(), power.data() + power.size(), exponent);
  const int n = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16)
    return out + digits.substr(0, 1) + (n > 1 ? "." + digits.substr(1) : "") +
           fmt::format("e{}{:02d}", exponent < 0 ? '-' : '+', std::abs(exponent));
  if (exponent < 0) return out + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  if (n <= exponent + 1) return out + digits + std::string(static_cast<size_t>(exponent + 1 - n), '0') + ".0";
  return out + digits.substr(0, static_cast<size_t>(exponent) + 1) + "." +
         digits.substr(static_cast<size_t>(exponent) + 1);
}

bool Printable(char32_t c) {
  if (c == ' ') return true;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return false;
    default:
      return true;
  }
}

void AppendRepr(std::string_view text, std::string* out) {
  const char quote = text.find('\'') != text.npos && text.find('"') == text.npos ? '"' : '\'';
  *out += quote;
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = NextUtf8(text.substr(at));
    const std::string_view bytes = text.substr(at, static_cast<size_t>(step.bytes));
    at += bytes.size();
    const auto c = static_cast<uint32_t>(step.code_point);
    if (c == static_cast<unsigned char>(quote) || c == '\\') {
      out->append("\\").append(bytes);
    } else if (c == '\n' || c == '\t' || c == '\r') {
      out->append(c == '\n' ? "\\n" : c == '\t' ? "\\t" : "\\r");
    } else if (Printable(step.code_point)) {
      out->append(bytes);
    } else {
      out->append(c < 0x100     ? fmt::format("\\x{:02x}", c)
                  : c < 0x10000 ? fmt::format("\\u{:04x}", c)
                                : fmt::format("\\U{:08x}", c));
    }
  }
  *out += quote;
}

void AppendJsonString(std::string_view text, std::string* out) {
  *out += '"';
  for (const char c : text) {
    constexpr std::string_view kFrom = "\"\\\n\r\t\f\b", kTo = "\"\\nrtfb";
    if (const size_t at = kFrom.find(c); at != kFrom.npos) {
      *out += '\\';
      *out += kTo[at];
    } else if (static_cast<unsigned char>(c) < 0x20) {
      *out += fmt::format("\\u{:04x}", static_cast<unsigned char>(c));
    } else {
      *out += c;
    }
  }
  *out += '"';
}

}  // namespace

const V* TemplateDict::Find(const std::string& key) const {
  const auto at = index.find(key);
  return at == index.end() ? nullptr : &items[at->second].second;
}
void TemplateDict::Set(const std::string& key, V value) {
  const auto [at, fresh] = index.emplace(key, items.size());
  if (fresh) {
    items.emplace_back(key, std::move(value));
  } else {
    items[at->second].second = std::move(value);
  }
}

V V::Undefined(std::string what) {
  V v;
  v.text = std::make_shared<const std::string>(std::move(what));
  return v;
}
V V::None() {
  V v;
  v.kind = kNone;
  return v;
}
V V::Bool(bool b) {
  V v;
  v.kind = kBool;
  v.integer = b ? 1 : 0;
  return v;
}
V V::Int(int64_t i) {
  V v;
  v.kind = kInt;
  v.integer = i;
  return v;
}
V V::Float(double d) {
  V v;
  v.kind = kFloat;
  v.real = d;
  return v;
}
V V::String(std::string s) {
  V v;
  v.kind = kString;
  v.text = std::make_shared<const std::string>(std::move(s));
  return v;
}

namespace {
// One more than the deepest of the items.
Status Hold(const V& item, int* depth) {
  if (item.kind == V::kNamespace || item.kind == V::kMacro)
    return Status(Code::kUnsupported, fmt::format("a {} inside a list or dict is not known here", item.TypeName()));
  const int below = item.kind == V::kList ? item.list->depth : item.kind == V::kDict ? item.dict->depth : 0;
  *depth = std::max(*depth, below + 1);
  if (*depth <= ChatTemplateLimits::kMaxDepth) return {};
  return Status(Code::kOutOfRange, fmt::format("values deeper than {}", ChatTemplateLimits::kMaxDepth));
}
}  // namespace

Result<V> V::List(std::vector<V> items, bool tuple) {
  auto list = std::make_shared<TemplateList>();
  for (const V& item : items) LQ_RETURN_IF_ERROR(Hold(item, &list->depth));
  list->items = std::move(items);
  list->tuple = tuple;
  V v;
  v.kind = kList;
  v.list = std::move(list);
  return v;
}
Result<V> V::Dict(std::shared_ptr<TemplateDict> dict) {
  for (const auto& [key, item] : dict->items) LQ_RETURN_IF_ERROR(Hold(item, &dict->depth));
  V v;
  v.kind = kDict;
  v.dict = std::move(dict);
  return v;
}

Result<V> V::FromJson(const nlohmann::ordered_json& v, int depth) {
  if (depth >= ChatTemplateLimits::kMaxDepth)
    return Status(Code::kOutOfRange, fmt::format("values deeper than {}", ChatTemplateLimits::kMaxDepth));
  const auto utf8 = [](const std::string& text) -> Status {
    const size_t at = InvalidUtf8At(text);
    if (at == text.npos) return {};
    return Status(Code::kInvalidArgument, fmt::format("a string is not UTF-8 at byte {} of {}", at, text.size()));
  };
  switch (v.type()) {
    case nlohmann::json::value_t::boolean:
      return Bool(v.get<bool>());
    case nlohmann::json::value_t::number_integer:
      return Int(v.get<int64_t>());
    case nlohmann::json::value_t::number_unsigned:
      if (v.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) return Float(v.get<double>());
      return Int(v.get<int64_t>());
    case nlohmann::json::value_t::number_float:
      return Float(v.get<double>());
    case nlohmann::json::value_t::string:
      LQ_RETURN_IF_ERROR(utf8(v.get_ref<const std::string&>()));
      return String(v.get<std::string>());
    case nlohmann::json::value_t::array: {
      std::vector<V> items;
      for (const auto& item : v) {
        LQ_ASSIGN_OR_RETURN(V inner, FromJson(item, depth + 1));
        items.push_back(std::move(inner));
      }
      return List(std::move(items));
    }
    case nlohmann::json::value_t::object: {
      auto dict = std::make_shared<TemplateDict>();
      for (const auto& [key, item] : v.items()) {
        LQ_RETURN_IF_ERROR(utf8(key));
        LQ_ASSIGN_OR_RETURN(V inner, FromJson(item, depth + 1));
        dict->Set(key, std::move(inner));
      }
      return Dict(std::move(dict));
    }
    default:
      return None();
  }
}

bool V::Truth() const {
  switch (kind) {
    case kUndefined:
    case kNone:
      return false;
    case kBool:
    case kInt:
      return integer != 0;
    case kFloat:
      return real != 0;
    case kString:
      return !text->empty();
    case kList:
      return !list->items.empty();
    case kDict:
      return !dict->items.empty();
    default:
      return true;
  }
}

const char* V::TypeName() const {
  switch (kind) {
    case kUndefined:
      return "undefined";
    case kNone:
      return "NoneType";
    case kBool:
      return "bool";
    case kInt:
      return "int";
    case kFloat:
      return "float";
    case kString:
      return "str";
    case kList:
      return list->tuple ? "tuple" : "list";
    case kDict:
      return "dict";
    case kNamespace:
      return "namespace";
    default:
      return "macro";
  }
}

bool AppendPython(const V& v, bool repr, size_t limit, std::string* out) {
  switch (v.kind) {
    case V::kUndefined:
      if (repr) *out += "Undefined";
      break;
    case V::kNone:
      *out += "None";
      break;
    case V::kBool:
      *out += v.integer != 0 ? "True" : "False";
      break;
    case V::kInt:
      *out += std::to_string(v.integer);
      break;
    case V::kFloat:
      *out += PythonFloat(v.real);
      break;
    case V::kString:
      if (repr) {
        AppendRepr(*v.text, out);
      } else {
        *out += *v.text;
      }
      break;
    case V::kList:
      *out += v.list->tuple ? '(' : '[';
      for (size_t i = 0; i < v.list->items.size(); ++i) {
        if (i > 0) *out += ", ";
        if (!AppendPython(v.list->items[i], true, limit, out)) return false;
      }
      if (v.list->tuple && v.list->items.size() == 1) *out += ',';
      *out += v.list->tuple ? ')' : ']';
      break;
    case V::kDict:
      *out += '{';
      for (size_t i = 0; i < v.dict->items.size(); ++i) {
        if (i > 0) *out += ", ";
        AppendRepr(v.dict->items[i].first, out);
        *out += ": ";
        if (!AppendPython(v.dict->items[i].second, true, limit, out)) return false;
      }
      *out += '}';
      break;
    default:  // Python shows addresses; nobody wants them in a prompt
      *out += fmt::format("<{}>", v.TypeName());
  }
  return out->size() <= limit;
}

bool AppendJson(const V& v, int indent, int level, size_t limit, std::string* out) {
  const auto line = [&](int depth) {
    if (indent < 0) return;
    *out += '\n';
    out->append(static_cast<size_t>(indent) * static_cast<size_t>(depth), ' ');
  };
  const auto all = [&](size_t count, char open, char close, auto&& each) {
    *out += open;
    for (size_t i = 0; i < count; ++i) {
      if (i > 0) *out += indent < 0 ? ", " : ",";
      line(level + 1);
      if (!each(i) || out->size() > limit) return false;
    }
    if (count > 0) line(level);
    *out += close;
    return true;
  };
  switch (v.kind) {
    case V::kBool:
      *out += v.integer != 0 ? "true" : "false";
      break;
    case V::kInt:
      *out += std::to_string(v.integer);
      break;
    case V::kFloat:
      *out += std::isnan(v.real)   ? "NaN"
              : std::isinf(v.real) ? (v.real < 0 ? "-Infinity" : "Infinity")
                                   : PythonFloat(v.real);
      break;
    case V::kString:
      AppendJsonString(*v.text, out);
      break;
    case V::kList:
      if (!all(v.list->items.size(), '[', ']',
               [&](size_t i) { return AppendJson(v.list->items[i], indent, level + 1, limit, out); }))
        return false;
      break;
    case V::kDict:
      if (!all(v.dict->items.size(), '{', '}', [&](size_t i) {
            AppendJsonString(v.dict->items[i].first, out);
            *out += ": ";
            return AppendJson(v.dict->items[i].second, indent, level + 1, limit, out);
          }))
        return false;
      break;
    case V::kNone:
      *out += "null";
      break;
    default:
      return false;
  }
  return out->size() <= limit;
}

bool PythonEqual(const V& a, const V& b, int64_t* steps) {
  if (--*steps < 0) return false;
  if (a.IsNumber() && b.IsNumber())
    return a.kind == V::kFloat || b.kind == V::kFloat ? a.AsDouble() == b.AsDouble() : a.integer == b.integer;
  if (a.kind != b.kind) return false;
  switch (a.kind) {
    case V::kString:
      if (a.text->size() != b.text->size()) return false;
      *steps -= static_cast<int64_t>(a.text->size() / kTemplateBytesAStep);
      return *steps >= 0 && *a.text == *b.text;
    case V::kList:
      return a.list->tuple == b.list->tuple && a.list->items.size() == b.list->items.size() &&
             std::equal(a.list->items.begin(), a.list->items.end(), b.list->items.begin(),
                        [&](const V& x, const V& y) { return PythonEqual(x, y, steps); });
    case V::kDict:
      return a.dict->items.size() == b.dict->items.size() &&
             std::all_of(a.dict->items.begin(), a.dict->items.end(), [&](const auto& item) {
               *steps -= static_cast<int64_t>(item.first.size() / kTemplateBytesAStep);
               const V* other = b.dict->Find(item.first);
               return other != nullptr && PythonEqual(item.second, *other, steps);
             });
    case V::kNamespace:
      return a.dict == b.dict;
    case V::kMacro:
      return a.node == b.node;
    default:
      return true;
  }
}

}  // namespace livequant
