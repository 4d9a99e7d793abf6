// model/weights.cc: see weights.h. Every name is checked before anything is packed: a wrong file costs no memory.
#include "model/weights.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <span>
#include <string_view>

#include "numeric/float_formats.h"

namespace livequant {
namespace {

using TensorMap = std::map<std::string, TensorInfo>;
constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kHead = "lm_head.weight";

std::string LayerTensor(int layer, const char* name) { return fmt::format("model.layers.{}.{}.weight", layer, name); }

Result<DType> StoredDType(const std::string& name, const TensorInfo& t) {
  if (t.dtype == "F32") return DType::kF32;
  if (t.dtype == "F16") return DType::kF16;
  if (t.dtype == "BF16") return DType::kBF16;
  return Status(Code::kUnsupported, fmt::format("tensor {} is {}; F32, F16 and BF16 are read", name, t.dtype));
}

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
  }
  return want;
}

// Tensors that say nothing which config.json or another tensor does not say. Older exports hold the RoPE frequencies as
// a buffer; some write a tied head twice, which is harmless only if it really is the embedding.
bool SaysNothingNew(const LlamaConfig& c, const TensorMap& tensors, const std::string& name, const TensorInfo& t) {
  if (name.ends_with("rotary_emb.inv_freq")) return true;
  if (name != kHead || !c.tie_word_embeddings) return false;
  const auto embedding = tensors.find(kEmbedding);
  return embedding != tensors.end() && embedding->second.dtype == t.dtype && embedding->second.shape == t.shape &&
         embedding->second.bytes.size() == t.bytes.size() &&
         std::memcmp(embedding->second.bytes.data(), t.bytes.data(), t.bytes.size()) == 0;
}

Status CheckNamesAndShapes(const LlamaConfig& c, const TensorMap& tensors) {
  const auto want = ExpectedShapes(c);
  for (const auto& [name, shape] : want) {
    const auto found = tensors.find(name);
    if (found == tensors.end())
      return Status(Code::kInvalidArgument, fmt::format("tensor {} is missing; config.json implies it", name));
    if (found->second.shape != shape)
      return Status(Code::kInvalidArgument, fmt::format("tensor {} has shape [{}]; config.json implies [{}]", name,
                                                        fmt::join(found->second.shape, ", "), fmt::join(shape, ", ")));
    LQ_ASSIGN_OR_RETURN(const DType dtype, StoredDType(name, found->second));
    int64_t values = 1;
    for (const int64_t d : shape) values *= d;
    LQ_CHECK(static_cast<int64_t>(found->second.bytes.size()) == values * DTypeBytes(dtype));  // ParseHeader's promise
  }
  for (const auto& [name, t] : tensors)
    if (!want.contains(name) && !SaysNothingNew(c, tensors, name, t))
      return Status(
          Code::kInvalidArgument,
          fmt::format("tensor {} is left over: LlamaForCausalLM with this config.json has no such tensor", name));
  return {};
}

class Reader {
 public:
  Reader(const LlamaConfig& config, const TensorMap& tensors) : c_(config), tensors_(tensors) {}

