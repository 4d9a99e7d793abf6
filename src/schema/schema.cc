#include "schema/schema.h"

#include <charconv>
#include <cmath>
#include <concepts>
#include <cstdio>
#include <string_view>
#include <type_traits>
#include <utility>

#include "io/file.h"
#include "io/json.h"
#include "schema/names.h"

namespace livequant {
namespace {

std::string Text(int v) { return std::to_string(v); }
template <std::same_as<bool> Bool>  // a pointer is no bool
std::string Text(Bool v) {
  return v ? "true" : "false";
}
std::string Text(const std::string& v) { return v; }
std::string Text(float v) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%.9g", static_cast<double>(v));  // 9 digits tell any two floats apart
  return buffer;
}
std::string Text(double v) {
  char buffer[40];
  std::snprintf(buffer, sizeof buffer, "%.17g", v);
  return buffer;
}
template <class Enum>
  requires std::is_enum_v<Enum>
std::string Text(Enum v) {
  return Name(v);
}

// Structured bindings name every member: a member that is added without a line here does not compile.
class FieldList {
 public:
  template <class T>
  void Add(const char* name, const T& value) {
    fields.push_back({prefix + name, Text(value)});
  }
  void AddCoding(const std::string& at, const TensorCoding& coding) {
    const auto& [kind, dtype, bits, axis, group, zero, qparam, small_scale, overflow, static_scale] = coding;
    const std::string outer = std::exchange(prefix, prefix + at);
    Add("kind", kind);
    Add("dtype", dtype);
    Add("bits", bits);
    Add("axis", axis);
    Add("group", group);
    Add("zero", zero);
    Add("qparam", qparam);
    Add("small_scale", small_scale);
    Add("overflow", overflow);
    Add("static_scale", static_scale);
    prefix = outer;
  }
  void AddClosure(const std::string& at, const Closure& closure) {
    const auto& [lag, step] = closure;
    const std::string outer = std::exchange(prefix, prefix + at);
    Add("lag", lag);
    Add("step", step);
    prefix = outer;
  }
  void AddLayer(const std::string& at, const LayerSchema& layer) {
    const auto& [num_kv_heads, head_dim, window, k, v, k_closure, v_closure, k_stage, exact_dtype, pinned_rows,
                 coded_page_rows, exact_page_rows, packing_version] = layer;
    const std::string outer = std::exchange(prefix, prefix + at);
    Add("num_kv_heads", num_kv_heads);
    Add("head_dim", head_dim);
    Add("window", window);
    AddCoding("k.", k);
    AddCoding("v.", v);
    AddClosure("k_closure.", k_closure);
    AddClosure("v_closure.", v_closure);
    Add("k_stage", k_stage);
    Add("exact_dtype", exact_dtype);
    Add("pinned_rows", pinned_rows);
    Add("coded_page_rows", coded_page_rows);
    Add("exact_page_rows", exact_page_rows);
    Add("packing_version", packing_version);
    prefix = outer;
  }
  std::vector<SchemaField> fields;
  std::string prefix;
};

// "layer 3 k.group 48: " before every complaint about one field.
struct Complaint {
  std::string layer;

