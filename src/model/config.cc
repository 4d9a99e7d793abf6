// model/config.cc: config.json -> LlamaConfig. Total: any text in, a config whose every field is within its limit or an
// error out.
#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "io/json.h"
#include "model/llama.h"

namespace livequant {
namespace {

using nlohmann::json;

// Limits that keep every product of two sizes far inside int64_t; far beyond any published Llama.
constexpr int64_t kMostVocab = 1 << 22, kMostHidden = 1 << 17, kMostIntermediate = 1 << 20, kMostPositions = 1 << 20;
constexpr int64_t kMostLayers = 1024, kMostHeads = 1024, kMostHeadDim = 1024;
constexpr int64_t kMaxRopeTableBytes = int64_t{1} << 30;

bool Absent(const json& object, const char* name) { return !object.contains(name) || object[name].is_null(); }

Status Bad(Code code, const char* name, const json& value, const std::string& limit) {
  return Status(code, fmt::format("config.json: {} is {}; {}", name, ExcerptOfValue(value), limit));
}

// An integer in [lo, hi].
Result<int64_t> Integer(const json& object, const char* name, int64_t lo, int64_t hi) {
  if (Absent(object, name)) return Status(Code::kInvalidArgument, fmt::format("config.json: {} is missing", name));
  const json& v = object[name];
  if (!v.is_number_integer())
    return Bad(Code::kInvalidArgument, name, v, fmt::format("an integer from {} to {} is needed", lo, hi));
  const bool beyond_int64 =
      v.is_number_unsigned() && v.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  if (beyond_int64 || v.get<int64_t>() < lo || v.get<int64_t>() > hi)
    return Bad(Code::kOutOfRange, name, v, fmt::format("must be from {} to {}", lo, hi));
  return v.get<int64_t>();
}

Result<int64_t> IntegerOr(const json& object, const char* name, int64_t absent, int64_t lo, int64_t hi) {
  if (Absent(object, name)) return absent;
  return Integer(object, name, lo, hi);
}

Result<bool> BooleanOr(const json& object, const char* name, bool absent) {
  if (Absent(object, name)) return absent;
  if (!object[name].is_boolean()) return Bad(Code::kInvalidArgument, name, object[name], "true or false is needed");
  return object[name].get<bool>();
}

// A number in (lo, hi].
Result<double> Number(const json& object, const char* name, double lo, double hi) {
  if (Absent(object, name)) return Status(Code::kInvalidArgument, fmt::format("config.json: {} is missing", name));
  const json& v = object[name];
  if (!v.is_number()) return Bad(Code::kInvalidArgument, name, v, "a number is needed");
  const double x = v.get<double>();
  if (!(x > lo && x <= hi))
    return Bad(Code::kOutOfRange, name, v, fmt::format("must be above {} and at most {}", lo, hi));
  return x;
}

Status CheckArchitecture(const json& root) {
  if (Absent(root, "architectures"))
    return Status(Code::kInvalidArgument, "config.json: architectures is missing; LlamaForCausalLM is read");
  const json& a = root["architectures"];
  if (!a.is_array() || a.size() != 1 || !a[0].is_string())
    return Bad(Code::kInvalidArgument, "architectures", a, "a list of one name is needed");
  if (a[0] != "LlamaForCausalLM") return Bad(Code::kUnsupported, "architectures", a, "only LlamaForCausalLM is read");
  if (!Absent(root, "model_type") && root["model_type"] != "llama")
    return Bad(Code::kUnsupported, "model_type", root["model_type"], "only \"llama\" goes with LlamaForCausalLM");
  return {};
}

// What LlamaForCausalLM allows and this code does not do: refused rather than ignored.
Status CheckUnsupported(const json& root) {
  for (const char* name : {"attention_bias", "mlp_bias"}) {
    LQ_ASSIGN_OR_RETURN(const bool on, BooleanOr(root, name, false));
    if (on) return Bad(Code::kUnsupported, name, root[name], "projections with biases are not read");
  }
  if (!Absent(root, "hidden_act") && root["hidden_act"] != "silu")
    return Bad(Code::kUnsupported, "hidden_act", root["hidden_act"], "only \"silu\" is known here");
  for (const char* name : {"sliding_window"})
    if (!Absent(root, name)) return Bad(Code::kUnsupported, name, root[name], "must be absent or null");
  return {};
}

// rope_scaling (older spelling, beside rope_theta) and rope_parameters (newer, theta inside) must both say "default".
Result<RopeConfig> ParseRope(const json& root, int head_dim) {
  RopeConfig rope;
  rope.dims = head_dim;
  bool have_theta = false;
  if (!Absent(root, "rope_theta")) {
    LQ_ASSIGN_OR_RETURN(rope.theta, Number(root, "rope_theta", 0, 1e12));
    have_theta = true;
  }
  for (const char* name : {"rope_scaling", "rope_parameters"}) {
    if (Absent(root, name)) continue;
    const json& r = root[name];
    if (!r.is_object()) return Bad(Code::kInvalidArgument, name, r, "an object or null is needed");
    for (const char* key : {"rope_type", "type"})  // before the fields that only another type would have
      if (!Absent(r, key) && r[key] != "default")
        return Bad(Code::kUnsupported, fmt::format("{}.{}", name, key).c_str(), r[key],
                   "only \"default\" is known here");
    for (const auto& [key, value] : r.items()) {
      if (value.is_null() || key == "rope_type" || key == "type") continue;
      if (key == "partial_rotary_factor") {
        if (!value.is_number() || value.get<double>() != 1.0)
          return Bad(Code::kUnsupported, fmt::format("{}.{}", name, key).c_str(), value, "only 1.0 is known here");
      } else if (key != "rope_theta") {
        return Bad(Code::kUnsupported, fmt::format("{}.{}", name, ExcerptOfKey(key)).c_str(), value,
                   "RoPE type \"default\" has no such field");
      }
    }
    if (Absent(r, "rope_theta")) continue;
    LQ_ASSIGN_OR_RETURN(const double theta, Number(r, "rope_theta", 0, 1e12));
    if (have_theta && theta != rope.theta)
      return Status(Code::kInvalidArgument,
                    fmt::format("config.json: {}.rope_theta is {} but rope_theta is {}", name, theta, rope.theta));
    rope.theta = theta;
    have_theta = true;
  }
  return rope;
}

Status ParseSpecialIds(const json& root, LlamaConfig& c) {
  if (!Absent(root, "bos_token_id")) {
    LQ_ASSIGN_OR_RETURN(const int64_t id, Integer(root, "bos_token_id", 0, c.vocab_size - 1));
    c.bos_token_id = static_cast<int32_t>(id);
  }
  if (Absent(root, "eos_token_id")) return {};
  const json& eos = root["eos_token_id"];
  const json list = eos.is_array() ? eos : json::array({eos});
  for (const json& v : list) {
    LQ_ASSIGN_OR_RETURN(const int64_t id, Integer(json{{"eos_token_id", v}}, "eos_token_id", 0, c.vocab_size - 1));
    c.eos_token_ids.push_back(static_cast<int32_t>(id));
  }
  return {};
}

}  // namespace

Result<LlamaConfig> ParseLlamaConfig(std::string_view text) {
  LQ_ASSIGN_OR_RETURN(const json root, ParseJson(text, "config.json", {.max_depth = 32, .max_bytes = 4 << 20}));
  if (!root.is_object())
    return Status(Code::kInvalidArgument, "config.json: an object is needed, got " + ExcerptOfValue(root));
  LQ_RETURN_IF_ERROR(CheckArchitecture(root));
  LQ_RETURN_IF_ERROR(CheckUnsupported(root));

  LlamaConfig c;
  LQ_ASSIGN_OR_RETURN(c.vocab_size, Integer(root, "vocab_size", 1, kMostVocab));
  LQ_ASSIGN_OR_RETURN(c.hidden_size, Integer(root, "hidden_size", 1, kMostHidden));
  LQ_ASSIGN_OR_RETURN(c.intermediate_size, Integer(root, "intermediate_size", 1, kMostIntermediate));
  LQ_ASSIGN_OR_RETURN(c.max_position_embeddings, Integer(root, "max_position_embeddings", 1, kMostPositions));
  LQ_ASSIGN_OR_RETURN(const int64_t layers, Integer(root, "num_hidden_layers", 1, kMostLayers));
  LQ_ASSIGN_OR_RETURN(const int64_t heads, Integer(root, "num_attention_heads", 1, kMostHeads));
  LQ_ASSIGN_OR_RETURN(const int64_t kv_heads, IntegerOr(root, "num_key_value_heads", heads, 1, kMostHeads));
  if (heads % kv_heads != 0)
    return Status(
        Code::kInvalidArgument,
        fmt::format("config.json: num_key_value_heads is {}; it must divide num_attention_heads, {}", kv_heads, heads));
  if (Absent(root, "head_dim") && c.hidden_size % heads != 0)
    return Status(
        Code::kInvalidArgument,
        fmt::format("config.json: hidden_size is {}; without head_dim, num_attention_heads, {}, must divide it",
                    c.hidden_size, heads));
  LQ_ASSIGN_OR_RETURN(const int64_t head_dim, IntegerOr(root, "head_dim", c.hidden_size / heads, 2, kMostHeadDim));
  if (head_dim < 2 || head_dim > kMostHeadDim || head_dim % 2 != 0)
    return Status(
        Code::kInvalidArgument,
        fmt::format("config.json: head_dim is {}; an even size from 2 to {} is needed", head_dim, kMostHeadDim));
  if (c.max_position_embeddings * head_dim * int64_t{sizeof(float)} > kMaxRopeTableBytes)
    return Status(
        Code::kOutOfRange,
        fmt::format("config.json: max_position_embeddings is {}; with head_dim {} the RoPE table allows {}",
                    c.max_position_embeddings, head_dim, kMaxRopeTableBytes / (head_dim * int64_t{sizeof(float)})));
  c.num_hidden_layers = static_cast<int>(layers);
  c.num_attention_heads = static_cast<int>(heads);
  c.num_key_value_heads = static_cast<int>(kv_heads);
  c.head_dim = static_cast<int>(head_dim);
  LQ_ASSIGN_OR_RETURN(const double eps, Number(root, "rms_norm_eps", 0, 1));
  c.rms_norm_eps = static_cast<float>(eps);
  if (c.rms_norm_eps < std::numeric_limits<float>::min())
    return Bad(Code::kOutOfRange, "rms_norm_eps", root["rms_norm_eps"], "below the smallest normal f32");
  LQ_ASSIGN_OR_RETURN(c.tie_word_embeddings, BooleanOr(root, "tie_word_embeddings", false));
  LQ_ASSIGN_OR_RETURN(c.rope, ParseRope(root, c.head_dim));
  LQ_RETURN_IF_ERROR(ParseSpecialIds(root, c));
  return c;
}

}  // namespace livequant
