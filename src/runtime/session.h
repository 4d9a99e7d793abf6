// runtime/session.h: one request at a time over a cache of its own: prefill in chunks, decode, stop.
//
// How the prompt is cut is scheduling (under `stepwise` it changes no bit), except where the schema's contract says
// otherwise: under chunk:C every cut lies at a multiple of C, under `prompt` the whole prompt is one step. NextCut
// below is that rule, for eval too.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "kv/kv_cache.h"
#include "model/llama.h"
#include "runtime/drafter.h"
#include "runtime/sampler.h"
#include "schema/schema.h"

namespace livequant {

// The largest step that prefill takes: `prefill_chunk` under stepwise; the largest multiple of C within it, but at
// least C, under chunk:C; `prompt_rows` under prompt; never more than prompt_rows. REQUIRES prefill_chunk, prompt_rows
// >= 1.
int64_t PrefillStepRows(int read_step, int64_t prefill_chunk, int64_t prompt_rows);
// The end of the prefill step that starts at row `at` of `prompt_rows`.
int64_t NextCut(int read_step, int64_t prefill_chunk, int64_t prompt_rows, int64_t at);

struct SessionOptions {
  int64_t max_len = 0;  // rows that the cache is made for; 0 = the model's max_position_embeddings
  int64_t prefill_chunk = 512;
  int64_t memory_bytes =
      0;  // a budget for the pool; 0 = none. Too small is an error with both numbers, never a shorter context
  bool allow_fallback = false;
  int max_draft_tokens = 0;  // that one step verifies, at most; 0: GenerateParams::drafter must be null
};

// What went into and came out of the attention of a run, and its cache at the end: what another runtime needs to do the
// same. Layer l: [rows][heads * head_dim], rows in order of position; keys and values as they were handed to the cache.
struct AttentionRecord {
  std::vector<int64_t> steps;                                        // rows of each step; their sum is `rows`
  std::vector<std::vector<float>> k, v, q, out;                      // by layer
  Owner::Lease lease;                                                // of the rows; must end before the session does
  static int64_t BytesFor(const LlamaConfig& config, int64_t rows);  // of the four
};

struct GenerateParams {
  int64_t max_new_tokens = 128;  // >= 0; prompt + max_new_tokens beyond max_len is kOutOfRange with both numbers
  SamplingParams sampling = {};
  bool ignore_eos = false;
  // Guesses that steps verify, several rows at once: only those that the model would have said itself are published, so
  // tokens and cache are those of a run without, bit for bit. Outlives the call. kUnsupported under a contract other
  // than stepwise, where rows of one step are read otherwise than rows of several.
  Drafter* drafter = nullptr;
  const std::atomic<bool>* cancel = nullptr;         // looked at before each step; true ends the run with what there is
  std::function<void(int32_t token)> on_token = {};  // each new token, in order; not the eos that ends the run
  std::function<void(int64_t done, int64_t total)> on_prefill = {};  // rows of the prompt, after each chunk
  AttentionRecord* record = nullptr;  // Generate fills it (Continue has rows of calls before: REQUIRES null)
};

enum class FinishReason { kEos, kLength, kCancelled };
const char* FinishReasonName(FinishReason reason);  // "eos", "length", "cancelled"

struct Generation {
  std::vector<int32_t> token_ids;  // new tokens only, without the eos
  FinishReason finish = FinishReason::kLength;
  int64_t prompt_tokens = 0, prefill_steps = 0, decode_steps = 0;
  int64_t reused_rows = 0;                   // of the prompt, already in the cache; the others were prefilled
  double prefill_seconds = 0;                // all prefilled rows, the first new token's logits included
  double decode_seconds = 0;                 // decode_steps steps: of one row, or of a row and a draft
  int64_t drafted_tokens = 0;                // guesses that steps verified
  int64_t accepted_tokens = 0;               // of them, what the model said too
  std::vector<int64_t> accepted_steps = {};  // [j]: steps that accepted j guesses; empty without a drafter
  int64_t cache_rows = 0;                    // rows in the cache at the end
  int64_t pending_tokens = 0;    // of prompt and answer, without a row: the last one has none before a forward
  int64_t cache_used_bytes = 0;  // pages that the sequence held at the end
  int64_t fallback_calls = 0;    // attention calls that the reference path served
  std::optional<KeySpike> key_spike = {};  // the worst, where keys have a scale a row (kv/key_spike.h)
  double prefill_tokens_per_s() const {
    return prefill_seconds > 0 ? double(prompt_tokens - reused_rows) / prefill_seconds : 0;
  }
  // Tokens behind the first, which prefill gave.
  double decode_tokens_per_s() const {
    return decode_seconds > 0 ? double(decode_steps + accepted_tokens) / decode_seconds : 0;
  }
  // Tokens that a decode step gave: 1 without drafts.
  double mean_acceptance_length() const {
    return decode_steps > 0 ? 1 + double(accepted_tokens) / double(decode_steps) : 0;
  }
  double acceptance_rate() const { return drafted_tokens > 0 ? double(accepted_tokens) / double(drafted_tokens) : 0; }
};

// What Generate and batches ask of a request before it runs. kInvalidArgument: an empty prompt, a negative number of
// new tokens. kOutOfRange: an id outside [0, vocab_size), prompt + new tokens beyond `context` rows, or what
// ValidateSampling says.
Status CheckRequest(std::span<const int32_t> prompt, int64_t max_new_tokens, const SamplingParams& sampling,
                    int64_t vocab_size, int64_t context);

// Owns the cache and the workspace; shares the model. One thread at a time; `pool` must outlive it.
class Session {
 public:
  // kOutOfRange: max_len beyond max_position_embeddings, or the pool beyond memory_bytes (both numbers named).
  // kInvalidArgument: a schema of another shape (layers, KV heads, head size, RoPE), negative or zero options.
  static Result<std::unique_ptr<Session>> Open(std::shared_ptr<const Llama> model, const CacheSchema& schema,
                                               const SessionOptions& options, ThreadPool& pool);
  ~Session();
  // Runs one request on a fresh sequence and releases it; what Continue had kept is released before. Errors: as
  // CheckRequest's. kNonFinite: the model produced NaN or Inf. On an error nothing stays in the cache.
  Result<Generation> Generate(std::span<const int32_t> prompt, const GenerateParams& params);
  // The same tokens out, bit for bit, but the sequence stays for the next call, which prefills only what is new:
  // of the longest common prefix of `prompt` and the kept tokens, the most rows that Truncate leaves as a fresh run of
  // `prompt` would have them (a format that keeps recent rows exact cannot go back behind a row that it coded since:
  // then none, and all is prefilled). On an error the sequence stays as the last whole step left it. kUnsupported: a
  // contract other than stepwise, under which a kept answer is read otherwise than a prompt.
  Result<Generation> Continue(std::span<const int32_t> prompt, const GenerateParams& params);
  std::span<const int32_t> kept_tokens() const;  // of the rows that Continue left in the cache

  KvCache& cache();
  int64_t max_len() const;
  int64_t pool_bytes() const;  // of all pages, used or not

 private:
  Session();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// ok if `schema` is for a model of this shape and RoPE, and sees no more than the model's windows; else the first field
// that differs, both values.
Status CheckSchemaFits(const CacheSchema& schema, const LlamaConfig& config);

}  // namespace livequant