  template <class T>
  Status Invalid(const char* field, const T& value, const std::string& limit) const {
    return Status(Code::kInvalidArgument, layer + field + " " + Text(value) + ": " + limit);
  }
  template <class T>
  Status Unsupported(const char* field, const T& value, const std::string& limit) const {
    return Status(Code::kUnsupported, layer + field + " " + Text(value) + ": " + limit);
  }
  Status InRange(const char* field, int value, int low, int high) const {
    if (value >= low && value <= high) return {};
    return Invalid(field, value, "must be in " + Text(low) + ".." + Text(high));
  }
  template <class T>
  Status MustBe(const char* field, const T& value, const T& wanted, const std::string& why) const {
    if (value == wanted) return {};
    return Invalid(field, value, "must be " + Text(wanted) + " " + why);
  }
};

bool PowerOfTwo(int v) { return v > 0 && (v & (v - 1)) == 0; }
bool PlainFloat(DType t) { return t == DType::kF32 || t == DType::kF16 || t == DType::kBF16; }
bool Fp8(DType t) { return t == DType::kFp8E4M3 || t == DType::kFp8E5M2; }

// Values of an enumeration that came from a cast of foreign bytes.
template <class Enum>
bool Known(Enum v) {
  return std::string_view(Name(v)) != "?";
}

Status CheckInteger(const Complaint& c, const TensorCoding& t, const LayerSchema& layer, const Closure& closure) {
  if (t.bits != 2 && t.bits != 3 && t.bits != 4 && t.bits != 8)
    return c.Unsupported("bits", t.bits, "integer codes have 2, 3, 4 or 8 bits");
  LQ_RETURN_IF_ERROR(c.MustBe("dtype", t.dtype, DType::kF16, "(its default) for integer codes, which have none"));
  if (t.axis != ScaleAxis::kRow && t.axis != ScaleAxis::kChannel)
    return c.Invalid("axis", t.axis, "integer codes need the axis row or channel");
  if (t.zero == ZeroConvention::kNone)
    return c.Invalid("zero", t.zero, "integer codes need symmetric, minimum or float_offset");
  if (t.qparam != DType::kF16 && t.qparam != DType::kF32)
    return c.Unsupported("qparam", t.qparam, "scales and minima are stored as f16 or f32");
  LQ_RETURN_IF_ERROR(c.InRange("group", t.group, 1, kMaxHeadDim));
  if (t.axis == ScaleAxis::kRow) {
    if (layer.head_dim % t.group != 0)
      return c.Invalid("group", t.group, "must divide head_dim " + Text(layer.head_dim));
  } else {
    if (t.zero != ZeroConvention::kMinimum)
      return c.Unsupported("zero", t.zero, "groups along a channel are stored with a minimum; nearest: minimum");
    if (closure.step % t.group != 0)
      return c.Invalid(
          "group", t.group,
          "must divide the closure step " + Text(closure.step) + ": a group along a channel closes at once");
    if (layer.coded_page_rows % t.group != 0)
      return c.Invalid("group", t.group, "must divide coded_page_rows " + Text(layer.coded_page_rows));
  }
  if (t.overflow == Overflow::kWrap) {
    if (t.zero != ZeroConvention::kFloatOffset)
      return c.Invalid("overflow", t.overflow, "only float_offset codes can overflow; must be clamp");
    if (t.bits != 4 || t.group != layer.head_dim || t.qparam != DType::kF16)
      return c.Unsupported(
          "overflow", t.overflow,
          "the released kernel's wrap exists for 4 bits, one f16 scale and offset per head row; here " + Text(t.bits) +
              " bits, group " + Text(t.group) + ", " + Text(t.qparam));
  }
  return {};
}

Status CheckCoding(const Complaint& c, const TensorCoding& t, const LayerSchema& layer, const Closure& closure) {
  if (!Known(t.kind)) return c.Invalid("kind", static_cast<int>(t.kind), "not a code kind");
  if (!Known(t.dtype)) return c.Invalid("dtype", static_cast<int>(t.dtype), "not a number format");
  if (!Known(t.axis)) return c.Invalid("axis", static_cast<int>(t.axis), "not a scale axis");
  if (!Known(t.zero)) return c.Invalid("zero", static_cast<int>(t.zero), "not a zero convention");
  if (!Known(t.qparam)) return c.Invalid("qparam", static_cast<int>(t.qparam), "not a number format");
  if (!Known(t.small_scale))
    return c.Invalid("small_scale", static_cast<int>(t.small_scale), "must be floor or refuse");
  if (!Known(t.overflow)) return c.Invalid("overflow", static_cast<int>(t.overflow), "must be clamp or wrap");

  const std::string unused = std::string("(its default) for ") + Name(t.kind) + " codes";
  if (t.kind == CodeKind::kInteger) {
    LQ_RETURN_IF_ERROR(CheckInteger(c, t, layer, closure));
  } else {
    if (t.kind == CodeKind::kNative) {
      if (!PlainFloat(t.dtype))
        return c.Invalid("dtype", t.dtype, "native values are f32, f16 or bf16; fp8 codes have the kind scaled_fp");
      LQ_RETURN_IF_ERROR(c.MustBe("axis", t.axis, ScaleAxis::kNone, "for native values"));
    } else {
      if (!Fp8(t.dtype)) return c.Invalid("dtype", t.dtype, "scaled_fp codes are fp8_e4m3 or fp8_e5m2");
      LQ_RETURN_IF_ERROR(
          c.MustBe("axis", t.axis, ScaleAxis::kTensor, "for scaled_fp codes: one static scale a tensor"));
    }
    LQ_RETURN_IF_ERROR(c.MustBe("bits", t.bits, 8 * DTypeBytes(t.dtype), std::string("for ") + Name(t.dtype)));
    LQ_RETURN_IF_ERROR(c.MustBe("group", t.group, 0, unused));
    LQ_RETURN_IF_ERROR(c.MustBe("zero", t.zero, ZeroConvention::kNone, unused));
    LQ_RETURN_IF_ERROR(c.MustBe("qparam", t.qparam, DType::kF16, unused));
    LQ_RETURN_IF_ERROR(c.MustBe("small_scale", t.small_scale, SmallScale::kFloor, unused));
    LQ_RETURN_IF_ERROR(c.MustBe("overflow", t.overflow, Overflow::kClamp, unused));
  }
  if (t.axis != ScaleAxis::kTensor) {
    LQ_RETURN_IF_ERROR(c.MustBe("static_scale", t.static_scale, 1.0f, "without the axis tensor"));
  } else if (!std::isnormal(t.static_scale) || t.static_scale < 0) {
    return c.Invalid("static_scale", t.static_scale, "must be finite and at least 2^-126, the smallest normal f32");
  }
  if (int64_t{layer.head_dim} * t.bits % 8 != 0)
    return c.Invalid("bits", t.bits,
                     "head_dim " + Text(layer.head_dim) + " x " + Text(t.bits) +
                         " bits is not a whole number of bytes: no byte may hold bits of two rows");
  return {};
}

Status CheckClosure(const Complaint& c, const Closure& closure, const LayerSchema& layer) {
  LQ_RETURN_IF_ERROR(c.InRange("lag", closure.lag, -1, kMaxClosureRows));
  LQ_RETURN_IF_ERROR(c.InRange("step", closure.step, 1, kMaxClosureRows));
  if (closure.lag == -1 && closure.step != 1)
    return c.Invalid("step", closure.step, "must be 1 with lag -1: a row that is coded in its own step closes alone");
  if (layer.window != 0 && layer.window < closure.lag + closure.step)
    return c.Invalid("lag", closure.lag,
                     "lag + step " + Text(closure.lag + closure.step) + " is more than the window of " +
                         Text(layer.window) + " rows: rows would leave the window before they close");
  return {};
}

Status CheckLayer(const LayerSchema& layer, int index) {
  const std::string name = "layer " + Text(index) + " ";
  const Complaint c{name};
  LQ_RETURN_IF_ERROR(c.InRange("num_kv_heads", layer.num_kv_heads, 1, kMaxKvHeads));
  LQ_RETURN_IF_ERROR(c.InRange("head_dim", layer.head_dim, 1, kMaxHeadDim));
  LQ_RETURN_IF_ERROR(c.InRange("window", layer.window, 0, kMaxWindowRows));
  LQ_RETURN_IF_ERROR(c.InRange("pinned_rows", layer.pinned_rows, 0, kMaxPinnedRows));
  LQ_RETURN_IF_ERROR(c.InRange("coded_page_rows", layer.coded_page_rows, 1, kMaxPageRows));
  LQ_RETURN_IF_ERROR(c.InRange("exact_page_rows", layer.exact_page_rows, 1, kMaxPageRows));
  if (!PowerOfTwo(layer.coded_page_rows))
    return c.Invalid("coded_page_rows", layer.coded_page_rows, "must be a power of two");
  if (!PowerOfTwo(layer.exact_page_rows))
    return c.Invalid("exact_page_rows", layer.exact_page_rows, "must be a power of two");
  if (layer.packing_version != 1)
    return c.Unsupported("packing_version", layer.packing_version, "this build reads version 1 (docs/formats/page.md)");
  if (!Known(layer.k_stage)) return c.Invalid("k_stage", static_cast<int>(layer.k_stage), "must be post or pre");
  if (!Known(layer.exact_dtype))
    return c.Invalid("exact_dtype", static_cast<int>(layer.exact_dtype), "not a number format");
  if (!PlainFloat(layer.exact_dtype))
    return c.Invalid("exact_dtype", layer.exact_dtype, "exact rows are f32, f16 or bf16");
  LQ_RETURN_IF_ERROR(CheckClosure({name + "k_closure."}, layer.k_closure, layer));
  LQ_RETURN_IF_ERROR(CheckClosure({name + "v_closure."}, layer.v_closure, layer));
  LQ_RETURN_IF_ERROR(CheckCoding({name + "k."}, layer.k, layer, layer.k_closure));
  return CheckCoding({name + "v."}, layer.v, layer, layer.v_closure);
}

}  // namespace

