// Sampling: greedy ties, seeds, what may be drawn and how often, refusals.
#include "runtime/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "support/property.h"

namespace livequant {
namespace {

using ::testing::HasSubstr;

TEST(Sampler, TemperatureZeroIsGreedyAndTiesGoToTheLowerId) {
  Sampler sampler({}, 4);
  EXPECT_EQ(*sampler.Next(std::vector<float>{1, 3, 3, 2}), 1);
  EXPECT_EQ(*sampler.Next(std::vector<float>{-1, -3, -3, -1}), 0);
}

TEST(Sampler, OneSeedGivesOneSequence) {
  ForAll(20, [](Rng& rng) {
    const SamplingParams params{.temperature = rng.Uniform(0.3, 2),
                                .top_k = rng.Range(0, 30),
                                .top_p = rng.Uniform(0.3, 1),
                                .seed = rng.Next()};
    Sampler a(params, 50), b(params, 50);
    SamplingParams other = params;
    other.seed += 1;
    for (int i = 0; i < 40; ++i) {
      std::vector<float> logits(50);
      for (float& x : logits) x = static_cast<float>(rng.Normal() * 3);
      EXPECT_EQ(*a.Next(logits), *b.Next(logits));
    }
  });
}

TEST(Sampler, SeedsDiffer) {
  const std::vector<float> flat(1000, 0.0f);
  std::set<int32_t> first;
  for (uint64_t seed = 0; seed < 50; ++seed) first.insert(*Sampler({.temperature = 1, .seed = seed}, 1000).Next(flat));
  EXPECT_GT(first.size(), 40u);
}

// What may be drawn, by the definition in the header.
std::set<int32_t> Allowed(const std::vector<float>& logits, const SamplingParams& p) {
  std::vector<int32_t> order(logits.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  });
  if (p.top_k > 0 && static_cast<size_t>(p.top_k) < order.size()) order.resize(static_cast<size_t>(p.top_k));
  double total = 0, reached = 0;
  for (const int32_t id : order) total += std::exp(logits[static_cast<size_t>(id)] / p.temperature);
  std::set<int32_t> allowed;
  for (const int32_t id : order) {
    if (reached >= p.top_p * total) break;
    allowed.insert(id);
    reached += std::exp(logits[static_cast<size_t>(id)] / p.temperature);
  }
  return allowed;
}

TEST(Sampler, DrawsOnlyFromTopKThenTopP) {
  ForAll(60, [](Rng& rng) {
    const SamplingParams params{.temperature = rng.Uniform(0.3, 2),
                                .top_k = rng.Range(0, 12),
                                .top_p = rng.Uniform(0.2, 0.99),
                                .seed = rng.Next()};
    std::vector<float> logits(30);
    for (float& x : logits) x = static_cast<float>(rng.Normal() * 2);
    const std::set<int32_t> allowed = Allowed(logits, params);
    Sampler sampler(params, 30);
    std::set<int32_t> drawn;
    for (int i = 0; i < 400; ++i) drawn.insert(*sampler.Next(logits));
    for (const int32_t id : drawn) EXPECT_TRUE(allowed.contains(id)) << id;
    EXPECT_TRUE(drawn.contains(*Sampler({}, 30).Next(logits)));  // the most probable one comes up in 400 draws
  });
}

TEST(Sampler, FrequenciesFollowTheProbabilities) {
  const std::vector<double> p = {0.5, 0.25, 0.15, 0.1};
  for (const double temperature : {1.0, 2.0}) {
    std::vector<float> logits;
    for (const double x : p)
      logits.push_back(static_cast<float>(std::log(x) * temperature + 100));  // the offset cancels
    Sampler sampler({.temperature = temperature, .seed = 7}, 4);
    std::vector<int> count(4);
    constexpr int kDraws = 40000;
    for (int i = 0; i < kDraws; ++i) ++count[static_cast<size_t>(*sampler.Next(logits))];
    for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(count[i], kDraws * p[i], 5 * std::sqrt(kDraws * p[i] * (1 - p[i])));
  }
}

TEST(Sampler, BadParametersAreNamedWithValueAndLimit) {
  const auto message = [](const SamplingParams& p) {
    EXPECT_EQ(ValidateSampling(p).code(), Code::kOutOfRange);
    return ValidateSampling(p).message();
  };
  EXPECT_THAT(message({.temperature = -0.5}), HasSubstr("temperature is -0.5"));
  EXPECT_THAT(message({.temperature = 101}), HasSubstr("100"));
  EXPECT_THAT(message({.temperature = std::numeric_limits<double>::quiet_NaN()}), HasSubstr("nan"));
  EXPECT_THAT(message({.top_k = -1}), HasSubstr("top-k is -1"));
  EXPECT_THAT(message({.top_p = 0}), HasSubstr("top-p is 0"));
  EXPECT_THAT(message({.top_p = 1.5}), HasSubstr("top-p is 1.5"));
  EXPECT_TRUE(ValidateSampling({.temperature = 100, .top_k = 1, .top_p = 1}).ok());
}

TEST(Sampler, LogitsThatAreNotFiniteAreRefused) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()})
    for (const double temperature : {0.0, 1.0}) {
      Sampler sampler({.temperature = temperature}, 3);
      const auto next = sampler.Next(std::vector<float>{1, bad, 2});
      EXPECT_EQ(next.status().code(), Code::kNonFinite);
      EXPECT_THAT(next.status().message(), HasSubstr("token 1"));
    }
}

}  // namespace
}  // namespace livequant
