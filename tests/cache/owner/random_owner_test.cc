// The random owner test (cache_core.md 8, reliability.md 2): see owner_simulator.h.
//
// LIVEQUANT_OWNER_OPS=2000000 runs that many operations in all; LIVEQUANT_OWNER_SEED=S starts at seed S (with OPS up to
// one seed's share: that seed alone).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <string>

#include "cache/owner/owner_simulator.h"
#include "support/effort.h"

namespace livequant {
namespace {

constexpr int64_t kOperationsPerSeed = 2000;

constexpr int64_t kOperations = Effort(100000, 4);

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoll(text, nullptr, 10);
}

TEST(RandomOwner, MatchesAListOfRowsAfterEveryOperation) {
  const int64_t operations = FromEnvironment("LIVEQUANT_OWNER_OPS", kOperations);
  uint64_t seed = static_cast<uint64_t>(FromEnvironment("LIVEQUANT_OWNER_SEED", 1));
  const uint64_t first = seed;
  Coverage coverage;
  int64_t total = 0;
  for (; total < operations; ++seed) {
    int64_t done = 0;
    const std::string failure = Simulate(seed, std::min(kOperationsPerSeed, operations - total), &coverage, &done);
    ASSERT_EQ(failure, "");
    total += done;
  }
  std::cout << total << " operations, seeds " << first << ".." << seed - 1 << "\n";
  for (const auto& [name, count] : coverage.counts()) std::cout << "  " << name << ": " << count << "\n";
  if (operations < 20000) return;  // a replay of one seed need not reach everything
  for (const std::string& name : Coverage::Required()) EXPECT_GT(coverage[name], 0) << name << " never happened";
}

// Lost replies, asked for again by id, change nothing: not one length, generation or page.
TEST(RandomOwner, ARunWithLostRepliesIsTheRunWithout) {
  Coverage lost;
  for (uint64_t seed = 1; seed <= 7; ++seed) {
    uint64_t history[2] = {};
    for (const int losses : {0, 40}) {
      Coverage coverage;
      OwnerSimulator simulator(seed, Choices(seed), losses == 0 ? &coverage : &lost);
      simulator.set_losses(losses);
      try {
        for (int i = 0; i < Effort(800, 8); ++i) simulator.Step();
        simulator.Drain();
      } catch (const SimulationError& error) {
        FAIL() << "seed " << seed << ", losses " << losses << ": " << error.what() << "\n" << simulator.Trace();
      }
      history[losses == 0 ? 0 : 1] = simulator.history();
    }
    EXPECT_EQ(history[0], history[1]) << "seed " << seed;
  }
  EXPECT_GT(lost["lost replies"], 100);
  EXPECT_GT(lost["lost replies of begin"], 0);
}

TEST(RandomOwner, ASeedIsOneRun) {
  Coverage a, b;
  int64_t done_a = 0, done_b = 0;
  EXPECT_EQ(Simulate(11, 600, &a, &done_a), "");
  EXPECT_EQ(Simulate(11, 600, &b, &done_b), "");
  EXPECT_EQ(a.counts(), b.counts());
}

}  // namespace
}  // namespace livequant