Status ValidateRope(const RopeConfig& rope) {
  const Complaint c{""};
  const auto in = [&](const char* field, double value, double low, double high) -> Status {
    if (value >= low && value <= high) return {};  // not NaN
    return c.Invalid(field, value, "must be in " + Text(low) + ".." + Text(high));
  };
  const bool linear = rope.type == "linear", llama3 = rope.type == "llama3", yarn = rope.type == "yarn";
  if (rope.type == "dynamic" || rope.type == "longrope")
    return c.Unsupported("rope.type", rope.type,
                         "its frequencies change with the length, which would turn keys that are stored already; "
                         "default, linear, llama3 and yarn are known");
  if (!linear && !llama3 && !yarn && rope.type != "default")
    return c.Unsupported("rope.type", Excerpt(rope.type), "default, linear, llama3 and yarn are known");
  if (!std::isfinite(rope.theta) || rope.theta <= 0)
    return c.Invalid("rope.theta", rope.theta, "must be finite and above 0");
  if (!Known(rope.pairing))
    return c.Invalid("rope.pairing", static_cast<int>(rope.pairing), "must be half_split or interleaved");
  if (rope.dims < 0 || rope.dims % 2 != 0) return c.Invalid("rope.dims", rope.dims, "must be even and at least 0");

  const RopeConfig none;
  const std::string unused = "(its default) for the type " + rope.type;
  if (linear || llama3 || yarn) {
    LQ_RETURN_IF_ERROR(in("rope.factor", rope.factor, 1, kMaxRopeFactor));
  } else {
    LQ_RETURN_IF_ERROR(c.MustBe("rope.factor", rope.factor, none.factor, unused));
  }
  if (llama3 || yarn) {
    LQ_RETURN_IF_ERROR(c.InRange("rope.original_max_positions", rope.original_max_positions, 1, kMaxWindowRows));
  } else {
    LQ_RETURN_IF_ERROR(c.MustBe("rope.original_max_positions", rope.original_max_positions, 0, unused));
  }
  constexpr double kLeast = 1e-6;
  if (llama3) {
    LQ_RETURN_IF_ERROR(in("rope.low_freq_factor", rope.low_freq_factor, kLeast, kMaxRopeFactor));
    LQ_RETURN_IF_ERROR(in("rope.high_freq_factor", rope.high_freq_factor, kLeast, kMaxRopeFactor));
    if (rope.high_freq_factor <= rope.low_freq_factor)
      return c.Invalid("rope.high_freq_factor", rope.high_freq_factor,
                       "must be above low_freq_factor " + Text(rope.low_freq_factor));
  } else {
    LQ_RETURN_IF_ERROR(c.MustBe("rope.low_freq_factor", rope.low_freq_factor, none.low_freq_factor, unused));
    LQ_RETURN_IF_ERROR(c.MustBe("rope.high_freq_factor", rope.high_freq_factor, none.high_freq_factor, unused));
  }
  if (yarn) {
    LQ_RETURN_IF_ERROR(in("rope.beta_fast", rope.beta_fast, kLeast, kMaxRopeFactor));
    LQ_RETURN_IF_ERROR(in("rope.beta_slow", rope.beta_slow, kLeast, kMaxRopeFactor));
    if (rope.beta_fast < rope.beta_slow)
      return c.Invalid("rope.beta_fast", rope.beta_fast, "must be at least beta_slow " + Text(rope.beta_slow));
    if (rope.theta <= 1) return c.Invalid("rope.theta", rope.theta, "must be above 1 for the type yarn");
    return in("rope.attention_factor", rope.attention_factor, kLeast, kMaxRopeFactor);
  }
  LQ_RETURN_IF_ERROR(c.MustBe("rope.beta_fast", rope.beta_fast, none.beta_fast, unused));
  LQ_RETURN_IF_ERROR(c.MustBe("rope.beta_slow", rope.beta_slow, none.beta_slow, unused));
  LQ_RETURN_IF_ERROR(c.MustBe("rope.truncate", rope.truncate, none.truncate, unused));
  return c.MustBe("rope.attention_factor", rope.attention_factor, none.attention_factor, unused);
}

