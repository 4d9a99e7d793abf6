// model/config_rope.cc: see config_rope.h.
#include "model/config_rope.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "io/json.h"

namespace livequant {
namespace {

using nlohmann::json;
constexpr double kMostTheta = 1e12;

// rope_type, or type as older files spell it.
Result<std::string> TypeOf(const ConfigFields& r) {
  std::optional<std::string> type;
  for (const char* key : {"rope_type", "type"}) {
    if (r.Absent(key)) continue;
    const json& v = r.json()[key];
    if (!v.is_string()) return r.Bad(Code::kInvalidArgument, key, v, "a name is needed");
    if (type && *type != v.get<std::string>())
      return r.Bad(Code::kInvalidArgument, key, v, fmt::format("rope_type is {}", Excerpt(*type)));
    type = v.get<std::string>();
  }
  return type.value_or("default");
}

// What a type may say, beside its name, rope_theta and partial_rotary_factor.
std::vector<std::string> FieldsOf(const std::string& type) {
  if (type == "linear") return {"factor"};
  if (type == "llama3") return {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"};
  if (type == "yarn")
    return {"factor",           "original_max_position_embeddings",
            "attention_factor", "beta_fast",
            "beta_slow",        "mscale",
            "mscale_all_dim",   "truncate"};
  return {};
}

Status ReadLlama3(const ConfigFields& r, RopeConfig& rope) {
  LQ_ASSIGN_OR_RETURN(const int64_t original, r.Integer("original_max_position_embeddings", 1, kMaxWindowRows));
  rope.original_max_positions = static_cast<int>(original);
  LQ_ASSIGN_OR_RETURN(rope.low_freq_factor, r.Number("low_freq_factor", 0, kMaxRopeFactor));
  LQ_ASSIGN_OR_RETURN(rope.high_freq_factor, r.Number("high_freq_factor", 0, kMaxRopeFactor));
  if (rope.high_freq_factor <= rope.low_freq_factor)
    return r.Bad(Code::kInvalidArgument, "high_freq_factor", rope.high_freq_factor,
                 fmt::format("must be above low_freq_factor, {}", rope.low_freq_factor));
  return {};
}

double YarnScale(double factor, double mscale) { return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0; }

Status ReadYarn(const ConfigFields& r, int64_t max_positions, RopeConfig& rope) {
  LQ_ASSIGN_OR_RETURN(const int64_t original,
                      r.IntegerOr("original_max_position_embeddings", max_positions, 1, kMaxWindowRows));
  rope.original_max_positions = static_cast<int>(original);
  if (r.Absent("factor"))
    rope.factor = std::max(1.0, static_cast<double>(max_positions) / static_cast<double>(original));
  LQ_ASSIGN_OR_RETURN(rope.beta_fast, r.NumberOr("beta_fast", 32, 0, kMaxRopeFactor));
  LQ_ASSIGN_OR_RETURN(rope.beta_slow, r.NumberOr("beta_slow", 1, 0, kMaxRopeFactor));
  if (rope.beta_fast < rope.beta_slow)
    return r.Bad(Code::kInvalidArgument, "beta_fast", rope.beta_fast,
                 fmt::format("must be at least beta_slow, {}", rope.beta_slow));
  LQ_ASSIGN_OR_RETURN(rope.truncate, r.BooleanOr("truncate", true));
  LQ_ASSIGN_OR_RETURN(const double mscale, r.NumberOr("mscale", 0, -kMaxRopeFactor, kMaxRopeFactor));
  LQ_ASSIGN_OR_RETURN(const double all_dim, r.NumberOr("mscale_all_dim", 0, -kMaxRopeFactor, kMaxRopeFactor));
  rope.attention_factor = mscale != 0 && all_dim != 0 ? YarnScale(rope.factor, mscale) / YarnScale(rope.factor, all_dim)
                                                      : YarnScale(rope.factor, 1);
  LQ_ASSIGN_OR_RETURN(rope.attention_factor, r.NumberOr("attention_factor", rope.attention_factor, 0, kMaxRopeFactor));
  return {};
}

// One object, rope_scaling or rope_parameters; theta stays out.
Result<RopeConfig> ReadObject(const ConfigFields& r, int head_dim, int64_t max_positions) {
  RopeConfig rope;
  rope.dims = head_dim;
  LQ_ASSIGN_OR_RETURN(rope.type, TypeOf(r));
  if (rope.type != "default" && FieldsOf(rope.type).empty()) {  // before the fields that only such a type would have
    const Status refused = ValidateRope(rope);
    LQ_CHECK(!refused.ok());
    return Status(refused.code(), "config.json: " + refused.message());
  }
  for (const auto& [key, value] : r.json().items()) {
    if (value.is_null() || key == "rope_type" || key == "type" || key == "rope_theta") continue;
    if (key == "partial_rotary_factor") {
      if (!value.is_number() || value.get<double>() != 1.0)
        return r.Bad(Code::kUnsupported, key, value, "only 1.0 is known here");
      continue;
    }
    const std::vector<std::string> known = FieldsOf(rope.type);
    if (std::find(known.begin(), known.end(), key) == known.end())
      return r.Bad(Code::kUnsupported, ExcerptOfKey(key), value,
                   fmt::format("RoPE type \"{}\" has no such field", rope.type));
  }
  if (rope.type == "default") return rope;
  if (rope.type != "yarn" || !r.Absent("factor") || r.Absent("original_max_position_embeddings")) {
    LQ_ASSIGN_OR_RETURN(rope.factor, r.Number("factor", 0, kMaxRopeFactor));
    if (rope.factor < 1) return r.Bad(Code::kOutOfRange, "factor", rope.factor, "must be at least 1");
  }
  if (rope.type == "llama3") LQ_RETURN_IF_ERROR(ReadLlama3(r, rope));
  if (rope.type == "yarn") LQ_RETURN_IF_ERROR(ReadYarn(r, max_positions, rope));
  return rope;
}

}  // namespace

Result<RopeConfig> ParseRope(const ConfigFields& root, int head_dim, int64_t max_positions) {
  std::optional<double> theta;
  if (!root.Absent("rope_theta")) {
    LQ_ASSIGN_OR_RETURN(theta, root.Number("rope_theta", 0, kMostTheta));
  }
  std::optional<RopeConfig> said;
  for (const char* name : {"rope_scaling", "rope_parameters"}) {
    if (root.Absent(name)) continue;
    const json& object = root.json()[name];
    if (!object.is_object()) return root.Bad(Code::kInvalidArgument, name, object, "an object or null is needed");
    const ConfigFields r(object, std::string(name) + ".");
    LQ_ASSIGN_OR_RETURN(const RopeConfig rope, ReadObject(r, head_dim, max_positions));
    if (said && !(rope == *said))
      return root.Bad(Code::kInvalidArgument, name, object, "rope_scaling is there too and says something else");
    said = rope;
    if (r.Absent("rope_theta")) continue;
    LQ_ASSIGN_OR_RETURN(const double inner, r.Number("rope_theta", 0, kMostTheta));
    if (theta && inner != *theta)
      return Status(Code::kInvalidArgument,
                    fmt::format("config.json: {}.rope_theta is {} but rope_theta is {}", name, inner, *theta));
    theta = inner;
  }
  RopeConfig rope = said.value_or(RopeConfig{});
  rope.dims = head_dim;
  if (theta) rope.theta = *theta;
  if (const Status s = ValidateRope(rope); !s.ok()) return Status(s.code(), "config.json: " + s.message());
  return rope;
}

}  // namespace livequant
