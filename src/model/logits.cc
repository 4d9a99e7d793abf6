// model/logits.cc: see logits.h.
#include "model/logits.h"

#include <cmath>

#include "base/check.h"
#include "kernels/ops.h"

namespace livequant {

double LogPartition(std::span<const float> logits) { return LogSumExp(logits); }

void Probabilities(std::span<const float> logits, double log_partition, std::span<float> out) {
  LQ_CHECK(out.size() == logits.size());
  // Shifted in double, so that no common offset of the logits costs a bit.
  for (size_t i = 0; i < logits.size(); ++i) out[i] = std::exp(static_cast<float>(logits[i] - log_partition));
}

int32_t MostProbable(std::span<const float> logits) {
  LQ_CHECK(!logits.empty());
  size_t best = 0;
  for (size_t i = 1; i < logits.size(); ++i)
    if (logits[i] > logits[best]) best = i;
  return static_cast<int32_t>(best);
}

}  // namespace livequant