Status Validate(const CacheSchema& schema) {
  const Complaint c{""};
  if (schema.layers.empty() || schema.layers.size() > kMaxLayers)
    return Status(Code::kInvalidArgument,
                  "layers " + std::to_string(schema.layers.size()) + ": must be in 1.." + std::to_string(kMaxLayers));
  for (size_t i = 0; i < schema.layers.size(); ++i)
    LQ_RETURN_IF_ERROR(CheckLayer(schema.layers[i], static_cast<int>(i)));

  int64_t row_values = 0;
  for (const LayerSchema& layer : schema.layers) row_values += int64_t{layer.num_kv_heads} * layer.head_dim;
  if (row_values > kMaxRowValues)
    return Status(Code::kInvalidArgument, "layers x num_kv_heads x head_dim " + std::to_string(row_values) +
                                              ": at most " + std::to_string(kMaxRowValues) +
                                              " values of K in one position");

  const RopeConfig& rope = schema.rope;
  LQ_RETURN_IF_ERROR(ValidateRope(rope));
  for (size_t i = 0; i < schema.layers.size(); ++i)
    if (rope.dims > schema.layers[i].head_dim)
      return c.Invalid("rope.dims", rope.dims,
                       "layer " + std::to_string(i) + " has only head_dim " + Text(schema.layers[i].head_dim));
  LQ_RETURN_IF_ERROR(c.InRange("read_step", schema.read_step, 1, kPromptReadStep));

  const std::string& source = schema.provenance.scale_source;
  if (!source.empty() && source != "none" && source != "warmup" && source != "dataset")
    return c.Invalid("provenance.scale_source", source, "must be none, warmup or dataset");
  if (source == "none")
    for (size_t i = 0; i < schema.layers.size(); ++i)
      for (const TensorCoding* t : {&schema.layers[i].k, &schema.layers[i].v})
        if (t->static_scale != 1.0f)
          return Complaint{"layer " + std::to_string(i) + (t == &schema.layers[i].k ? " k." : " v.")}.Invalid(
              "static_scale", t->static_scale, "must be 1 while provenance.scale_source is none");
  return {};
}

