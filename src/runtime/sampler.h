// runtime/sampler.h: the next token from one row of logits; the same on every machine for one seed.
//
// temperature 0 is greedy: the largest logit, ties to the lower id; no random number is drawn. Otherwise, in this
// order: logits / temperature, the top_k largest (ties to the lower id), the smallest set of largest probabilities
// whose sum reaches top_p, one draw from what is left.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/rng.h"
#include "base/status.h"

namespace livequant {

struct SamplingParams {
  double temperature = 0;  // 0 = greedy; at most 100
  int64_t top_k = 0;       // 0 = all
  double top_p = 1.0;      // in (0, 1]; 1 = all
  uint64_t seed = 0;
};
// kOutOfRange names the field, the value and the limit.
Status ValidateSampling(const SamplingParams& params);

class Sampler {
 public:
  // REQUIRES ValidateSampling(params).ok(). vocab_size fixes the scratch, so sampling allocates nothing.
  Sampler(const SamplingParams& params, int64_t vocab_size);
  // kNonFinite: a NaN or Inf among the logits (its id is named). REQUIRES logits.size() == vocab_size.
  Result<int32_t> Next(std::span<const float> logits);

 private:
  SamplingParams params_;
  Rng rng_;
  std::vector<int32_t> order_;
  std::vector<double> weight_;
};

}  // namespace livequant
