// runtime/drafter.h: guesses at the next tokens, for speculative decoding. What a drafter says changes how many steps
// an answer takes, never a token of it: Session takes only what the model itself would have said.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "kv/kv_cache.h"
#include "model/llama.h"
#include "schema/schema.h"

namespace livequant {

class Drafter {
 public:
  virtual ~Drafter() = default;
  // Up to `most` guesses at what follows `tokens` (prompt and answer so far); none where it has no idea. Valid until
  // the next call. An error ends the request that asked.
  virtual Result<std::span<const int32_t>> Draft(std::span<const int32_t> tokens, int most) = 0;
};

// Prompt lookup: the longest of the last `max` to `min` tokens that stood somewhere before; what followed them the last
// time, itself included, is the guess. Costs no forward.
class NgramDrafter : public Drafter {
 public:
  // REQUIRES 1 <= min <= max.
  NgramDrafter(int min, int max);
  Result<std::span<const int32_t>> Draft(std::span<const int32_t> tokens, int most) override;

 private:
  int min_, max_;
  std::vector<int32_t> guess_;
};

// A smaller model that continues greedily, with a cache of its own. Before each guess it forks the sequence, so that
// going back to the rows that were accepted is a release and leaves no scar, whatever its cache format.
class ModelDrafter : public Drafter {
 public:
  struct Options {
    int max_tokens = 5;   // of a draft
    int64_t context = 0;  // rows of the longest request; 0 = the draft model's max_position_embeddings
    int64_t prefill_chunk = 512;
    bool allow_fallback = false;
  };
  // kInvalidArgument, kOutOfRange: as Session::Open. The caller sees to it that both models have one tokenizer.
  static Result<std::unique_ptr<ModelDrafter>> Open(std::shared_ptr<const Llama> model, const CacheSchema& schema,
                                                    const Options& options, ThreadPool& pool);
  ~ModelDrafter() override;
  Result<std::span<const int32_t>> Draft(std::span<const int32_t> tokens, int most) override;
  KvCache& cache();
  int64_t forwards() const;  // steps that the draft model ran

 private:
  ModelDrafter();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace livequant