std::vector<SchemaField> SchemaFields(const CacheSchema& schema) {
  const auto& [layers, rope, read_step, identity, provenance] = schema;
  const auto& [type, theta, dims, pairing, factor, original, low, high, fast, slow, truncate, attention_factor] = rope;
  const auto& [model, adapter, tokenizer, calibration] = identity;
  FieldList list;
  list.Add("identity.model", model);
  list.Add("identity.adapter", adapter);
  list.Add("identity.tokenizer", tokenizer);
  list.Add("identity.calibration", calibration);
  list.Add("rope.type", type);
  list.Add("rope.theta", theta);
  list.Add("rope.dims", dims);
  list.Add("rope.pairing", pairing);
  list.Add("rope.factor", factor);
  list.Add("rope.original_max_positions", original);
  list.Add("rope.low_freq_factor", low);
  list.Add("rope.high_freq_factor", high);
  list.Add("rope.beta_fast", fast);
  list.Add("rope.beta_slow", slow);
  list.Add("rope.truncate", truncate);
  list.Add("rope.attention_factor", attention_factor);
  list.Add("read_step", read_step);
  list.Add("layers", static_cast<int>(layers.size()));
  for (size_t i = 0; i < layers.size(); ++i) list.AddLayer("layers[" + std::to_string(i) + "].", layers[i]);
  return std::move(list.fields);
}

