// apps/run.h: what the ways of `livequant run` share: one prompt (run.cc), the same by beam search (run_beam.cc), a
// file of prompts (run_batch.cc), a conversation (run_chat.cc).
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "apps/context.h"
#include "runtime/drafter.h"
#include "runtime/model_bundle.h"
#include "runtime/sampler.h"
#include "runtime/session.h"

namespace livequant::app {

struct RunFlags {
  std::string model, prompt, prompts, system, dtype = "f16", skip, memory, contract, speculate, draft_dtype, record;
  bool prompt_given = false, system_given = false;
  int64_t n = 128, max_model_len = 0, prefill_chunk = 512;
  int threads = 0, max_num_seqs = 8, beams = 0;
  double length_penalty = 1.0;
  int64_t speculative_tokens = 5;
  int prompt_lookup_min = 2, prompt_lookup_max = 4;
  SamplingParams sampling;
  bool interactive = false, json = false, ignore_eos = false, allow_fallback = false, print_config = false;

  int DraftTokens() const { return speculate.empty() ? 0 : static_cast<int>(speculative_tokens); }
};

// The model, the cache's schema and the flags that are texts, read.
struct RunSetup {
  ModelBundle bundle;
  CacheSchema schema;
  int64_t memory_bytes = 0;
  int64_t context = 0;  // rows of the longest request: --max-model-len, else the model's

  // Fields of the `context` object that every way fills alike. `threads` as the pool has them.
  ContextInfo Info(const RunFlags& flags, int threads) const;
};

// What --speculate asks for; no drafter without the flag.
struct Speculation {
  std::unique_ptr<Drafter> drafter;
  ModelDrafter* model = nullptr;  // the drafter, if it is one
  std::string method, dtype, model_digest;

  nlohmann::json Json(const RunFlags& flags, const Generation& g) const;  // null without a drafter
  void Print(const RunFlags& flags, const Generation& g) const;           // a line on stderr
};
// For requests of up to `context` rows. kUnsupported: a contract other than stepwise. kInvalidArgument: a draft model
// with another tokenizer, lookup lengths in the wrong order. Else as ModelBundle::Load, Schema and ModelDrafter::Open.
Result<Speculation> OpenSpeculation(const RunFlags& flags, const RunSetup& setup, int64_t context, ThreadPool& pool);

// Each returns the exit code, errors printed.
int RunBatchFile(const RunFlags& flags, const RunSetup& setup);
int RunChat(const RunFlags& flags, const RunSetup& setup);
// `ids` are the tokens of `prompt`.
int RunBeamSearch(const RunFlags& flags, const RunSetup& setup, const std::string& prompt,
                  std::span<const int32_t> ids);

// --record (docs/formats/record.md). kOutOfRange: `rows` rows are more than a record holds; both numbers.
Status CheckRecord(const LlamaConfig& config, int64_t rows);
// Errors: kIo as WriteFile's. REQUIRES a record of a whole run over `cache`, its lease held.
Status WriteRecord(const std::string& path, const LlamaConfig& config, const KvCache& cache,
                   const AttentionRecord& record);

// To standard output, at once. kIo: it cannot be written.
Status WriteOut(std::string_view text);

}  // namespace livequant::app
