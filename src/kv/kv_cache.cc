// kv/kv_cache.cc: see kv/kv_cache.h. The owner says which slots; this file moves rows into them, one (sequence, tensor,
// head) at a time.
#include "kv/kv_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "cache/ledger/ledger.h"
#include "cache/pages/page_pool.h"
#include "kernels/ops.h"
#include "kernels/page_codec.h"
#include "kv/round_rows.h"
#include "kv/slots.h"
#include "schema/layout.h"

namespace livequant {
namespace {

// Values (K and V, rounded or encoded) below which a step's layer runs on the caller's thread: waking a worker costs
// more than they do.
constexpr int64_t kParallelValues = 16384;
// Rows up to which a team's threads go through a step's heads without a word to each other. Larger steps are worth an
// even split.
constexpr int kByHeadRows = 4;

const char* TensorName(int tensor) { return tensor == kK ? "K" : "V"; }

// Pages of every plane. With fewer pool rows than full sequences any split of them must fit, equal shares or one long
// sequence among empty ones. A sequence of t rows holds at most ceil(t / page rows) pages of a plane, so all of them
// hold at most a page for each page rows of the pool and, but for one, one more that is part filled. Exact planes stop
// growing once rows are coded: then what equal shares need is what any shares need.
std::vector<int64_t> PoolPages(const CacheSchema& schema, const KvOptions& o) {
  std::vector<int64_t> full = PagesFor(schema, o.max_len, o.max_sequences, o.max_step_rows);
  if (o.pool_tokens == 0) return full;
  if (o.max_sequences == 1) return PagesFor(schema, std::min(o.max_len, o.pool_tokens), 1, o.max_step_rows);
  const int64_t share = std::min(o.max_len, (o.pool_tokens + o.max_sequences - 1) / o.max_sequences);
  std::vector<int64_t> pages = PagesFor(schema, share, o.max_sequences, o.max_step_rows);
  const std::vector<LayerClass> classes = LayerClasses(schema);
  for (size_t i = 0; i < pages.size(); ++i) {
    const LayerClass& cls = classes[i / 4];
    if (i % 2 == kCoded) pages[i] = (o.pool_tokens + cls.coded_page_rows - 1) / cls.coded_page_rows;
    if (pages[i] > 0) pages[i] = std::min(full[i], pages[i] + o.max_sequences - 1);
  }
  return pages;
}

Status CheckOptions(const CacheSchema& schema, const KvOptions& o) {
  const auto at_least = [](const char* name, int64_t value, int64_t least) {
    if (value >= least) return Status();
    return Status(Code::kInvalidArgument, fmt::format("{} is {}; the least is {}", name, value, least));
  };
  LQ_RETURN_IF_ERROR(at_least("max_sequences", o.max_sequences, 1));
  LQ_RETURN_IF_ERROR(at_least("max_len", o.max_len, 1));
  LQ_RETURN_IF_ERROR(at_least("max_step_rows", o.max_step_rows, 1));
  LQ_RETURN_IF_ERROR(at_least("pool_tokens", o.pool_tokens, 0));
  LQ_RETURN_IF_ERROR(at_least("memory_bytes", o.memory_bytes, 0));
  LQ_RETURN_IF_ERROR(at_least("threads", o.threads, 0));
  for (const LayerSchema& layer : schema.layers)
    LQ_RETURN_IF_ERROR(at_least("max_q_heads", o.max_q_heads, layer.num_kv_heads));
  if (o.max_len > std::numeric_limits<int32_t>::max() - o.max_step_rows)
    return Status(Code::kInvalidArgument, fmt::format("max_len is {}; the most is {}", o.max_len,
                                                      std::numeric_limits<int32_t>::max() - o.max_step_rows));
  return {};
}

// What a layer needs at each step, resolved at Open.
struct Layer {
  LayerPlan plan;
  KernelChoice choice[3];  // by Phase
  int cls = 0;
  int64_t row_values = 0;  // num_kv_heads * head_dim: the stride of step rows
  std::byte* base[2][2];   // planes, writable

  std::byte* Block(const CacheView& view, int tensor, int form, uint32_t page, int head) const {
    return base[tensor][form] + (view.head_block(tensor, form, page, head) - view.plane[tensor][form].base);
  }
};

}  // namespace

Result<int64_t> KvPoolBytes(const CacheSchema& schema, const KvOptions& options) {
  LQ_RETURN_IF_ERROR(Validate(schema));
  LQ_RETURN_IF_ERROR(CheckOptions(schema, options));
  return PoolBytes(schema, PoolPages(schema, options));
}

struct KvCache::Impl {
  CacheSchema schema;
  KvOptions options;
  std::unique_ptr<Owner> owner;
  std::map<int, std::unique_ptr<RopeTable>> rope;  // by head_dim, of layers with keys before RoPE
  std::vector<Layer> layers;
  int max_head_dim = 0, max_page_rows = 0;
  std::atomic<int64_t> fallback_calls{0};
  std::atomic<uint64_t> step_number{0};
  std::atomic<float> spike_ratio{0};  // of `spike`: a row below it need not be looked at closely

