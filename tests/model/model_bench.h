// model/model_bench.h: a model with a cache of its own, for tests that step it.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "model/llama.h"

namespace livequant {

// A cache of the model's own shapes whose rows are plain values of `dtype`.
inline CacheSchema NativeSchema(const LlamaConfig& c, DType dtype) {
  CacheSchema schema;
  for (int l = 0; l < c.num_hidden_layers; ++l) {
    LayerSchema& layer = schema.layers.emplace_back();
    layer.num_kv_heads = c.num_key_value_heads;
    layer.head_dim = c.head_dim;
    layer.window = c.shape().window(l);
    layer.k = layer.v = {.dtype = dtype, .bits = 8 * DTypeBytes(dtype)};
    layer.exact_dtype = dtype;
  }
  schema.rope = c.rope;
  return schema;
}

struct ModelBench {
  std::shared_ptr<const Llama> model;
  std::unique_ptr<KvCache> cache;
  std::unique_ptr<Llama::Workspace> workspace;

  ModelBench(std::shared_ptr<const Llama> m, const CacheSchema& schema, int sequences, int64_t max_len, int max_rows)
      : model(std::move(m)) {
    auto opened = KvCache::Open(schema, {.max_sequences = sequences,
                                         .max_len = max_len,
                                         .max_step_rows = max_rows,
                                         .max_q_heads = model->config().num_attention_heads});
    EXPECT_TRUE(opened.ok()) << opened.status().ToString();
    cache = *std::move(opened);
    workspace = model->NewWorkspace(max_rows, max_rows);
  }
  SeqId Open() {
    auto seq = cache->owner().Open();
    EXPECT_TRUE(seq.ok()) << seq.status().ToString();
    return seq->seq;
  }
  int64_t vocab() const { return model->config().vocab_size; }

  // Logits of every row of one published step.
  std::vector<float> Step(std::span<const SequenceTokens> batch, ThreadPool& pool) {
    int64_t rows = 0;
    for (const SequenceTokens& s : batch) rows += static_cast<int64_t>(s.tokens.size());
    std::vector<float> logits(static_cast<size_t>(rows * vocab()));
    const Status s = model->Step(batch, *cache, *workspace, MatrixView<float>(logits.data(), rows, vocab()), pool);
    EXPECT_TRUE(s.ok()) << s.ToString();
    return logits;
  }
  std::vector<float> Step(SeqId seq, std::span<const int32_t> tokens, ThreadPool& pool) {
    const SequenceTokens part{.seq = seq, .tokens = tokens, .all_logits = true};
    return Step({&part, 1}, pool);
  }
};

}  // namespace livequant
