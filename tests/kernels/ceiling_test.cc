// kernels/ceiling.h: the ceilings are positive and finite, and a working set is named by a cache level. No speed is
// asserted.
#include "kernels/ceiling.h"

#include <gtest/gtest.h>

#include <cmath>

namespace livequant {
namespace {

TEST(Ceiling, MeasuresSomethingOnOneAndTwoThreads) {
  for (const int threads : {1, 2}) {
    ThreadPool pool(threads);
    for (const double rate :
         {MeasureFmaGflops(pool, 1), MeasureReadGbps(pool, 8192 * threads, 1), MeasureReadGbps(pool, 1000001, 1)}) {
      EXPECT_TRUE(std::isfinite(rate));
      EXPECT_GT(rate, 0);
    }
  }
}

TEST(Ceiling, ALargerSetNeverFitsASmallerCache) {
  if (CacheLevelOf(1, 1) == "cache sizes unknown") GTEST_SKIP();
  const auto rank = [](const std::string& name) {
    return name == "memory" ? 'M' : name[1];
  };  // "L1d" < "L2" < "L3" < "memory"
  char last = 0;
  for (int64_t bytes = 1024; bytes < (int64_t{1} << 40); bytes *= 2) {
    const char now = rank(CacheLevelOf(bytes, 1));
    EXPECT_GE(now, last);
    last = now;
    EXPECT_LE(rank(CacheLevelOf(bytes, 2)), now);  // two cores hold more
  }
  EXPECT_EQ(CacheLevelOf(int64_t{1} << 50, 1), "memory");
}

}  // namespace
}  // namespace livequant
