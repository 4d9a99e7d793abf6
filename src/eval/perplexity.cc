// eval/perplexity.cc: see perplexity.h. A worker takes one window at a time and runs it chunk by chunk: first the
// baseline, whose logits and probabilities of the chunk are kept, then every format on the same rows. So memory is
// bounded by a chunk, not by a window.
#include "eval/perplexity.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>

#include "eval/scoring.h"
#include "method/method.h"
#include "runtime/session.h"

namespace livequant {
namespace {

using Clock = std::chrono::steady_clock;

// Rows that are run together, and what follows each of them. Rows [first_scored, inputs.size()) are scored.
struct Window {
  std::vector<int32_t> inputs, targets;
  int64_t first_scored = 0;
  int64_t rows() const { return static_cast<int64_t>(inputs.size()); }
};

std::vector<Window> CutWindows(std::span<const int32_t> text, int32_t bos, int64_t context) {
  std::vector<Window> windows;
  const size_t piece = static_cast<size_t>(context - 1);
  for (size_t at = 0; at < text.size(); at += piece) {
    const std::span<const int32_t> part = text.subspan(at, std::min(piece, text.size() - at));
    Window w;
    w.inputs.push_back(bos);
    w.inputs.insert(w.inputs.end(), part.begin(), part.end() - 1);
    w.targets.assign(part.begin(), part.end());
    windows.push_back(std::move(w));
  }
  return windows;
}

// The last row of a chunk predicts a token of the next one and is not run.
std::vector<Window> CutLlamaCpp(std::span<const int32_t> text, int32_t bos, int64_t context) {
  std::vector<int32_t> all = {bos};
  all.insert(all.end(), text.begin(), text.end());
  std::vector<Window> windows;
  const std::ptrdiff_t n = static_cast<std::ptrdiff_t>(context);
  for (auto at = all.begin(); all.end() - at >= n; at += n) {
    Window w;
    w.inputs.assign(at, at + n - 1);
    w.inputs[0] = bos;
    w.targets.assign(at + 1, at + n);
    w.first_scored = context / 2;
    windows.push_back(std::move(w));
  }
  return windows;
}

struct WindowScore {
  ScoreSums sums;
  double seconds = 0;
};

// Everything that the workers share. Workers write only the results of windows that they took.
struct Job {
  Job(const Llama& m, std::span<const EvalFormat> f, const PerplexityOptions& o) : model(m), formats(f), options(o) {}

  const Llama& model;
  std::vector<Window> windows;
  std::span<const EvalFormat> formats;
  CacheSchema baseline;
  std::vector<bool> is_baseline;  // of each format
  const PerplexityOptions& options;
  int64_t max_rows = 0, step_rows = 0;

  std::vector<std::vector<WindowScore>> scores;  // [window][baseline, then formats]
  std::atomic<int64_t> next{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;  // guards what follows
  int64_t done = 0, total = 0;
  int64_t failed_window = -1;
  Status failure;
  std::vector<int64_t> fallbacks;               // of each format
  std::vector<std::optional<KeySpike>> spikes;  // of each format

  void Fail(int64_t window, Status why) {
    const std::lock_guard lock(mutex);
    stop = true;
    if (failed_window < 0 || window < failed_window) {
      failed_window = window;
      failure = std::move(why);
    }
  }
  void Advance() {
    const std::lock_guard lock(mutex);
    ++done;
    if (options.on_progress) options.on_progress(done, total);
  }
};

// One thread: its caches (baseline, then formats), workspace and logits.
class Worker {
 public:
  explicit Worker(Job& job) : job_(job), pool_(1) {}

  void Run() {
    if (Status s = Open(); !s.ok()) return job_.Fail(0, std::move(s));
    while (!job_.stop) {
      const int64_t i = job_.next++;
      if (i >= static_cast<int64_t>(job_.windows.size())) break;
      if (Status s = RunWindow(i); !s.ok()) return job_.Fail(i, std::move(s));
    }
    const std::lock_guard lock(job_.mutex);
    for (size_t f = 0; f < job_.formats.size(); ++f) {
      if (caches_[f + 1] == nullptr) continue;
      job_.fallbacks[f] += caches_[f + 1]->fallback_calls();
      const auto spike = caches_[f + 1]->TakeKeySpike();
      if (spike && (!job_.spikes[f] || spike->Beats(*job_.spikes[f]))) job_.spikes[f] = spike;
    }
  }