  std::mutex id_mutex;                               // between the look for a caller's id and its begin
  mutable std::mutex mutex;                          // guards the three below
  std::optional<KeySpike> spike;                     // the worst so far
  std::vector<std::unique_ptr<KvStep::Impl>> steps;  // all that were ever made
  std::vector<KvStep::Impl*> free_steps;

  KvStep::Impl* TakeStep();
  void NoteSpikes(int layer, int head, const LayerSchema& schema, MatrixView<const float> keys, int64_t first);
  CacheView View(const Owner::Lease& lease, int layer, SeqRow* row) const;
};

// Lives as long as the cache and is used again and again.
struct KvStep::Impl {
  enum class State { kOpen, kFailed, kPublished };
  struct Part {
    TxnView txn;
    int first_row;
  };

  KvCache::Impl* cache = nullptr;
  State state = State::kFailed;
  std::vector<Part> parts;
  std::vector<TxnId> ids;
  std::vector<Receipt> published;
  std::vector<std::vector<SeqRow>> seq_rows;  // [class][sequence], first_query filled in
  std::vector<uint8_t> prepared;              // by layer
  int rows = 0, entered = -1, last_layer = -1, prepared_layers = 0;
  bool drafts = false, decode = true;
  float *k = nullptr, *v = nullptr;
  uint64_t number = 0;  // of the step, in this cache
  int64_t values = 0;   // that preparing the entered layer touches

  // Scratch for `threads` threads; made anew when a wider pool comes.
  int threads = 0;
  std::unique_ptr<AttentionWorkspace> attention;
  std::vector<float> gather;  // [threads][max_page_rows * max_head_dim]

  std::mutex fault_mutex;
  int64_t fault_index = 0;
  Status fault;
  Status marked;  // why the owner would not take a prepared layer; seen by whoever ends or goes on with the step

  void MakeScratch(int wanted);
  CacheView View(int layer) const;
  Status Fail(Status why);
  void AbortAll();
  void Report(int64_t index, Status why);
  bool RunHead(int layer, const CacheView& view, int part, int tensor, int head, int thread);
  void PrepareHeads(Team& team);
  Status EndPrepare();
  AttentionCall Call(const float* q, int num_q_heads, float scale, float* out) const;
  bool Falls() const;
  void Attend(const AttentionCall& call, Team& team);

