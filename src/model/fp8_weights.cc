// model/fp8_weights.cc: see fp8_weights.h.
#include "model/fp8_weights.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <set>

#include "base/check.h"
#include "io/json.h"
#include "numeric/float_formats.h"

namespace livequant {
namespace {

using nlohmann::json;

constexpr int64_t kMostBlock = 1 << 16;
constexpr double kLargestE4M3 = 448;

Status BadField(Code code, const std::string& field, const json& value, std::string_view limit) {
  return Status(code,
                fmt::format("config.json: quantization_config.{} is {}; {}", field, ExcerptOfValue(value), limit));
}

// Every field of `object` must be among `read` or have its value in `fixed`; null is as good as absent.
Status CheckFields(const json& object, const std::string& path, const std::set<std::string>& read,
                   const std::map<std::string, std::vector<json>>& fixed) {
  for (const auto& [key, value] : object.items()) {
    if (value.is_null() || read.contains(key)) continue;
    const auto known = fixed.find(key);
    if (known == fixed.end())
      return BadField(Code::kUnsupported, path + ExcerptOfKey(key), value, "no such field is known here");
    if (std::find(known->second.begin(), known->second.end(), value) == known->second.end())
      return BadField(Code::kUnsupported, path + key, value,
                      fmt::format("only {} is known here", ExcerptOfValue(json(known->second))));
  }
  return {};
}

Status ReadBlock(const json& value, const std::string& field, Fp8Scheme* s) {
  const auto size = [](const json& v) {
    return v.is_number_unsigned() && v.get<uint64_t>() >= 1 && v.get<uint64_t>() <= static_cast<uint64_t>(kMostBlock);
  };
  if (!value.is_array() || value.size() != 2 || !size(value[0]) || !size(value[1]))
    return BadField(Code::kInvalidArgument, field, value,
                    fmt::format("two sizes from 1 to {} are needed: rows, columns", kMostBlock));
  s->scales = Fp8Scheme::Scales::kBlock;
  s->block_rows = value[0].get<int64_t>();
  s->block_cols = value[1].get<int64_t>();
  return {};
}

Status ReadIgnored(const json& object, const char* field, Fp8Scheme* s) {
  if (!object.contains(field) || object[field].is_null()) return {};
  const json& list = object[field];
  if (!list.is_array() || !std::all_of(list.begin(), list.end(), [](const json& v) { return v.is_string(); }))
    return BadField(Code::kInvalidArgument, field, list, "a list of module names is needed");
  for (const json& name : list) s->ignored.push_back(name.get<std::string>());
  return {};
}

Status ReadPlainFp8(const json& q, Fp8Scheme* s) {
  LQ_RETURN_IF_ERROR(CheckFields(
      q, "", {"quant_method", "weight_block_size", "modules_to_not_convert", "ignored_layers", "activation_scheme"},
      {{"fmt", {"e4m3"}}, {"scale_fmt", {"ue8m0", "float"}}, {"dequantize", {false}}}));
  for (const char* field : {"modules_to_not_convert", "ignored_layers"}) LQ_RETURN_IF_ERROR(ReadIgnored(q, field, s));
  if (q.contains("activation_scheme") && !q["activation_scheme"].is_null()) {
    if (q["activation_scheme"] != "dynamic" && q["activation_scheme"] != "static")
      return BadField(Code::kUnsupported, "activation_scheme", q["activation_scheme"],
                      "only \"dynamic\" and \"static\" are known here");
    s->static_activations = q["activation_scheme"] == "static";
  }
  if (q.contains("weight_block_size") && !q["weight_block_size"].is_null())
    return ReadBlock(q["weight_block_size"], "weight_block_size", s);
  return {};
}

Status ReadCompressedTensors(const json& q, Fp8Scheme* s) {
  LQ_RETURN_IF_ERROR(CheckFields(q, "",
                                 {"quant_method", "config_groups", "ignore", "global_compression_ratio", "version"},
                                 {{"format", {"float-quantized"}},
                                  {"quantization_status", {"compressed", "frozen"}},
                                  {"sparsity_config", {json::object()}},
                                  {"transform_config", {json::object()}}}));
  LQ_RETURN_IF_ERROR(ReadIgnored(q, "ignore", s));
  const json groups = q.value("config_groups", json());
  if (!groups.is_object() || groups.size() != 1)
    return BadField(Code::kUnsupported, "config_groups", groups, "an object with one group is read");
  const json& group = groups.begin().value();
  const std::string path = "config_groups." + ExcerptOfKey(groups.begin().key());
  if (!group.is_object()) return BadField(Code::kInvalidArgument, path, group, "an object is needed");
  LQ_RETURN_IF_ERROR(CheckFields(group, path + ".", {"weights", "input_activations"},
                                 {{"targets", {json::array({"Linear"})}}, {"format", {"float-quantized"}}}));
  const json weights = group.value("weights", json()), inputs = group.value("input_activations", json());
  if (!weights.is_object()) return BadField(Code::kInvalidArgument, path + ".weights", weights, "an object is needed");
  LQ_RETURN_IF_ERROR(CheckFields(weights, path + ".weights.", {"strategy", "block_structure", "observer"},
                                 {{"num_bits", {8}},
                                  {"type", {"float"}},
                                  {"symmetric", {true}},
                                  {"dynamic", {false}},
                                  {"observer_kwargs", {json::object()}}}));
  for (const char* field : {"num_bits", "type", "symmetric"})  // their absence would mean something else
    if (!weights.contains(field) || weights[field].is_null())
      return BadField(Code::kInvalidArgument, path + ".weights." + field, json(), "it must be said");
  if (!inputs.is_null()) {
    if (!inputs.is_object())
      return BadField(Code::kInvalidArgument, path + ".input_activations", inputs, "an object or null is needed");
    if (inputs.value("num_bits", json()) != 8 || inputs.value("type", json()) != "float")
      return BadField(Code::kUnsupported, path + ".input_activations", inputs, "only 8-bit floats are known here");
    s->static_activations = inputs.value("dynamic", json(false)) == false;
  }
  const json strategy = weights.value("strategy", json());
  if (strategy == "block")
    return ReadBlock(weights.value("block_structure", json()), path + ".weights.block_structure", s);
  if (strategy != "tensor" && strategy != "channel")
    return BadField(Code::kUnsupported, path + ".weights.strategy", strategy,
                    "only \"tensor\", \"channel\" and \"block\" are known here");
  s->scales = strategy == "tensor" ? Fp8Scheme::Scales::kTensor : Fp8Scheme::Scales::kRow;
  if (!weights.value("block_structure", json()).is_null())
    return BadField(Code::kInvalidArgument, path + ".weights.block_structure", weights["block_structure"],
                    "only the strategy \"block\" has one");
  return {};
}

bool IsScaleName(const std::string& name) {
  for (const char* end : {".weight_scale", ".weight_scale_inv", ".input_scale"})
    if (name.ends_with(end)) return true;
  return false;
}

float ScaleValue(const TensorInfo& t, int64_t index) {
  float f;
  uint16_t bits;
  if (t.dtype == "F32") {
    std::memcpy(&f, t.bytes.data() + index * 4, 4);
    return f;
  }
  std::memcpy(&bits, t.bytes.data() + index * 2, 2);
  return t.dtype == "F16" ? F16ToFloat(bits) : Bf16ToFloat(bits);
}

// Shape, dtype and values of the scales of one matrix.
Status CheckScales(const std::string& name, const Fp8Matrix& m, const std::string& scale_name,
                   const Fp8Scheme& scheme) {
  using Shape = std::vector<int64_t>;
  const int64_t rows = m.codes->shape[0], cols = m.codes->shape[1];
  std::vector<Shape> want;
  switch (scheme.scales) {
    case Fp8Scheme::Scales::kTensor:
      want = {{}, {1}, {1, 1}};
      break;
    case Fp8Scheme::Scales::kRow:
      want = {{rows, 1}, {rows}};
      break;
    case Fp8Scheme::Scales::kBlock:
      want = {{(rows + scheme.block_rows - 1) / scheme.block_rows, (cols + scheme.block_cols - 1) / scheme.block_cols}};
      break;
  }
  const TensorInfo& s = *m.scales;
  if (std::find(want.begin(), want.end(), s.shape) == want.end())
    return Status(Code::kInvalidArgument,
                  fmt::format("tensor {} has shape [{}]; {} of [{}, {}] with {} needs [{}]", scale_name,
                              fmt::join(s.shape, ", "), name, rows, cols, scheme.Text(), fmt::join(want[0], ", ")));
  if (s.dtype != "F32" && s.dtype != "BF16" && s.dtype != "F16")
    return Status(Code::kUnsupported,
                  fmt::format("tensor {} is {}; scales of F32, BF16 and F16 are read", scale_name, s.dtype));
  const int64_t count = static_cast<int64_t>(s.bytes.size()) / (s.dtype == "F32" ? 4 : 2);
  for (int64_t i = 0; i < count; ++i) {
    const double x = double{ScaleValue(s, i)};
    if (!(std::fabs(x) * kLargestE4M3 <= double{Bf16ToFloat(0x7F7F)}))
      return Status(
          Code::kOutOfRange,
          fmt::format("tensor {} holds {} at index {}; times 448 it must be finite in bf16", scale_name, x, i));
  }
  return {};
}

}  // namespace

std::string Fp8Scheme::Text() const {
  switch (scales) {
    case Scales::kTensor:
      return "one scale per tensor";
    case Scales::kRow:
      return "scales per row";
    case Scales::kBlock:
      return fmt::format("scales per {}x{} block", block_rows, block_cols);
  }
  return "?";
}

Result<std::optional<Fp8Scheme>> ParseFp8Scheme(std::string_view config_json) {
  LQ_ASSIGN_OR_RETURN(const json root, ParseJson(config_json, "config.json", {.max_depth = 32, .max_bytes = 4 << 20}));
  if (!root.is_object() || !root.contains("quantization_config") || root["quantization_config"].is_null())
    return std::optional<Fp8Scheme>();
  const json& q = root["quantization_config"];
  if (!q.is_object())
    return Status(
        Code::kInvalidArgument,
        fmt::format("config.json: quantization_config is {}; an object or null is needed", ExcerptOfValue(q)));
  Fp8Scheme scheme;
  const json method = q.value("quant_method", json());
  if (method == "fp8") {
    LQ_RETURN_IF_ERROR(ReadPlainFp8(q, &scheme));
  } else if (method == "compressed-tensors") {
    LQ_RETURN_IF_ERROR(ReadCompressedTensors(q, &scheme));
  } else {
    return BadField(Code::kUnsupported, "quant_method", method,
                    "only \"fp8\" and \"compressed-tensors\" with F8_E4M3 weights are read");
  }
  return std::optional<Fp8Scheme>(std::move(scheme));
}

int64_t Fp8Matrix::Decode(int64_t first, int64_t count, std::byte* out) const {
  static const std::array<float, 256> kValues = [] {
    std::array<float, 256> v{};
    for (int i = 0; i < 256; ++i) v[static_cast<size_t>(i)] = Fp8E4M3ToFloat(static_cast<uint8_t>(i));
    return v;
  }();
  const int64_t cols = codes->shape[1], scale_cols = (cols + block_cols - 1) / block_cols;
  int64_t changed = 0;
  for (int64_t r = first; r < first + count; ++r) {
    const std::byte* code = codes->bytes.data() + r * cols;
    for (int64_t b = 0; b < scale_cols; ++b) {
      const double scale = double{ScaleValue(*scales, r / block_rows * scale_cols + b)};
      const int64_t end = std::min(cols, (b + 1) * block_cols);
      for (int64_t c = b * block_cols; c < end; ++c) {
        // 4 and 24 bits of significand: exact in a double, so that bf16 is the only rounding.
        const double exact = double{kValues[std::to_integer<size_t>(code[c])]} * scale;
        const uint16_t bits = Bf16FromDouble(exact);
        changed += double{Bf16ToFloat(bits)} != exact && exact == exact;
        std::memcpy(out, &bits, sizeof bits);
        out += sizeof bits;
      }
    }
  }
  return changed;
}

Result<std::map<std::string, Fp8Matrix>> PairFp8Scales(const std::map<std::string, TensorInfo>& tensors,
                                                       const std::optional<Fp8Scheme>& scheme,
                                                       std::vector<std::string>* used) {
  std::map<std::string, Fp8Matrix> out;
  for (const auto& [name, t] : tensors)
    if (t.dtype == "F8_E4M3") out[name].codes = &t;
  if (!scheme.has_value()) {
    if (out.empty()) return out;
    return Status(Code::kInvalidArgument,
                  fmt::format("tensor {} is F8_E4M3 ({} such tensors), but config.json has no quantization_config",
                              out.begin()->first, out.size()));
  }
  if (out.empty())
    return Status(Code::kInvalidArgument,
                  fmt::format("config.json: quantization_config says F8_E4M3 with {}; none of {} tensors is F8_E4M3",
                              scheme->Text(), tensors.size()));
  int64_t scales = 0;
  for (const auto& [name, t] : tensors) scales += IsScaleName(name) && !name.ends_with(".input_scale");
  const std::string counts =
      fmt::format("{} F8_E4M3 tensors need {} scales, {} are there", out.size(), out.size(), scales);
  std::set<std::string> paired;
  for (auto& [name, m] : out) {
    const std::string module = name.substr(0, name.rfind('.'));
    if (!name.ends_with(".weight") || m.codes->shape.size() != 2 || m.codes->shape[0] < 1 || m.codes->shape[1] < 1)
      return Status(Code::kUnsupported,
                    fmt::format("tensor {} is F8_E4M3 of shape [{}]; only matrices named *.weight are read so", name,
                                fmt::join(m.codes->shape, ", ")));
    if (std::find(scheme->ignored.begin(), scheme->ignored.end(), module) != scheme->ignored.end())
      return Status(Code::kInvalidArgument,
                    fmt::format("tensor {} is F8_E4M3, but quantization_config leaves module {} out", name, module));
    const std::string plain = name + "_scale", inverse = name + "_scale_inv";
    const auto a = tensors.find(plain), b = tensors.find(inverse);
    if (a == tensors.end() && b == tensors.end())
      return Status(Code::kInvalidArgument,
                    fmt::format("tensor {} is missing, and so is {}: {}", plain, inverse, counts));
    if (a != tensors.end() && b != tensors.end())
      return Status(Code::kInvalidArgument,
                    fmt::format("tensors {} and {} are both there: {}", plain, inverse, counts));
    const std::string& scale_name = a != tensors.end() ? plain : inverse;
    m.scales = &tensors.at(scale_name);
    LQ_RETURN_IF_ERROR(CheckScales(name, m, scale_name, *scheme));
    const int64_t rows = m.codes->shape[0], cols = m.codes->shape[1];
    m.block_rows = scheme->scales == Fp8Scheme::Scales::kBlock ? scheme->block_rows
                   : scheme->scales == Fp8Scheme::Scales::kRow ? 1
                                                               : rows;
    m.block_cols = scheme->scales == Fp8Scheme::Scales::kBlock ? scheme->block_cols : cols;
    paired.insert(scale_name);
    if (scheme->static_activations && tensors.contains(module + ".input_scale")) paired.insert(module + ".input_scale");
  }
  for (const auto& [name, t] : tensors)
    if (IsScaleName(name) && !paired.contains(name))
      return Status(Code::kInvalidArgument, fmt::format("tensor {} is left over: {}", name, counts));
  used->assign(paired.begin(), paired.end());
  return out;
}

}  // namespace livequant
