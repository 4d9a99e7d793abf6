// tests/kv/kv_support.h: caches of many schemas, rows that carry their write id, and a list-of-rows oracle.
//
// A row's values come from hash(write id, layer, tensor, channel), so a wrong row differs by more than any rounding and
// cannot pass. The oracle keeps, for each sequence, the write ids and which rows closed together; it knows no page,
// mark, view or transaction.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "kv/kv_cache.h"
#include "support/property.h"

namespace livequant {

// ---- schemas ----

// Every preset, then mixed policies, other closures, pinned rows, keys before RoPE, a window.
const std::vector<std::string>& CaseNames();
// The schema of a case for a model of this shape. head_dim >= 32.
CacheSchema CaseSchema(const std::string& name, int layers, int heads, int head_dim);
// gtest's name of a case.
std::string CaseTestName(const ::testing::TestParamInfo<std::string>& info);
// K has groups along rows, so tests of state must run past three K closures.
bool KiviLike(const CacheSchema& schema);

// ---- rows ----

using Id = uint64_t;
// Write ids of rows [from, to) of a stream: a sequence that is written once, or again after a truncate.
std::vector<Id> Ids(uint64_t stream, int64_t from, int64_t to);
// Values of one written row, [heads * head_dim]; query rows have tensor 2.
void FillRow(Id id, int layer, int tensor, std::span<float> out);

struct StepInput {
  SeqId seq;
  std::vector<Id> ids;
  Mode mode = Mode::kAll;
};
// Attention outputs of one row, all layers one after the other.
using RowOutput = std::vector<float>;

class Harness {
 public:
  struct Options {
    int sequences = 8, max_len = 640, step_rows = 512, threads = 2, q_group = 2;
    int64_t pool_tokens = 0;
    bool allow_fallback = false;
  };
  Harness(const CacheSchema& schema, const Options& options);
  explicit Harness(const CacheSchema& schema) : Harness(schema, Options()) {}

  KvCache& cache() { return *cache_; }
  Owner& owner() { return cache_->owner(); }
  const CacheSchema& schema() const { return cache_->schema(); }
  ThreadPool& pool() { return pool_; }
  int q_group() const { return q_group_; }
  SeqId Open();

  // Begins, prepares and attends; outputs[i][r] is row r of sequence i (none without `attend`). Every other layer goes
  // through a team. The step stays unpublished.
  Result<KvStep> Run(std::span<const StepInput> inputs, std::vector<std::vector<RowOutput>>* outputs,
                     bool attend = true);
  // One layer by a team of the pool; expects all threads to hear the same.
  Status PrepareAndAttend(KvStep& step, int layer, float* k, float* v, const float* q, int num_q_heads, float scale,
                          float* out);
  // Run and publish; expects success, and every invariant of the owner to hold.
  std::vector<std::vector<RowOutput>> Append(std::span<const StepInput> inputs, bool attend = true);
  // One sequence in steps of at most `chunk` rows.
  std::vector<RowOutput> AppendAll(SeqId seq, std::span<const Id> ids, int chunk, bool attend = true);
  std::vector<std::byte> State(SeqId seq) { return cache_->StateBytes(seq); }
  void ExpectSound();

 private:
  ThreadPool pool_;
  int q_group_, attended_ = 0;
  std::unique_ptr<KvCache> cache_;
};

// ---- oracle ----

// Rows that were coded with one set of qparams: `start` is the position of ids[0]. Rows cut off later still count.
struct Closed {
  int32_t start;
  std::vector<Id> ids;
  std::vector<float> decoded;  // [head][row][head_dim], made when first asked for
};

// One sequence as a list of rows.
class Shadow {
 public:
  explicit Shadow(const CacheSchema& schema);
  void Append(std::span<const Id> ids);
  void Truncate(int64_t len);
  int64_t len() const { return static_cast<int64_t>(ids_.size()); }
  int64_t frontier(int layer, int tensor) const { return layers_[layer].f[tensor]; }

  // Row `position` of one head as it is stored, exact or coded. A pinned row has no coded form.
  std::vector<float> Exact(int layer, int tensor, int head, int64_t position) const;
  std::vector<float> Coded(int layer, int tensor, int head, int64_t position) const;
  std::vector<float> AtRest(int layer, int tensor, int head, int64_t position) const;
  // Worst |decoded - exact| over the bound that the format documents, over all coded rows of a layer. At most 1.
  double WorstErrorOverBound(int layer, int tensor) const;

  // Plain attention in double for the rows that one step appended to `before`, which made `after`: each query reads
  // each row in the form that the contract says. Layers one after the other, as RowOutput; `limit` receives the largest
  // |v| of each layer.
  static std::vector<RowOutput> Attend(const Shadow& before, const Shadow& after, int q_group,
                                       std::vector<double>* limit);

 private:
  std::vector<float> ExactOf(Id id, int layer, int tensor, int head, bool pinned, int64_t position) const;
  struct Layer {
    int64_t f[2] = {0, 0};
    std::vector<std::shared_ptr<Closed>> closed[2];  // by position; null for pinned rows
  };
  CacheSchema schema_;
  std::vector<Id> ids_;
  std::vector<Layer> layers_;
};

// Every row of `seq` as ReadRows gives it equals the shadow's, bit for bit, and the frontiers are the shadow's.
void ExpectRows(Harness& h, SeqId seq, const Shadow& shadow);
// Outputs of the rows that made `after` from `before` in one step, against Shadow::Attend.
void ExpectAttention(Harness& h, const std::vector<RowOutput>& outputs, const Shadow& before, const Shadow& after);
// Of a schema with groups along rows: the owner has seen three closures of K, and all groups of them.
void ExpectThreeClosures(Harness& h);
// Bit-equal rows.
void ExpectSameOutputs(std::span<const RowOutput> a, std::span<const RowOutput> b);

}  // namespace livequant