 private:
  Status OpenCache(const CacheSchema& schema) {
    LQ_ASSIGN_OR_RETURN(auto cache, KvCache::Open(schema, {.max_sequences = 1,
                                                           .max_len = job_.max_rows,
                                                           .max_step_rows = static_cast<int>(job_.step_rows),
                                                           .max_q_heads = job_.model.config().num_attention_heads,
                                                           .allow_fallback = job_.options.allow_fallback}));
    caches_.push_back(std::move(cache));
    return {};
  }

  Status Open() {
    LQ_RETURN_IF_ERROR(OpenCache(job_.baseline));
    for (size_t f = 0; f < job_.formats.size(); ++f) {
      if (job_.is_baseline[f]) {
        caches_.push_back(nullptr);
      } else {
        LQ_RETURN_IF_ERROR(OpenCache(job_.formats[f].schema));
      }
    }
    workspace_ = job_.model.NewWorkspace(static_cast<int>(job_.step_rows), static_cast<int>(job_.step_rows));
    const size_t values = static_cast<size_t>(job_.step_rows * job_.model.config().vocab_size);
    baseline_logits_.resize(values);
    probabilities_.resize(values);
    logits_.resize(values);
    rows_.resize(static_cast<size_t>(job_.step_rows));
    seqs_.resize(caches_.size());
    return {};
  }

  std::span<float> Row(std::vector<float>& m, int64_t r) const {
    const size_t vocab = static_cast<size_t>(job_.model.config().vocab_size);
    return std::span<float>(m).subspan(static_cast<size_t>(r) * vocab, vocab);
  }

  // Rows [from, to) of the window through one cache; logits of all rows, or of the last one where none is scored.
  Status Forward(const Window& w, size_t cache, int64_t from, int64_t to, std::vector<float>& logits) {
    const bool scored = to > w.first_scored;
    const SequenceTokens part{
        .seq = seqs_[cache],
        .tokens = std::span<const int32_t>(w.inputs).subspan(static_cast<size_t>(from), static_cast<size_t>(to - from)),
        .all_logits = scored};
    const MatrixView<float> out(logits.data(), scored ? to - from : 1, job_.model.config().vocab_size);
    return job_.model.Step({&part, 1}, *caches_[cache], *workspace_, out, pool_);
  }

  Status ScoreBaseline(const Window& w, int64_t from, int64_t to, WindowScore& score) {
    LQ_RETURN_IF_ERROR(Forward(w, 0, from, to, baseline_logits_));
    for (int64_t r = std::max(from, w.first_scored); r < to; ++r) {
      BaselineRow& row = rows_[static_cast<size_t>(r - from)];
      if (!BaselineRow::Prepare(Row(baseline_logits_, r - from), w.targets[static_cast<size_t>(r)],
                                Row(probabilities_, r - from), row))
        return Status(Code::kNonFinite, fmt::format("the logits at row {} are not finite", r));
      score.sums.AddBaselineRow(row);
    }
    return {};
  }

  Status ScoreFormat(const Window& w, size_t cache, int64_t from, int64_t to, WindowScore& score) {
    LQ_RETURN_IF_ERROR(Forward(w, cache, from, to, logits_));
    for (int64_t r = std::max(from, w.first_scored); r < to; ++r)
      if (!score.sums.AddRow(rows_[static_cast<size_t>(r - from)], Row(logits_, r - from),
                             w.targets[static_cast<size_t>(r)]))
        return Status(Code::kNonFinite, fmt::format("the logits at row {} are not finite", r));
    return {};
  }