  Status PrepareHead(int layer, const CacheView& view, int part, int tensor, int head, float* rows_data,
                     float* scratch);
  Status EncodeJob(int layer, const CacheView& view, int part, const CloseJob& job, int head, const float* step,
                   float* scratch);
  Status SealPart(int part, int accepted);
  Result<std::vector<Receipt>> Publish(std::span<const int> accepted);
};

// ---- step scratch
// ------------------------------------------------------------------------------------------------------------

void KvStep::Impl::MakeScratch(int wanted) {
  if (wanted <= threads) return;
  threads = wanted;
  const KvOptions& o = cache->options;
  attention =
      std::make_unique<AttentionWorkspace>(threads, o.max_step_rows, o.max_q_heads, cache->max_head_dim, o.max_len);
  gather.assign(static_cast<size_t>(threads) * cache->max_page_rows * cache->max_head_dim, 0.0f);
}

CacheView KvStep::Impl::View(int layer) const {
  CacheView view = cache->owner->ViewOfLayer(layer);
  const std::vector<SeqRow>& seq = seq_rows[cache->layers[layer].cls];
  view.seq = seq.data();
  view.sequences = static_cast<int32_t>(seq.size());
  return view;
}

void KvStep::Impl::AbortAll() {
  for (const TxnId id : ids) cache->owner->Abort(id);
  state = State::kFailed;
}

Status KvStep::Impl::Fail(Status why) {
  AbortAll();
  return why;
}

// Of several heads that fail at once the first in batch order is reported, so a message does not depend on threads.
void KvStep::Impl::Report(int64_t index, Status why) {
  std::lock_guard lock(fault_mutex);
  if (fault.ok() || index < fault_index) {
    fault_index = index;
    fault = std::move(why);
  }
}

// ---- prepare
// -----------------------------------------------------------------------------------------------------------------

// Encodes job.from .. job.to of one head into the coded slots that the transaction claimed. Rows of the step come from
// `step` (the head's first row; null in a seal, when the step's rows of this layer are gone), all others are read again
// from exact pages.
Status KvStep::Impl::EncodeJob(int layer_index, const CacheView& view, int part, const CloseJob& job, int head,
                               const float* step, float* scratch) {
  const Layer& layer = cache->layers[layer_index];
  const TxnView& txn = parts[part].txn;
  const int tensor = job.tensor, d = layer.plan.schema.head_dim;
  const BlockFormat& coded = layer.plan.format[tensor][kCoded];
  const BlockFormat& exact = layer.plan.format[tensor][kExact];
  const DecodeRowsFn decode_exact = layer.plan.decode[tensor][kExact];
  const int32_t first_step_row = step != nullptr ? txn.first : std::numeric_limits<int32_t>::max();

  int32_t encoded = 0;
  for (const Claim& claim : txn.claims) {
    if (claim.cls != layer.cls || claim.tensor != tensor || claim.form != kCoded) continue;
    const int32_t low = std::max(claim.position, job.from);
    const int32_t high = std::min(claim.position + claim.to - claim.from, job.to);
    if (low >= high) continue;
    MatrixView<const float> rows;
    if (low >= first_step_row) {
      rows = {step + (low - txn.first) * layer.row_values, high - low, d, layer.row_values};
    } else {
      const int32_t stored = std::min(high, first_step_row);
      const int32_t found = ForRuns(view, part, tensor, kExact, low, stored, [&](const SlotRun& run) {
        decode_exact(exact, layer.Block(view, tensor, kExact, run.page, head), run.slot,
                     {scratch + int64_t{run.position - low} * d, run.rows, d});
      });
      LQ_CHECK(found == stored - low);
      for (int32_t p = stored; p < high; ++p)
        std::memcpy(scratch + int64_t{p - low} * d, step + (p - txn.first) * layer.row_values,
                    static_cast<size_t>(d) * sizeof(float));
      rows = {scratch, high - low, d};
    }
    // Groups along rows: a frontier stops at a group edge, so the rows are whole groups, or short ones behind a scar or
    // pinned rows.
    if (Status s = EncodeRows(coded, rows, claim.from + (low - claim.position),
                              layer.Block(view, tensor, kCoded, claim.page, head));
        !s.ok())
      return Status(s.code(), fmt::format("layer {} {}, positions {} to {}, head {}: {}", layer_index,
                                          TensorName(tensor), low, high - 1, head, s.message()));
    encoded += high - low;
  }
  LQ_CHECK(encoded == job.to - job.from);
  return {};
}

// All that one head of one sequence needs before attention: rounded rows, copies, exact slots, due codes.
Status KvStep::Impl::PrepareHead(int layer_index, const CacheView& view, int part, int tensor, int head,
                                 float* rows_data, float* scratch) {
  const Layer& layer = cache->layers[layer_index];
  const TxnView& txn = parts[part].txn;
  const int d = layer.plan.schema.head_dim;
  const BlockFormat& exact = layer.plan.format[tensor][kExact];
  float* step = rows_data + parts[part].first_row * layer.row_values + static_cast<int64_t>(head) * d;

  // Pinned keys lie in pages as attention uses them: after RoPE, whatever the stage of the coding.
  if (tensor == kK && layer.plan.rope != nullptr)
    for (int32_t p = txn.first; p < std::min(txn.first + txn.count, layer.plan.schema.pinned_rows); ++p) {
      float* row = step + (p - txn.first) * layer.row_values;
      if (std::all_of(row, row + d,
                      [](float x) { return std::isfinite(x); }))  // else RoundRows names the value as it came
        RopeRows({row, 1, d}, 1, d, std::span(&p, 1), *layer.plan.rope);
    }

  RowFault fault_at;
  if (!RoundRows(layer.plan.schema.exact_dtype, {step, txn.count, d, layer.row_values}, &fault_at))
    return Status(Code::kNonFinite,
                  fmt::format("layer {} {}, position {}, head {}, channel {}: {} is not a finite {}", layer_index,
                              TensorName(tensor), txn.first + fault_at.row, head, fault_at.channel, fault_at.value,
                              DTypeName(layer.plan.schema.exact_dtype)));

  if (tensor == kK && layer.plan.schema.k.axis == ScaleAxis::kRow)
    cache->NoteSpikes(layer_index, head, layer.plan.schema, {step, txn.count, d, layer.row_values}, txn.first);

  for (const PageCopy& copy : txn.copies)
    if (copy.cls == layer.cls && copy.tensor == tensor)
      CopySlots(layer.plan.format[tensor][copy.form], layer.Block(view, tensor, copy.form, copy.src, head),
                layer.Block(view, tensor, copy.form, copy.dst, head), copy.from, copy.to);

  for (const Claim& claim : txn.claims) {
    if (claim.cls != layer.cls || claim.tensor != tensor || claim.form != kExact) continue;
    LQ_CHECK(claim.position >= txn.first);
    const MatrixView<const float> rows{step + (claim.position - txn.first) * layer.row_values, claim.to - claim.from, d,
                                       layer.row_values};
    LQ_RETURN_IF_ERROR(EncodeRows(exact, rows, claim.from, layer.Block(view, tensor, kExact, claim.page, head)));
  }
  for (const CloseJob& job : txn.jobs)
    if (job.cls == layer.cls && job.tensor == tensor && !job.at_seal)
      LQ_RETURN_IF_ERROR(EncodeJob(layer_index, view, part, job, head, step, scratch));
  return {};
}

// False: it failed. The first failure, in batch order, is left in `fault`.
bool KvStep::Impl::RunHead(int layer, const CacheView& view, int part, int tensor, int head, int thread) {
  const int64_t scratch = static_cast<int64_t>(gather.size()) / threads;
  Status s = PrepareHead(layer, view, part, tensor, head, tensor == kK ? k : v, gather.data() + thread * scratch);
  if (s.ok()) return true;
  const int heads = cache->layers[layer].plan.schema.num_kv_heads;
  Report((int64_t{part} * 2 + tensor) * heads + head, std::move(s));
  return false;
}

Status KvStep::Enter(int layer, float* k, float* v, int threads) {
  LQ_CHECK(impl_ != nullptr);
  Impl& s = *impl_;
  if (s.state != Impl::State::kOpen) return Status(Code::kFailedTxn, "prepare: the step has ended; begin a fresh one");
  KvCache::Impl& cache = *s.cache;
  if (!s.marked.ok()) return s.Fail(s.marked);
  if (layer < 0 || layer >= static_cast<int>(cache.layers.size()))
    return s.Fail(Status(Code::kInvalidArgument, fmt::format("prepare: layer {} of {}", layer, cache.layers.size())));
  if (s.prepared[layer] != 0)
    return s.Fail(
        Status(Code::kDuplicateLayer, fmt::format("prepare: layer {} was prepared before in this step", layer)));
  s.MakeScratch(threads);
  const Layer& l = cache.layers[layer];
  int64_t encoded = 0;
  for (const Impl::Part& part : s.parts)
    for (const CloseJob& job : part.txn.jobs) encoded += job.cls == l.cls ? job.to - job.from : 0;
  s.values = (2 * int64_t{s.rows} + encoded) * l.row_values;
  s.entered = layer;
  s.k = k;
  s.v = v;
  return {};
}

// All heads: shared out, or on this thread if they are few.
void KvStep::Impl::PrepareHeads(Team& team) {
  const CacheView view = View(entered);
  const int heads = cache->layers[entered].plan.schema.num_kv_heads;
  team.For(static_cast<int64_t>(parts.size()) * 2 * heads, [&](int64_t i, int thread) {
    RunHead(entered, view, static_cast<int>(i / heads / 2), static_cast<int>(i / heads % 2),
            static_cast<int>(i % heads), thread);
  });
}

// What follows when every head was prepared, on one thread.
Status KvStep::Impl::EndPrepare() {
  if (!fault.ok()) return Fail(fault);
  for (const TxnId id : ids)
    if (marked.ok()) marked = cache->owner->MarkPrepared(id, entered);
  prepared[entered] = 1;
  ++prepared_layers;
  last_layer = entered;
  return {};
}

AttentionCall KvStep::Impl::Call(const float* q, int num_q_heads, float scale, float* out) const {
  AttentionCall call;
  call.plan = &cache->layers[entered].plan;
  call.view = View(entered);
  call.step_k = k;
  call.step_v = v;
  call.q = q;
  call.num_q_heads = num_q_heads;
  call.scale = scale;
  call.out = out;
  call.step = number;
  return call;
}

bool KvStep::Impl::Falls() const {
  const Phase phase = drafts ? Phase::kVerify : decode ? Phase::kDecode : Phase::kPrefill;
  return cache->layers[entered].choice[static_cast<int>(phase)].fallback;
}

void KvStep::Impl::Attend(const AttentionCall& call, Team& team) {
  if (!Falls()) return AttendGeneric(call, *attention, team);
  if (team.thread() == 0) {
    cache->fallback_calls.fetch_add(1, std::memory_order_relaxed);
    AttendReference(call);
  }
  team.Barrier();
}

bool KvStep::ByHead(const Team& team) const {
  const Impl& s = *impl_;
  return s.values < kParallelValues && s.rows <= kByHeadRows &&
         s.cache->layers[s.entered].plan.schema.num_kv_heads % team.threads() == 0 && !s.Falls();
}

Status KvStep::PrepareAndAttend(const float* q, int num_q_heads, float scale, float* out, Team& team) {
  LQ_CHECK(impl_ != nullptr);
  Impl& s = *impl_;
  const AttentionCall call = s.Call(q, num_q_heads, scale, out);
  if (!ByHead(team)) {
    team.Barrier();
    s.PrepareHeads(team);
    if (s.fault.ok()) s.Attend(call, team);
  } else {
    const Team::Range heads = team.Share(call.plan->schema.num_kv_heads);
    bool prepared = true;
    for (int part = 0; part < static_cast<int>(s.parts.size()); ++part)
      for (const int tensor : {kK, kV})
        for (int64_t head = heads.begin; head < heads.end; ++head)
          prepared &= s.RunHead(s.entered, call.view, part, tensor, static_cast<int>(head), team.thread());
    if (prepared) AttendHeads(call, *s.attention, heads, team.thread());
    team.Barrier();
  }
  const Status result = s.fault;
  return team.thread() == 0 ? s.EndPrepare() : result;
}

Status KvStep::Prepare(int layer, float* k, float* v, ThreadPool& pool) {
  LQ_RETURN_IF_ERROR(Enter(layer, k, v, pool.threads()));
  Impl& s = *impl_;
  if (s.values < kParallelValues) {
    Team alone;
    s.PrepareHeads(alone);
  } else {
    pool.Together([&](Team& team) { s.PrepareHeads(team); });
  }
  LQ_RETURN_IF_ERROR(s.EndPrepare());
  return s.marked.ok() ? Status() : s.Fail(s.marked);
}

Status KvStep::Attend(int layer, const float* q, int num_q_heads, float scale, float* out, ThreadPool& pool) {
  LQ_CHECK(impl_ != nullptr);
  Impl& s = *impl_;
  if (s.state != Impl::State::kOpen) return Status(Code::kFailedTxn, "attend: the step has ended; begin a fresh one");
  KvCache::Impl& cache = *s.cache;
  if (layer < 0 || layer != s.last_layer)
    return Status(Code::kInvalidArgument,
                  fmt::format("attend: layer {}, but layer {} was prepared last", layer, s.last_layer));
  const Layer& l = cache.layers[layer];
  if (num_q_heads < 1 || num_q_heads > cache.options.max_q_heads || num_q_heads % l.plan.schema.num_kv_heads != 0)
    return Status(Code::kInvalidArgument,
                  fmt::format("attend: {} query heads; a multiple of {} KV heads is needed, at most {}", num_q_heads,
                              l.plan.schema.num_kv_heads, cache.options.max_q_heads));
  s.MakeScratch(pool.threads());
  const AttentionCall call = s.Call(q, num_q_heads, scale, out);
  pool.Together([&](Team& team) { s.Attend(call, team); });
  return {};
}

// ---- publish
// -----------------------------------------------------------------------------------------------------------------

// The closures that needed every row accepted: from exact pages, which hold all rows of a kPrefix step.
Status KvStep::Impl::SealPart(int part, int accepted) {
  auto jobs = cache->owner->Seal(ids[part], accepted);
  if (!jobs.ok()) return jobs.status();
  for (const CloseJob& job : *jobs)
    for (const int layer : cache->owner->classes()[job.cls].layers) {
      const CacheView view = View(layer);
      for (int head = 0; head < cache->layers[layer].plan.schema.num_kv_heads; ++head)
        LQ_RETURN_IF_ERROR(EncodeJob(layer, view, part, job, head, nullptr, gather.data()));
    }
  return {};
}

Result<std::vector<Receipt>> KvStep::Impl::Publish(std::span<const int> accepted) {
  std::vector<Receipt> receipts;
  if (state == State::kPublished) return published;
  if (state != State::kOpen) return Status(Code::kFailedTxn, "publish: the step has ended; begin a fresh one");
  if (!accepted.empty() && accepted.size() != parts.size())
    return Fail(Status(Code::kInvalidArgument,
                       fmt::format("publish: {} accepted counts for {} sequences", accepted.size(), parts.size())));
  const auto take = [&](size_t i) { return accepted.empty() ? parts[i].txn.count : accepted[i]; };
  for (size_t i = 0; i < parts.size(); ++i) {
    const TxnView& txn = parts[i].txn;
    const int least = txn.mode == Mode::kPrefix ? 0 : txn.count;
    if (take(i) < least || take(i) > txn.count)
      return Fail(Status(Code::kInvalidArgument, fmt::format("publish: {} rows of sequence {}; {} to {} can be taken",
                                                             take(i), txn.seq, least, txn.count)));
  }
  if (!marked.ok()) return Fail(marked);
  if (prepared_layers != static_cast<int>(prepared.size()))
    return Fail(
        Status(Code::kMissingLayer,
               fmt::format("publish: layer {} of {} was not prepared",
                           std::find(prepared.begin(), prepared.end(), 0) - prepared.begin(), prepared.size())));

  // Every seal first: it is the last thing that can fail for the step as a whole.
  std::string refused;
  Code refusal = Code::kStale;
  const auto moved_on = [](const Status& why) { return why.code() == Code::kStale || why.code() == Code::kClosed; };
  const auto refuse = [&](size_t i, const Status& why) {
    cache->owner->Abort(ids[i]);
    if (refused.empty()) refusal = why.code();
    refused += fmt::format("{}sequence {}: {}", refused.empty() ? "" : "; ", parts[i].txn.seq, why.message());
    receipts[i].rows = -1;
  };
  receipts.resize(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].txn.mode != Mode::kPrefix || take(i) == 0) continue;
    if (Status sealed = SealPart(static_cast<int>(i), take(i)); !sealed.ok()) {
      if (!moved_on(sealed)) return Fail(std::move(sealed));
      refuse(i, sealed);
    }
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    if (receipts[i].rows < 0) continue;
    const int rows_taken = take(i);
    if (rows_taken == 0) {
      const SeqId seq = parts[i].txn.seq;
      const uint64_t generation = cache->owner->generation(seq);
      receipts[i] = Receipt{.txn = ids[i],
                            .transition = Transition::kAppend,
                            .seq = seq,
                            .generation_before = generation,
                            .generation = generation,
                            .length = parts[i].txn.first,
                            .first = parts[i].txn.first};
      cache->owner->Abort(ids[i]);
      continue;
    }
    auto receipt = cache->owner->Publish(ids[i], rows_taken);
    if (receipt.ok())
      receipts[i] = *receipt;
    else
      refuse(i, receipt.status());
  }
  if (!refused.empty()) {
    state = State::kFailed;
    return Status(refusal, "publish: " + refused);
  }
  state = State::kPublished;
  published = receipts;
  return receipts;
}

