#include "method/method.h"

#include <algorithm>

#include "schema/policy.h"

namespace livequant {
namespace {

// A preset is data: the form of K and V, when they close, and what exact rows are rounded to. group 0 stands for the
// head size.
struct Preset {
  const char* name;
  TensorCoding k, v;
  Closure k_closure, v_closure;
  DType exact_dtype;
  const char* summary;
};

constexpr TensorCoding Native(DType dtype) { return {.dtype = dtype, .bits = 8 * DTypeBytes(dtype)}; }
constexpr TensorCoding Fp8(DType dtype) {
  return {.kind = CodeKind::kScaledFp, .dtype = dtype, .bits = 8, .axis = ScaleAxis::kTensor};
}
constexpr TensorCoding Integer(int bits, ScaleAxis axis, int group, ZeroConvention zero) {
  return {.kind = CodeKind::kInteger, .bits = bits, .axis = axis, .group = group, .zero = zero};
}
constexpr TensorCoding HeadRow(int bits, ZeroConvention zero) { return Integer(bits, ScaleAxis::kRow, 0, zero); }

constexpr Closure kOwnStep{-1, 1};    // a row is stored coded and read back coded, by its own query too
constexpr Closure kNextStep{0, 1};    // exact for its own query, coded from the next on
constexpr Closure kChunk128{0, 128};  // KIVI keys: 128 rows at a time
constexpr Closure kRolling128{128, 1};
constexpr Closure kSync{97, 32};  // R - G + 1 = 97 rows behind, a group of 32 at a time: 97 to 128 exact rows

constexpr TensorCoding KiviKey(int bits) { return Integer(bits, ScaleAxis::kChannel, 32, ZeroConvention::kMinimum); }
constexpr TensorCoding KiviValue(int bits) { return Integer(bits, ScaleAxis::kRow, 32, ZeroConvention::kMinimum); }
constexpr auto kSymmetric = ZeroConvention::kSymmetric;
constexpr auto kFloatOffset = ZeroConvention::kFloatOffset;

const std::vector<Preset>& Presets() {
  static const std::vector<Preset> presets = {
      {"f32", Native(DType::kF32), Native(DType::kF32), kOwnStep, kOwnStep, DType::kF32, "rows as f32; the reference"},
      {"f16", Native(DType::kF16), Native(DType::kF16), kOwnStep, kOwnStep, DType::kF16, "rows as f16"},
      {"bf16", Native(DType::kBF16), Native(DType::kBF16), kOwnStep, kOwnStep, DType::kBF16, "rows as bf16"},
      {"fp8_e4m3", Fp8(DType::kFp8E4M3), Fp8(DType::kFp8E4M3), kOwnStep, kOwnStep, DType::kF32,
       "fp8 e4m3fn, one f32 scale a tensor, 1.0 unless an artifact gives it (vLLM fp8_e4m3)"},
      {"fp8_e5m2", Fp8(DType::kFp8E5M2), Fp8(DType::kFp8E5M2), kOwnStep, kOwnStep, DType::kF32,
       "fp8 e5m2, one f32 scale a tensor, 1.0 unless an artifact gives it (vLLM fp8_e5m2)"},
      {"int8", HeadRow(8, kSymmetric), HeadRow(8, kSymmetric), kOwnStep, kOwnStep, DType::kF32,
       "8-bit symmetric integers, one f16 scale per row and KV head"},
      {"int4", HeadRow(4, kSymmetric), HeadRow(4, kSymmetric), kOwnStep, kOwnStep, DType::kF32,
       "4-bit symmetric integers, one f16 scale per row and KV head"},
      {"int2", HeadRow(2, kSymmetric), HeadRow(2, kSymmetric), kOwnStep, kOwnStep, DType::kF32,
       "2-bit symmetric integers, one f16 scale per row and KV head"},
      {"kivi4", KiviKey(4), KiviValue(4), kChunk128, kRolling128, DType::kF16,
       "KIVI, 4 bits, G 32, R 128: keys per channel, values per row, split frontiers (arXiv 2402.02750, released "
       "code)"},
      {"kivi2", KiviKey(2), KiviValue(2), kChunk128, kRolling128, DType::kF16,
       "KIVI, 2 bits, G 32, R 128: keys per channel, values per row, split frontiers (arXiv 2402.02750, released "
       "code)"},
      {"kivi2_sync", KiviKey(2), KiviValue(2), kSync, kSync, DType::kF16,
       "KIVI, 2 bits, G 32, with one frontier for keys and values and a tail of at most 128 rows"},
      {"qserve8", HeadRow(8, kFloatOffset), HeadRow(8, kFloatOffset), kNextStep, kNextStep, DType::kF16,
       "QServe KV8: f16 scale and f16 floating zero per row and KV head, clamped (arXiv 2405.04532)"},
      {"qserve4", HeadRow(4, kFloatOffset), HeadRow(4, kFloatOffset), kNextStep, kNextStep, DType::kF16,
       "QServe KV4: f16 scale and f16 floating zero per row and KV head, clamped (arXiv 2405.04532)"},
  };
  return presets;
}

const Preset* FindPreset(std::string_view name) {
  for (const Preset& p : Presets())
    if (name == p.name) return &p;
  return nullptr;
}

std::string AllNames() {
  std::string names;
  for (const Preset& p : Presets()) names += (names.empty() ? "" : " ") + std::string(p.name);
  return names;
}

Status Unknown(std::string_view name) {
  return Status(Code::kNotFound, "preset \"" + std::string(name) + "\" does not exist; presets: " + AllNames());
}

PresetLookup LookupFor(const CacheShape& shape) {
  return [&shape](std::string_view name) { return PresetLayer(name, shape.num_kv_heads, shape.head_dim); };
}

}  // namespace

const std::vector<std::string>& PresetNames() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const Preset& p : Presets()) list.emplace_back(p.name);
    return list;
  }();
  return names;
}

