// eval/logits.h: raw logits of given token ids, and a greedy continuation: how others check our runtime. Needs no
// tokenizer.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "model/llama.h"
#include "schema/schema.h"

namespace livequant {

struct LogitsRequest {
  std::vector<int32_t> token_ids = {};  // fed as they are; no BOS is added
  std::vector<int64_t> positions =
      {};                // rows whose logits are wanted, each in [0, token_ids.size()); empty = the last one
  int64_t generate = 0;  // greedy tokens after the last row; eos does not stop them
  int64_t prefill_chunk = 512;
  bool allow_fallback = false;
};

struct PositionLogits {
  int64_t position = 0;
  std::vector<float> logits;  // [vocab_size], of the token that follows `position`
};
struct LogitsResult {
  std::vector<PositionLogits> positions;  // in the order asked
  std::vector<int32_t> generated;
  std::optional<KeySpike> key_spike = {};  // the worst, where keys have a scale a row (kv/key_spike.h)
};

// kInvalidArgument: no tokens, a schema of another shape. kOutOfRange: an id, a position, or tokens + generate beyond
// max_position_embeddings.
Result<LogitsResult> EvalLogits(const Llama& model, const CacheSchema& schema, const LogitsRequest& request,
                                ThreadPool& pool);

}  // namespace livequant
