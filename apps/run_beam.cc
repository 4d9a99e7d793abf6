// apps/run_beam.cc: livequant run --beams N: the best hypotheses of one prompt, and what they cost.
#include <fmt/format.h>

#include <cstdio>
#include <string>
#include <vector>

#include "apps/console.h"
#include "apps/run.h"
#include "cache/ledger/ledger.h"
#include "io/file.h"
#include "runtime/beam.h"

namespace livequant::app {

int RunBeamSearch(const RunFlags& flags, const RunSetup& setup, const std::string& prompt,
                  std::span<const int32_t> ids) {
  const LlamaConfig& config = setup.bundle.model->config();
  ThreadPool pool(ThreadsOrDefault(flags.threads));
  BeamOptions options{.num_beams = flags.beams,
                      .max_new_tokens = flags.n,
                      .length_penalty = flags.length_penalty,
                      .context = setup.context,
                      .prefill_chunk = flags.prefill_chunk,
                      .memory_bytes = setup.memory_bytes,
                      .allow_fallback = flags.allow_fallback};
  if (!flags.ignore_eos) options.stop_ids = config.eos_token_ids;
  auto opened = BeamSearch::Open(setup.bundle.model, setup.schema, ids, options, pool);
  if (!opened.ok()) return Fail(opened.status(), kExitFailed);
  BeamSearch& search = **opened;
  bool cancelled = false;
  {
    Progress progress("beams");
    for (;;) {
      cancelled = Interrupted().load(std::memory_order_relaxed);
      if (cancelled) break;
      const auto more = search.Step();
      if (!more.ok()) return Fail(more.status(), kExitFailed);
      if (!*more) break;
      progress.Update(search.stats().steps, flags.n);
    }
  }

  const std::vector<BeamHypothesis> found = search.Hypotheses();
  std::vector<std::string> texts;
  for (const BeamHypothesis& h : found) {
    auto text = setup.bundle.tokenizer->Decode(h.token_ids);
    if (!text.ok()) return Fail(text.status(), kExitFailed);
    texts.push_back(*std::move(text));
  }
  const BeamSearch::Stats& stats = search.stats();
  const Owner& owner = search.cache().owner();
  const int64_t rows = owner.length(search.beams()[0].seq);
  const int64_t fallbacks = search.cache().fallback_calls();
  // Pages of as many sequences that share nothing.
  const LedgerBytes alone = Ledger(setup.schema, rows);
  const int64_t unshared = (alone.total() + alone.slack) * static_cast<int64_t>(search.beams().size());
  const double steps_per_s = stats.decode_seconds > 0 ? double(stats.steps) / stats.decode_seconds : 0;
  if (flags.json) {
    ContextInfo info = setup.Info(flags, pool.threads());
    info.data_hash = Sha256Hex(std::as_bytes(std::span(prompt)));
    info.context_length = setup.context;
    info.fallback_calls = fallbacks;
    nlohmann::json hypotheses = nlohmann::json::array();
    for (size_t i = 0; i < found.size(); ++i)
      hypotheses.push_back({{"text", texts[i]},
                            {"token_ids", found[i].token_ids},
                            {"score", found[i].score},
                            {"sum_logprob", found[i].sum_logprob},
                            {"finish_reason", FinishReasonName(found[i].finish)}});
    const nlohmann::json out = {{"hypotheses", hypotheses},
                                {"num_beams", flags.beams},
                                {"length_penalty", flags.length_penalty},
                                {"prompt_tokens", ids.size()},
                                {"steps", stats.steps},
                                {"reorders", stats.reorders},
                                {"beams_duplicated", stats.duplicated},
                                {"beams_dropped", stats.dropped},
                                {"prefill_seconds", stats.prefill_seconds},
                                {"decode_seconds", stats.decode_seconds},
                                {"cache_rows", rows},
                                {"cache_bytes", owner.used_bytes()},
                                {"most_cache_bytes", stats.most_used_bytes},
                                {"unshared_bytes", unshared},
                                {"pool_bytes", stats.pool_bytes},
                                {"peak_rss_bytes", PeakRssBytes()},
                                {"context", ContextJson(info)}};
    if (const Status s = WriteOut(out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n"); !s.ok())
      return Fail(s, kExitFailed);
  } else {
    if (const Status s = WriteOut((found.empty() ? std::string() : texts[0]) + "\n"); !s.ok())
      return Fail(s, kExitFailed);
    std::vector<std::vector<std::string>> table = {{"beam", "score", "sum logprob", "tokens", "finish"}};
    for (size_t i = 0; i < found.size(); ++i)
      table.push_back({std::to_string(i + 1), fmt::format("{:.6f}", found[i].score),
                       fmt::format("{:.4f}", found[i].sum_logprob), std::to_string(found[i].token_ids.size()),
                       FinishReasonName(found[i].finish)});
    fmt::print(
        stderr,
        "\n{}prefill  {} tokens in {:.3f} s\ndecode   {} steps of {} beams in {:.3f} s, {:.0f} steps/s; {} "
        "reorders, {} beams taken twice or more, {} dropped\ncache    {} under {}: {} rows a beam, at most {} in "
        "pages of a pool of {}; {} if nothing were shared\n",
        Table(table), ids.size(), stats.prefill_seconds, stats.steps, flags.beams, stats.decode_seconds, steps_per_s,
        stats.reorders, stats.duplicated, stats.dropped, flags.dtype, ContractName(setup.schema.read_step), rows,
        HumanBytes(static_cast<double>(stats.most_used_bytes)), HumanBytes(static_cast<double>(stats.pool_bytes)),
        HumanBytes(static_cast<double>(unshared)));
    if (fallbacks > 0)
      fmt::print(stderr, "fallback {} attention calls took the reference path (--allow-fallback)\n", fallbacks);
  }
  WarnOfSpike(flags.dtype, search.cache().TakeKeySpike());
  return cancelled ? kExitInterrupted : kExitOk;
}

}  // namespace livequant::app