std::string PresetSummary(std::string_view name) {
  const Preset* p = FindPreset(name);
  return p == nullptr ? Unknown(name).message() : p->summary;
}

Result<LayerSchema> PresetLayer(std::string_view name, int num_kv_heads, int head_dim) {
  const Preset* p = FindPreset(name);
  if (p == nullptr) return Unknown(name);
  LayerSchema layer;
  layer.num_kv_heads = num_kv_heads;
  layer.head_dim = head_dim;
  layer.k = p->k;
  layer.v = p->v;
  for (TensorCoding* t : {&layer.k, &layer.v})
    if (t->axis == ScaleAxis::kRow && t->group == 0) t->group = head_dim;
  layer.k_closure = p->k_closure;
  layer.v_closure = p->v_closure;
  layer.exact_dtype = p->exact_dtype;
  if (num_kv_heads < 1 || num_kv_heads > kMaxKvHeads)
    return Status(Code::kInvalidArgument,
                  "num_kv_heads " + std::to_string(num_kv_heads) + ": must be in 1.." + std::to_string(kMaxKvHeads));
  if (head_dim < 1 || head_dim > kMaxHeadDim)
    return Status(Code::kInvalidArgument,
                  "head_dim " + std::to_string(head_dim) + ": must be in 1.." + std::to_string(kMaxHeadDim));
  // A preset is sound by itself (a test), so what Validate() finds here is a head size that does not fit.
  CacheSchema alone;
  alone.layers = {layer};
  if (const Status s = Validate(alone); !s.ok())
    return Status(Code::kUnsupported, "preset " + std::string(name) + ": " + s.message() +
                                          "; a policy file can set another group (docs/formats/policy.md)");
  return layer;
}

