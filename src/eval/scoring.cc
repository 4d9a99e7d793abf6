// eval/scoring.cc: see scoring.h.
#include "eval/scoring.h"

#include <algorithm>
#include <cmath>

#include "model/logits.h"

namespace livequant {
namespace {

// sum(p[i] * (a[i] - b[i])): 8 fixed partial sums in double, so that compilers may use vectors and the bits stay the
// same.
double WeightedDifference(std::span<const float> p, std::span<const float> a, std::span<const float> b) {
  double part[8] = {};
  size_t i = 0;
  for (; i + 8 <= p.size(); i += 8)
    for (size_t j = 0; j < 8; ++j) part[j] += static_cast<double>(p[i + j] * (a[i + j] - b[i + j]));
  double sum = ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
  for (; i < p.size(); ++i) sum += static_cast<double>(p[i] * (a[i] - b[i]));
  return sum;
}

// Standard error of the mean of n values with these sums; 0 where one value leaves it unknown.
double StandardError(double sum, double squares, int64_t n) {
  if (n < 2) return 0;
  const double count = static_cast<double>(n), mean = sum / count;
  return std::sqrt(std::max(0.0, squares / count - mean * mean) / (count - 1));
}

}  // namespace

bool BaselineRow::Prepare(std::span<const float> logits, int32_t target, std::span<float> probabilities,
                          BaselineRow& out) {
  out.logits = logits;
  out.probabilities = probabilities;
  out.log_partition = LogPartition(logits);
  if (!std::isfinite(out.log_partition)) return false;
  Probabilities(logits, out.log_partition, probabilities);
  out.top = MostProbable(logits);
  out.target_logp = logits[static_cast<size_t>(target)] - out.log_partition;
  return std::isfinite(out.target_logp);
}

bool ScoreSums::AddRow(const BaselineRow& baseline, std::span<const float> logits, int32_t target) {
  const double log_partition = LogPartition(logits);
  if (!std::isfinite(log_partition)) return false;
  const double logp = logits[static_cast<size_t>(target)] - log_partition;
  // KL(p || q) = sum p (log p - log q) = sum p (a - b) + log Z_b - log Z_a.
  const double divergence =
      WeightedDifference(baseline.probabilities, baseline.logits, logits) + (log_partition - baseline.log_partition);
  if (!std::isfinite(logp) || !std::isfinite(divergence)) return false;
  const double change = std::exp(logp) - std::exp(baseline.target_logp);
  ++tokens;
  same_top += MostProbable(logits) == baseline.top;
  nll -= logp;
  nll2 += logp * logp;
  kld += divergence;
  kld2 += divergence * divergence;
  dp += change;
  dp2 += change * change;
  kld_rows.push_back(static_cast<float>(divergence));
  return true;
}

void ScoreSums::AddBaselineRow(const BaselineRow& baseline) {
  ++tokens;
  ++same_top;
  nll -= baseline.target_logp;
  nll2 += baseline.target_logp * baseline.target_logp;
  kld_rows.push_back(0);
}

void ScoreSums::Add(const ScoreSums& other) {
  tokens += other.tokens;
  same_top += other.same_top;
  nll += other.nll;
  nll2 += other.nll2;
  kld += other.kld;
  kld2 += other.kld2;
  dp += other.dp;
  dp2 += other.dp2;
  kld_rows.insert(kld_rows.end(), other.kld_rows.begin(), other.kld_rows.end());
}

void ScoreSums::Finish(FormatQuality& out) const {
  LQ_CHECK(tokens >= 1 && static_cast<int64_t>(kld_rows.size()) == tokens);
  const double n = static_cast<double>(tokens);
  out.tokens = tokens;
  out.nll = nll / n;
  out.perplexity = std::exp(out.nll);
  out.perplexity_error = StandardError(nll, nll2, tokens) * out.perplexity;  // d exp(x) = exp(x) dx
  out.mean_kld = kld / n;
  out.kld_error = StandardError(kld, kld2, tokens);
  std::vector<float> sorted = kld_rows;
  std::sort(sorted.begin(), sorted.end());
  out.median_kld = Percentile(sorted, 0.5);
  out.p90_kld = Percentile(sorted, 0.9);
  out.p95_kld = Percentile(sorted, 0.95);
  out.p99_kld = Percentile(sorted, 0.99);
  out.p999_kld = Percentile(sorted, 0.999);
  out.max_kld = sorted.back();
  out.min_kld = sorted.front();
  out.mean_dp = dp / n;
  out.rms_dp = std::sqrt(dp2 / n);
  out.same_top_p = static_cast<double>(same_top) / n;
}

double Percentile(std::span<const float> sorted, double q) {
  LQ_CHECK(!sorted.empty() && q >= 0 && q <= 1);
  const double at = q * static_cast<double>(sorted.size() - 1);
  const size_t below = static_cast<size_t>(at), above = std::min(below + 1, sorted.size() - 1);
  const double share = at - static_cast<double>(below);
  return (1 - share) * sorted[below] + share * sorted[above];
}

}  // namespace livequant
