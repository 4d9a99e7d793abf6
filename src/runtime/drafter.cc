// runtime/drafter.cc: see drafter.h.
#include "runtime/drafter.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "runtime/session.h"

namespace livequant {

NgramDrafter::NgramDrafter(int min, int max) : min_(min), max_(max) { LQ_CHECK(1 <= min && min <= max); }

Result<std::span<const int32_t>> NgramDrafter::Draft(std::span<const int32_t> tokens, int most) {
  guess_.clear();
  const int64_t n = static_cast<int64_t>(tokens.size());
  // The end of the earlier place whose tokens agree with the last ones the furthest back; of equals the latest.
  int64_t found = -1, longest = min_ - 1;
  for (int64_t end = n - 1; end >= 1 && longest < max_; --end) {
    int64_t same = 0;
    while (same < max_ && same < end &&
           tokens[static_cast<size_t>(end - 1 - same)] == tokens[static_cast<size_t>(n - 1 - same)])
      ++same;
    if (same > longest) {
      longest = same;
      found = end;
    }
  }
  if (found < 0) return std::span<const int32_t>();
  // Past the end of the text the guess goes on behind itself: a period is continued.
  for (int i = 0; i < most; ++i) {
    const int64_t at = found + i;
    guess_.push_back(at < n ? tokens[static_cast<size_t>(at)] : guess_[static_cast<size_t>(at - n)]);
  }
  return std::span<const int32_t>(guess_);
}

// `chain` holds one sequence a length: chain[0] has the rows that all others go on from, chain[i] one row more than
// chain[i - 1]. tokens_[r] is the token of row r of the longest.
struct ModelDrafter::Impl {
  std::shared_ptr<const Llama> model;
  Options options;
  ThreadPool* pool = nullptr;
  std::unique_ptr<KvCache> cache;
  std::unique_ptr<Llama::Workspace> workspace;
  std::vector<float> logits;
  std::vector<SeqId> chain;
  std::vector<int32_t> in_rows;  // of chain.back()
  std::vector<int32_t> guess;
  int64_t forwards = 0;

  // Rows of the longest sequence of the chain whose rows are all of `tokens`; longer ones go.
  Status Keep(std::span<const int32_t> tokens) {
    const int64_t most = static_cast<int64_t>(tokens.size()) - 1;  // the last one is run: its logits are needed
    const auto same =
        std::mismatch(in_rows.begin(), in_rows.end(), tokens.begin(), tokens.end()).first - in_rows.begin();
    while (!chain.empty() && cache->owner().length(chain.back()) > std::min<int64_t>(same, most)) {
      LQ_RETURN_IF_ERROR(cache->owner().Release(chain.back()).status());
      chain.pop_back();
    }
    if (chain.empty()) {
      LQ_ASSIGN_OR_RETURN(const Receipt open, cache->owner().Open());
      chain.push_back(open.seq);
    }
    in_rows.resize(static_cast<size_t>(cache->owner().length(chain.back())));
    // The others are behind it for good.
    for (; chain.size() > 1; chain.erase(chain.begin())) LQ_RETURN_IF_ERROR(cache->owner().Release(chain[0]).status());
    return {};
  }
  Status Forward(SeqId seq, std::span<const int32_t> tokens) {
    const SequenceTokens part{.seq = seq, .tokens = tokens};
    LQ_RETURN_IF_ERROR(model->Step({&part, 1}, *cache, *workspace,
                                   MatrixView<float>(logits.data(), 1, static_cast<int64_t>(logits.size())), *pool));
    in_rows.insert(in_rows.end(), tokens.begin(), tokens.end());
    ++forwards;
    return {};
  }
};

ModelDrafter::ModelDrafter() : impl_(std::make_unique<Impl>()) {}
ModelDrafter::~ModelDrafter() = default;
KvCache& ModelDrafter::cache() { return *impl_->cache; }
int64_t ModelDrafter::forwards() const { return impl_->forwards; }

Result<std::unique_ptr<ModelDrafter>> ModelDrafter::Open(std::shared_ptr<const Llama> model, const CacheSchema& schema,
                                                         const Options& options, ThreadPool& pool) {
  LQ_CHECK(model != nullptr);
  const LlamaConfig& c = model->config();
  Options o = options;
  if (o.context == 0) o.context = c.max_position_embeddings;
  if (o.max_tokens < 1 || o.prefill_chunk < 1)
    return Status(Code::kInvalidArgument,
                  fmt::format("a draft of {} tokens, prefilled in chunks of {}; both must be at "
                              "least 1",
                              o.max_tokens, o.prefill_chunk));
  if (o.context < 1 || o.context > c.max_position_embeddings)
    return Status(Code::kOutOfRange,
                  fmt::format("the draft model holds {} rows (max_position_embeddings); the request may have {}",
                              c.max_position_embeddings, o.context));
  LQ_RETURN_IF_ERROR(CheckSchemaFits(schema, c));
  std::unique_ptr<ModelDrafter> drafter(new ModelDrafter);
  Impl& s = *drafter->impl_;
  const int step_rows = static_cast<int>(std::min(o.prefill_chunk, o.context));
  // One history, and for each sequence of the chain three pages: one shared in part and copied, one that a step adds,
  // one that is part filled.
  int64_t page = 1;
  for (const LayerSchema& layer : schema.layers)
    page = std::max<int64_t>({page, layer.coded_page_rows, layer.exact_page_rows});
  const int64_t rows = std::min(o.max_tokens * o.context, o.context + o.max_tokens * 3 * page);
  LQ_ASSIGN_OR_RETURN(s.cache, KvCache::Open(schema, {.max_sequences = o.max_tokens,
                                                      .max_len = o.context,
                                                      .pool_tokens = rows,
                                                      .max_step_rows = step_rows,
                                                      .max_q_heads = c.num_attention_heads,
                                                      .allow_fallback = o.allow_fallback,
                                                      .threads = pool.threads()}));
  s.workspace = model->NewWorkspace(step_rows, 1);
  s.logits.resize(static_cast<size_t>(c.vocab_size));
  s.model = std::move(model);
  s.options = o;
  s.pool = &pool;
  return drafter;
}

Result<std::span<const int32_t>> ModelDrafter::Draft(std::span<const int32_t> tokens, int most) {
  Impl& s = *impl_;
  LQ_CHECK(!tokens.empty());
  s.guess.clear();
  const int64_t room = s.options.context - static_cast<int64_t>(tokens.size());
  most = static_cast<int>(std::min<int64_t>({most, s.options.max_tokens, room}));
  if (most < 1) return std::span<const int32_t>();
  LQ_RETURN_IF_ERROR(s.Keep(tokens));
  for (size_t at = s.in_rows.size(); at < tokens.size();) {
    const size_t rows = std::min(tokens.size() - at, static_cast<size_t>(s.options.prefill_chunk));
    LQ_RETURN_IF_ERROR(s.Forward(s.chain.back(), tokens.subspan(at, rows)));
    at += rows;
  }
  for (;;) {
    // Whatever the logits are, this is only a guess.
    const auto best = std::max_element(s.logits.begin(), s.logits.end());
    s.guess.push_back(static_cast<int32_t>(best - s.logits.begin()));
    if (static_cast<int>(s.guess.size()) == most) break;
    LQ_ASSIGN_OR_RETURN(const Receipt fork, s.cache->owner().Fork(s.chain.back()));
    s.chain.push_back(fork.seq);
    LQ_RETURN_IF_ERROR(s.Forward(fork.seq, {&s.guess.back(), 1}));
  }
  return std::span<const int32_t>(s.guess);
}

}  // namespace livequant