Result<std::vector<Receipt>> KvStep::Publish() {
  LQ_CHECK(impl_ != nullptr);
  return impl_->Publish({});
}
Result<std::vector<Receipt>> KvStep::Publish(std::span<const int> accepted) {
  LQ_CHECK(impl_ != nullptr);
  return impl_->Publish(accepted);
}

// ---- step: the rest
// ------------------------------------------------------------------------------------------------------------

KvStep::KvStep() = default;
KvStep::KvStep(KvStep&&) noexcept = default;
KvStep& KvStep::operator=(KvStep&&) noexcept = default;
KvStep::~KvStep() = default;

void KvStep::GiveBack::operator()(Impl* impl) const {
  if (impl->state == Impl::State::kOpen) impl->AbortAll();
  KvCache::Impl& cache = *impl->cache;
  std::lock_guard lock(cache.mutex);
  cache.free_steps.push_back(impl);
}

int KvStep::sequences() const { return static_cast<int>(impl_->parts.size()); }
int KvStep::rows() const { return impl_->rows; }
int KvStep::first_row(int sequence) const { return impl_->parts[sequence].first_row; }
int KvStep::count(int sequence) const { return impl_->parts[sequence].txn.count; }
int64_t KvStep::position(int sequence) const { return impl_->parts[sequence].txn.first; }
TxnId KvStep::txn(int sequence) const { return impl_->ids[sequence]; }

