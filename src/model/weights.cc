// model/weights.cc: see weights.h. Every name is checked before anything is packed: a wrong file costs no memory.
#include "model/weights.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>

#include "numeric/float_formats.h"

namespace livequant {
namespace {

constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kHead = "lm_head.weight";

std::string LayerTensor(int layer, const char* name) { return fmt::format("model.layers.{}.{}.weight", layer, name); }
std::string LayerBias(int layer, const char* name) { return fmt::format("model.layers.{}.{}.bias", layer, name); }

std::map<std::string, std::vector<int64_t>> ExpectedShapes(const LlamaConfig& c) {
  const int64_t q = int64_t{c.num_attention_heads} * c.head_dim, kv = int64_t{c.num_key_value_heads} * c.head_dim;
  const int64_t h = c.hidden_size, i = c.intermediate_size;
  std::map<std::string, std::vector<int64_t>> want = {{kEmbedding, {c.vocab_size, h}}, {"model.norm.weight", {h}}};
  if (!c.tie_word_embeddings) want[kHead] = {c.vocab_size, h};
  for (int l = 0; l < c.num_hidden_layers; ++l) {
    want[LayerTensor(l, "input_layernorm")] = {h};
    want[LayerTensor(l, "post_attention_layernorm")] = {h};
    want[LayerTensor(l, "self_attn.q_proj")] = {q, h};
    want[LayerTensor(l, "self_attn.k_proj")] = {kv, h};
    want[LayerTensor(l, "self_attn.v_proj")] = {kv, h};
    want[LayerTensor(l, "self_attn.o_proj")] = {h, q};
    want[LayerTensor(l, "mlp.gate_proj")] = {i, h};
    want[LayerTensor(l, "mlp.up_proj")] = {i, h};
    want[LayerTensor(l, "mlp.down_proj")] = {h, i};
    if (c.qk_norm) want[LayerTensor(l, "self_attn.q_norm")] = want[LayerTensor(l, "self_attn.k_norm")] = {c.head_dim};
    if (c.qkv_bias) {
      want[LayerBias(l, "self_attn.q_proj")] = {q};
      want[LayerBias(l, "self_attn.k_proj")] = want[LayerBias(l, "self_attn.v_proj")] = {kv};
    }
    if (c.o_bias) want[LayerBias(l, "self_attn.o_proj")] = {h};
    if (c.mlp_bias) {
      want[LayerBias(l, "mlp.gate_proj")] = want[LayerBias(l, "mlp.up_proj")] = {i};
      want[LayerBias(l, "mlp.down_proj")] = {h};
    }
  }
  return want;
}

constexpr int64_t kCopyValues = 1 << 16;  // values that are compared or widened at once

// Both matrices hold the same bytes.
bool SameValues(const WeightSource& source, const std::string& a, const std::string& b) {
  const SourceTensor &ta = source.tensors().at(a), &tb = source.tensors().at(b);
  if (ta.dtype != tb.dtype || ta.shape != tb.shape) return false;
  const int64_t step = std::max<int64_t>(1, kCopyValues / ta.cols()), row_bytes = ta.cols() * DTypeBytes(ta.dtype);
  std::vector<std::byte> left(static_cast<size_t>(step * row_bytes)), right(left.size());
  for (int64_t r = 0; r < ta.rows(); r += step) {
    const int64_t n = std::min(step, ta.rows() - r);
    source.Read(a, r, n, left.data());
    source.Read(b, r, n, right.data());
    if (std::memcmp(left.data(), right.data(), static_cast<size_t>(n * row_bytes)) != 0) return false;
  }
  return true;
}

// Tensors that say nothing which config.json or another tensor does not say. Older exports hold the RoPE frequencies as
// a buffer; some write a tied head twice, which is harmless only if it really is the embedding.
bool SaysNothingNew(const LlamaConfig& c, const WeightSource& source, const std::string& name) {
  if (name.ends_with("rotary_emb.inv_freq")) return true;
  if (name != kHead || !c.tie_word_embeddings) return false;
  return source.tensors().contains(kEmbedding) && source.tensors().contains(kHead) &&
         SameValues(source, kEmbedding, kHead);
}

Status LeftOver(const std::string& name) {
  return Status(Code::kInvalidArgument,
                fmt::format("tensor {} is left over: the model of this config.json has no such tensor", name));
}

}  // namespace

Status CheckLlamaWeights(const LlamaConfig& c, const WeightSource& source) {
  const auto want = ExpectedShapes(c);
  const auto& tensors = source.tensors();
  for (const auto& [name, shape] : want) {
    if (const auto refused = source.refused().find(name); refused != source.refused().end()) return refused->second;
    const auto found = tensors.find(name);
    if (found == tensors.end())
      return Status(Code::kInvalidArgument, fmt::format("tensor {} is missing; config.json implies it", name));
    if (found->second.shape != shape)
      return Status(Code::kInvalidArgument, fmt::format("tensor {} has shape [{}]; config.json implies [{}]", name,
                                                        fmt::join(found->second.shape, ", "), fmt::join(shape, ", ")));
  }
  for (const auto& [name, t] : tensors)
    if (!want.contains(name) && !SaysNothingNew(c, source, name)) return LeftOver(name);
  for (const auto& [name, why] : source.refused())
    if (!want.contains(name) && !SaysNothingNew(c, source, name)) return LeftOver(name);
  return {};
}

namespace {

class WeightsReader {
 public:
  WeightsReader(const LlamaConfig& config, const WeightSource& source) : c_(config), source_(source) {}

