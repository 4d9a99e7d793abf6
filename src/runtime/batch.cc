// runtime/batch.cc: see batch.h.
#include "runtime/batch.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <numeric>

#include "base/seconds.h"

namespace livequant {
namespace {

using Clock = std::chrono::steady_clock;

int64_t MostRows(const BatchRequest& r) { return static_cast<int64_t>(r.prompt.size()) + r.max_new_tokens; }

Status CheckBatchOptions(const BatchOptions& o, int64_t context, const LlamaConfig& config) {
  if (o.max_num_seqs < 1)
    return Status(Code::kInvalidArgument, fmt::format("max_num_seqs is {}; must be at least 1", o.max_num_seqs));
  if (o.prefill_chunk < 1)
    return Status(Code::kInvalidArgument, fmt::format("prefill_chunk is {}; must be at least 1", o.prefill_chunk));
  if (o.memory_bytes < 0)
    return Status(Code::kInvalidArgument,
                  fmt::format("cache memory is {} bytes; must be 0 (no budget) or more", o.memory_bytes));
  if (context < 1 || context > config.max_position_embeddings)
    return Status(Code::kOutOfRange, fmt::format("the context is {}; the model's max_position_embeddings is {}",
                                                 context, config.max_position_embeddings));
  return {};
}

// Sequences and rows of the pool: without a budget enough for any max_num_seqs of the requests at once; with one, the
// most sequences of which one may be the longest, then the most rows.
Result<KvOptions> PlanPool(const CacheSchema& schema, std::span<const BatchRequest> requests, const BatchOptions& o,
                           const LlamaConfig& config, int threads) {
  std::vector<int64_t> rows;
  int64_t chunk = 1, prompt_rows = 0;
  for (const BatchRequest& r : requests) {
    rows.push_back(MostRows(r));
    prompt_rows += static_cast<int64_t>(r.prompt.size());
    chunk = std::max(chunk, PrefillStepRows(schema.read_step, o.prefill_chunk, static_cast<int64_t>(r.prompt.size())));
  }
  chunk = std::max(chunk, std::min(o.prefill_chunk, prompt_rows));
  std::sort(rows.begin(), rows.end(), std::greater<>());
  const int64_t longest = rows[0];
  const auto plan = [&](int sequences, int64_t pool_rows) {
    return KvOptions{.max_sequences = sequences,
                     .max_len = longest,
                     .pool_tokens = pool_rows,
                     // Everybody's decode row and the largest cut of any prompt: the oldest prompt always moves on.
                     .max_step_rows = static_cast<int>(chunk + sequences - 1),
                     .max_q_heads = config.num_attention_heads,
                     .allow_fallback = o.allow_fallback,
                     .threads = threads};
  };
  int sequences = static_cast<int>(std::min<size_t>(static_cast<size_t>(o.max_num_seqs), rows.size()));
  const auto all_rows = [&] { return std::accumulate(rows.begin(), rows.begin() + sequences, int64_t{0}); };
  if (o.memory_bytes == 0) return plan(sequences, all_rows());
  Status fault;
  const auto fits = [&](int64_t pool_rows) {
    const Result<int64_t> bytes = KvPoolBytes(schema, plan(sequences, pool_rows));
    if (!bytes.ok()) fault = bytes.status();
    return bytes.ok() && *bytes <= o.memory_bytes;
  };
  while (sequences > 1 && !fits(longest)) --sequences;
  int64_t low = longest, high = all_rows();  // low fits, or is refused by KvCache::Open with both numbers
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (fits(middle))
      low = middle;
    else
      high = middle - 1;
  }
  LQ_RETURN_IF_ERROR(fault);
  KvOptions options = plan(sequences, low);
  options.memory_bytes = o.memory_bytes;
  return options;
}

// One request that runs.
struct Active {
  size_t request;
  SeqId seq;
  Sampler sampler;
  Clock::time_point started;
  int64_t rows = 0;   // of the prompt, in the cache
  int32_t token = 0;  // the next row, once the prompt is in
};

class Batch {
 public:
  Batch(const Llama& model, std::span<const BatchRequest> requests, const BatchOptions& options, KvCache& cache,
        ThreadPool& pool)
      : model_(model),
        requests_(requests),
        options_(options),
        cache_(cache),
        pool_(pool),
        workspace_(model.NewWorkspace(cache.options().max_step_rows, cache.options().max_sequences)),
        logits_(static_cast<size_t>(cache.options().max_sequences * model.config().vocab_size)) {
    run_.results.resize(requests.size());
    active_.reserve(static_cast<size_t>(cache.options().max_sequences));
  }

