// text/template_builtins.h: filters, tests and methods of chat templates. Private to text/.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "text/template_value.h"

namespace livequant {

struct TemplateArguments;

// What one rendering may still use.
struct TemplateBudget {
  int64_t steps, bytes;
  std::optional<int64_t> now;
  size_t bytes_left() const { return bytes < 0 ? 0 : static_cast<size_t>(bytes); }
  // Pays for steps and for bytes of text or values. kOutOfRange: none left.
  Status Charge(int line, size_t n_steps, size_t n_bytes);
  // Pays for reading a value, a text by its length; and the arguments with it.
  Status Look(int line, const TemplateValue& value);
  Status Look(int line, const TemplateValue& value, const TemplateArguments& arguments);
};

struct TemplateArguments {
  int line;
  std::vector<TemplateValue> positional;
  std::vector<std::pair<std::string, TemplateValue>> named;
  // The argument in place `i`, or of that name; null where it was not given.
  const TemplateValue* Get(size_t i, std::string_view name) const;
};

// value | name(arguments). kUnsupported: no such filter.
Result<TemplateValue> ApplyTemplateFilter(TemplateBudget& budget, const std::string& name, const TemplateValue& value,
                                          const TemplateArguments& arguments);
// value is name(arguments). kUnsupported: no such test.
Result<bool> ApplyTemplateTest(TemplateBudget& budget, const std::string& name, const TemplateValue& value,
                               const TemplateArguments& arguments);
// object.name(arguments) of strings, dicts and lists. kUnsupported: no such method.
Result<TemplateValue> CallTemplateMethod(TemplateBudget& budget, const std::string& name, const TemplateValue& object,
                                         const TemplateArguments& arguments);
// Whether a value of this kind has the method.
bool HasTemplateMethod(const TemplateValue& object, std::string_view name);

// Characters of a text in UTF-8.
size_t CountCharacters(std::string_view text);
// What a loop over the value sees. kInvalidArgument: not iterable.
Result<std::vector<TemplateValue>> TemplateItems(TemplateBudget& budget, int line, const TemplateValue& value);
// object[key], undefined where there is none. kInvalidArgument: object is undefined.
Result<TemplateValue> TemplateItem(int line, const TemplateValue& object, const TemplateValue& key);
// str(value), paid for.
Result<std::string> TemplateString(TemplateBudget& budget, int line, const TemplateValue& value);
// Python's a < b. kInvalidArgument: of kinds that have no order.
Result<bool> TemplateLess(int line, const TemplateValue& a, const TemplateValue& b);
// needle in haystack.
Result<bool> TemplateContains(TemplateBudget& budget, int line, const TemplateValue& haystack,
                              const TemplateValue& needle);

}  // namespace livequant