Status Compatible(const CacheSchema& a, const CacheSchema& b) {
  const std::vector<SchemaField> here = SchemaFields(a), there = SchemaFields(b);
  // The number of layers precedes the layers, so lists of unequal length differ before the shorter one ends.
  for (size_t i = 0; i < here.size(); ++i) {
    LQ_CHECK(i < there.size() && here[i].name == there[i].name);
    if (here[i].value == there[i].value) continue;
    const auto quote = [](const std::string& v) { return v.empty() ? std::string("\"\"") : v; };
    return Status(Code::kInvalidArgument,
                  here[i].name + ": " + quote(here[i].value) + " here, " + quote(there[i].value) + " there");
  }
  return {};
}

std::string Digest(const CacheSchema& schema) {
  Sha256 sha;
  sha.Add(std::string_view("livequant schema 1"));
  for (const SchemaField& field : SchemaFields(schema)) {
    sha.Add(std::string_view(field.name));
    sha.Add(std::string_view(field.value));
  }
  return sha.Hex();
}

std::string ContractName(int read_step) {
  if (read_step == kStepwise) return "stepwise";
  if (read_step == kPromptReadStep) return "prompt";
  return "chunk:" + std::to_string(read_step);
}

Result<int> ParseContract(const std::string& name) {
  if (name == "stepwise") return kStepwise;
  if (name == "prompt") return kPromptReadStep;
  const std::string prefix = "chunk:";
  int rows = 0;
  if (name.starts_with(prefix)) {
    const char *first = name.data() + prefix.size(), *last = name.data() + name.size();
    const auto [end, error] = std::from_chars(first, last, rows);
    // chunk:1 is stepwise under another name, and one contract has one name.
    if (error == std::errc() && end == last && *first != '0' && rows > 1 && rows < kPromptReadStep) return rows;
  }
  return Status(Code::kInvalidArgument, "contract " + Excerpt(name) +
                                            ": must be stepwise, prompt or chunk:N with N in 2.." +
                                            std::to_string(kPromptReadStep - 1));
}

std::vector<LayerClass> LayerClasses(const CacheSchema& schema) {
  std::vector<LayerClass> classes;
  for (size_t i = 0; i < schema.layers.size(); ++i) {
    const LayerSchema& layer = schema.layers[i];
    LayerClass* home = nullptr;
    for (LayerClass& c : classes)
      if (c.closure[0] == layer.k_closure && c.closure[1] == layer.v_closure && c.window == layer.window &&
          c.pinned_rows == layer.pinned_rows && c.coded_page_rows == layer.coded_page_rows &&
          c.exact_page_rows == layer.exact_page_rows)
        home = &c;
    if (home == nullptr) {
      classes.push_back({{},
                         {layer.k_closure, layer.v_closure},
                         layer.window,
                         layer.pinned_rows,
                         layer.coded_page_rows,
                         layer.exact_page_rows});
      home = &classes.back();
    }
    home->layers.push_back(static_cast<int>(i));
  }
  return classes;
}

}  // namespace livequant