// ---- cache
// -------------------------------------------------------------------------------------------------------------------

KvCache::KvCache() : impl_(std::make_unique<Impl>()) {}
KvCache::~KvCache() {
  LQ_CHECK(impl_->free_steps.size() == impl_->steps.size());  // a step outlived its cache
}

Result<int64_t> KvCache::MemoryBytes(const CacheSchema& schema, const KvOptions& options) {
  LQ_RETURN_IF_ERROR(Validate(schema));
  LQ_RETURN_IF_ERROR(CheckOptions(schema, options));
  return PoolBytes(schema, PoolPages(schema, options), Owner::kMemoryAlignment);
}

Result<std::unique_ptr<KvCache>> KvCache::Open(const CacheSchema& schema, const KvOptions& options) {
  LQ_RETURN_IF_ERROR(Validate(schema));
  LQ_RETURN_IF_ERROR(CheckOptions(schema, options));
  OwnerLimits limits;
  limits.max_sequences = options.max_sequences;
  limits.max_len = options.max_len;
  limits.max_step_rows =
      static_cast<int>(std::min<int64_t>(options.max_step_rows, options.max_len));  // of one sequence
  limits.pages = PoolPages(schema, options);
  const int64_t pool_bytes = options.memory != nullptr ? PoolBytes(schema, limits.pages, Owner::kMemoryAlignment)
                                                       : PoolBytes(schema, limits.pages);
  if (reinterpret_cast<uintptr_t>(options.memory) % Owner::kMemoryAlignment != 0)
    return Status(Code::kInvalidArgument, fmt::format("memory is not aligned to {} bytes", Owner::kMemoryAlignment));
  if (options.memory != nullptr && options.memory_bytes == 0)
    return Status(Code::kInvalidArgument, "memory is given but memory_bytes is 0");
  limits.memory = options.memory;
  if (options.memory_bytes > 0 && pool_bytes > options.memory_bytes)
    return Status(Code::kOutOfRange,
                  fmt::format("the cache needs {} bytes for {} rows in {} sequences; memory_bytes is {}", pool_bytes,
                              options.pool_tokens > 0 ? options.pool_tokens : options.max_len * options.max_sequences,
                              options.max_sequences, options.memory_bytes));

  std::unique_ptr<KvCache> cache(new KvCache);
  Impl& impl = *cache->impl_;
  impl.schema = schema;
  impl.options = options;
  LQ_ASSIGN_OR_RETURN(impl.owner, Owner::Create(schema, limits));
  for (size_t i = 0; i < schema.layers.size(); ++i) {
    const LayerSchema& s = schema.layers[i];
    Layer& layer = impl.layers.emplace_back();
    const RopeTable* rope = nullptr;
    if (s.k_stage == RopeStage::kPre) {
      std::unique_ptr<RopeTable>& table = impl.rope[s.head_dim];
      if (table == nullptr) table = std::make_unique<RopeTable>(schema.rope, s.head_dim, options.max_len);
      rope = table.get();
    }
    auto plan = PlanLayer(s, rope, options.allow_fallback);
    if (!plan.ok()) return Status(plan.status().code(), fmt::format("layer {}: {}", i, plan.status().message()));
    layer.plan = *std::move(plan);
    for (const Phase phase : {Phase::kDecode, Phase::kPrefill, Phase::kVerify}) {
      auto choice = ChooseKernel(s, phase, options.allow_fallback);
      if (!choice.ok())
        return Status(choice.status().code(), fmt::format("layer {}: {}", i, choice.status().message()));
      layer.choice[static_cast<int>(phase)] = *std::move(choice);
    }
    layer.cls = impl.owner->class_of_layer(static_cast<int>(i));
    layer.row_values = int64_t{s.num_kv_heads} * s.head_dim;
    for (const TensorIndex tensor : {kK, kV})
      for (const FormIndex form : {kCoded, kExact})
        layer.base[tensor][form] = impl.owner->pool(layer.cls, tensor, form).base();
    impl.max_head_dim = std::max(impl.max_head_dim, s.head_dim);
    impl.max_page_rows = std::max({impl.max_page_rows, s.coded_page_rows, s.exact_page_rows});
  }
  impl.free_steps.push_back(impl.TakeStep());
  impl.free_steps.back()->MakeScratch(
      options.threads > 0 ? options.threads : std::max(1, static_cast<int>(std::thread::hardware_concurrency())));
  return cache;
}