  Status RunWindow(int64_t index) {
    const Window& w = job_.windows[static_cast<size_t>(index)];
    std::vector<WindowScore>& scores = job_.scores[static_cast<size_t>(index)];
    for (size_t c = 0; c < caches_.size(); ++c)
      if (caches_[c] != nullptr) {
        LQ_ASSIGN_OR_RETURN(const Receipt open, caches_[c]->owner().Open());
        seqs_[c] = open.seq;
      }
    for (int64_t from = 0; from < w.rows();) {
      const int64_t to = NextCut(job_.formats[0].schema.read_step, job_.options.prefill_chunk, w.rows(), from);
      for (size_t c = 0; c < caches_.size(); ++c) {
        if (caches_[c] == nullptr) continue;
        if (job_.stop) return {};
        if (job_.options.cancel != nullptr && job_.options.cancel->load()) return Status(Code::kCancelled, "cancelled");
        const auto start = Clock::now();
        const Status s = c == 0 ? ScoreBaseline(w, from, to, scores[0]) : ScoreFormat(w, c, from, to, scores[c]);
        if (!s.ok())
          return Status(s.code(),
                        fmt::format("{}, window {}: {}", c == 0 ? "the f32 baseline" : job_.formats[c - 1].name, index,
                                    s.message()));
        scores[c].seconds += std::chrono::duration<double>(Clock::now() - start).count();
        if (to == w.rows()) job_.Advance();
      }
      from = to;
    }
    for (size_t c = 0; c < caches_.size(); ++c)
      if (caches_[c] != nullptr) LQ_RETURN_IF_ERROR(caches_[c]->owner().Release(seqs_[c]).status());
    return {};
  }

