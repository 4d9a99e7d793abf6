// kv/kv_cache.h: the one place where schema, kernels and pages meet. Knows no method by name.
//
// A step:  KvStep step = cache.Begin(requests);  for each layer, in any order: step.Prepare(layer, k, v);
// step.Attend(layer, q, out);
//          step.Publish().  Destroying an unpublished step aborts it and nothing happened.
// Prepare rounds the rows to exact_dtype in place, refuses NaN and Inf (then nothing is published), runs the layer's
// page copies, writes exact rows and encodes due rows into private slots. Attend reads the private view. Source:
// cache_core.md 5; docs/kv.md.
//
// Invariants: a step writes only slots that its transactions claimed; a step that failed has aborted every transaction
// in it, and every byte that a published view reaches is as it was; after the first step of a width nothing is
// allocated per step but the receipts. Threads: Begin, and steps of different threads, may run at once (each step has
// scratch of its own); a step belongs to one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "cache/owner/owner.h"
#include "kv/key_spike.h"
#include "schema/schema.h"

namespace livequant {

struct KvOptions {
  int max_sequences = 1;
  int64_t max_len = 0;      // rows of the longest sequence
  int64_t pool_tokens = 0;  // rows that the pool can hold in all, however they are spread; 0 = max_sequences * max_len
  int max_step_rows = 512;  // rows of the largest step, all sequences together
  int max_q_heads = 0;
  int64_t memory_bytes = 0;  // a budget: kOutOfRange names both numbers if the pool does not fit; 0 = no budget
  // Memory for all pages, the caller's, aligned to Owner::kMemoryAlignment, memory_bytes >= MemoryBytes() long, to
  // outlive the cache; null: the cache maps its own.
  std::byte* memory = nullptr;
  bool allow_fallback = false;  // read codings that no kernel reads by the reference path, counted
  // Threads of the widest pool that steps will use; 0 = as many as the machine has. Scratch for them is made by Open,
  // and anew if a wider pool comes.
  int threads = 0;
};

// Bytes of the pool that KvCache::Open would make of these, whatever memory_bytes says. Errors: as Open's for the
// schema and the options.
Result<int64_t> KvPoolBytes(const CacheSchema& schema, const KvOptions& options);

class KvCache;

// One step over a batch of sequences. Move only; one thread. Must not outlive its cache.
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
  TxnId txn(int sequence) const;         // also after Publish, for Owner::FindReceipt

  // k, v [rows()][num_kv_heads * head_dim], keys at the schema's RoPE stage, pinned positions too (this rotates those
  // before it stores them: pinned keys lie after RoPE); rounded in place, and read by Attend until the next Prepare.
  // The first failure aborts the step: kNonFinite (NaN, Inf, or beyond exact_dtype: layer, tensor, position, head,
  // channel and value named), kOutOfRange (a small scale that the schema refuses), kDuplicateLayer, kInvalidArgument
  // (no such layer); kFailedTxn: it had ended before.
  Status Prepare(int layer, float* k, float* v, ThreadPool& pool);
  // q, out [rows()][num_q_heads * head_dim]; scale is usually 1/sqrt(head_dim). Only after Prepare(layer), before the
  // next one. kInvalidArgument: a layer that was not prepared last, or heads that do not fit; the step stays usable.
  // kFailedTxn: it has ended.
  Status Attend(int layer, const float* q, int num_q_heads, float scale, float* out, ThreadPool& pool);
  // The same by a team, all threads of which run the step: one thread calls Enter, and after a barrier all call
  // PrepareAndAttend, which ends in one and returns the same on all. ByHead says how it begins. If true, a thread does
  // its Share of the KV heads, in both parts, and nobody waits: the thread itself must have written these rows of k and
  // v and the rows of q of their query heads, or a barrier lies behind whoever did. If false, it begins with a barrier.
  // Enter may be called once the call before has returned on the calling thread. Errors: those of Prepare; REQUIRES
  // query heads that fit.
  Status Enter(int layer, float* k, float* v, int threads);
  bool ByHead(const Team& team) const;
  Status PrepareAndAttend(const float* q, int num_q_heads, float scale, float* out, Team& team);
  // Makes all rows visible, or the first accepted[i] rows of sequence i: all of them under kAll, 0..count(i) under
  // kPrefix (0 drops the transaction; its receipt has rows 0). Receipts in batch order. kMissingLayer,
  // kInvalidArgument, and what a seal refuses, abort the whole step. kStale, kClosed: nothing changed for the sequences
  // that the message names; the others are published (Owner::FindReceipt(txn(i))). Asked again after success it repeats
  // the receipts, never the effect.
  Result<std::vector<Receipt>> Publish();
  Result<std::vector<Receipt>> Publish(std::span<const int> accepted);

 private:
  friend class KvCache;
  struct Impl;
  struct GiveBack {
    void operator()(Impl* impl) const;  // to the cache's free steps
  };
  KvStep();
  std::unique_ptr<Impl, GiveBack> impl_;
};

class KvCache {
 public:
  // Checks the schema, sizes the pool by the ledger, makes owner, plans and scratch. kInvalidArgument names the option,
  // its value and the limit; kOutOfRange: memory_bytes, with the bytes needed (never a smaller context); kUnsupported:
  // a coding that no kernel reads.
  static Result<std::unique_ptr<KvCache>> Open(const CacheSchema& schema, const KvOptions& options);
  // Bytes that KvOptions::memory needs under these options, `memory` and `memory_bytes` aside. Errors as Open's.
  static Result<int64_t> MemoryBytes(const CacheSchema& schema, const KvOptions& options);
  ~KvCache();
  const CacheSchema& schema() const;
  const KvOptions& options() const;
  Owner& owner();
  const Owner& owner() const;
  // All or none. kInvalidArgument: no request, rows > max_step_rows, an id that a step holds; else as Owner::Begin.
  Result<KvStep> Begin(std::span<const AppendRequest> requests);

  // Decoded rows [0, length) of one layer, tensor and KV head as they are at rest, out [length][head_dim]: below the
  // frontier from their codes, the others exact; keys at the schema's RoPE stage, pinned ones after RoPE. Rows that a
  // window dropped are NaN.
  void ReadRows(const Owner::Lease& lease, int layer, TensorIndex tensor, int head, float* out) const;
  // The stored bytes of every live row in canonical order: (len, frontiers, then by layer, tensor and head each row's
  // codes and qparams, or exact bytes; groups along rows with their first row and count, which shows the scars).
  // Independent of page placement. Two states are equal iff these are (cache_core.md 5, archive). Empty for a sequence
  // that does not exist.
  std::vector<std::byte> StateBytes(SeqId seq) const;
  std::vector<std::byte> StateBytes(const Owner::Lease& lease) const;

  // The worst key spike (kv/key_spike.h) among the rows that steps prepared since the last call, published or not, in
  // layers whose keys have one scale for some channels of a row; pinned rows, which are never coded, aside. Which one
  // does not depend on batches, cuts or threads.
  std::optional<KeySpike> TakeKeySpike();
  int64_t fallback_calls() const;  // attention calls that the reference path served
  KernelChoice kernel(int layer, Phase phase) const;
  int64_t workspace_bytes() const;  // scratch of all steps: bounded by the options, independent of any history

 private:
  friend class KvStep;
  KvCache();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace livequant