KvStep::Impl* KvCache::Impl::TakeStep() {
  std::lock_guard lock(mutex);
  if (!free_steps.empty()) {
    KvStep::Impl* step = free_steps.back();
    free_steps.pop_back();
    return step;
  }
  KvStep::Impl& step = *steps.emplace_back(std::make_unique<KvStep::Impl>());
  step.cache = this;
  const size_t most = static_cast<size_t>(options.max_sequences);
  step.parts.reserve(most);
  step.ids.reserve(most);
  step.published.reserve(most);
  step.seq_rows.resize(owner->classes().size());
  for (std::vector<SeqRow>& rows : step.seq_rows) rows.reserve(most);
  step.prepared.resize(layers.size());
  free_steps.reserve(steps.size());
  return &step;
}

// keys: rows of one head at positions first, first + 1, ...
void KvCache::Impl::NoteSpikes(int layer, int head, const LayerSchema& schema, MatrixView<const float> keys,
                               int64_t first) {
  for (int64_t r = std::max<int64_t>(0, schema.pinned_rows - first); r < keys.rows; ++r) {
    auto found = FindKeySpike(std::span(keys.row(r), static_cast<size_t>(keys.cols)),
                              spike_ratio.load(std::memory_order_relaxed));
    if (!found) continue;
    found->layer = layer;
    found->head = head;
    found->position = first + r;
    std::lock_guard lock(mutex);
    if (spike && !found->Beats(*spike)) continue;
    spike = found;
    spike_ratio.store(found->ratio(), std::memory_order_relaxed);
  }
}

