// model/gguf_source.cc: names, row order and values of a GGUF file's tensors. Its metadata: model/gguf_config.cc.
#include "model/gguf_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "base/check.h"
#include "io/json.h"
#include "numeric/float_formats.h"

namespace livequant {
namespace {

struct NamePair {
  std::string_view gguf, hugging_face;
};
constexpr NamePair kTop[] = {
    {"token_embd", "model.embed_tokens"}, {"output_norm", "model.norm"}, {"output", "lm_head"}};
constexpr NamePair kLayer[] = {{"attn_norm", "input_layernorm"},    {"ffn_norm", "post_attention_layernorm"},
                               {"attn_q", "self_attn.q_proj"},      {"attn_k", "self_attn.k_proj"},
                               {"attn_v", "self_attn.v_proj"},      {"attn_output", "self_attn.o_proj"},
                               {"attn_q_norm", "self_attn.q_norm"}, {"attn_k_norm", "self_attn.k_norm"},
                               {"ffn_gate", "mlp.gate_proj"},       {"ffn_up", "mlp.up_proj"},
                               {"ffn_down", "mlp.down_proj"}};

// Hugging Face's name of a tensor; nothing if this table does not know it. *part is its name inside a layer.
std::optional<std::string> HuggingFaceName(std::string_view name, std::string_view* part) {
  const size_t dot = name.rfind('.');
  if (dot == name.npos) return std::nullopt;
  const std::string_view kind = name.substr(dot + 1), stem = name.substr(0, dot);
  if (kind != "weight" && kind != "bias") return std::nullopt;
  for (const NamePair& p : kTop)
    if (stem == p.gguf) return fmt::format("{}.{}", p.hugging_face, kind);
  if (!stem.starts_with("blk.")) return std::nullopt;
  const size_t end = stem.find('.', 4);
  if (end == stem.npos) return std::nullopt;
  const std::string_view layer = stem.substr(4, end - 4);
  const bool number = !layer.empty() && layer.size() <= 6 && (layer == "0" || layer[0] != '0') &&
                      std::all_of(layer.begin(), layer.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!number) return std::nullopt;
  *part = stem.substr(end + 1);
  for (const NamePair& p : kLayer)
    if (*part == p.gguf) return fmt::format("model.layers.{}.{}.{}", layer, p.hugging_face, kind);
  return std::nullopt;
}

float ScaleOf(const std::byte* block) {
  uint16_t bits;
  std::memcpy(&bits, block, sizeof bits);
  return F16ToFloat(bits);
}

// One stored row of `cols` values.
void ReadRow(GgufDType dtype, const std::byte* from, int64_t cols, std::byte* out) {
  const auto put = [&](int64_t i, float x) { std::memcpy(out + i * 4, &x, sizeof x); };
  switch (dtype) {
    case GgufDType::kF32:
    case GgufDType::kF16:
    case GgufDType::kBF16:
      std::memcpy(out, from, static_cast<size_t>(GgufRowBytes(dtype, cols)));
      return;
    case GgufDType::kQ8_0:
      for (int64_t b = 0; b < cols; b += kGgufBlock, from += 2 + kGgufBlock) {
        const float scale = ScaleOf(from);
        for (int64_t i = 0; i < kGgufBlock; ++i)
          put(b + i, static_cast<float>(static_cast<int8_t>(std::to_integer<uint8_t>(from[2 + i]))) * scale);
      }
      return;
    case GgufDType::kQ4_0:
      for (int64_t b = 0; b < cols; b += kGgufBlock, from += 2 + kGgufBlock / 2) {
        const float scale = ScaleOf(from);
        for (int64_t i = 0; i < kGgufBlock / 2; ++i) {
          const int byte = std::to_integer<int>(from[2 + i]);
          put(b + i, static_cast<float>((byte & 15) - 8) * scale);
          put(b + i + kGgufBlock / 2, static_cast<float>((byte >> 4) - 8) * scale);
        }
      }
      return;
  }
}

DType ReadAs(GgufDType dtype) {
  switch (dtype) {
    case GgufDType::kF16:
      return DType::kF16;
    case GgufDType::kBF16:
      return DType::kBF16;
    default:
      return DType::kF32;
  }
}

}  // namespace

Result<std::unique_ptr<GgufSource>> GgufSource::Make(const Gguf& gguf, std::string_view what) {
  std::unique_ptr<GgufSource> source(new GgufSource());
  const std::string architecture(std::get<std::string_view>(gguf.Find("general.architecture")->value));
  const auto heads = [&](std::string_view key) -> int64_t {  // as GgufConfigJson checked them
    const GgufValue* v = gguf.Find(architecture + "." + std::string(key));
    if (v == nullptr) v = gguf.Find(architecture + ".attention.head_count");
    LQ_CHECK(v != nullptr);
    if (const GgufArray* array = std::get_if<GgufArray>(&v->value)) return GgufInteger(*array, 0);
    if (const int64_t* n = std::get_if<int64_t>(&v->value)) return *n;
    return static_cast<int64_t>(std::get<uint64_t>(v->value));
  };
  const bool permuted = architecture == "llama" || architecture == "mistral";
  for (const auto& [name, tensor] : gguf.tensors()) {
    if (name == "rope_freqs.weight") continue;  // part of the config
    std::string_view part;
    const std::string mapped = HuggingFaceName(name, &part).value_or(name);
    Entry entry{.tensor = &tensor};
    if (permuted && (part == "attn_q" || part == "attn_k")) {
      entry.permuted_heads = heads(part == "attn_q" ? "attention.head_count" : "attention.head_count_kv");
      if (tensor.shape[0] % (2 * entry.permuted_heads) != 0)
        return Status(Code::kInvalidArgument,
                      fmt::format("{}: tensor {} has {} rows; {} heads of an even size are needed", what, Excerpt(name),
                                  tensor.shape[0], entry.permuted_heads));
      if (tensor.shape.size() == 1 && ReadAs(tensor.dtype) == DType::kF32 && tensor.dtype != GgufDType::kF32)
        return Status(Code::kUnsupported, fmt::format("{}: tensor {} is a vector of {}; F32, F16 and BF16 are read",
                                                      what, Excerpt(name), GgufDTypeName(tensor.dtype)));
    }
    SourceTensor info{.shape = tensor.shape,
                      .stored = GgufDTypeName(tensor.dtype),
                      .dtype = ReadAs(tensor.dtype),
                      .stored_bytes = static_cast<int64_t>(tensor.bytes.size())};
    if (!source->entries_.emplace(mapped, entry).second)
      return Status(Code::kInvalidArgument,
                    fmt::format("{}: tensor {} means {}, and so does another", what, Excerpt(name), Excerpt(mapped)));
    source->tensors_.emplace(mapped, std::move(info));
  }
  return source;
}

void GgufSource::Read(const std::string& name, int64_t first, int64_t count, std::byte* out) const {
  const SourceTensor& info = tensors_.at(name);
  const Entry& entry = entries_.at(name);
  LQ_CHECK(first >= 0 && count >= 0 && first + count <= info.rows());
  // A permuted vector (a bias) is read as a column: one value a row.
  const bool column = entry.permuted_heads > 0 && info.shape.size() == 1;
  const int64_t rows = column ? info.cols() : info.rows(), cols = column ? 1 : info.cols();
  const int64_t begin = column ? 0 : first, end = column ? rows : first + count;
  const int64_t stored = GgufRowBytes(entry.tensor->dtype, cols), given = cols * DTypeBytes(info.dtype);
  for (int64_t r = begin; r < end; ++r, out += given) {
    int64_t from = r;
    if (entry.permuted_heads > 0) {
      const int64_t d = rows / entry.permuted_heads, in_head = r % d, half = d / 2;
      from = r - in_head + 2 * (in_head % half) + in_head / half;
    }
    ReadRow(entry.tensor->dtype, entry.tensor->bytes.data() + from * stored, cols, out);
  }
}

}  // namespace livequant
