// model/logits.h: what a row of logits says, for those above who must not see kernels.
#pragma once

#include <cstdint>
#include <span>

namespace livequant {

// log(sum(exp(x))) of one row: NaN or Inf if any logit is. REQUIRES a non-empty row. Source: kernels/ops.h, LogSumExp.
double LogPartition(std::span<const float> logits);
// out[i] = exp(logits[i] - log_partition), f32; both spans [vocab_size].
void Probabilities(std::span<const float> logits, double log_partition, std::span<float> out);
// The id of the largest logit, ties to the lower id. REQUIRES a non-empty row; a NaN is never the largest unless it
// stands first.
int32_t MostProbable(std::span<const float> logits);

}  // namespace livequant
