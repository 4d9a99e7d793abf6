// runtime/session.cc: see session.h.
#include "runtime/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "base/seconds.h"

namespace livequant {
namespace {

constexpr int kMaxDraftTokens = 1024;

}  // namespace

int64_t PrefillStepRows(int read_step, int64_t prefill_chunk, int64_t prompt_rows) {
  LQ_CHECK(read_step >= 1 && prefill_chunk >= 1 && prompt_rows >= 1);
  if (read_step == kStepwise) return std::min(prefill_chunk, prompt_rows);
  if (read_step >= prompt_rows) return prompt_rows;  // `prompt`, or a chunk that holds it all
  return std::min(std::max<int64_t>(prefill_chunk / read_step * read_step, read_step), prompt_rows);
}

int64_t NextCut(int read_step, int64_t prefill_chunk, int64_t prompt_rows, int64_t at) {
  return std::min(prompt_rows, at + PrefillStepRows(read_step, prefill_chunk, prompt_rows));
}

const char* FinishReasonName(FinishReason reason) {
  switch (reason) {
    case FinishReason::kEos:
      return "eos";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
      return "cancelled";
  }
  return "?";
}

Status CheckSchemaFits(const CacheSchema& schema, const LlamaConfig& config) {
  const auto differ = [](const std::string& field, auto here, auto model) {
    return Status(Code::kInvalidArgument, fmt::format("cache schema: {} is {}; the model's is {}", field, here, model));
  };
  if (static_cast<int>(schema.layers.size()) != config.num_hidden_layers)
    return differ("layers", schema.layers.size(), config.num_hidden_layers);
  const CacheShape shape = config.shape();
  for (size_t l = 0; l < schema.layers.size(); ++l) {
    const LayerSchema& layer = schema.layers[l];
    if (layer.num_kv_heads != config.num_key_value_heads)
      return differ(fmt::format("layer {} num_kv_heads", l), layer.num_kv_heads, config.num_key_value_heads);
    if (layer.head_dim != config.head_dim)
      return differ(fmt::format("layer {} head_dim", l), layer.head_dim, config.head_dim);
    const int window = shape.window(static_cast<int>(l));
    if (window != 0 && (layer.window == 0 || layer.window > window))
      return differ(fmt::format("layer {} window", l), layer.window, window);
  }
  // Rotary fields one by one, under the names that schemas are compared by.
  CacheSchema here, model;
  here.rope = schema.rope;
  model.rope = config.rope;
  for (RopeConfig* rope : {&here.rope, &model.rope})
    if (rope->dims == 0) rope->dims = config.head_dim;
  const std::vector<SchemaField> a = SchemaFields(here), b = SchemaFields(model);
  for (size_t i = 0; i < a.size(); ++i)
    if (a[i].value != b[i].value) return differ(a[i].name, a[i].value, b[i].value);
  return {};
}

Status CheckRequest(std::span<const int32_t> prompt, int64_t max_new_tokens, const SamplingParams& sampling,
                    int64_t vocab_size, int64_t context) {
  const int64_t rows = static_cast<int64_t>(prompt.size());
  if (rows == 0) return Status(Code::kInvalidArgument, "the prompt is empty: at least one token is needed");
  if (max_new_tokens < 0)
    return Status(Code::kInvalidArgument,
                  fmt::format("{} new tokens were asked for; must be 0 or more", max_new_tokens));
  if (rows > context || max_new_tokens > context - rows)
    return Status(Code::kOutOfRange, fmt::format("{} prompt tokens and {} new ones exceed the context of {}", rows,
                                                 max_new_tokens, context));
  for (const int32_t id : prompt)
    if (id < 0 || id >= vocab_size)
      return Status(Code::kOutOfRange,
                    fmt::format("token id {} is outside the vocabulary: ids are 0 to {}", id, vocab_size - 1));
  return ValidateSampling(sampling);
}

struct Session::Impl {
  std::shared_ptr<const Llama> model;
  SessionOptions options;
  ThreadPool* pool;
  std::unique_ptr<KvCache> cache;
  std::unique_ptr<Llama::Workspace> workspace;
  std::vector<float> logits;  // [1 + max_draft_tokens][vocab]: of the last row, or of each row that a step verifies
  int64_t pool_bytes = 0;
  std::optional<SeqId> kept;     // Continue's sequence
  std::vector<int32_t> text;     // of in_rows and what a step verifies
  std::vector<int32_t> in_rows;  // the token of each row of the sequence that runs, or is kept