  Result<LlamaWeights> Read() {
    LQ_RETURN_IF_ERROR(CheckNamesAndShapes(c_, tensors_));
    LlamaWeights w;
    const TensorInfo& embedding = tensors_.at(kEmbedding);
    LQ_ASSIGN_OR_RETURN(w.embedding_dtype, StoredDType(kEmbedding, embedding));
    w.embedding.assign(embedding.bytes.begin(), embedding.bytes.end());
    const int64_t row_bytes = c_.hidden_size * DTypeBytes(w.embedding_dtype);
    values_ += c_.vocab_size * c_.hidden_size;
    if (c_.tie_word_embeddings) {
      // The head's rows are read; the row that is looked up is one of them.
      LQ_ASSIGN_OR_RETURN(w.lm_head,
                          PackedMatrix::Pack(w.embedding_dtype, w.embedding.data(), c_.vocab_size, c_.hidden_size));
      stored_bytes_ += row_bytes * c_.vocab_size;
    } else {
      LQ_ASSIGN_OR_RETURN(w.lm_head, Stack({kHead}));
      stored_bytes_ += row_bytes;
    }
    for (int l = 0; l < c_.num_hidden_layers; ++l) {
      LlamaLayer layer;
      layer.input_norm = Norm(LayerTensor(l, "input_layernorm"));
      layer.post_attention_norm = Norm(LayerTensor(l, "post_attention_layernorm"));
      LQ_ASSIGN_OR_RETURN(layer.qkv, Stack({LayerTensor(l, "self_attn.q_proj"), LayerTensor(l, "self_attn.k_proj"),
                                            LayerTensor(l, "self_attn.v_proj")}));
      LQ_ASSIGN_OR_RETURN(layer.o, Stack({LayerTensor(l, "self_attn.o_proj")}));
      LQ_ASSIGN_OR_RETURN(layer.gate_up, Stack({LayerTensor(l, "mlp.gate_proj"), LayerTensor(l, "mlp.up_proj")}));
      LQ_ASSIGN_OR_RETURN(layer.down, Stack({LayerTensor(l, "mlp.down_proj")}));
      w.layers.push_back(std::move(layer));
    }
    w.final_norm = Norm("model.norm.weight");
    w.parameters = values_;
    w.step_bytes = stored_bytes_;
    return w;
  }

 private:
  // The named matrices, one below the other, packed. They keep their dtype if they share one, else all are widened to
  // f32.
  Result<PackedMatrix> Stack(const std::vector<std::string>& names) {
    int64_t rows = 0;
    const int64_t cols = tensors_.at(names[0]).shape[1];
    std::vector<DType> dtypes;
    bool mixed = false;
    for (const std::string& name : names) {
      const TensorInfo& t = tensors_.at(name);
      LQ_ASSIGN_OR_RETURN(const DType dtype, StoredDType(name, t));
      dtypes.push_back(dtype);
      mixed = mixed || dtype != dtypes[0];
      rows += t.shape[0];
      values_ += t.shape[0] * cols;
      stored_bytes_ += static_cast<int64_t>(t.bytes.size());
    }
    const DType dtype = mixed ? DType::kF32 : dtypes[0];
    std::vector<std::byte> stacked(static_cast<size_t>(rows * cols * DTypeBytes(dtype)));  // aligned, as Pack needs it
    std::byte* to = stacked.data();
    for (size_t i = 0; i < names.size(); ++i) {
      const TensorInfo& t = tensors_.at(names[i]);
      const int64_t values = t.shape[0] * cols;
      if (mixed)
        WidenValues(dtypes[i], t.bytes.data(), values, reinterpret_cast<float*>(to));
      else
        std::memcpy(to, t.bytes.data(), t.bytes.size());
      to += values * DTypeBytes(dtype);
    }
    return PackedMatrix::Pack(dtype, stacked.data(), rows, cols);
  }

  std::vector<float> Norm(const std::string& name) {
    const TensorInfo& t = tensors_.at(name);
    std::vector<float> out(static_cast<size_t>(c_.hidden_size));
    const Result<DType> dtype = StoredDType(name, t);
    LQ_CHECK(dtype.ok());  // CheckNamesAndShapes saw it
    WidenValues(*dtype, t.bytes.data(), c_.hidden_size, out.data());
    values_ += c_.hidden_size;
    stored_bytes_ += static_cast<int64_t>(t.bytes.size());
    return out;
  }

  const LlamaConfig& c_;
  const TensorMap& tensors_;
  int64_t values_ = 0, stored_bytes_ = 0;
};

}  // namespace

Result<LlamaWeights> ReadLlamaWeights(const LlamaConfig& config, const TensorMap& tensors) {
  return Reader(config, tensors).Read();
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
      LQ_CHECK(!"a weight dtype that StoredDType does not give");
  }
}

}  // namespace livequant
