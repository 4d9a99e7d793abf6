#include "schema/policy.h"

#include <array>
#include <charconv>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "io/file.h"
#include "io/json.h"
#include "schema/names.h"

namespace livequant {
namespace {

using Json = nlohmann::json;
constexpr int kPolicyVersion = 1;
constexpr int kModelsWindow = -1;  // no window was said

Status Bad(const std::string& at, const std::string& what) {
  return Status(Code::kInvalidArgument, "policy " + at + ": " + what);
}

// One JSON object, read field by field; Done() refuses what nobody asked for.
class Object {
 public:
  Object(const Json& json, std::string at) : json_(json), at_(std::move(at)) {}

  Status IsObject() const {
    if (json_.is_object()) return {};
    return Bad(at_.empty() ? "file" : at_, std::string("must be an object, is ") + json_.type_name());
  }
  std::string At(const char* key) const { return at_.empty() ? key : at_ + "." + key; }
  const Json* Find(const char* key) {
    known_.emplace_back(key);
    const auto found = json_.find(key);
    return found == json_.end() ? nullptr : &*found;
  }
  Status Read(const char* key, int& out) {
    const Json* v = Find(key);
    if (v == nullptr) return {};
    // A number beyond int64 arrives as an unsigned or a float; neither is silently narrowed.
    if (!v->is_number_integer()) return Bad(At(key), ExcerptOfValue(*v) + " is not an integer");
    const bool fits = v->is_number_unsigned() ? v->get<uint64_t>() <= uint64_t{std::numeric_limits<int>::max()}
                                              : v->get<int64_t>() >= std::numeric_limits<int>::min() &&
                                                    v->get<int64_t>() <= std::numeric_limits<int>::max();
    if (!fits) return Bad(At(key), ExcerptOfValue(*v) + " does not fit 32 bits");
    out = v->get<int>();
    return {};
  }
  Status Read(const char* key, float& out) {
    const Json* v = Find(key);
    if (v == nullptr) return {};
    if (!v->is_number()) return Bad(At(key), ExcerptOfValue(*v) + " is not a number");
    const double wide = v->get<double>();
    if (!(wide >= -std::numeric_limits<float>::max() && wide <= std::numeric_limits<float>::max()))
      return Bad(At(key), ExcerptOfValue(*v) + " is beyond f32");
    out = static_cast<float>(wide);
    return {};
  }
  Status Read(const char* key, std::string& out) {
    const Json* v = Find(key);
    if (v == nullptr) return {};
    if (!v->is_string()) return Bad(At(key), ExcerptOfValue(*v) + " is not a string");
    out = v->get<std::string>();
    return {};
  }
  // One of `values` by Name().
  template <class Enum, size_t kCount>
  Status Read(const char* key, const std::array<Enum, kCount>& values, Enum& out) {
    std::string text;
    const Json* v = Find(key);
    if (v == nullptr) return {};
    if (!v->is_string()) return Bad(At(key), ExcerptOfValue(*v) + " is not a string");
    std::string names;
    for (const Enum value : values) {
      if (v->get<std::string>() == Name(value)) {
        out = value;
        return {};
      }
      names += (names.empty() ? "" : ", ") + std::string(Name(value));
    }
    return Bad(At(key), ExcerptOfValue(*v) + ": must be one of " + names);
  }
  Status Done() const {
    for (const auto& [key, value] : json_.items()) {
      bool known = false;
      std::string all;
      for (const std::string& k : known_) {
        known |= k == key;
        all += (all.empty() ? "" : ", ") + k;
      }
      if (!known) return Bad(At(ExcerptOfKey(key).c_str()), "unknown field; known here: " + all);
    }
    return {};
  }