namespace {

// Every layer as the preset has it, with the shape's windows; not validated yet, for some layers may be replaced.
Result<CacheSchema> EveryLayer(std::string_view name, const CacheShape& shape) {
  LQ_ASSIGN_OR_RETURN(const LayerSchema layer, PresetLayer(name, shape.num_kv_heads, shape.head_dim));
  if (shape.num_layers < 1 || shape.num_layers > kMaxLayers)
    return Status(Code::kInvalidArgument,
                  "num_layers " + std::to_string(shape.num_layers) + ": must be in 1.." + std::to_string(kMaxLayers));
  CacheSchema schema;
  schema.layers.assign(static_cast<size_t>(shape.num_layers), layer);
  for (int i = 0; i < shape.num_layers; ++i) schema.layers[static_cast<size_t>(i)].window = shape.window(i);
  schema.rope = shape.rope;
  schema.provenance.preset = name;
  schema.provenance.scale_source = "none";
  return schema;
}

// A preset's layer alone is sound: what is wrong here is the model's RoPE, or a window that is shorter than a closure.
Status ValidatePreset(const CacheSchema& schema) {
  const Status s = Validate(schema);
  return s.ok() ? s : Status(Code::kUnsupported, "preset " + schema.provenance.preset + ": " + s.message());
}

}  // namespace

Result<CacheSchema> PresetSchema(std::string_view name, const CacheShape& shape) {
  LQ_ASSIGN_OR_RETURN(CacheSchema schema, EveryLayer(name, shape));
  LQ_RETURN_IF_ERROR(ValidatePreset(schema));
  return schema;
}

Result<CacheSchema> SchemaFor(const std::string& spec, const CacheShape& shape, const std::vector<int>& skip_layers) {
  CacheSchema schema;
  std::string skip = kSkipPreset;
  const bool is_preset = FindPreset(spec) != nullptr;
  if (is_preset) {
    LQ_ASSIGN_OR_RETURN(schema, EveryLayer(spec, shape));
  } else {
    const Result<std::string> text = ReadPolicyFile(spec);
    if (!text.ok()) {
      if (text.status().code() != Code::kNotFound) return text.status();
      return Status(Code::kNotFound, "\"" + spec + "\" is neither a preset nor a policy file; presets: " + AllNames());
    }
    LQ_ASSIGN_OR_RETURN(Policy policy, ReadPolicy(*text, shape, LookupFor(shape)));
    schema = std::move(policy.schema);
    schema.provenance.preset = spec;
    if (!policy.skip.empty()) skip = policy.skip;
  }
  if (skip_layers.empty()) {
    if (is_preset) LQ_RETURN_IF_ERROR(ValidatePreset(schema));
    return schema;
  }
  LQ_ASSIGN_OR_RETURN(const LayerSchema instead, PresetLayer(skip, shape.num_kv_heads, shape.head_dim));
  std::vector<int> sorted = skip_layers;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size(); ++i) {
    const std::string at = "skip layers: layer " + std::to_string(sorted[i]);
    if (sorted[i] < 0 || sorted[i] >= shape.num_layers)
      return Status(Code::kInvalidArgument, at + ": the model has layers 0.." + std::to_string(shape.num_layers - 1));
    if (i > 0 && sorted[i] == sorted[i - 1]) return Status(Code::kInvalidArgument, at + " is named twice");
    LayerSchema& layer = schema.layers[static_cast<size_t>(sorted[i])];
    const int window = layer.window;  // what a query sees is the model's, not the format's
    layer = instead;
    layer.window = window;
  }
  schema.provenance.preset += ", layers " + LayerListText(sorted) + " as " + skip;
  LQ_RETURN_IF_ERROR(ValidatePreset(schema));
  return schema;
}

Result<CacheSchema> ParsePolicy(std::string_view json, const CacheShape& shape) {
  LQ_ASSIGN_OR_RETURN(Policy policy, ReadPolicy(json, shape, LookupFor(shape)));
  policy.schema.provenance.preset = "policy";
  return std::move(policy.schema);
}

std::string PolicyJson(const CacheSchema& schema) { return WritePolicy(schema); }

}  // namespace livequant