  Status Forward(SeqId seq, std::span<const int32_t> tokens, AttentionRecord* record) {
    const SequenceTokens part{.seq = seq, .tokens = tokens};
    const MatrixView<float> row(logits.data(), 1, model->config().vocab_size);
    if (record == nullptr) {
      LQ_RETURN_IF_ERROR(model->Step({&part, 1}, *cache, *workspace, row, *pool));
    } else {
      LQ_RETURN_IF_ERROR(RecordStep(part, row, *record));
    }
    in_rows.insert(in_rows.end(), tokens.begin(), tokens.end());
    return {};
  }
  Status RecordStep(const SequenceTokens& part, MatrixView<float> row, AttentionRecord& record);
  std::span<const float> Logits(int64_t row) const {
    const auto vocab = static_cast<size_t>(model->config().vocab_size);
    return std::span(logits).subspan(static_cast<size_t>(row) * vocab, vocab);
  }
  Status Check(std::span<const int32_t> prompt, const GenerateParams& params) const {
    if (params.drafter != nullptr && options.max_draft_tokens == 0)
      return Status(Code::kInvalidArgument, "a drafter was given; the session was opened for max_draft_tokens 0");
    if (params.drafter != nullptr && params.record != nullptr)
      return Status(Code::kInvalidArgument, "a record is of a run whose every row was published: not of drafts");
    if (params.drafter != nullptr && cache->schema().read_step != kStepwise)
      return Status(Code::kUnsupported,
                    fmt::format("drafts are verified under the contract stepwise only: under {} rows of one step are "
                                "read otherwise than rows of several",
                                ContractName(cache->schema().read_step)));
    return CheckRequest(prompt, params.max_new_tokens, params.sampling, model->config().vocab_size, options.max_len);
  }
  template <class Take>
  Result<bool> Verify(SeqId seq, const GenerateParams& params, int32_t* token, const Take& take, Generation& out);
  Status Run(SeqId seq, std::span<const int32_t> prompt, const GenerateParams& params, Generation& out);
  // Run, and what the sequence held at its end.
  Status Account(SeqId seq, std::span<const int32_t> prompt, const GenerateParams& params, Generation& out);
  int64_t RowsToKeep(int64_t common) const;
  Status DropKept();
  Status CutKept(int64_t rows);
};

Session::Session() : impl_(std::make_unique<Impl>()) {}
Session::~Session() = default;
KvCache& Session::cache() { return *impl_->cache; }
int64_t Session::max_len() const { return impl_->options.max_len; }
int64_t Session::pool_bytes() const { return impl_->pool_bytes; }
std::span<const int32_t> Session::kept_tokens() const { return impl_->in_rows; }

Result<std::unique_ptr<Session>> Session::Open(std::shared_ptr<const Llama> model, const CacheSchema& schema,
                                               const SessionOptions& options, ThreadPool& pool) {
  LQ_CHECK(model != nullptr);
  const LlamaConfig& c = model->config();
  SessionOptions o = options;
  if (o.max_len < 0)
    return Status(Code::kInvalidArgument, fmt::format("max_len is {}; must be 0 (the model's) or more", o.max_len));
  if (o.prefill_chunk < 1)
    return Status(Code::kInvalidArgument, fmt::format("prefill_chunk is {}; must be at least 1", o.prefill_chunk));
  if (o.max_draft_tokens < 0 || o.max_draft_tokens > kMaxDraftTokens)
    return Status(Code::kInvalidArgument,
                  fmt::format("max_draft_tokens is {}; must be 0 to {}", o.max_draft_tokens, kMaxDraftTokens));
  if (o.memory_bytes < 0)
    return Status(Code::kInvalidArgument,
                  fmt::format("cache memory is {} bytes; must be 0 (no budget) or more", o.memory_bytes));
  if (o.max_len == 0) o.max_len = c.max_position_embeddings;
  if (o.max_len > c.max_position_embeddings)
    return Status(Code::kOutOfRange, fmt::format("max_len is {}; the model's max_position_embeddings is {}", o.max_len,
                                                 c.max_position_embeddings));
  LQ_RETURN_IF_ERROR(CheckSchemaFits(schema, c));

  std::unique_ptr<Session> s(new Session());
  // A step never holds more rows than the sequence.
  const int verified = static_cast<int>(std::min<int64_t>(1 + o.max_draft_tokens, o.max_len));
  const int step_rows =
      std::max(verified, static_cast<int>(PrefillStepRows(schema.read_step, o.prefill_chunk, o.max_len)));
  LQ_ASSIGN_OR_RETURN(s->impl_->cache, KvCache::Open(schema, {.max_sequences = 1,
                                                              .max_len = o.max_len,
                                                              .max_step_rows = step_rows,
                                                              .max_q_heads = c.num_attention_heads,
                                                              .memory_bytes = o.memory_bytes,
                                                              .allow_fallback = o.allow_fallback}));
  const Owner& owner = s->impl_->cache->owner();
  for (int cls = 0; cls < static_cast<int>(owner.classes().size()); ++cls)
    for (const TensorIndex tensor : {kK, kV})
      for (const FormIndex form : {kCoded, kExact}) {
        const PagePool& p = owner.pool(cls, tensor, form);
        s->impl_->pool_bytes += p.capacity() * p.page_bytes();
      }
  s->impl_->workspace = model->NewWorkspace(step_rows, verified);
  s->impl_->logits.resize(static_cast<size_t>(verified * c.vocab_size));
  s->impl_->model = std::move(model);
  s->impl_->options = o;
  s->impl_->pool = &pool;
  return s;
}

int64_t AttentionRecord::BytesFor(const LlamaConfig& c, int64_t rows) {
  const int64_t heads = 2 * (int64_t{c.num_key_value_heads} + c.num_attention_heads);
  return rows * c.num_hidden_layers * heads * c.head_dim * static_cast<int64_t>(sizeof(float));
}

// A published step whose attention is appended to the record.
Status Session::Impl::RecordStep(const SequenceTokens& part, MatrixView<float> row, AttentionRecord& record) {
  const LlamaConfig& c = model->config();
  const int64_t rows = static_cast<int64_t>(part.tokens.size()), layers = c.num_hidden_layers;
  const int64_t kv = int64_t{c.num_key_value_heads} * c.head_dim, q = int64_t{c.num_attention_heads} * c.head_dim;
  std::vector<float> step[4];
  AttentionTaps taps;
  std::vector<std::vector<float>>* const kept[4] = {&record.k, &record.v, &record.q, &record.out};
  MatrixView<float>* const views[4] = {&taps.k, &taps.v, &taps.q, &taps.out};
  for (int i = 0; i < 4; ++i) {
    const int64_t cols = i < 2 ? kv : q;
    step[i].resize(static_cast<size_t>(layers * rows * cols));
    *views[i] = {step[i].data(), layers * rows, cols};
    kept[i]->resize(static_cast<size_t>(layers));
  }
  LQ_ASSIGN_OR_RETURN(KvStep forward, model->Forward({&part, 1}, *cache, *workspace, row, *pool, {}, &taps));
  LQ_RETURN_IF_ERROR(forward.Publish().status());
  for (int i = 0; i < 4; ++i)
    for (int64_t l = 0; l < layers; ++l) {
      const float* from = views[i]->row(l * rows);
      std::vector<float>& to = (*kept[i])[static_cast<size_t>(l)];
      to.insert(to.end(), from, from + rows * views[i]->cols);
    }
  record.steps.push_back(rows);
  return {};
}

Status Session::Impl::Run(SeqId seq, std::span<const int32_t> prompt, const GenerateParams& params, Generation& out) {
  const int64_t rows = static_cast<int64_t>(prompt.size());
  const auto cancelled = [&] { return params.cancel != nullptr && params.cancel->load(std::memory_order_relaxed); };
  const std::vector<int32_t>& eos = model->config().eos_token_ids;
  Sampler sampler(params.sampling, model->config().vocab_size);

  auto start = std::chrono::steady_clock::now();
  for (int64_t at = out.reused_rows; at < rows;) {
    if (cancelled()) {
      out.finish = FinishReason::kCancelled;
      return {};
    }
    const int64_t end = NextCut(cache->schema().read_step, options.prefill_chunk, rows, at);
    LQ_RETURN_IF_ERROR(
        Forward(seq, prompt.subspan(static_cast<size_t>(at), static_cast<size_t>(end - at)), params.record));
    ++out.prefill_steps;
    out.prompt_tokens = at = end;
    out.prefill_seconds = SecondsSince(start);
    if (params.on_prefill) params.on_prefill(at, rows);
  }
  start = std::chrono::steady_clock::now();
  // Takes the next token from a row of logits; false: the answer ends with it, or before it.
  const auto take = [&](std::span<const float> row, int32_t* token) -> Result<bool> {
    LQ_ASSIGN_OR_RETURN(*token, sampler.Next(row));
    if (!params.ignore_eos && std::find(eos.begin(), eos.end(), *token) != eos.end()) {
      out.finish = FinishReason::kEos;
      return false;
    }
    out.token_ids.push_back(*token);
    if (params.on_token) params.on_token(*token);
    return static_cast<int64_t>(out.token_ids.size()) < params.max_new_tokens;
  };
  if (params.max_new_tokens == 0) return {};
  int32_t token = 0;
  LQ_ASSIGN_OR_RETURN(bool more, take(Logits(0), &token));
  while (more) {
    if (cancelled()) {
      out.finish = FinishReason::kCancelled;
      break;
    }
    if (params.drafter == nullptr) {
      LQ_RETURN_IF_ERROR(Forward(seq, {&token, 1}, params.record));
      LQ_ASSIGN_OR_RETURN(more, take(Logits(0), &token));
    } else {
      LQ_ASSIGN_OR_RETURN(more, Verify(seq, params, &token, take, out));
    }
    ++out.decode_steps;
    out.decode_seconds = SecondsSince(start);
  }
  return {};
}

// One step over the token that waits and a draft behind it. The model's own tokens are taken row by row while they are
// what the draft says; the rows up to there are published, the others never happened. The token behind them has no row
// yet: it waits for its own forward, whether the draft had it or not.
template <class Take>
Result<bool> Session::Impl::Verify(SeqId seq, const GenerateParams& params, int32_t* token, const Take& take,
                                   Generation& out) {
  const int64_t left = params.max_new_tokens - static_cast<int64_t>(out.token_ids.size());  // >= 1
  text.assign(in_rows.begin(), in_rows.end());
  text.push_back(*token);
  // The last token of the answer needs no row, so at most left - 1 guesses are of use.
  const int most = static_cast<int>(std::min<int64_t>(options.max_draft_tokens, left - 1));
  std::span<const int32_t> guess;
  if (most > 0) {
    LQ_ASSIGN_OR_RETURN(guess, params.drafter->Draft(text, most));
    LQ_CHECK(static_cast<int>(guess.size()) <= most);
  }
  // A guess that is no token ends the draft.
  const int64_t vocab = model->config().vocab_size;
  const auto bad = std::find_if(guess.begin(), guess.end(), [&](int32_t id) { return id < 0 || id >= vocab; });
  guess = guess.first(static_cast<size_t>(bad - guess.begin()));

  const size_t first = text.size() - 1;
  text.insert(text.end(), guess.begin(), guess.end());
  const SequenceTokens part{
      .seq = seq, .tokens = std::span(text).subspan(first), .all_logits = true, .mode = Mode::kPrefix};
  const auto rows = static_cast<int64_t>(part.tokens.size());
  LQ_ASSIGN_OR_RETURN(KvStep step, model->Forward({&part, 1}, *cache, *workspace,
                                                  MatrixView<float>(logits.data(), rows, vocab), *pool));
  int taken = 1;  // rows of which the model is sure
  bool more = true;
  for (;; ++taken) {
    LQ_ASSIGN_OR_RETURN(more, take(Logits(taken - 1), token));
    if (!more || taken == step.count(0) || *token != part.tokens[static_cast<size_t>(taken)]) break;
  }
  LQ_RETURN_IF_ERROR(step.Publish(std::span(&taken, 1)).status());
  in_rows.insert(in_rows.end(), part.tokens.begin(), part.tokens.begin() + taken);
  out.drafted_tokens += step.count(0) - 1;
  out.accepted_tokens += taken - 1;
  out.accepted_steps.resize(std::max(out.accepted_steps.size(), static_cast<size_t>(taken)));
  ++out.accepted_steps[static_cast<size_t>(taken) - 1];
  return more;
}

Status Session::Impl::Account(SeqId seq, std::span<const int32_t> prompt, const GenerateParams& params,
                              Generation& out) {
  const int64_t fallbacks = cache->fallback_calls();
  (void)cache->TakeKeySpike();  // what another request left
  const Status ran = Run(seq, prompt, params, out);
  out.cache_rows = cache->owner().length(seq);
  out.pending_tokens = out.prompt_tokens + static_cast<int64_t>(out.token_ids.size()) - out.cache_rows;
  out.cache_used_bytes = cache->owner().used_bytes();
  out.fallback_calls = cache->fallback_calls() - fallbacks;
  out.key_spike = cache->TakeKeySpike();
  return ran;
}

Status Session::Impl::DropKept() {
  in_rows.clear();
  if (!kept.has_value()) return {};
  const SeqId seq = *kept;
  kept.reset();
  return cache->owner().Release(seq).status();
}

// The most rows t <= common with min(frontier(now), t) == frontier(t) in every layer: Truncate(t) leaves the left side
// coded, a fresh run of t rows the right side.
int64_t Session::Impl::RowsToKeep(int64_t common) const {
  const int64_t now = static_cast<int64_t>(in_rows.size());
  const auto as_fresh = [&](int64_t t) {
    for (const LayerSchema& layer : cache->schema().layers)
      for (const Closure& c : {layer.k_closure, layer.v_closure})
        if (std::min(c.frontier(now), t) != c.frontier(t)) return false;
    return true;
  };
  int64_t t = common;
  while (t > 0 && !as_fresh(t)) --t;
  return t;
}

// Leaves the first `rows` rows in the kept sequence, or none where a window has dropped rows that the next one sees.
Status Session::Impl::CutKept(int64_t rows) {
  if (rows == 0) return DropKept();
  if (rows == static_cast<int64_t>(in_rows.size())) return {};
  const Status cut = cache->owner().Truncate(*kept, rows).status();
  if (cut.code() == Code::kOutOfRange) return DropKept();
  LQ_RETURN_IF_ERROR(cut);
  in_rows.resize(static_cast<size_t>(rows));
  return {};
}

Result<Generation> Session::Generate(std::span<const int32_t> prompt, const GenerateParams& params) {
  LQ_RETURN_IF_ERROR(impl_->Check(prompt, params));
  LQ_RETURN_IF_ERROR(impl_->DropKept());
  Generation out;
  LQ_ASSIGN_OR_RETURN(const Receipt open, impl_->cache->owner().Open());
  const Status ran = impl_->Account(open.seq, prompt, params, out);
  if (ran.ok() && params.record != nullptr) {
    LQ_ASSIGN_OR_RETURN(params.record->lease, impl_->cache->owner().Acquire(open.seq));
  }
  impl_->in_rows.clear();
  LQ_RETURN_IF_ERROR(impl_->cache->owner().Release(open.seq).status());
  LQ_RETURN_IF_ERROR(ran);
  return out;
}

Result<Generation> Session::Continue(std::span<const int32_t> prompt, const GenerateParams& params) {
  Impl& s = *impl_;
  LQ_CHECK(params.record == nullptr);
  LQ_RETURN_IF_ERROR(s.Check(prompt, params));
  if (s.cache->schema().read_step != kStepwise)
    return Status(Code::kUnsupported, fmt::format("a sequence is kept between requests under the contract stepwise "
                                                  "only: under {} a kept answer would be read otherwise than a prompt",
                                                  ContractName(s.cache->schema().read_step)));
  const auto differ = std::mismatch(prompt.begin(), prompt.end(), s.in_rows.begin(), s.in_rows.end()).first;
  // The last row is always run: its logits are the first new token's.
  const int64_t common = std::min<int64_t>(differ - prompt.begin(), static_cast<int64_t>(prompt.size()) - 1);
  LQ_RETURN_IF_ERROR(s.CutKept(s.RowsToKeep(common)));
  if (!s.kept.has_value()) {
    LQ_ASSIGN_OR_RETURN(const Receipt open, s.cache->owner().Open());
    s.kept = open.seq;
  }
  Generation out;
  out.prompt_tokens = out.reused_rows = static_cast<int64_t>(s.in_rows.size());
  LQ_RETURN_IF_ERROR(s.Account(*s.kept, prompt, params, out));
  return out;
}

}  // namespace livequant
