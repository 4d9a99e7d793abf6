// runtime/beam.h: beam search over one cache: every beam is a sequence, all beams move in one publication.
//
// A step scores every continuation of every beam by its summed log-probability and keeps the best 2 N (or 1 + number of
// stop ids times N, if that is more). Of the first N of them those that end (a stop id, or the last token allowed)
// become finished hypotheses with score = sum / tokens^length_penalty, a stop id counted; the best N that do not end
// are the next beams. The search is over when no beam can beat the worst of N finished ones at its present length, or
// nothing can go on. Ties go to the lower beam, then to the lower id. Semantics: `generate(num_beams=N,
// do_sample=False)` of Hugging Face transformers with early_stopping False; tests/runtime/golden/beams.json is what it
// computed.
//
// The prompt's rows are shared by all beams; a beam that is taken twice is copied on write, one that is taken by nobody
// drops. At every step each beam holds the bytes, and gives the logits, that a sequence which was never branched has.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "kv/kv_cache.h"
#include "model/llama.h"
#include "runtime/session.h"

namespace livequant {

struct BeamOptions {
  int num_beams = 4;  // 1 .. 256
  int64_t max_new_tokens = 128;
  double length_penalty = 1.0;         // above 0 long hypotheses gain, below 0 short ones; within -100 .. 100
  std::vector<int32_t> stop_ids = {};  // that end a hypothesis; at most 64
  int64_t context = 0;                 // rows of a beam allowed; 0 = the model's max_position_embeddings
  int64_t prefill_chunk = 512;
  int64_t memory_bytes = 0;  // a budget for the pool; 0 = none. Too small is an error with both numbers
  bool allow_fallback = false;
};

struct BeamHypothesis {
  std::vector<int32_t> token_ids;  // new tokens, without the stop id
  FinishReason finish = FinishReason::kLength;
  double sum_logprob = 0, score = 0;
};

class BeamSearch {
 public:
  // Checks everything and runs the prompt in one sequence, cut as prefill is. kInvalidArgument, kOutOfRange name the
  // option; else as CheckRequest and Session::Open.
  static Result<std::unique_ptr<BeamSearch>> Open(std::shared_ptr<const Llama> model, const CacheSchema& schema,
                                                  std::span<const int32_t> prompt, const BeamOptions& options,
                                                  ThreadPool& pool);
  ~BeamSearch();
  // One token for every beam: scores, one reorder of the cache, one forward. false: the search had ended, or has now
  // (then no forward ran). kNonFinite: a logit, or a row of the cache. An error ends the search.
  Result<bool> Step();
  // Finished hypotheses, best first; where fewer than num_beams ended (a search that was left early), the beams as they
  // stand besides, as kCancelled.
  std::vector<BeamHypothesis> Hypotheses() const;

  // The running beams, best first: all their tokens but the last have rows in `seq`; logits are of the last row.
  struct Beam {
    SeqId seq;
    std::vector<int32_t> token_ids;
    double sum_logprob;
    std::span<const float> logits;
  };
  std::vector<Beam> beams() const;
  KvCache& cache();

  struct Stats {
    int64_t steps = 0, reorders = 0, prefill_steps = 0;
    int64_t duplicated = 0, dropped = 0;  // beams taken more than once (each extra time) and by nobody
    double prefill_seconds = 0, decode_seconds = 0;
    int64_t pool_bytes = 0, most_used_bytes = 0;
  };
  const Stats& stats() const;

 private:
  BeamSearch();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace livequant