  Result<BatchRun> Run() {
    const Clock::time_point start = Clock::now();
    while (next_ < requests_.size() || !active_.empty()) {
      if (options_.cancel != nullptr && options_.cancel->load(std::memory_order_relaxed)) {
        LQ_RETURN_IF_ERROR(CancelAll());
        break;
      }
      LQ_RETURN_IF_ERROR(Admit());
      Compose();
      LQ_RETURN_IF_ERROR(Step());
      for (size_t i = active_.size(); i-- > 0;)
        if (ended_[i]) LQ_RETURN_IF_ERROR(End(i));
    }
    run_.seconds = SecondsSince(start);
    return std::move(run_);
  }

 private:
  Generation& Out(const Active& a) { return run_.results[a.request].generation; }
  bool InPrompt(const Active& a) const { return a.rows < static_cast<int64_t>(requests_[a.request].prompt.size()); }

  Status Admit() {
    const KvOptions& o = cache_.options();
    while (next_ < requests_.size() && static_cast<int>(active_.size()) < o.max_sequences &&
           reserved_rows_ + MostRows(requests_[next_]) <= o.pool_tokens) {
      LQ_ASSIGN_OR_RETURN(const Receipt open, cache_.owner().Open());
      active_.push_back({.request = next_,
                         .seq = open.seq,
                         .sampler = Sampler(requests_[next_].sampling, model_.config().vocab_size),
                         .started = Clock::now()});
      reserved_rows_ += MostRows(requests_[next_++]);
    }
    run_.most_at_once = std::max(run_.most_at_once, static_cast<int>(active_.size()));
    return {};
  }

  // Every answer's next row, then prompts, oldest first, each to its next cut or, under stepwise where any cut is as
  // good, as far as the step has room.
  void Compose() {
    const int read_step = cache_.schema().read_step;
    int64_t room = cache_.options().max_step_rows;
    parts_.clear();
    part_of_.clear();
    for (size_t i = 0; i < active_.size(); ++i) {
      if (InPrompt(active_[i])) continue;
      parts_.push_back({.seq = active_[i].seq, .tokens = {&active_[i].token, 1}});
      part_of_.push_back(i);
      --room;
    }
    for (size_t i = 0; i < active_.size() && room > 0; ++i) {
      const Active& a = active_[i];
      if (!InPrompt(a)) continue;
      const std::vector<int32_t>& prompt = requests_[a.request].prompt;
      int64_t rows = NextCut(read_step, options_.prefill_chunk, static_cast<int64_t>(prompt.size()), a.rows) - a.rows;
      if (read_step == kStepwise) rows = std::min(rows, room);
      if (rows > room) continue;
      parts_.push_back(
          {.seq = a.seq, .tokens = std::span(prompt).subspan(static_cast<size_t>(a.rows), static_cast<size_t>(rows))});
      part_of_.push_back(i);
      room -= rows;
    }
    LQ_CHECK(!parts_.empty());
  }

  // Runs the parts together. A value that is not finite refuses the step whole and says nothing about the other
  // requests: they run again, one by one, and only those that fail alone end.
  Status Step() {
    ended_.assign(active_.size(), 0);
    const int64_t vocab = model_.config().vocab_size;
    const auto forward = [&](size_t from, size_t count) {
      ++run_.steps;
      return model_.Step(
          std::span(parts_).subspan(from, count), cache_, *workspace_,
          MatrixView<float>(logits_.data() + static_cast<int64_t>(from) * vocab, static_cast<int64_t>(count), vocab),
          pool_);
    };
    const Status together = forward(0, parts_.size());
    if (!together.ok() && together.code() != Code::kNonFinite) return together;
    const bool answers = !InPrompt(active_[part_of_.front()]), prompts = InPrompt(active_[part_of_.back()]);
    if (together.ok() && answers && prompts) ++run_.mixed_steps;
    for (size_t p = 0; p < parts_.size(); ++p) {
      Active& a = active_[part_of_[p]];
      Status ran = together;
      if (!together.ok() && parts_.size() > 1) ran = forward(p, 1);
      if (!ran.ok() && ran.code() != Code::kNonFinite) return ran;
      if (ran.ok()) {
        run_.rows += static_cast<int64_t>(parts_[p].tokens.size());
        ran = Take(a, static_cast<int64_t>(parts_[p].tokens.size()),
                   std::span(logits_).subspan(p * static_cast<size_t>(vocab), static_cast<size_t>(vocab)),
                   ended_[part_of_[p]]);
      }
      if (!ran.ok()) {
        run_.results[a.request].status = std::move(ran);
        ended_[part_of_[p]] = 1;
      }
    }
    return {};
  }

