// apps/run.h: what the three ways of `livequant run` share: one prompt (run.cc), a file of prompts (run_batch.cc), a
// conversation (run_chat.cc).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "apps/context.h"
#include "runtime/model_bundle.h"
#include "runtime/sampler.h"
#include "runtime/session.h"

namespace livequant::app {

struct RunFlags {
  std::string model, prompt, prompts, system, dtype = "f16", skip, memory, contract, record;
  bool prompt_given = false, system_given = false;
  int64_t n = 128, max_model_len = 0, prefill_chunk = 512;
  int threads = 0, max_num_seqs = 8;
  SamplingParams sampling;
  bool interactive = false, json = false, ignore_eos = false, allow_fallback = false, print_config = false;
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

// Each returns the exit code, errors printed.
int RunBatchFile(const RunFlags& flags, const RunSetup& setup);
int RunChat(const RunFlags& flags, const RunSetup& setup);

// --record (docs/formats/record.md). kOutOfRange: `rows` rows are more than a record holds; both numbers.
Status CheckRecord(const LlamaConfig& config, int64_t rows);
// Errors: kIo as WriteFile's. REQUIRES a record of a whole run over `cache`, its lease held.
Status WriteRecord(const std::string& path, const LlamaConfig& config, const KvCache& cache,
                   const AttentionRecord& record);

// To standard output, at once. kIo: it cannot be written.
Status WriteOut(std::string_view text);

}  // namespace livequant::app
