// model/config_fields.h: fields of config.json, read with limits. Every error names the field with the path to it, the
// value and the limit. A null is as good as an absent field.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "base/status.h"

namespace livequant {

class ConfigFields {
 public:
  // `object` must outlive this. path: "" for the whole file, "rope_scaling." for an object in it.
  explicit ConfigFields(const nlohmann::json& object, std::string path = "")
      : object_(object), path_(std::move(path)) {}

  const nlohmann::json& json() const { return object_; }
  // Not there, or null.
  bool Absent(const char* name) const { return !object_.contains(name) || object_[name].is_null(); }
  // An integer in [lo, hi]. kInvalidArgument: absent, or no integer; kOutOfRange.
  Result<int64_t> Integer(const char* name, int64_t lo, int64_t hi) const;
  Result<int64_t> IntegerOr(const char* name, int64_t absent, int64_t lo, int64_t hi) const;
  Result<bool> BooleanOr(const char* name, bool absent) const;
  // A number in (lo, hi].
  Result<double> Number(const char* name, double lo, double hi) const;
  Result<double> NumberOr(const char* name, double absent, double lo, double hi) const;

  // "config.json: rope_scaling.factor is 0.5; must be above 1".
  Status Bad(Code code, const std::string& name, const nlohmann::json& value, const std::string& limit) const;

 private:
  Status Missing(const char* name) const;
  const nlohmann::json& object_;
  std::string path_;
};

}  // namespace livequant
