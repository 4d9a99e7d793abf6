// model/config_fields.cc: see config_fields.h.
#include "model/config_fields.h"

#include <fmt/format.h>

#include <limits>

#include "io/json.h"

namespace livequant {

Status ConfigFields::Bad(Code code, const std::string& name, const nlohmann::json& value,
                         const std::string& limit) const {
  return Status(code, fmt::format("config.json: {}{} is {}; {}", path_, name, ExcerptOfValue(value), limit));
}

Status ConfigFields::Missing(const char* name) const {
  return Status(Code::kInvalidArgument, fmt::format("config.json: {}{} is missing", path_, name));
}

Result<int64_t> ConfigFields::Integer(const char* name, int64_t lo, int64_t hi) const {
  if (Absent(name)) return Missing(name);
  const nlohmann::json& v = object_[name];
  if (!v.is_number_integer())
    return Bad(Code::kInvalidArgument, name, v, fmt::format("an integer from {} to {} is needed", lo, hi));
  const bool beyond_int64 =
      v.is_number_unsigned() && v.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  if (beyond_int64 || v.get<int64_t>() < lo || v.get<int64_t>() > hi)
    return Bad(Code::kOutOfRange, name, v, fmt::format("must be from {} to {}", lo, hi));
  return v.get<int64_t>();
}

Result<int64_t> ConfigFields::IntegerOr(const char* name, int64_t absent, int64_t lo, int64_t hi) const {
  if (Absent(name)) return absent;
  return Integer(name, lo, hi);
}

Result<bool> ConfigFields::BooleanOr(const char* name, bool absent) const {
  if (Absent(name)) return absent;
  if (!object_[name].is_boolean()) return Bad(Code::kInvalidArgument, name, object_[name], "true or false is needed");
  return object_[name].get<bool>();
}

Result<double> ConfigFields::Number(const char* name, double lo, double hi) const {
  if (Absent(name)) return Missing(name);
  const nlohmann::json& v = object_[name];
  if (!v.is_number()) return Bad(Code::kInvalidArgument, name, v, "a number is needed");
  const double x = v.get<double>();
  if (!(x > lo && x <= hi))
    return Bad(Code::kOutOfRange, name, v, fmt::format("must be above {} and at most {}", lo, hi));
  return x;
}

Result<double> ConfigFields::NumberOr(const char* name, double absent, double lo, double hi) const {
  if (Absent(name)) return absent;
  return Number(name, lo, hi);
}

}  // namespace livequant