  // The published rows of one request and the logits of its last one.
  Status Take(Active& a, int64_t rows, std::span<const float> logits, uint8_t& ended) {
    const BatchRequest& request = requests_[a.request];
    Generation& out = Out(a);
    if (InPrompt(a)) {
      out.prompt_tokens = a.rows += rows;
      ++out.prefill_steps;
      out.prefill_seconds = SecondsSince(a.started);
      if (InPrompt(a)) return {};
    } else {
      ++out.decode_steps;
      out.decode_seconds = SecondsSince(a.started) - out.prefill_seconds;
    }
    const auto full = [&] { return static_cast<int64_t>(out.token_ids.size()) == request.max_new_tokens; };
    if (!full()) {
      LQ_ASSIGN_OR_RETURN(a.token, a.sampler.Next(logits));
      const std::vector<int32_t>& eos = model_.config().eos_token_ids;
      if (!request.ignore_eos && std::find(eos.begin(), eos.end(), a.token) != eos.end()) {
        out.finish = FinishReason::kEos;
        ended = 1;
        return {};
      }
      out.token_ids.push_back(a.token);
    }
    if (full()) ended = 1;
    return {};
  }

  Status End(size_t i) {
    const Active& a = active_[i];
    const size_t request = a.request;
    Out(a).cache_rows = cache_.owner().length(a.seq);
    LQ_RETURN_IF_ERROR(cache_.owner().Release(a.seq).status());
    reserved_rows_ -= MostRows(requests_[request]);
    active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(i));
    if (options_.on_finish) options_.on_finish(request, run_.results[request]);
    return {};
  }

  Status CancelAll() {
    while (!active_.empty()) {
      Out(active_.back()).finish = FinishReason::kCancelled;
      LQ_RETURN_IF_ERROR(End(active_.size() - 1));
    }
    for (; next_ < requests_.size(); ++next_) {
      run_.results[next_].generation.finish = FinishReason::kCancelled;
      if (options_.on_finish) options_.on_finish(next_, run_.results[next_]);
    }
    return {};
  }

  const Llama& model_;
  const std::span<const BatchRequest> requests_;
  const BatchOptions& options_;
  KvCache& cache_;
  ThreadPool& pool_;
  const std::unique_ptr<Llama::Workspace> workspace_;
  std::vector<float> logits_;  // by part
  std::vector<Active> active_;
  std::vector<SequenceTokens> parts_;
  std::vector<size_t> part_of_;  // index in active_ of each part
  std::vector<uint8_t> ended_;   // by index in active_
  size_t next_ = 0;              // the first request that was not admitted
  int64_t reserved_rows_ = 0;    // that the admitted requests may grow to
  BatchRun run_;
};

}  // namespace

Result<BatchRun> RunBatch(const std::shared_ptr<const Llama>& model, const CacheSchema& schema,
                          std::span<const BatchRequest> requests, const BatchOptions& options, ThreadPool& pool) {
  LQ_CHECK(model != nullptr);
  const LlamaConfig& config = model->config();
  const int64_t context = options.context == 0 ? config.max_position_embeddings : options.context;
  LQ_RETURN_IF_ERROR(CheckBatchOptions(options, context, config));
  LQ_RETURN_IF_ERROR(CheckSchemaFits(schema, config));
  if (requests.empty()) return BatchRun{};
  for (size_t i = 0; i < requests.size(); ++i) {
    const BatchRequest& r = requests[i];
    const Status good = CheckRequest(r.prompt, r.max_new_tokens, r.sampling, config.vocab_size, context);
    if (!good.ok()) return Status(good.code(), fmt::format("request {}: {}", i, good.message()));
  }
  LQ_ASSIGN_OR_RETURN(const KvOptions plan, PlanPool(schema, requests, options, config, pool.threads()));
  LQ_ASSIGN_OR_RETURN(const std::unique_ptr<KvCache> cache, KvCache::Open(schema, plan));
  LQ_ASSIGN_OR_RETURN(BatchRun run, Batch(*model, requests, options, *cache, pool).Run());
  LQ_ASSIGN_OR_RETURN(run.pool_bytes, KvPoolBytes(schema, plan));
  run.pool_rows = plan.pool_tokens;
  run.fallback_calls = cache->fallback_calls();
  run.key_spike = cache->TakeKeySpike();
  return run;
}

}  // namespace livequant
