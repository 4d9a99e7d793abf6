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
      LQ_ASSIGN_OR_RETURN(w.lm_head, Stack({kHead}));
      step_bytes_ += row_bytes;
    }
    for (int l = 0; l < c_.num_hidden_layers; ++l) {
      LlamaLayer layer;
      layer.input_norm = Vectors({LayerTensor(l, "input_layernorm")});
      layer.post_attention_norm = Vectors({LayerTensor(l, "post_attention_layernorm")});
      if (c_.qk_norm) {
        layer.q_norm = Vectors({LayerTensor(l, "self_attn.q_norm")});
        layer.k_norm = Vectors({LayerTensor(l, "self_attn.k_norm")});
      }
      if (c_.qkv_bias)
        layer.qkv_bias = Vectors(
            {LayerBias(l, "self_attn.q_proj"), LayerBias(l, "self_attn.k_proj"), LayerBias(l, "self_attn.v_proj")});
      if (c_.o_bias) layer.o_bias = Vectors({LayerBias(l, "self_attn.o_proj")});
      if (c_.mlp_bias) {
        layer.gate_up_bias = Vectors({LayerBias(l, "mlp.gate_proj"), LayerBias(l, "mlp.up_proj")});
        layer.down_bias = Vectors({LayerBias(l, "mlp.down_proj")});
      }
      LQ_ASSIGN_OR_RETURN(layer.qkv, Stack({LayerTensor(l, "self_attn.q_proj"), LayerTensor(l, "self_attn.k_proj"),
                                            LayerTensor(l, "self_attn.v_proj")}));
      LQ_ASSIGN_OR_RETURN(layer.o, Stack({LayerTensor(l, "self_attn.o_proj")}));
      LQ_ASSIGN_OR_RETURN(layer.gate_up, Stack({LayerTensor(l, "mlp.gate_proj"), LayerTensor(l, "mlp.up_proj")}));
      LQ_ASSIGN_OR_RETURN(layer.down, Stack({LayerTensor(l, "mlp.down_proj")}));
      w.layers.push_back(std::move(layer));
    }
    w.final_norm = Vectors({"model.norm.weight"});
    w.parameters = values_;
    w.step_bytes = step_bytes_;
    return w;
  }

 private:
  // The named matrices, one below the other, packed. They keep their dtype if they share one, else all are widened to
  // f32.
  Result<PackedMatrix> Stack(const std::vector<std::string>& names) {
    const SourceTensor& first = source_.tensors().at(names[0]);
    const int64_t cols = first.cols();
    int64_t rows = 0;
    DType dtype = first.dtype;
    for (const std::string& name : names) {
      const SourceTensor& t = source_.tensors().at(name);
      if (t.dtype != dtype) dtype = DType::kF32;
      rows += t.rows();
      values_ += t.rows() * cols;
      step_bytes_ += t.rows() * cols * DTypeBytes(t.dtype);
    }
    std::vector<std::byte> stacked(static_cast<size_t>(rows * cols * DTypeBytes(dtype)));  // aligned, as Pack needs it
    std::byte* to = stacked.data();
    for (const std::string& name : names) {
      ReadAs(dtype, name, to);
      to += source_.tensors().at(name).rows() * cols * DTypeBytes(dtype);
    }
    return PackedMatrix::Pack(dtype, stacked.data(), rows, cols);
  }

  // The named vectors (norms, biases), one after the other, as f32.
  std::vector<float> Vectors(const std::vector<std::string>& names) {
    std::vector<float> out;
    for (const std::string& name : names) {
      const SourceTensor& t = source_.tensors().at(name);
      const size_t before = out.size();
      out.resize(before + static_cast<size_t>(t.cols()));
      ReadAs(DType::kF32, name, reinterpret_cast<std::byte*>(out.data() + before));
      values_ += t.cols();
      step_bytes_ += t.cols() * DTypeBytes(t.dtype);
    }
    return out;
  }

  // All rows of a tensor in its own dtype or, widened, in kF32.
  void ReadAs(DType dtype, const std::string& name, std::byte* out) const {
    const SourceTensor& t = source_.tensors().at(name);
    if (t.dtype == dtype) return source_.Read(name, 0, t.rows(), out);
    LQ_CHECK(dtype == DType::kF32);
    const int64_t step = std::max<int64_t>(1, kCopyValues / t.cols());
    std::vector<std::byte> narrow(static_cast<size_t>(step * t.cols() * DTypeBytes(t.dtype)));
    for (int64_t r = 0; r < t.rows(); r += step) {
      const int64_t n = std::min(step, t.rows() - r);
      source_.Read(name, r, n, narrow.data());
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