  Result<LlamaWeights> Read() {
    LQ_RETURN_IF_ERROR(CheckLlamaWeights(c_, source_));
    LlamaWeights w;
    w.embedding_dtype = source_.tensors().at(kEmbedding).dtype;
    const int64_t row_bytes = c_.hidden_size * DTypeBytes(w.embedding_dtype);
    w.embedding.resize(static_cast<size_t>(c_.vocab_size * row_bytes));
    source_.Read(kEmbedding, 0, c_.vocab_size, w.embedding.data());
    values_ += c_.vocab_size * c_.hidden_size;
    if (c_.tie_word_embeddings) {
      // The head's rows are read; the row that is looked up is one of them.
      LQ_ASSIGN_OR_RETURN(w.lm_head,
                          PackedMatrix::Pack(w.embedding_dtype, w.embedding.data(), c_.vocab_size, c_.hidden_size));
      step_bytes_ += row_bytes * c_.vocab_size;
    } else {
      LQ_ASSIGN_OR_RETURN(w.lm_head, Stack({{kHead}}));
      step_bytes_ += row_bytes;
    }
    for (int l = 0; l < c_.num_hidden_layers; ++l) {
      LlamaLayer layer;
      layer.input_norm = Vectors({{LayerTensor(l, "input_layernorm")}});
      layer.post_attention_norm = Vectors({{LayerTensor(l, "post_attention_layernorm")}});
      if (c_.qk_norm) {
        layer.q_norm = Vectors({{LayerTensor(l, "self_attn.q_norm")}});
        layer.k_norm = Vectors({{LayerTensor(l, "self_attn.k_norm")}});
      }
      const int64_t d = c_.head_dim, group = c_.num_attention_heads / c_.num_key_value_heads;
      if (c_.qkv_bias)
        layer.qkv_bias = Vectors({{LayerBias(l, "self_attn.q_proj"), group * d},
                                  {LayerBias(l, "self_attn.k_proj"), d},
                                  {LayerBias(l, "self_attn.v_proj"), d}});
      if (c_.o_bias) layer.o_bias = Vectors({{LayerBias(l, "self_attn.o_proj")}});
      if (c_.mlp_bias) {
        layer.gate_up_bias = Vectors({{LayerBias(l, "mlp.gate_proj"), kUnits}, {LayerBias(l, "mlp.up_proj"), kUnits}});
        layer.down_bias = Vectors({{LayerBias(l, "mlp.down_proj")}});
      }
      LQ_ASSIGN_OR_RETURN(layer.qkv, Stack({{LayerTensor(l, "self_attn.q_proj"), group * d},
                                            {LayerTensor(l, "self_attn.k_proj"), d},
                                            {LayerTensor(l, "self_attn.v_proj"), d}}));
      LQ_ASSIGN_OR_RETURN(layer.o, Stack({{LayerTensor(l, "self_attn.o_proj")}}));
      LQ_ASSIGN_OR_RETURN(layer.gate_up,
                          Stack({{LayerTensor(l, "mlp.gate_proj"), kUnits}, {LayerTensor(l, "mlp.up_proj"), kUnits}}));
      LQ_ASSIGN_OR_RETURN(layer.down, Stack({{LayerTensor(l, "mlp.down_proj")}}));
      w.layers.push_back(std::move(layer));
    }
    w.final_norm = Vectors({{"model.norm.weight"}});
    w.parameters = values_;
    w.step_bytes = step_bytes_;
    return w;
  }

 private:
  struct Part {
    std::string name;
    int64_t turn = 0;  // rows (values of a vector) that stand side by side before the next part's; 0: all
  };

