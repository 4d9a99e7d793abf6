// runtime/beam.cc: see beam.h.
#include "runtime/beam.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>

#include "base/seconds.h"

namespace livequant {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxBeams = 256, kMaxStopIds = 64;

// One token behind one beam.
struct Candidate {
  double sum = 0;  // of log-probabilities
  int beam = 0;
  int32_t token = 0;
};
bool Better(const Candidate& a, const Candidate& b) {
  if (a.sum != b.sum) return a.sum > b.sum;
  return a.beam != b.beam ? a.beam < b.beam : a.token < b.token;
}

Status CheckOptions(const BeamOptions& o, const LlamaConfig& config, int64_t context) {
  if (o.num_beams < 1 || o.num_beams > kMaxBeams)
    return Status(Code::kInvalidArgument, fmt::format("num_beams is {}; must be 1 to {}", o.num_beams, kMaxBeams));
  if (!(o.length_penalty >= -100 && o.length_penalty <= 100))
    return Status(Code::kInvalidArgument, fmt::format("length_penalty is {}; must be -100 to 100", o.length_penalty));
  if (o.stop_ids.size() > kMaxStopIds)
    return Status(Code::kInvalidArgument, fmt::format("{} stop ids; at most {}", o.stop_ids.size(), kMaxStopIds));
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

// Rows of the pool: the prompt once, and for each beam its own rows and three pages: one that it shares in part and
// copies, one that a step adds, one that is part filled.
int64_t PoolRows(const CacheSchema& schema, int64_t prompt, const BeamOptions& o, int64_t max_len) {
  int64_t page = 1;
  for (const LayerSchema& layer : schema.layers)
    page = std::max<int64_t>({page, layer.coded_page_rows, layer.exact_page_rows});
  return std::min(o.num_beams * max_len, prompt + o.num_beams * (o.max_new_tokens + 3 * page));
}

}  // namespace

struct BeamSearch::Impl {
  std::shared_ptr<const Llama> model;
  BeamOptions options;
  ThreadPool* pool = nullptr;
  std::unique_ptr<KvCache> cache;
  std::unique_ptr<Llama::Workspace> workspace;
  int64_t vocab = 0;
  size_t keep = 0;  // candidates of a step

  struct Running {
    std::vector<int32_t> token_ids;
    double sum = 0;
  };
  std::vector<SeqId> group;              // sequence of each place; one until the first step is done
  std::vector<Running> running;          // by place, best first
  std::vector<float> logits;             // [place][vocab], of the row behind each beam
  std::vector<BeamHypothesis> finished;  // at most num_beams, best first
  bool ended = false;
  Stats stats;