 private:
  const Json& json_;
  std::string at_;
  std::vector<std::string> known_;
};

constexpr std::array kKinds{CodeKind::kNative, CodeKind::kScaledFp, CodeKind::kInteger};
constexpr std::array kAxes{ScaleAxis::kNone, ScaleAxis::kTensor, ScaleAxis::kRow, ScaleAxis::kChannel};
constexpr std::array kZeros{ZeroConvention::kNone, ZeroConvention::kSymmetric, ZeroConvention::kMinimum,
                            ZeroConvention::kFloatOffset};
constexpr std::array kSmallScales{SmallScale::kFloor, SmallScale::kRefuse};
constexpr std::array kOverflows{Overflow::kClamp, Overflow::kWrap};
constexpr std::array kStages{RopeStage::kPost, RopeStage::kPre};
constexpr std::array kDTypes{DType::kF32, DType::kF16, DType::kBF16, DType::kFp8E4M3, DType::kFp8E5M2};

// When the scales of an axis are fixed. Codes mean nothing without their scale, so it may never change once a code
// exists.
const char* LifetimeOf(ScaleAxis axis) {
  switch (axis) {
    case ScaleAxis::kNone:
      return "none";
    case ScaleAxis::kTensor:
      return "static";
    case ScaleAxis::kRow:
      return "row";
    case ScaleAxis::kChannel:
      return "group";
  }
  return "?";
}

Status ReadCoding(const Json& json, const std::string& at, TensorCoding& coding) {
  Object o(json, at);
  LQ_RETURN_IF_ERROR(o.IsObject());
  // With a kind the object says the coding in full; without one it changes single fields of what was there.
  if (json.contains("kind")) coding = TensorCoding{};
  LQ_RETURN_IF_ERROR(o.Read("kind", kKinds, coding.kind));
  LQ_RETURN_IF_ERROR(o.Read("dtype", kDTypes, coding.dtype));
  if (json.contains("kind") && !json.contains("bits") && coding.kind != CodeKind::kInteger)
    coding.bits = 8 * DTypeBytes(coding.dtype);
  LQ_RETURN_IF_ERROR(o.Read("bits", coding.bits));
  LQ_RETURN_IF_ERROR(o.Read("axis", kAxes, coding.axis));
  LQ_RETURN_IF_ERROR(o.Read("group", coding.group));
  LQ_RETURN_IF_ERROR(o.Read("zero", kZeros, coding.zero));
  LQ_RETURN_IF_ERROR(o.Read("qparam", kDTypes, coding.qparam));
  LQ_RETURN_IF_ERROR(o.Read("small_scale", kSmallScales, coding.small_scale));
  LQ_RETURN_IF_ERROR(o.Read("overflow", kOverflows, coding.overflow));
  LQ_RETURN_IF_ERROR(o.Read("static_scale", coding.static_scale));
  std::string lifetime = LifetimeOf(coding.axis);
  LQ_RETURN_IF_ERROR(o.Read("scale_lifetime", lifetime));
  if (lifetime == "running_max")
    return Status(
        Code::kUnsupported,
        "policy " + o.At("scale_lifetime") +
            " running_max: codes that were made under the old maximum would decode to other values under the new one, "
            "so growing the scale rewrites history; use a static scale, one scale per row, or groups that close "
            "behind an exact tail");
  if (lifetime != LifetimeOf(coding.axis))
    return Bad(o.At("scale_lifetime"), Excerpt(lifetime) + ": scales of the axis " + Name(coding.axis) +
                                           " have the lifetime " + LifetimeOf(coding.axis));
  return o.Done();
}

// The preset that the file names at `at`.
Result<LayerSchema> PresetAt(const std::string& at, const std::string& name, const PresetLookup& preset) {
  // What a lookup says may repeat the name as it got it; presets have short printable names, which an excerpt keeps.
  Result<LayerSchema> found = preset(ExcerptOfKey(name));
  if (!found.ok()) return Status(found.status().code(), "policy " + at + ": " + found.status().message());
  return found;
}

// "k" or "v": a preset's name (its coding and closure) or a coding.
Status ReadTensor(Object& o, const char* key, bool is_key, const PresetLookup& preset, LayerSchema& layer) {
  const Json* v = o.Find(key);
  if (v == nullptr) return {};
  if (!v->is_string()) return ReadCoding(*v, o.At(key), is_key ? layer.k : layer.v);
  LQ_ASSIGN_OR_RETURN(const LayerSchema from, PresetAt(o.At(key), v->get<std::string>(), preset));
  (is_key ? layer.k : layer.v) = is_key ? from.k : from.v;
  (is_key ? layer.k_closure : layer.v_closure) = is_key ? from.k_closure : from.v_closure;
  return {};
}

Status ReadClosure(Object& o, const char* key, Closure& closure) {
  const Json* v = o.Find(key);
  if (v == nullptr) return {};
  Object c(*v, o.At(key));
  LQ_RETURN_IF_ERROR(c.IsObject());
  for (const char* field : {"lag", "step"})
    if (!v->contains(field)) return Bad(c.At(field), "missing; a closure is {\"lag\": rows, \"step\": rows}");
  LQ_RETURN_IF_ERROR(c.Read("lag", closure.lag));
  LQ_RETURN_IF_ERROR(c.Read("step", closure.step));
  return c.Done();
}

// The fields that the file's top and each override share.
Status ReadLayerFields(Object& o, const PresetLookup& preset, LayerSchema& layer) {
  std::string base;
  LQ_RETURN_IF_ERROR(o.Read("base", base));
  if (o.Find("base") != nullptr) {  // an empty name is no preset either
    LQ_ASSIGN_OR_RETURN(layer, PresetAt(o.At("base"), base, preset));
    layer.window = kModelsWindow;  // a preset is a format; what a query sees is the model's
  }
  LQ_RETURN_IF_ERROR(ReadTensor(o, "k", true, preset, layer));
  LQ_RETURN_IF_ERROR(ReadTensor(o, "v", false, preset, layer));
  LQ_RETURN_IF_ERROR(ReadClosure(o, "k_closure", layer.k_closure));
  LQ_RETURN_IF_ERROR(ReadClosure(o, "v_closure", layer.v_closure));
  LQ_RETURN_IF_ERROR(o.Read("k_stage", kStages, layer.k_stage));
  LQ_RETURN_IF_ERROR(o.Read("exact_dtype", kDTypes, layer.exact_dtype));
  LQ_RETURN_IF_ERROR(o.Read("window", layer.window));
  if (o.Find("window") != nullptr && (layer.window < 0 || layer.window > kMaxWindowRows))
    return Bad(o.At("window"), std::to_string(layer.window) + ": must be in 0.." + std::to_string(kMaxWindowRows));
  LQ_RETURN_IF_ERROR(o.Read("pinned_rows", layer.pinned_rows));
  LQ_RETURN_IF_ERROR(o.Read("coded_page_rows", layer.coded_page_rows));
  LQ_RETURN_IF_ERROR(o.Read("exact_page_rows", layer.exact_page_rows));
  return o.Read("packing_version", layer.packing_version);
}

// Whether a level says K and V in full, so that no base preset is needed.
bool SaysBoth(const Json& json) {
  const auto full = [&](const char* key) {
    return json.contains(key) && (json[key].is_string() || (json[key].is_object() && json[key].contains("kind")));
  };
  return json.is_object() && full("k") && full("v");
}

Json CodingJson(const TensorCoding& c) {
  Json json = {{"kind", Name(c.kind)}, {"bits", c.bits}};
  if (c.kind != CodeKind::kInteger) json["dtype"] = Name(c.dtype);
  if (c.axis != ScaleAxis::kNone) json["axis"] = Name(c.axis);
  if (c.axis == ScaleAxis::kTensor) json["static_scale"] = c.static_scale;
  if (c.has_qparams()) {
    json["group"] = c.group;
    json["zero"] = Name(c.zero);
    json["qparam"] = Name(c.qparam);
    json["small_scale"] = Name(c.small_scale);
    json["overflow"] = Name(c.overflow);
  }
  return json;
}

Json LayerJson(const LayerSchema& layer) {
  const auto closure = [](const Closure& c) { return Json{{"lag", c.lag}, {"step", c.step}}; };
  return {{"k", CodingJson(layer.k)},
          {"v", CodingJson(layer.v)},
          {"k_closure", closure(layer.k_closure)},
          {"v_closure", closure(layer.v_closure)},
          {"k_stage", Name(layer.k_stage)},
          {"exact_dtype", Name(layer.exact_dtype)},
          {"window", layer.window},
          {"pinned_rows", layer.pinned_rows},
          {"coded_page_rows", layer.coded_page_rows},
          {"exact_page_rows", layer.exact_page_rows},
          {"packing_version", layer.packing_version}};
}

}  // namespace

Result<Policy> ReadPolicy(std::string_view text, const CacheShape& shape, const PresetLookup& preset) {
  LQ_ASSIGN_OR_RETURN(const Json json, ParseJson(text, "policy", {.max_depth = 8, .max_bytes = 1 << 20}));
  Object o(json, "");
  LQ_RETURN_IF_ERROR(o.IsObject());
  int version = 0;
  LQ_RETURN_IF_ERROR(o.Read("version", version));
  if (version != kPolicyVersion)
    return Bad("version", std::to_string(version) + ": must be " + std::to_string(kPolicyVersion));
  if (shape.num_layers < 1 || shape.num_layers > kMaxLayers)
    return Bad("shape",
               "num_layers " + std::to_string(shape.num_layers) + ": must be in 1.." + std::to_string(kMaxLayers));

  Policy policy;
  CacheSchema& schema = policy.schema;
  LayerSchema common;
  common.num_kv_heads = shape.num_kv_heads;
  common.head_dim = shape.head_dim;
  common.window = kModelsWindow;
  LQ_RETURN_IF_ERROR(ReadLayerFields(o, preset, common));
  schema.layers.assign(static_cast<size_t>(shape.num_layers), common);
  std::vector<bool> said(static_cast<size_t>(shape.num_layers), json.contains("base") || SaysBoth(json));
  std::vector<int> named_by(static_cast<size_t>(shape.num_layers), -1);
  if (const Json* list = o.Find("layers")) {
    if (!list->is_array()) return Bad("layers", std::string("must be a list, is ") + list->type_name());
    for (size_t i = 0; i < list->size(); ++i) {
      const Json& entry = (*list)[i];
      const std::string at = "layers[" + std::to_string(i) + "]";
      Object e(entry, at);
      LQ_RETURN_IF_ERROR(e.IsObject());
      std::string which;
      LQ_RETURN_IF_ERROR(e.Read("layers", which));
      const Result<std::vector<int>> numbers = ParseLayerList(which, shape.num_layers);
      if (!numbers.ok()) return Bad(e.At("layers"), numbers.status().message());
      for (const int n : *numbers) {
        const size_t layer = static_cast<size_t>(n);
        if (named_by[layer] >= 0)
          return Bad(e.At("layers"), "layer " + std::to_string(n) + " is already named by layers[" +
                                         std::to_string(named_by[layer]) + "]");
        named_by[layer] = static_cast<int>(i);
        said[layer] = said[layer] || entry.contains("base") || SaysBoth(entry);
        Object fresh(entry, at);
        fresh.Find("layers");
        LQ_RETURN_IF_ERROR(ReadLayerFields(fresh, preset, schema.layers[layer]));
        LQ_RETURN_IF_ERROR(fresh.Done());
      }
    }
  }

  std::string contract = ContractName(kStepwise);
  LQ_RETURN_IF_ERROR(o.Read("contract", contract));
  LQ_ASSIGN_OR_RETURN(schema.read_step, ParseContract(contract));
  schema.provenance.scale_source = "none";
  LQ_RETURN_IF_ERROR(o.Read("scale_source", schema.provenance.scale_source));
  const std::string& source = schema.provenance.scale_source;
  if (source != "none" && source != "warmup" && source != "dataset")
    return Bad("scale_source", Excerpt(source) + ": must be none, warmup or dataset");
  LQ_RETURN_IF_ERROR(o.Read("calibration", schema.identity.calibration));
  if (source == "dataset" && schema.identity.calibration.empty())
    return Bad("calibration", "missing: scales from a dataset need the digest of their artifact");
  LQ_RETURN_IF_ERROR(o.Read("skip", policy.skip));
  if (o.Find("skip") != nullptr) LQ_RETURN_IF_ERROR(PresetAt("skip", policy.skip, preset).status());
  LQ_RETURN_IF_ERROR(o.Done());
  // Behind Done: where "base" is misspelt, the field that nobody knows is the news.
  for (size_t i = 0; i < said.size(); ++i)
    if (!said[i])
      return Bad("layers", "layer " + std::to_string(i) + " has neither a base nor both k and v with a kind");

  schema.rope = shape.rope;
  for (size_t i = 0; i < schema.layers.size(); ++i) {
    const int models = shape.window(static_cast<int>(i));
    int& window = schema.layers[i].window;
    if (window == kModelsWindow) window = models;
    if (models != 0 && (window == 0 || window > models))
      return Bad("layer " + std::to_string(i) + " window", std::to_string(window) + ": the model's queries see " +
                                                               std::to_string(models) +
                                                               " rows; a policy can only narrow that");
  }
  // What the page mathematics allows and no kernel reads; a policy is for running (cache_core.md 4).
  for (size_t i = 0; i < schema.layers.size(); ++i) {
    const LayerSchema& layer = schema.layers[i];
    const std::string at = "layer " + std::to_string(i);
    if (layer.coded_page_rows % 128 != 0)
      return Bad(at + " coded_page_rows", std::to_string(layer.coded_page_rows) + ": kernels need a multiple of 128");
    if (layer.exact_page_rows % 32 != 0)
      return Bad(at + " exact_page_rows", std::to_string(layer.exact_page_rows) + ": kernels need a multiple of 32");
  }
  if (const Status s = Validate(schema); !s.ok()) return Status(s.code(), "policy: " + s.message());
  return policy;
}

Result<std::string> ReadPolicyFile(const std::string& path) { return ReadFile(path, 1 << 20); }

std::string WritePolicy(const CacheSchema& schema) {
  for (const LayerSchema& layer : schema.layers)
    LQ_CHECK(layer.head_dim == schema.layers[0].head_dim && layer.num_kv_heads == schema.layers[0].num_kv_heads);
  Json json = {{"version", kPolicyVersion}, {"contract", ContractName(schema.read_step)}};
  if (!schema.provenance.scale_source.empty()) json["scale_source"] = schema.provenance.scale_source;
  if (!schema.identity.calibration.empty()) json["calibration"] = schema.identity.calibration;
  json["layers"] = Json::array();
  std::vector<bool> written(schema.layers.size());
  for (size_t i = 0; i < schema.layers.size(); ++i) {
    if (written[i]) continue;
    std::vector<int> alike;
    for (size_t j = i; j < schema.layers.size(); ++j)
      if (schema.layers[j] == schema.layers[i]) {
        written[j] = true;
        alike.push_back(static_cast<int>(j));
      }
    Json entry = LayerJson(schema.layers[i]);
    entry["layers"] = LayerListText(alike);
    json["layers"].push_back(std::move(entry));
  }
  return json.dump(2) + "\n";
}

std::string LayerListText(const std::vector<int>& layers) {
  std::string text;
  for (size_t i = 0; i < layers.size();) {
    size_t j = i;
    while (j + 1 < layers.size() && layers[j + 1] == layers[j] + 1) ++j;
    text += (text.empty() ? "" : ",") + std::to_string(layers[i]);
    if (j > i) text += "-" + std::to_string(layers[j]);
    i = j + 1;
  }
  return text;
}

Result<std::vector<int>> ParseLayerList(std::string_view text, int num_layers) {
  std::vector<int> layers;
  const auto bad = [&](const std::string& why) { return Status(Code::kInvalidArgument, Excerpt(text) + ": " + why); };
  const char *at = text.data(), *last = text.data() + text.size();
  const auto number = [&](int& out) {
    const auto [end, error] = std::from_chars(at, last, out);
    // from_chars takes a sign, a layer number has none.
    if (error != std::errc() || at == last || *at == '-') return false;
    at = end;
    return true;
  };
  while (true) {
    int first = 0, final = 0;
    if (!number(first)) return bad("must be layer numbers and ranges, as in 0-3,7");
    final = first;
    if (at != last && *at == '-') {
      ++at;
      if (!number(final)) return bad("must be layer numbers and ranges, as in 0-3,7");
    }
    if (final < first) return bad("range " + std::to_string(first) + "-" + std::to_string(final) + " falls");
    if (final >= num_layers)
      return bad("layer " + std::to_string(final) + ": the model has layers 0.." + std::to_string(num_layers - 1));
    if (!layers.empty() && first <= layers.back())
      return bad("layer " + std::to_string(first) + " does not rise above " + std::to_string(layers.back()));
    for (int n = first; n <= final; ++n) layers.push_back(n);
    if (at == last) return layers;
    if (*at != ',') return bad("must be layer numbers and ranges, as in 0-3,7");
    ++at;
  }
}

}  // namespace livequant
