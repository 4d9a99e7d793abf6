// runtime/sampler.cc: see sampler.h. Everything after the logits is double, in a fixed order.
#include "runtime/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "model/logits.h"

namespace livequant {

Status ValidateSampling(const SamplingParams& p) {
  if (!(p.temperature >= 0 && p.temperature <= 100))
    return Status(Code::kOutOfRange, fmt::format("temperature is {}; must be from 0 to 100", p.temperature));
  if (p.top_k < 0) return Status(Code::kOutOfRange, fmt::format("top-k is {}; must be 0 (all) or more", p.top_k));
  if (!(p.top_p > 0 && p.top_p <= 1))
    return Status(Code::kOutOfRange, fmt::format("top-p is {}; must be above 0 and at most 1", p.top_p));
  return {};
}

Sampler::Sampler(const SamplingParams& params, int64_t vocab_size)
    : params_(params),
      rng_(params.seed),
      order_(static_cast<size_t>(vocab_size)),
      weight_(static_cast<size_t>(vocab_size)) {
  LQ_CHECK(vocab_size > 0 && ValidateSampling(params).ok());
}

Result<int32_t> Sampler::Next(std::span<const float> logits) {
  LQ_CHECK(logits.size() == order_.size());
  for (size_t i = 0; i < logits.size(); ++i)
    if (!std::isfinite(logits[i]))
      return Status(Code::kNonFinite, fmt::format("the logit of token {} is {}", i, logits[i]));
  if (params_.temperature == 0) return MostProbable(logits);

  // The candidates, largest first, ties to the lower id.
  std::iota(order_.begin(), order_.end(), 0);
  const auto larger = [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  };
  size_t kept = order_.size();
  if (params_.top_k > 0) kept = std::min(kept, static_cast<size_t>(params_.top_k));
  if (kept < order_.size() || params_.top_p < 1)
    std::partial_sort(order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(kept), order_.end(), larger);

  // Weights relative to the largest logit: no overflow, and the sum is at least 1.
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (size_t i = 0; i < kept; ++i) {
    weight_[i] =
        std::exp((static_cast<double>(logits[static_cast<size_t>(order_[i])]) - largest) / params_.temperature);
    sum += weight_[i];
  }
  if (params_.top_p < 1) {
    const double enough = params_.top_p * sum;
    double reached = 0;
    size_t n = 0;
    while (n < kept && reached < enough) reached += weight_[n++];
    kept = std::max<size_t>(n, 1);
    sum = reached;
  }
  double left = rng_.Uniform() * sum;
  for (size_t i = 0; i + 1 < kept; ++i) {
    if (left < weight_[i]) return order_[i];
    left -= weight_[i];
  }
  return order_[kept - 1];  // rounding may leave a crumb beyond the last weight
}

}  // namespace livequant
