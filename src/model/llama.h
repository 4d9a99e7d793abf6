// model/llama.h: a Hugging Face LlamaForCausalLM directory, run in f32 over a KvCache.
//
// Row invariance: the logits of a row depend on that row's tokens and positions only; not on batch, chunks, drafts or threads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "kv/kv_cache.h"
#include "schema/schema.h"

namespace livequant {

struct LlamaConfig {
  int64_t vocab_size = 0, hidden_size = 0, intermediate_size = 0, max_position_embeddings = 0;
  int num_hidden_layers = 0, num_attention_heads = 0, num_key_value_heads = 0, head_dim = 0;
  float rms_norm_eps = 0;
  bool tie_word_embeddings = false;
  std::vector<int32_t> eos_token_ids;
  int32_t bos_token_id = -1;  // -1: none
  RopeConfig rope;
};
// config.json's text. Every error names the field, the value and the limit; an unknown architecture, RoPE type or activation is kUnsupported.
Result<LlamaConfig> ParseLlamaConfig(std::string_view json);

// One sequence's share of a forward.
struct SequenceTokens {
  SeqId seq;
  std::span<const int32_t> tokens;   // >= 1, each in [0, vocab_size)
  bool all_logits = false;           // logits of every row, else of the last one
  Mode mode = Mode::kAll;
};

class Llama {
 public:
  // Reads config.json and model.safetensors (one file, or an index with shards) of `directory`. Missing, left-over or misshapen tensors are errors.
  static Result<std::shared_ptr<const Llama>> Load(const std::string& directory);
  const LlamaConfig& config() const;
  const std::string& digest() const;      // SHA-256 of config.json and the weight files, hex
  int64_t parameters() const;
  int64_t weight_bytes() const;           // as stored; what one decode step reads (the embedding table once, if tied)

  // Scratch for steps of up to max_rows rows, of which up to max_logit_rows have logits.
  class Workspace;
  std::unique_ptr<Workspace> NewWorkspace(int max_rows, int max_logit_rows) const;

  // Runs one step and leaves it unpublished. logits: [logit rows, in batch order][vocab_size].
  // Errors: an id out of range, a step beyond max_len, NaN or Inf rows (kNonFinite); nothing is published.
  Result<KvStep> Forward(std::span<const SequenceTokens> batch, KvCache& cache, Workspace& workspace, MatrixView<float> logits,
                         ThreadPool& pool) const;
  // The same, published.
  Status Step(std::span<const SequenceTokens> batch, KvCache& cache, Workspace& workspace, MatrixView<float> logits, ThreadPool& pool) const;

 private:
  Llama();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace livequant