  // body(part, first, count) in stacking order: a turn of each part, and again until none has more.
  template <class Body>
  static void InTurns(const std::vector<Part>& parts, const std::vector<int64_t>& sizes, Body&& body) {
    for (int64_t turn = 0, left = 1; left != 0; ++turn) {
      left = 0;
      for (size_t p = 0; p < parts.size(); ++p) {
        const int64_t step = parts[p].turn > 0 ? parts[p].turn : sizes[p], first = turn * step;
        if (first >= sizes[p]) continue;
        const int64_t count = std::min(step, sizes[p] - first);
        body(p, first, count);
        left += sizes[p] - first - count;
      }
    }
  }

  // The named matrices in one, packed. They keep their dtype if they share one, else all are widened to f32.
  Result<PackedMatrix> Stack(const std::vector<Part>& parts) {
    const SourceTensor& first_tensor = source_.tensors().at(parts[0].name);
    const int64_t cols = first_tensor.cols();
    int64_t rows = 0;
    DType dtype = first_tensor.dtype;
    std::vector<int64_t> sizes;
    for (const Part& part : parts) {
      const SourceTensor& t = source_.tensors().at(part.name);
      if (t.dtype != dtype) dtype = DType::kF32;
      sizes.push_back(t.rows());
      rows += t.rows();
      values_ += t.rows() * cols;
      step_bytes_ += t.rows() * cols * DTypeBytes(t.dtype);
    }
    std::vector<std::byte> stacked(static_cast<size_t>(rows * cols * DTypeBytes(dtype)));  // aligned, as Pack needs it
    std::byte* to = stacked.data();
    InTurns(parts, sizes, [&](size_t p, int64_t first, int64_t count) {
      ReadAs(dtype, parts[p].name, first, count, to);
      to += count * cols * DTypeBytes(dtype);
    });
    return PackedMatrix::Pack(dtype, stacked.data(), rows, cols);
  }

  // The named vectors (norms, biases) in one, as f32.
  std::vector<float> Vectors(const std::vector<Part>& parts) {
    std::vector<std::vector<float>> whole;
    std::vector<int64_t> sizes;
    for (const Part& part : parts) {
      const SourceTensor& t = source_.tensors().at(part.name);
      whole.emplace_back(static_cast<size_t>(t.cols()));
      ReadAs(DType::kF32, part.name, 0, 1, reinterpret_cast<std::byte*>(whole.back().data()));
      sizes.push_back(t.cols());
      values_ += t.cols();
      step_bytes_ += t.cols() * DTypeBytes(t.dtype);
    }
    std::vector<float> out;
    InTurns(parts, sizes, [&](size_t p, int64_t first, int64_t count) {
      out.insert(out.end(), whole[p].begin() + first, whole[p].begin() + first + count);
    });
    return out;
  }

  // Rows [first, first + count) of a tensor in its own dtype or, widened, in kF32.
  void ReadAs(DType dtype, const std::string& name, int64_t first, int64_t count, std::byte* out) const {
    const SourceTensor& t = source_.tensors().at(name);
    if (t.dtype == dtype) return source_.Read(name, first, count, out);
    LQ_CHECK(dtype == DType::kF32);
    const int64_t step = std::max<int64_t>(1, kCopyValues / t.cols());
    std::vector<std::byte> narrow(static_cast<size_t>(step * t.cols() * DTypeBytes(t.dtype)));
    for (int64_t r = 0; r < count; r += step) {
      const int64_t n = std::min(step, count - r);
      source_.Read(name, first + r, n, narrow.data());
      WidenValues(t.dtype, narrow.data(), n * t.cols(), reinterpret_cast<float*>(out) + r * t.cols());
    }
  }

  const LlamaConfig& c_;
  const WeightSource& source_;
  int64_t values_ = 0, step_bytes_ = 0;
};

}  // namespace

Result<LlamaWeights> ReadLlamaWeights(const LlamaConfig& config, const WeightSource& source) {
  return WeightsReader(config, source).Read();
}

void WidenValues(DType dtype, const std::byte* values, int64_t count, float* out) {
  switch (dtype) {
    case DType::kF32:
      std::memcpy(out, values, static_cast<size_t>(count) * sizeof(float));
      return;
    case DType::kF16:
    case DType::kBF16:
      for (int64_t i = 0; i < count; ++i) {
        uint16_t bits;
        std::memcpy(&bits, values + 2 * i, sizeof(bits));
        out[i] = dtype == DType::kF16 ? F16ToFloat(bits) : Bf16ToFloat(bits);
      }
      return;
    default:
      LQ_CHECK(!"a weight dtype that no source gives");
  }
}

}  // namespace livequant
