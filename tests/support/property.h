// tests/support/property.h: properties over seeds, with the seed of a failure printed.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "base/rng.h"

namespace livequant {

// Runs property(rng) for seeds 1..count and stops at the first seed that fails. LIVEQUANT_SEED=n runs seed n alone.
template <class Property>
void ForAll(int count, Property&& property) {
  uint64_t first = 1, last = static_cast<uint64_t>(count);
  if (const char* only = std::getenv("LIVEQUANT_SEED")) first = last = std::strtoull(only, nullptr, 10);
  for (uint64_t seed = first; seed <= last; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed) + " (replay: LIVEQUANT_SEED=" + std::to_string(seed) + ")");
    Rng rng(seed);
    property(rng);
    if (::testing::Test::HasFailure()) return;
  }
}

// rows x cols normal values with a few large channels and a few large single values, as K and V rows have them.
inline std::vector<float> NormalWithOutliers(Rng& rng, int64_t rows, int64_t cols) {
  std::vector<float> x(static_cast<size_t>(rows * cols));
  std::vector<double> channel(static_cast<size_t>(cols));
  for (double& c : channel) c = rng.Chance(0.05) ? rng.Uniform(5, 30) : rng.Uniform(0.2, 2);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c)
      x[static_cast<size_t>(r * cols + c)] =
          static_cast<float>(rng.Normal() * channel[static_cast<size_t>(c)] * (rng.Chance(0.002) ? 10 : 1));
  return x;
}

}  // namespace livequant
