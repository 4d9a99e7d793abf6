// Frequencies of every RoPE type: worked values, limits of the formulas, and what the table does with them.
#include "kernels/rope_table.h"

#include <gtest/gtest.h>

#include <cmath>

#include "support/property.h"

namespace livequant {
namespace {

constexpr double kPi = 3.14159265358979323846;

RopeConfig Llama3(double theta, double factor, double low, double high, int original) {
  return {.type = "llama3",
          .theta = theta,
          .factor = factor,
          .original_max_positions = original,
          .low_freq_factor = low,
          .high_freq_factor = high};
}
RopeConfig Yarn(double theta, double factor, int original, double fast, double slow, bool truncate) {
  return {.type = "yarn",
          .theta = theta,
          .factor = factor,
          .original_max_positions = original,
          .beta_fast = fast,
          .beta_slow = slow,
          .truncate = truncate,
          .attention_factor = 1.25};
}

TEST(RopeFrequencies, DefaultAndLinear) {
  EXPECT_EQ(RopeFrequencies({.theta = 10000.0}, 8),
            (std::vector<double>{1, std::pow(10000.0, -0.25), 0.01, std::pow(10000.0, -0.75)}));
  const auto linear = RopeFrequencies({.type = "linear", .theta = 10000.0, .factor = 4}, 8);
  EXPECT_EQ(linear[0], 0.25);
  EXPECT_EQ(linear[2], 0.0025);
}

// theta 10^8 over 8 channels: frequencies 1, 10^-2, 10^-4, 10^-6, wavelengths 2 pi, 200 pi, ...; with 1000 positions of
// pretraining, low 1 and high 4 the first stays (6.3 < 250), the second is mixed (250 < 628 < 1000), the others
// stretch.
TEST(RopeFrequencies, Llama3WorkedByHand) {
  const auto f = RopeFrequencies(Llama3(1e8, 8, 1, 4, 1000), 8);
  EXPECT_DOUBLE_EQ(f[0], 1);
  const double keep = (1000 / (200 * kPi) - 1) / 3;  // 0.19718...
  EXPECT_NEAR(keep, 0.19718, 1e-5);
  EXPECT_NEAR(f[1], keep * 1e-2 + (1 - keep) * 1e-2 / 8, 1e-16);
  EXPECT_NEAR(f[2], 1e-4 / 8, 1e-18);
  EXPECT_NEAR(f[3], 1e-6 / 8, 1e-20);
}

// theta 10^8 over 8 channels: pair i turns original 10^(-2 i) / (2 pi) times, so t turns are at pair
// log10(original / (2 pi t)) / 2: with 2000 pi positions 10 turns at 1, 0.01 turns at 2.5.
TEST(RopeFrequencies, YarnWorkedByHand) {
  const int original = 6283;  // 1000 * 2 pi, nearly
  const auto exact = RopeFrequencies(Yarn(1e8, 4, original, 10, 0.01, false), 8);
  EXPECT_DOUBLE_EQ(exact[0], 1);
  EXPECT_NEAR(exact[1], 1e-2, 1e-6);
  const double stretch = (2 - 1) / (2.5 - 1);
  EXPECT_NEAR(exact[2], 1e-4 * (stretch / 4 + 1 - stretch), 1e-8);
  EXPECT_NEAR(exact[3], 1e-6 / 4, 1e-12);
  // Rounded outward: 0.99999 becomes 0, 2.5 becomes 3.
  const auto rounded = RopeFrequencies(Yarn(1e8, 4, original, 10, 0.01, true), 8);
  EXPECT_DOUBLE_EQ(rounded[0], 1);
  EXPECT_NEAR(rounded[1], 1e-2 * (1.0 / 3 / 4 + 2.0 / 3), 1e-15);
  EXPECT_NEAR(rounded[2], 1e-4 * (2.0 / 3 / 4 + 1.0 / 3), 1e-17);
}

// Whatever the parameters: between base and base / factor, and a factor of 1 changes nothing.
TEST(RopeFrequencies, LieBetweenBaseAndStretched) {
  ForAll(300, [](Rng& rng) {
    const int dim = 2 * static_cast<int>(rng.Range(1, 64));
    const double theta = rng.Pick({2.0, 10000.0, 500000.0, 1e6}), factor = rng.Uniform(1, 64);
    const int original = static_cast<int>(rng.Range(1, 100000));
    const double low = rng.Uniform(0.1, 4), slow = rng.Uniform(0.01, 4);
    for (RopeConfig c : {Llama3(theta, factor, low, low + rng.Uniform(0.1, 8), original),
                         Yarn(theta, factor, original, slow + rng.Uniform(0, 40), slow, rng.Chance(0.5))}) {
      const auto f = RopeFrequencies(c, dim), base = RopeFrequencies({.theta = theta}, dim);
      c.factor = 1;
      const auto same = RopeFrequencies(c, dim);
      for (size_t i = 0; i < f.size(); ++i) {
        EXPECT_LE(f[i], base[i] * (1 + 1e-14)) << c.type << " pair " << i;
        EXPECT_GE(f[i], base[i] / factor * (1 - 1e-14)) << c.type << " pair " << i;
        EXPECT_NEAR(same[i], base[i], base[i] * 1e-14);
      }
    }
  });
}

TEST(RopeTable, HoldsCosAndSinTimesTheAttentionFactor) {
  const RopeConfig c = Yarn(10000, 8, 64, 32, 1, true);
  const auto f = RopeFrequencies(c, 20);
  const RopeTable table(c, 20, 50);
  for (int64_t p = 0; p < 50; ++p)
    for (size_t i = 0; i < 10; ++i) {
      EXPECT_EQ(table.cos(p)[i], static_cast<float>(1.25 * std::cos(static_cast<double>(p) * f[i])));
      EXPECT_EQ(table.sin(p)[i], static_cast<float>(1.25 * std::sin(static_cast<double>(p) * f[i])));
    }
}

}  // namespace
}  // namespace livequant