  Status Prefill(std::span<const int32_t> prompt);
  Result<std::vector<Candidate>> Best() const;
  bool Ends(int32_t token, int64_t length) const {
    return length == options.max_new_tokens ||
           std::find(options.stop_ids.begin(), options.stop_ids.end(), token) != options.stop_ids.end();
  }
  double Score(double sum, int64_t length) const {
    return sum / std::pow(static_cast<double>(length), options.length_penalty);
  }
  void Finish(const Candidate& candidate, int64_t length);
  Status Move(std::span<const int> parents);
  Status Forward();
  Result<bool> Step();
};

BeamSearch::BeamSearch() : impl_(std::make_unique<Impl>()) {}
BeamSearch::~BeamSearch() = default;
KvCache& BeamSearch::cache() { return *impl_->cache; }
const BeamSearch::Stats& BeamSearch::stats() const { return impl_->stats; }

Result<std::unique_ptr<BeamSearch>> BeamSearch::Open(std::shared_ptr<const Llama> model, const CacheSchema& schema,
                                                     std::span<const int32_t> prompt, const BeamOptions& options,
                                                     ThreadPool& pool) {
  LQ_CHECK(model != nullptr);
  const LlamaConfig& config = model->config();
  const int64_t context = options.context == 0 ? config.max_position_embeddings : options.context;
  LQ_RETURN_IF_ERROR(CheckOptions(options, config, context));
  LQ_RETURN_IF_ERROR(CheckSchemaFits(schema, config));
  LQ_RETURN_IF_ERROR(CheckRequest(prompt, options.max_new_tokens, {}, config.vocab_size, context));

  std::unique_ptr<BeamSearch> search(new BeamSearch);
  Impl& s = *search->impl_;
  s.options = options;
  s.pool = &pool;
  s.vocab = config.vocab_size;
  s.keep = std::max<size_t>(2, 1 + options.stop_ids.size()) * static_cast<size_t>(options.num_beams);
  if (static_cast<int64_t>(s.keep) > s.vocab)
    return Status(Code::kOutOfRange,
                  fmt::format("{} beams and {} stop ids keep {} continuations a step; the vocabulary has {}",
                              options.num_beams, options.stop_ids.size(), s.keep, s.vocab));
  const auto rows = static_cast<int64_t>(prompt.size());
  const int64_t max_len = rows + std::max<int64_t>(options.max_new_tokens, 1) - 1;  // the last token needs no row
  const int step_rows = static_cast<int>(
      std::max<int64_t>(PrefillStepRows(schema.read_step, options.prefill_chunk, rows), options.num_beams));
  LQ_ASSIGN_OR_RETURN(s.cache, KvCache::Open(schema, {.max_sequences = options.num_beams,
                                                      .max_len = max_len,
                                                      .pool_tokens = PoolRows(schema, rows, options, max_len),
                                                      .max_step_rows = step_rows,
                                                      .max_q_heads = config.num_attention_heads,
                                                      .memory_bytes = options.memory_bytes,
                                                      .allow_fallback = options.allow_fallback,
                                                      .threads = pool.threads()}));
  LQ_ASSIGN_OR_RETURN(s.stats.pool_bytes, KvPoolBytes(schema, s.cache->options()));
  s.workspace = model->NewWorkspace(step_rows, options.num_beams);
  s.logits.resize(static_cast<size_t>(options.num_beams * s.vocab));
  s.model = std::move(model);
  LQ_ASSIGN_OR_RETURN(const Receipt open, s.cache->owner().Open());
  s.group = {open.seq};
  s.running.resize(1);
  LQ_RETURN_IF_ERROR(s.Prefill(prompt));
  s.ended = options.max_new_tokens == 0;
  return search;
}

Status BeamSearch::Impl::Prefill(std::span<const int32_t> prompt) {
  const Clock::time_point start = Clock::now();
  const auto rows = static_cast<int64_t>(prompt.size());
  for (int64_t at = 0; at < rows; ++stats.prefill_steps) {
    const int64_t end = NextCut(cache->schema().read_step, options.prefill_chunk, rows, at);
    const SequenceTokens part{.seq = group[0],
                              .tokens = prompt.subspan(static_cast<size_t>(at), static_cast<size_t>(end - at))};
    LQ_RETURN_IF_ERROR(model->Step({&part, 1}, *cache, *workspace, MatrixView<float>(logits.data(), 1, vocab), *pool));
    at = end;
  }
  stats.prefill_seconds = SecondsSince(start);
  stats.most_used_bytes = cache->owner().used_bytes();
  return {};
}

// The `keep` best continuations of all beams, best first.
Result<std::vector<Candidate>> BeamSearch::Impl::Best() const {
  std::vector<Candidate> best;  // a heap whose front is the worst
  best.reserve(keep + 1);
  for (size_t b = 0; b < running.size(); ++b) {
    const std::span<const float> row =
        std::span(logits).subspan(b * static_cast<size_t>(vocab), static_cast<size_t>(vocab));
    float most = -std::numeric_limits<float>::infinity();
    for (size_t i = 0; i < row.size(); ++i) {
      if (!std::isfinite(row[i]))
        return Status(Code::kNonFinite, fmt::format("beam {}: the logit of token {} is {}", b, i, row[i]));
      most = std::max(most, row[i]);
    }
    double sum = 0;
    for (const float x : row) sum += std::exp(double{x} - double{most});
    const double base = running[b].sum - double{most} - std::log(sum);
    for (size_t i = 0; i < row.size(); ++i) {
      const Candidate c{base + double{row[i]}, static_cast<int>(b), static_cast<int32_t>(i)};
      if (best.size() == keep && !Better(c, best.front())) continue;
      best.push_back(c);
      std::push_heap(best.begin(), best.end(), Better);
      if (best.size() <= keep) continue;
      std::pop_heap(best.begin(), best.end(), Better);
      best.pop_back();
    }
  }
  std::sort_heap(best.begin(), best.end(), Better);
  return best;
}

void BeamSearch::Impl::Finish(const Candidate& candidate, int64_t length) {
  BeamHypothesis done;
  done.sum_logprob = candidate.sum;
  done.score = Score(candidate.sum, length);
  const size_t most = static_cast<size_t>(options.num_beams);
  if (finished.size() == most && !(done.score > finished.back().score)) return;
  done.token_ids = running[static_cast<size_t>(candidate.beam)].token_ids;
  if (std::find(options.stop_ids.begin(), options.stop_ids.end(), candidate.token) != options.stop_ids.end())
    done.finish = FinishReason::kEos;
  else
    done.token_ids.push_back(candidate.token);
  const auto behind =
      std::find_if(finished.begin(), finished.end(), [&](const BeamHypothesis& h) { return h.score < done.score; });
  finished.insert(behind, std::move(done));
  if (finished.size() > most) finished.pop_back();
}

// Place i continues as parents[i] was.
Status BeamSearch::Impl::Move(std::span<const int> parents) {
  if (group.size() == 1) {  // behind the prompt all beams are one
    while (group.size() < parents.size()) {
      LQ_ASSIGN_OR_RETURN(const Receipt fork, cache->owner().Fork(group[0]));
      group.push_back(fork.seq);
    }
    return {};
  }
  bool stays = true;
  std::vector<int> taken(parents.size(), 0);
  for (size_t i = 0; i < parents.size(); ++i) {
    stays &= parents[i] == static_cast<int>(i);
    ++taken[static_cast<size_t>(parents[i])];
  }
  if (stays) return {};
  LQ_RETURN_IF_ERROR(cache->owner().Reorder(group, parents).status());
  ++stats.reorders;
  for (const int times : taken) {
    stats.dropped += times == 0;
    stats.duplicated += std::max(0, times - 1);
  }
  return {};
}

// The last token of every beam.
Status BeamSearch::Impl::Forward() {
  std::vector<SequenceTokens> parts;
  for (size_t i = 0; i < running.size(); ++i)
    parts.push_back({.seq = group[i], .tokens = {&running[i].token_ids.back(), 1}});
  LQ_RETURN_IF_ERROR(model->Step(parts, *cache, *workspace,
                                 MatrixView<float>(logits.data(), static_cast<int64_t>(parts.size()), vocab), *pool));
  ++stats.steps;
  return {};
}

Result<bool> BeamSearch::Step() {
  Impl& s = *impl_;
  if (s.ended) return false;
  Result<bool> went = s.Step();
  if (!went.ok()) s.ended = true;
  return went;
}

Result<bool> BeamSearch::Impl::Step() {
  const Clock::time_point start = Clock::now();
  LQ_ASSIGN_OR_RETURN(const std::vector<Candidate> best, Best());
  const int64_t length = static_cast<int64_t>(running[0].token_ids.size()) + 1;
  const size_t beams = static_cast<size_t>(options.num_beams);

  std::vector<int> parents;
  std::vector<Running> next;
  for (size_t i = 0; i < best.size(); ++i) {
    const Candidate& c = best[i];
    if (Ends(c.token, length)) {
      if (i < beams) Finish(c, length);
    } else if (next.size() < beams) {
      parents.push_back(c.beam);
      next.push_back({running[static_cast<size_t>(c.beam)].token_ids, c.sum});
      next.back().token_ids.push_back(c.token);
    }
  }
  if (next.empty() || (finished.size() == beams && !(Score(next[0].sum, length) > finished.back().score))) {
    ended = true;
    return false;
  }
  LQ_CHECK(next.size() == beams);
  LQ_RETURN_IF_ERROR(Move(parents));
  running = std::move(next);
  LQ_RETURN_IF_ERROR(Forward());
  stats.most_used_bytes = std::max(stats.most_used_bytes, cache->owner().used_bytes());
  stats.decode_seconds += SecondsSince(start);
  return true;
}

std::vector<BeamHypothesis> BeamSearch::Hypotheses() const {
  const Impl& s = *impl_;
  std::vector<BeamHypothesis> out = s.finished;
  if (s.ended && !out.empty()) return out;
  for (const Impl::Running& r : s.running) {
    if (out.size() == static_cast<size_t>(s.options.num_beams)) break;
    const auto length = static_cast<int64_t>(r.token_ids.size());
    out.push_back({r.token_ids, s.options.max_new_tokens == 0 ? FinishReason::kLength : FinishReason::kCancelled, r.sum,
                   length == 0 ? 0.0 : s.Score(r.sum, length)});
  }
  // The best first; of equal scores the one that was there first.
  std::vector<BeamHypothesis> sorted;
  for (BeamHypothesis& h : out) {
    const auto better = [](const BeamHypothesis& a, const BeamHypothesis& b) { return a.score > b.score; };
    sorted.insert(std::upper_bound(sorted.begin(), sorted.end(), h, better), std::move(h));
  }
  return sorted;
}

std::vector<BeamSearch::Beam> BeamSearch::beams() const {
  const Impl& s = *impl_;
  std::vector<Beam> out;
  for (size_t i = 0; i < s.running.size(); ++i)
    out.push_back({s.group[i], s.running[i].token_ids, s.running[i].sum,
                   std::span(s.logits).subspan(i * static_cast<size_t>(s.vocab), static_cast<size_t>(s.vocab))});
  return out;
}

}  // namespace livequant
