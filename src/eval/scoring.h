// eval/scoring.h: one row of logits against the baseline's row, and the sums of many.
//
// A window's sums run over its rows in order, and the windows' sums are added in window order (Add): the result depends
// on neither threads nor chunks. Everything is natural logarithms. Source of the names: llama.cpp, tools/perplexity
// (kl_divergence).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "eval/perplexity.h"

namespace livequant {

// The exact model's view of one row, computed once for all formats.
struct BaselineRow {
  std::span<const float> logits;
  std::span<float> probabilities;  // filled by Prepare
  double log_partition = 0;
  int32_t top = 0;         // its most probable token
  double target_logp = 0;  // of the token that follows

  // false: a NaN or Inf among the logits. `logits` and `probabilities` are [vocab_size].
  static bool Prepare(std::span<const float> logits, int32_t target, std::span<float> probabilities, BaselineRow& out);
};

// Sums over scored rows.
struct ScoreSums {
  int64_t tokens = 0, same_top = 0;
  double nll = 0, nll2 = 0, kld = 0, kld2 = 0, dp = 0, dp2 = 0;  // x2: sums of squares
  std::vector<float> kld_rows;                                   // for percentiles

  // One row of a format. false: a NaN or Inf among the logits.
  bool AddRow(const BaselineRow& baseline, std::span<const float> logits, int32_t target);
  // The baseline's own row: divergence 0 by definition.
  void AddBaselineRow(const BaselineRow& baseline);
  void Add(const ScoreSums& other);
  // Fills everything of FormatQuality that follows from sums. REQUIRES tokens >= 1.
  void Finish(FormatQuality& out) const;
};

// The value below which a share `q` of `sorted` lies, linear between neighbours. REQUIRES sorted, not empty, q in [0,
// 1].
double Percentile(std::span<const float> sorted, double q);

}  // namespace livequant