std::optional<KeySpike> KvCache::TakeKeySpike() {
  std::lock_guard lock(impl_->mutex);
  impl_->spike_ratio.store(0, std::memory_order_relaxed);
  return std::exchange(impl_->spike, std::nullopt);
}

Result<KvStep> KvCache::Begin(std::span<const AppendRequest> requests) {
  if (requests.empty()) return Status(Code::kInvalidArgument, "begin: no request");
  int64_t rows = 0;
  for (const AppendRequest& r : requests) rows += std::max(r.rows, 0);
  if (rows > impl_->options.max_step_rows)
    return Status(Code::kInvalidArgument,
                  fmt::format("begin: {} rows in one step; max_step_rows is {}", rows, impl_->options.max_step_rows));

  // What was begun under an id belongs to the step that began it, until that ends.
  std::unique_lock<std::mutex> ids(impl_->id_mutex, std::defer_lock);
  for (const AppendRequest& r : requests) {
    if (r.id == 0) continue;
    if (!ids.owns_lock()) ids.lock();
    if (impl_->owner->Get(r.id).ok())
      return Status(Code::kInvalidArgument, fmt::format("begin: transaction id {} is in another step's hands", r.id));
  }

  KvStep step;
  step.impl_.reset(impl_->TakeStep());
  KvStep::Impl& s = *step.impl_;
  s.state = KvStep::Impl::State::kFailed;  // nothing to abort yet
  s.parts.clear();
  s.ids.assign(requests.size(), 0);
  for (std::vector<SeqRow>& seq : s.seq_rows) seq.clear();
  std::fill(s.prepared.begin(), s.prepared.end(), uint8_t{0});
  s.rows = s.prepared_layers = 0;
  s.entered = s.last_layer = -1;
  s.fault = s.marked = Status();
  s.number = ++impl_->step_number;
  s.drafts = false;
  s.decode = true;
  LQ_RETURN_IF_ERROR(impl_->owner->Begin(requests, s.ids));
  s.state = KvStep::Impl::State::kOpen;
  for (const TxnId id : s.ids) {
    auto txn = impl_->owner->Get(id);
    LQ_CHECK(txn.ok());
    s.parts.push_back({*txn, s.rows});
    for (size_t c = 0; c < s.seq_rows.size(); ++c) {
      s.seq_rows[c].push_back(txn->rows[c]);
      s.seq_rows[c].back().first_query = s.rows;
    }
    s.rows += txn->count;
    s.drafts |= txn->mode == Mode::kPrefix;
    s.decode &= txn->count == 1;
  }
  return step;
}

