// One row against the baseline's, by the definitions in double.
#include "eval/scoring.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/property.h"

namespace livequant {
namespace {

std::vector<double> Softmax(const std::vector<float>& x) {
  double largest = -1e300, sum = 0;
  for (const float v : x) largest = std::max<double>(largest, v);
  std::vector<double> p;
  for (const float v : x) sum += p.emplace_back(std::exp(v - largest));
  for (double& v : p) v /= sum;
  return p;
}

TEST(Scoring, FollowsTheDefinitions) {
  ForAll(100, [](Rng& rng) {
    const int rows = static_cast<int>(rng.Range(2, 30));
    const size_t vocab = static_cast<size_t>(rng.Range(2, 700));
    ScoreSums sums, self;
    double nll = 0, kld = 0, kld2 = 0, dp = 0, dp2 = 0, same = 0, self_nll = 0;
    for (int r = 0; r < rows; ++r) {
      std::vector<float> a(vocab), b(vocab), p(vocab);
      const double noise = rng.Uniform(0, 0.5);
      for (size_t i = 0; i < vocab; ++i) {
        a[i] = static_cast<float>(rng.Normal() * 3);
        b[i] = static_cast<float>(a[i] + rng.Normal() * noise);
      }
      const int32_t target = static_cast<int32_t>(rng.Range(0, static_cast<int64_t>(vocab) - 1));
      BaselineRow row;
      ASSERT_TRUE(BaselineRow::Prepare(a, target, p, row));
      ASSERT_TRUE(sums.AddRow(row, b, target));
      ASSERT_TRUE(self.AddRow(row, a, target));
      const std::vector<double> pa = Softmax(a), pb = Softmax(b);
      double k = 0;
      for (size_t i = 0; i < vocab; ++i) k += pa[i] * std::log(pa[i] / pb[i]);
      const double change = pb[static_cast<size_t>(target)] - pa[static_cast<size_t>(target)];
      nll -= std::log(pb[static_cast<size_t>(target)]);
      self_nll -= std::log(pa[static_cast<size_t>(target)]);
      kld += k;
      kld2 += k * k;
      dp += change;
      dp2 += change * change;
      same += std::max_element(a.begin(), a.end()) - a.begin() == std::max_element(b.begin(), b.end()) - b.begin();
    }
    FormatQuality q;
    sums.Finish(q);
    EXPECT_EQ(q.tokens, rows);
    EXPECT_NEAR(q.nll, nll / rows, 1e-6);
    EXPECT_NEAR(q.perplexity, std::exp(nll / rows), 1e-5 * q.perplexity);
    EXPECT_NEAR(q.mean_kld, kld / rows, 1e-6);
    EXPECT_NEAR(q.kld_error, std::sqrt((kld2 / rows - kld / rows * kld / rows) / (rows - 1)), 1e-6);
    EXPECT_NEAR(q.mean_dp, dp / rows, 1e-6);
    EXPECT_NEAR(q.rms_dp, std::sqrt(dp2 / rows), 1e-6);
    EXPECT_EQ(q.same_top_p, same / rows);
    EXPECT_LE(q.min_kld, q.median_kld);
    EXPECT_LE(q.median_kld, q.p99_kld);
    EXPECT_LE(q.p99_kld, q.max_kld);
    FormatQuality s;
    self.Finish(s);
    EXPECT_NEAR(s.nll, self_nll / rows, 1e-6);
    EXPECT_EQ(s.max_kld, 0);  // exactly: the rows are the same bits
    EXPECT_EQ(s.min_kld, 0);
    EXPECT_EQ(s.rms_dp, 0);
    EXPECT_EQ(s.same_top_p, 1);
  });
}

TEST(Scoring, SumsOfPartsAreTheWhole) {
  ScoreSums whole, parts[2];
  Rng rng(3);
  for (int r = 0; r < 20; ++r) {
    std::vector<float> a(40), b(40), p(40);
    for (size_t i = 0; i < 40; ++i)
      b[i] = (a[i] = static_cast<float>(rng.Normal())) + static_cast<float>(rng.Normal() * 0.1);
    BaselineRow row;
    ASSERT_TRUE(BaselineRow::Prepare(a, 7, p, row));
    ASSERT_TRUE(whole.AddRow(row, b, 7));
    ASSERT_TRUE(parts[r / 12].AddRow(row, b, 7));
  }
  parts[0].Add(parts[1]);
  EXPECT_EQ(parts[0].tokens, 20);
  EXPECT_EQ(parts[0].kld_rows, whole.kld_rows);
  EXPECT_NEAR(parts[0].kld, whole.kld, 1e-12);
  EXPECT_NEAR(parts[0].nll2, whole.nll2, 1e-12);
}

TEST(Scoring, LogitsThatAreNotFiniteAreRefused) {
  std::vector<float> good = {1, 2, 3}, p(3);
  BaselineRow row;
  ASSERT_TRUE(BaselineRow::Prepare(good, 1, p, row));
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    const std::vector<float> x = {1, bad, 3};
    ScoreSums sums;
    EXPECT_FALSE(sums.AddRow(row, x, 1));
    EXPECT_EQ(sums.tokens, 0);
    BaselineRow other;
    EXPECT_FALSE(BaselineRow::Prepare(x, 1, p, other));
  }
}

TEST(Scoring, PercentilesAreLinearBetweenNeighbours) {
  const std::vector<float> x = {0, 1, 2, 3, 10};
  EXPECT_EQ(Percentile(x, 0), 0);
  EXPECT_EQ(Percentile(x, 0.5), 2);
  EXPECT_DOUBLE_EQ(Percentile(x, 0.625), 2.5);
  EXPECT_EQ(Percentile(x, 1), 10);
  EXPECT_EQ(Percentile(std::span(x).first(1), 0.99), 0);
}

}  // namespace
}  // namespace livequant