  Job& job_;
  ThreadPool pool_;
  std::vector<std::unique_ptr<KvCache>> caches_;  // null: the format is the baseline itself
  std::vector<SeqId> seqs_;
  std::unique_ptr<Llama::Workspace> workspace_;
  std::vector<float> baseline_logits_, probabilities_, logits_;  // [step rows][vocab_size]
  std::vector<BaselineRow> rows_;
};

Status CheckCall(const LlamaConfig& c, std::span<const int32_t> tokens, std::span<const EvalFormat> formats,
                 const PerplexityOptions& o) {
  if (tokens.empty()) return Status(Code::kInvalidArgument, "perplexity: no tokens");
  if (formats.empty()) return Status(Code::kInvalidArgument, "perplexity: no cache formats");
  if (c.bos_token_id < 0)
    return Status(Code::kInvalidArgument,
                  "perplexity: config.json has no bos_token_id, which every window begins with");
  if (o.max_tokens < 0)
    return Status(Code::kInvalidArgument, fmt::format("max-tokens is {}; must be 0 (all) or more", o.max_tokens));
  if (o.prefill_chunk < 1)
    return Status(Code::kInvalidArgument, fmt::format("prefill-chunk is {}; must be at least 1", o.prefill_chunk));
  if (o.threads < 1) return Status(Code::kInvalidArgument, fmt::format("threads is {}; must be at least 1", o.threads));
  const int64_t least = o.protocol == PerplexityProtocol::kWindows ? 2 : 4;
  if (o.context < least || o.context > c.max_position_embeddings)
    return Status(Code::kOutOfRange,
                  fmt::format("context is {}; must be from {} to the model's max_position_embeddings, {}", o.context,
                              least, c.max_position_embeddings));
  for (const int32_t id : tokens)
    if (id < 0 || id >= c.vocab_size)
      return Status(Code::kOutOfRange,
                    fmt::format("token id {} is outside the vocabulary: ids are 0 to {}", id, c.vocab_size - 1));
  for (const EvalFormat& f : formats) {
    if (const Status s = CheckSchemaFits(f.schema, c); !s.ok()) return Status(s.code(), f.name + ": " + s.message());
    if (f.schema.read_step != formats[0].schema.read_step)
      return Status(Code::kInvalidArgument,
                    fmt::format("{} reads under {} but {} under {}: one call compares one contract", formats[0].name,
                                ContractName(formats[0].schema.read_step), f.name, ContractName(f.schema.read_step)));
  }
  return {};
}

}  // namespace

const char* ProtocolName(PerplexityProtocol protocol) {
  return protocol == PerplexityProtocol::kWindows ? "windows" : "llama.cpp";
}

Result<PerplexityProtocol> ParseProtocol(const std::string& name) {
  for (const PerplexityProtocol p : {PerplexityProtocol::kWindows, PerplexityProtocol::kLlamaCpp})
    if (name == ProtocolName(p)) return p;
  return Status(Code::kInvalidArgument,
                fmt::format("protocol \"{}\" is unknown; windows and llama.cpp are known", name));
}

Result<PerplexityResult> EvalPerplexity(const Llama& model, std::span<const int32_t> tokens,
                                        std::span<const EvalFormat> formats, const PerplexityOptions& options) {
  const LlamaConfig& c = model.config();
  LQ_RETURN_IF_ERROR(CheckCall(c, tokens, formats, options));
  if (options.max_tokens > 0 && options.max_tokens < static_cast<int64_t>(tokens.size()))
    tokens = tokens.first(static_cast<size_t>(options.max_tokens));
  const auto start = Clock::now();

  Job job(model, formats, options);
  if (options.protocol == PerplexityProtocol::kWindows) {
    job.windows = CutWindows(tokens, c.bos_token_id, options.context);
  } else {
    if (static_cast<int64_t>(tokens.size()) + 1 < 2 * options.context)
      return Status(
          Code::kInvalidArgument,
          fmt::format("perplexity: {} tokens with BOS; the llama.cpp protocol needs at least {} at context {}",
                      tokens.size() + 1, 2 * options.context, options.context));
    job.windows = CutLlamaCpp(tokens, c.bos_token_id, options.context);
  }
  LQ_ASSIGN_OR_RETURN(job.baseline, PresetSchema("f32", c.shape()));
  for (const EvalFormat& f : formats) {
    CacheSchema same = job.baseline;
    same.identity = f.schema.identity;
    job.is_baseline.push_back(Compatible(f.schema, same).ok());
  }
  for (const Window& w : job.windows) job.max_rows = std::max(job.max_rows, w.rows());
  job.step_rows = PrefillStepRows(formats[0].schema.read_step, options.prefill_chunk, job.max_rows);
  job.scores.assign(job.windows.size(), std::vector<WindowScore>(formats.size() + 1));
  job.fallbacks.assign(formats.size(), 0);
  job.spikes.resize(formats.size());
  const int64_t columns = 1 + std::count(job.is_baseline.begin(), job.is_baseline.end(), false);
  job.total = columns * static_cast<int64_t>(job.windows.size());

  const auto work = [&job] { Worker(job).Run(); };
  std::vector<std::thread> threads;
  const size_t workers = std::min(static_cast<size_t>(options.threads), job.windows.size());
  for (size_t t = 1; t < workers; ++t) threads.emplace_back(work);
  work();
  for (std::thread& t : threads) t.join();
  if (job.failed_window >= 0) return job.failure;

  PerplexityResult result;
  std::vector<WindowScore> sums(formats.size() + 1);
  for (const std::vector<WindowScore>& window : job.scores)
    for (size_t i = 0; i < sums.size(); ++i) {
      sums[i].sums.Add(window[i].sums);
      sums[i].seconds += window[i].seconds;
    }
  FormatQuality baseline;
  sums[0].sums.Finish(baseline);
  result.contract = ContractName(formats[0].schema.read_step);
  result.tokens = baseline.tokens;
  result.windows = static_cast<int64_t>(job.windows.size());
  result.baseline_nll = baseline.nll;
  result.baseline_perplexity = baseline.perplexity;
  result.baseline_seconds = sums[0].seconds;
  for (size_t f = 0; f < formats.size(); ++f) {
    const WindowScore& s = sums[job.is_baseline[f] ? 0 : f + 1];
    FormatQuality q;
    s.sums.Finish(q);
    q.format = formats[f].name;
    q.contract = result.contract;
    q.windows = result.windows;
    q.seconds = s.seconds;
    q.fallback_calls = job.fallbacks[f];
    q.key_spike = job.spikes[f];
    q.is_baseline = job.is_baseline[f];
    result.formats.push_back(std::move(q));
  }
  result.wall_seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return result;
}

}  // namespace livequant