CacheView KvCache::Impl::View(const Owner::Lease& lease, int layer, SeqRow* row) const {
  *row = lease.rows()[layers[layer].cls];
  CacheView view = owner->ViewOfLayer(layer);
  view.seq = row;
  view.sequences = 1;
  return view;
}

namespace {

// The three parts of a sequence at rest: pinned rows, coded rows, exact rows. fn(form, from, to).
template <class Fn>
void ForForms(const CacheView& view, int tensor, Fn&& fn) {
  const int32_t len = view.seq[0].len, pinned = std::min(view.pinned, len), f = std::max(view.seq[0].f[tensor], pinned);
  fn(kExact, 0, pinned);
  fn(kCoded, pinned, f);
  fn(kExact, f, len);
}

}  // namespace

void KvCache::ReadRows(const Owner::Lease& lease, int layer, TensorIndex tensor, int head, float* out) const {
  LQ_CHECK(layer >= 0 && layer < static_cast<int>(impl_->layers.size()));
  const Layer& l = impl_->layers[layer];
  LQ_CHECK(head >= 0 && head < l.plan.schema.num_kv_heads);
  SeqRow row;
  const CacheView view = impl_->View(lease, layer, &row);
  const int d = l.plan.schema.head_dim;
  if (view.window > 0) std::fill(out, out + lease.length() * d, std::numeric_limits<float>::quiet_NaN());
  ForForms(view, tensor, [&](FormIndex form, int32_t from, int32_t to) {
    const int32_t found = ForRuns(view, 0, tensor, form, from, to, [&](const SlotRun& run) {
      l.plan.decode[tensor][form](l.plan.format[tensor][form], view.head_block(tensor, form, run.page, head), run.slot,
                                  {out + int64_t{run.position} * d, run.rows, d});
    });
    LQ_CHECK(found == to - from || view.window > 0);
  });
}

std::vector<std::byte> KvCache::StateBytes(SeqId seq) const {
  auto lease = impl_->owner->Acquire(seq);
  return lease.ok() ? StateBytes(*lease) : std::vector<std::byte>();
}

std::vector<std::byte> KvCache::StateBytes(const Owner::Lease& lease) const {
  std::vector<std::byte> out;
  const auto number = [&](int64_t value) {
    for (int i = 0; i < 8; ++i) out.push_back(static_cast<std::byte>(static_cast<uint64_t>(value) >> (8 * i)));
  };
  number(lease.length());
  for (const SeqRow& row : lease.rows())
    for (const TensorIndex tensor : {kK, kV}) number(row.f[tensor]);
  for (size_t layer = 0; layer < impl_->layers.size(); ++layer) {
    const Layer& l = impl_->layers[layer];
    SeqRow row;
    const CacheView view = impl_->View(lease, static_cast<int>(layer), &row);
    for (const TensorIndex tensor : {kK, kV})
      for (int head = 0; head < l.plan.schema.num_kv_heads; ++head)
        ForForms(view, tensor, [&](FormIndex form, int32_t from, int32_t to) {
          const int32_t found = ForRuns(view, 0, tensor, form, from, to, [&](const SlotRun& run) {
            AppendSlots(l.plan.format[tensor][form], view.head_block(tensor, form, run.page, head), run.slot, run.rows,
                        run.position, out);
          });
          LQ_CHECK(found == to - from || view.window > 0);
        });
  }
  return out;
}

const CacheSchema& KvCache::schema() const { return impl_->schema; }
const KvOptions& KvCache::options() const { return impl_->options; }
Owner& KvCache::owner() { return *impl_->owner; }
const Owner& KvCache::owner() const { return *impl_->owner; }
int64_t KvCache::fallback_calls() const { return impl_->fallback_calls.load(std::memory_order_relaxed); }

KernelChoice KvCache::kernel(int layer, Phase phase) const {
  LQ_CHECK(layer >= 0 && layer < static_cast<int>(impl_->layers.size()));
  return impl_->layers[layer].choice[static_cast<int>(phase)];
}

int64_t KvCache::workspace_bytes() const {
  std::lock_guard lock(impl_->mutex);
  int64_t bytes = 0;
  for (const auto& step : impl_->steps)
    bytes +=
        (step->attention ? step->attention->bytes() : 0) + static_cast<int64_t>(step->gather.size() * sizeof(float));
  return bytes;
}

}  // namespace livequant
