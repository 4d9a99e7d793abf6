// model/config.h: what config.json says of a model of the Llama family: LlamaForCausalLM, MistralForCausalLM,
// Qwen2ForCausalLM, Qwen3ForCausalLM. They are one block with switches: biases, a norm per head of Q and K, windows.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "schema/schema.h"

namespace livequant {

struct LlamaConfig {
  std::string architecture = "LlamaForCausalLM";
  int64_t vocab_size = 0, hidden_size = 0, intermediate_size = 0, max_position_embeddings = 0;
  int num_hidden_layers = 0, num_attention_heads = 0, num_key_value_heads = 0, head_dim = 0;
  float rms_norm_eps = 0;
  bool tie_word_embeddings = false;
  bool qkv_bias = false, o_bias = false, mlp_bias = false;  // mlp: gate, up and down
  bool qk_norm = false;  // each head of Q and K through an RMSNorm [head_dim] before RoPE
  std::vector<int> windows =
      {};  // rows that a query of each layer sees, its own included; 0 = all. Empty: all everywhere
  std::vector<int32_t> eos_token_ids;
  int32_t bos_token_id = -1;  // -1: none
  RopeConfig rope;

  // What the model fixes of its cache.
  CacheShape shape() const {
    return {.num_layers = num_hidden_layers,
            .num_kv_heads = num_key_value_heads,
            .head_dim = head_dim,
            .rope = rope,
            .windows = windows};
  }
};

// config.json's text. Every error names the field, the value and the limit; an unknown architecture, RoPE type or
// activation is kUnsupported, as is every field that is not known here (fields that say nothing
// of the result are known and ignored; the list is in config.cc); quantization_config is left to model/fp8_weights.h.
// Where transformers documents a default, an absent field has it: num_key_value_heads (the heads; 8 for Mistral, 32 for
// Qwen), head_dim (hidden_size / num_attention_heads; 128 for Qwen3), hidden_act (silu), rope_theta (10000),
// tie_word_embeddings, attention_bias, mlp_bias, use_sliding_window (false), sliding_window (4096 for Mistral, and for
// Qwen where use_sliding_window is true), max_window_layers (28); rms_norm_eps and the sizes must be said. A null is as
// good as absent, but for Mistral's sliding_window and num_key_value_heads, where it means none and all heads. RoPE
// stands in rope_theta and rope_scaling, or in rope_parameters; where both are there they must agree. Source:
// transformers, configuration_{llama,mistral,qwen2,qwen3}.py.
Result<LlamaConfig> ParseLlamaConfig(std::string_view json);

}  // namespace livequant
