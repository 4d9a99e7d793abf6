// model/llama.h: a model of the Llama family (model/config.h), of a Hugging Face directory or a GGUF file, run in f32
// over a KvCache.
//
// Row invariance: the logits of a row depend on that row's tokens and positions only; not on batch, chunks, drafts or
// threads (chunks: under `stepwise`, where the schema makes a row's reads independent of how its prompt was cut). Every
// failure leaves the cache as it was: a step is published whole or not at all.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/span2d.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "kv/kv_cache.h"
#include "model/config.h"

namespace livequant {

// One sequence's share of a forward.
struct SequenceTokens {
  SeqId seq;
  std::span<const int32_t> tokens;  // >= 1, each in [0, vocab_size); positions go on from the sequence's length
  bool all_logits = false;          // logits of every row, else of the last one
  Mode mode = Mode::kAll;
};

// Where a forward leaves what went into and came out of its attention, for whoever checks another runtime: each
// [num_layers * rows][heads * head_dim], row r of layer l in row l * rows + r, rows those of the step. Keys and values
// are as they were handed to the cache, before it rounded them.
struct AttentionTaps {
  MatrixView<float> k, v, q, out;
};

// What scores are multiplied by: 1 / sqrt(head_dim).
float AttentionScale(const LlamaConfig& config);

class Llama {
 public:
  ~Llama();
  // Reads a directory, its config.json and model.safetensors (one file, or an index with shards), or one GGUF file.
  // Weights are F32, F16, BF16, F8_E4M3 with scales (model/fp8_weights.h), and in GGUF Q8_0 and Q4_0 besides. Missing,
  // left-over or misshapen tensors are errors that name the tensor, but for two that say nothing new: a
  // `rotary_emb.inv_freq` buffer (config.json holds theta), and an lm_head.weight equal byte for byte to the embedding
  // it is tied to.
  static Result<std::shared_ptr<const Llama>> Load(const std::string& path);
  const LlamaConfig& config() const;
  const std::string& digest() const;  // SHA-256 of config.json and the weight files, or of the GGUF file, hex
  int64_t parameters() const;
  int64_t weight_bytes() const;  // as held; what one decode step reads (the embedding table once, if tied)

  // Scratch of one stepping thread: nothing is allocated in a step.
  class Workspace {
   public:
    ~Workspace();
    int64_t bytes() const;

   private:
    friend class Llama;
    Workspace();
    struct Impl;
    std::unique_ptr<Impl> impl_;
  };
  // For steps of up to max_rows rows, of which up to max_logit_rows have logits. REQUIRES 1 <= max_logit_rows <=
  // max_rows.
  std::unique_ptr<Workspace> NewWorkspace(int max_rows, int max_logit_rows) const;

  // Runs one step and leaves it unpublished. logits: [logit rows, in batch order][vocab_size]. Under Mode::kPrefix the
  // step may hold fewer rows than asked (KvStep::count): then as many logit rows fewer are written, packed to the
  // front. residuals, if not empty: [num_layers * logit rows][hidden_size], the residual stream after layer l at logit
  // row i in row l * logit rows + i. taps, if not null, is
  // filled too. Errors: kInvalidArgument an empty batch or sequence, sizes beyond the workspace, a
  // logits view of another shape; kOutOfRange an id, or a position beyond max_position_embeddings or the cache's
  // max_len; kNonFinite NaN or Inf among the rows to be cached. Nothing is published. REQUIRES the cache's schema to
  // have this model's shape and RoPE, and no window wider than the model's.
  Result<KvStep> Forward(std::span<const SequenceTokens> batch, KvCache& cache, Workspace& workspace,
                         MatrixView<float> logits, ThreadPool& pool, MatrixView<float> residuals = {},
                         const AttentionTaps* taps = nullptr) const;
  // The same, published whole. kStale: another transaction on one of the sequences was published meanwhile.
  Status Step(std::span<const SequenceTokens> batch, KvCache& cache, Workspace& workspace, MatrixView<float> logits,
              ThreadPool& pool) const;

 private:
  Llama();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace livequant
