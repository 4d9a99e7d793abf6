// kv/kv_cache.h: the one place where schema, kernels and pages meet. Knows no method by name.
//
// A step:  KvStep step = cache.Begin(requests);  for each layer, in any order: step.Prepare(layer, k, v); step.Attend(layer, q, out);
//          step.Publish().  Destroying an unpublished step aborts it and nothing happened.
// Prepare rounds the rows to exact_dtype in place, refuses NaN and Inf (then nothing is published), runs the layer's page copies, writes exact
// rows and encodes due rows into private slots. Attend reads the private view. Source: cache_core.md 5.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "cache/owner/owner.h"
#include "schema/schema.h"

namespace livequant {

struct KvOptions {
  int max_sequences = 1;
  int64_t max_len = 0;           // rows of the longest sequence
  int64_t pool_tokens = 0;       // rows that the pool can hold in all; 0 = max_sequences * max_len
  int max_step_rows = 512;       // rows of the largest step, all sequences together
  int max_q_heads = 0;
  int64_t memory_bytes = 0;      // a budget: kOutOfRange names both numbers if the pool does not fit; 0 = no budget
  bool allow_fallback = false;   // read codings that no kernel reads by the reference path, counted
};

class KvCache;

// One step over a batch of sequences. Move only; one thread.
class KvStep {
 public:
  KvStep(KvStep&&) noexcept;
  KvStep& operator=(KvStep&&) noexcept;
  ~KvStep();
  int sequences() const;
  int rows() const;                      // of all sequences together
  int first_row(int sequence) const;     // index of its first row in the batch
  int count(int sequence) const;         // rows of this sequence; may be fewer than asked under kPrefix
  int64_t position(int sequence) const;  // of its first row
  TxnId txn(int sequence) const;

  // k, v [rows()][num_kv_heads * head_dim], keys at the schema's RoPE stage; rounded in place, and read by Attend until the
  // next Prepare. kNonFinite, kOutOfRange, kDuplicateLayer abort the step.
  Status Prepare(int layer, float* k, float* v, ThreadPool& pool);
  // q, out [rows()][num_q_heads * head_dim]; scale is usually 1/sqrt(head_dim). Only after Prepare(layer).
  Status Attend(int layer, const float* q, int num_q_heads, float scale, float* out, ThreadPool& pool);
  // Makes all rows visible, or accepted[i] rows of sequence i (kPrefix). On kStale nothing changed for that sequence; the others are published.
  Result<std::vector<Receipt>> Publish();
  Result<std::vector<Receipt>> Publish(std::span<const int> accepted);

 private:
  friend class KvCache;
  KvStep();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

class KvCache {
 public:
  static Result<std::unique_ptr<KvCache>> Open(const CacheSchema& schema, const KvOptions& options);
  ~KvCache();
  const CacheSchema& schema() const;
  Owner& owner();
  const Owner& owner() const;
  // All or none of the requests.
  Result<KvStep> Begin(std::span<const AppendRequest> requests);

  // Decoded rows [0, length) of one layer and KV head as plain attention would read them at rest, K and V [length][head_dim].
  void ReadRows(const Owner::Lease& lease, int layer, TensorIndex tensor, int head, float* out) const;
  // The stored bytes of every live row in canonical order: (len, frontiers, scars, then each row's codes and qparams, or exact bytes).
  // Two states are equal iff these are (cache_core.md 5, archive).
  std::vector<std::byte> StateBytes(SeqId seq) const;

  int64_t fallback_calls() const;              // attention calls that the reference path served
  KernelChoice kernel(int layer, Phase phase) const;
  int64_t workspace_bytes() const;

 private:
  friend class KvStep;
  KvCache();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace livequant
