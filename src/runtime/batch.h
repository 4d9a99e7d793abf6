// runtime/batch.h: many requests over one cache: sequences join when there is room, prompts and answers share steps.
//
// Each request gives the tokens that it gives alone, bit for bit, whatever runs beside it: rows do not depend on their
// neighbours (model/llama.h), each request has a sampler of its own, and prompts are cut as the contract says
// (NextCut). A request is admitted, in order, when a sequence is free and the pool holds all rows that it and those
// admitted before may grow to: so no step ever runs out of pages, and none waits in the middle.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "model/llama.h"
#include "runtime/session.h"

namespace livequant {

struct BatchRequest {
  std::vector<int32_t> prompt;
  int64_t max_new_tokens = 128;
  SamplingParams sampling = {};
  bool ignore_eos = false;
};

struct BatchResult {
  Status status;  // kNonFinite: this request's rows or logits held NaN or Inf, and it ended with the tokens it had
  Generation generation;
};

struct BatchOptions {
  int max_num_seqs = 8;  // requests that run at once, at most
  int64_t context = 0;   // rows of the longest request allowed; 0 = the model's max_position_embeddings
  int64_t prefill_chunk = 512;
  int64_t memory_bytes = 0;  // a budget for the pool; 0 = none. Under it fewer requests run at once, never shorter ones
  bool allow_fallback = false;
  const std::atomic<bool>* cancel = nullptr;  // looked at before each step; true ends every request with what it has
  std::function<void(size_t request, const BatchResult&)> on_finish = {};  // as requests end, in any order
};

struct BatchRun {
  std::vector<BatchResult> results;    // by request
  int64_t steps = 0, mixed_steps = 0;  // mixed: rows of prompts and of answers in one step
  int64_t rows = 0;                    // of all steps
  int most_at_once = 0;
  double seconds = 0;
  int64_t pool_bytes = 0, pool_rows = 0, fallback_calls = 0;
  std::optional<KeySpike> key_spike = {};  // the worst of all requests (kv/key_spike.h)
};

// Every request is checked before any runs: the first bad one is an error that names its index, and nothing ran.
// Errors: as CheckRequest's; kInvalidArgument: options below their least, a schema of another shape; kOutOfRange: a
// context beyond the model's, or a budget in which the longest request does not fit (both numbers).
Result<BatchRun> RunBatch(const std::shared_ptr<const Llama>& model, const CacheSchema& schema,
                          std::span<const BatchRequest> requests, const BatchOptions& options, ThreadPool& pool);

}  // namespace livequant
