// model/weights.h: the tensors of a model of the Llama family, checked against its config and packed for the kernels.
//
// Invariant of a LlamaWeights that was read: every tensor that the config implies was there once, in its shape, and
// nothing else was. Projections that share an input are stacked by rows and packed as one matrix, so that a layer has
// four products instead of seven:
//   qkv      [heads * d + 2 * kv_heads * d][hidden]   rows of q, then k, then v
//   gate_up  [2 * intermediate][hidden]               rows of gate, then up
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "kernels/matmul.h"
#include "model/llama.h"
#include "model/weight_source.h"
#include "numeric/dtype.h"

namespace livequant {

// Hidden units whose gates and ups stand side by side; the last turn may have fewer.
inline constexpr int64_t kUnits = PackedMatrix::kPanel;

struct LlamaLayer {
  std::vector<float> input_norm, post_attention_norm;  // [hidden]
  std::vector<float> q_norm, k_norm;                   // [head_dim]; empty: the model has none
  PackedMatrix qkv, o, gate_up, down;
  std::vector<float> qkv_bias, o_bias, gate_up_bias, down_bias;  // one a row of the matrix; empty: none
};

struct LlamaWeights {
  DType embedding_dtype = DType::kF32;
  std::vector<std::byte> embedding;  // [vocab][hidden], in the source's dtype
  std::vector<LlamaLayer> layers;
  std::vector<float> final_norm;  // [hidden]
  PackedMatrix lm_head;           // [vocab][hidden]
  int64_t parameters = 0;         // values in the file, ignored tensors left out
  int64_t step_bytes = 0;         // bytes that one decode step of one row reads
};

// Names, shapes and dtypes of `source` against the config; reads no value but those of a head written twice.
// kInvalidArgument names the tensor that is missing, left over or misshapen (both shapes); kUnsupported a dtype that
// `source` can't read.
Status CheckLlamaWeights(const LlamaConfig& config, const WeightSource& source);
// All of them, after that check. Besides the result there is never more than one matrix in memory.
Result<LlamaWeights> ReadLlamaWeights(const LlamaConfig& config, const WeightSource& source);

// `count` values of `dtype` (kF32, kF16, kBF16), at any alignment, as f32; exact.
void WidenValues(DType dtype, const std::byte* values, int64_t count, float* out);

}  // namespace livequant
