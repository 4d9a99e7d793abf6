// eval/logits.cc: see logits.h.
#include "eval/logits.h"

#include <fmt/format.h>

#include <algorithm>

#include "model/logits.h"
#include "runtime/session.h"

namespace livequant {
namespace {

Status CheckRequest(const LlamaConfig& c, const CacheSchema& schema, const LogitsRequest& r) {
  const int64_t n = static_cast<int64_t>(r.token_ids.size());
  if (n == 0) return Status(Code::kInvalidArgument, "logits: no token ids");
  if (r.generate < 0)
    return Status(Code::kInvalidArgument, fmt::format("generate is {}; must be 0 or more", r.generate));
  if (r.prefill_chunk < 1)
    return Status(Code::kInvalidArgument, fmt::format("prefill-chunk is {}; must be at least 1", r.prefill_chunk));
  if (n > c.max_position_embeddings || r.generate > c.max_position_embeddings - n)
    return Status(Code::kOutOfRange, fmt::format("{} token ids and {} to generate exceed max_position_embeddings, {}",
                                                 n, r.generate, c.max_position_embeddings));
  for (const int64_t p : r.positions)
    if (p < 0 || p >= n)
      return Status(Code::kOutOfRange, fmt::format("position {} is outside the token ids: 0 to {}", p, n - 1));
  return CheckSchemaFits(schema, c);
}

}  // namespace

Result<LogitsResult> EvalLogits(const Llama& model, const CacheSchema& schema, const LogitsRequest& request,
                                ThreadPool& pool) {
  const LlamaConfig& c = model.config();
  LQ_RETURN_IF_ERROR(CheckRequest(c, schema, request));
  const int64_t n = static_cast<int64_t>(request.token_ids.size()), vocab = c.vocab_size;
  const int step_rows = static_cast<int>(PrefillStepRows(schema.read_step, request.prefill_chunk, n));
  LQ_ASSIGN_OR_RETURN(const auto cache, KvCache::Open(schema, {.max_sequences = 1,
                                                               .max_len = n + request.generate,
                                                               .max_step_rows = step_rows,
                                                               .max_q_heads = c.num_attention_heads,
                                                               .allow_fallback = request.allow_fallback}));
  LQ_ASSIGN_OR_RETURN(const Receipt open, cache->owner().Open());
  const auto workspace = model.NewWorkspace(step_rows, step_rows);
  std::vector<float> logits(static_cast<size_t>(step_rows * vocab));
  const auto row = [&](int64_t r) {
    return std::span<const float>(logits).subspan(static_cast<size_t>(r * vocab), static_cast<size_t>(vocab));
  };

  LogitsResult result;
  std::vector<int64_t> wanted = request.positions;
  if (wanted.empty()) wanted.push_back(n - 1);
  for (const int64_t p : wanted) result.positions.push_back({.position = p, .logits = {}});
  int64_t rows = 0;  // of the last step
  for (int64_t at = 0; at < n; at += rows) {
    rows = NextCut(schema.read_step, request.prefill_chunk, n, at) - at;
    const SequenceTokens part{
        .seq = open.seq,
        .tokens =
            std::span<const int32_t>(request.token_ids).subspan(static_cast<size_t>(at), static_cast<size_t>(rows)),
        .all_logits = true};
    LQ_RETURN_IF_ERROR(model.Step({&part, 1}, *cache, *workspace, MatrixView<float>(logits.data(), rows, vocab), pool));
    for (PositionLogits& p : result.positions)
      if (p.position >= at && p.position < at + rows)
        p.logits.assign(row(p.position - at).begin(), row(p.position - at).end());
  }
  std::span<const float> last = row(rows - 1);
  while (static_cast<int64_t>(result.generated.size()) < request.generate) {
    const int32_t token = MostProbable(last);
    result.generated.push_back(token);
    if (static_cast<int64_t>(result.generated.size()) == request.generate) break;
    const SequenceTokens part{.seq = open.seq, .tokens = {&token, 1}};
    LQ_RETURN_IF_ERROR(model.Step({&part, 1}, *cache, *workspace, MatrixView<float>(logits.data(), 1, vocab), pool));
    last = row(0);
  }
  result.key_spike = cache->TakeKeySpike();
  return result;
}

}  // namespace livequant
