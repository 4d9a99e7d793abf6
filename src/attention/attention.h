// attention/attention.h: softmax(q K^T * scale) V over all regions of a cache at once: pinned rows, coded pages, exact
// pages, and the rows of the current step. One softmax, by a reduction tree that is fixed by absolute position:
//     leaves of kLeafRows rows [256 i, 256 (i+1)), folded left to right into nodes of kNodeLeaves leaves, nodes folded
//     left to right.
// So the bits of an output row depend on that query, its position and the rows it reads; not on batch, neighbours,
// chunks or threads.
//
// Which form of row j the query at position q reads (cache_core.md 2): j < pinned: exact. j < view.coded_rows(q):
// coded. Else exact: from the exact plane if j < first row of the step, from the step rows otherwise. Rows outside [q -
// window + 1, q] are dropped by select, never by a zero weight. Query head h reads KV head h / (num_q_heads /
// num_kv_heads).
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "base/thread_pool.h"
#include "kernels/ops.h"
#include "kernels/page_codec.h"
#include "schema/cache_view.h"

namespace livequant {

inline constexpr int kLeafRows = 256;
inline constexpr int kNodeLeaves = 8;

// One layer, resolved when a cache opens: below this nothing looks at a schema.
struct LayerPlan {
  LayerSchema schema;
  BlockFormat format[2][2];         // [K,V][coded,exact]
  DecodeRowsFn decode[2][2];        // vector kernels, or the reference where a fallback was allowed
  const RopeTable* rope = nullptr;  // kPre: keys are rotated after decoding
};

struct AttentionCall {
  const LayerPlan* plan;
  CacheView view;  // view.seq: one a sequence of the batch, with first_query set
  // Step rows of the batch, [rows][num_kv_heads * head_dim], rounded to exact_dtype; keys at the coding's RoPE stage,
  // but those of pinned positions after RoPE, as they are stored.
  const float* step_k;
  const float* step_v;
  const float* q;  // [rows][num_q_heads * head_dim], after RoPE
  int num_q_heads;
  float scale;
  float* out;  // [rows][num_q_heads * head_dim]
  // A number that says that this workspace saw these sequences, lengths and counts before: how a call is cut into work
  // is found once and kept for the layers that have the same shape. 0: not known.
  uint64_t step = 0;
};

// Scratch of one pool: bounded by tiles, independent of history length, but for one leaf state per kLeafRows rows of
// max_len, query head and thread, which calls too small to fill the threads (decode) are split into; none with one
// thread.
class AttentionWorkspace {
 public:
  // Enough for steps of up to `max_rows` rows in all, of sequences up to max_len rows, on up to `threads` threads.
  AttentionWorkspace(int threads, int max_rows, int max_q_heads, int max_head_dim, int64_t max_len);
  ~AttentionWorkspace();
  AttentionWorkspace(AttentionWorkspace&&) noexcept;
  int64_t bytes() const;
  struct Impl;
  Impl* impl() const { return impl_; }

 private:
  Impl* impl_;
};

// The definition: scalar, double precision inside, one softmax over all rows of a query. Slow; the oracle of every
// kernel.
void AttendReference(const AttentionCall& call);

// The generic vector path for every coding: a tile of 128 rows of one KV head is decoded to f32 once for all its query
// heads and a block of queries, then f32 multiply-adds. Decode, prefill, drafts and evaluation use this one path
// (arithmetic id generic_f32).
void AttendGeneric(const AttentionCall& call, AttentionWorkspace& workspace, ThreadPool& pool);
// The same by a team, every thread of which calls it with an equal call. Begins without a barrier where the step and
// shape are those of the call before: then what other threads wrote must be complete. Ends in one.
void AttendGeneric(const AttentionCall& call, AttentionWorkspace& workspace, Team& team);
// KV heads [begin, end) of such a call and their query heads, by the calling thread alone. `thread` is its place in the
// workspace.
void AttendHeads(const AttentionCall& call, AttentionWorkspace& workspace, Team::Range kv_heads, int thread);

enum class Phase { kDecode, kPrefill, kVerify };
// "decode", "prefill", "verify".
const char* PhaseName(Phase phase);

// Which kernel a layer gets in a phase: the registry is attention/variants.inc.
struct KernelChoice {
  std::string attention;  // "generic_f32" or "reference"
  std::string decode_k, decode_v;
  bool fallback = false;  // the reference path, taken only because it was allowed
};
// kUnsupported names the coding that nothing reads and the nearest one that is read; with allow_fallback the reference
// is chosen.
Result<KernelChoice> ChooseKernel(const LayerSchema& layer, Phase phase, bool allow_fallback);
// Fills a plan by the same choice. `rope` must outlive the plan.
Result<LayerPlan> PlanLayer(const LayerSchema& layer, const RopeTable* rope, bool allow_fallback);

}  // namespace livequant
