// Every planted mistake (cache/pages/plants.h) is caught by the random owner test. This program compiles the owner with
// LIVEQUANT_PLANTS.
//
// The oracle alone must see it: rows, byte counts and return values; the owner's own invariants are not asked. A plant
// runs in a child process, since a check that ends the process is a catch too. Prints at which operation each was
// caught.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <new>
#include <string>
#include <vector>

#include "cache/owner/owner_simulator.h"
#include "cache/pages/plants.h"

namespace livequant {
namespace {

#ifndef LIVEQUANT_PLANTS
#error "this program needs the plants"
#endif

constexpr int kSeeds = 200;
constexpr int64_t kOperationsPerSeed = 2000;
constexpr int kSurvived = 0, kCaught = 42;

struct Report {
  int64_t operations = 0;
  int seed = 0;
  char how[160] = {};
};

struct PlantName {
  int plant;
  const char* name;
  const char* what;
};

const std::vector<PlantName>& AllPlants() {
  static const std::vector<PlantName> plants = {
#define LQ_PLANT_ENTRY(name, what) {plants::name, #name, what},
      LQ_PLANT_LIST(LQ_PLANT_ENTRY)
#undef LQ_PLANT_ENTRY
  };
  return plants;
}

// Runs seeds with one plant until something is noticed.
int RunChild(int plant, Report* report) {
  if (std::freopen("/dev/null", "w", stderr) == nullptr) return kSurvived;
  plants::active = plant;
  for (int seed = 1; seed <= kSeeds; ++seed) {
    report->seed = seed;
    Coverage coverage;
    std::string failure;
    try {
      OwnerSimulator simulator(static_cast<uint64_t>(seed), Choices(static_cast<uint64_t>(seed)), &coverage);
      simulator.set_check_invariants(false);
      simulator.set_losses(30);
      for (int64_t i = 0; i < kOperationsPerSeed; ++i) {
        ++report->operations;
        simulator.Step();
      }
      simulator.Drain();
    } catch (const SimulationError& error) {
      failure = error.what();
    }
    if (!failure.empty()) {
      std::strncpy(report->how, failure.c_str(), sizeof report->how - 1);
      return kCaught;
    }
  }
  return kSurvived;
}

TEST(Plants, EveryPlantedMistakeIsCaught) {
  ASSERT_GE(AllPlants().size(), 16u);
  void* shared = mmap(nullptr, sizeof(Report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  for (const PlantName& plant : AllPlants()) {
    Report* report = new (shared) Report;
    std::cout.flush();
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) _exit(RunChild(plant.plant, report));
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    const bool survived = WIFEXITED(status) && WEXITSTATUS(status) == kSurvived;
    EXPECT_FALSE(survived) << plant.name << " (" << plant.what << ") was not noticed in " << report->operations
                           << " operations";
    const std::string how =
        WIFSIGNALED(status) ? std::string("signal ") + std::to_string(WTERMSIG(status)) : report->how;
    std::cout << "  " << plant.name << ": operation " << report->operations << " (seed " << report->seed << "): " << how
              << "\n";
  }
  munmap(shared, sizeof(Report));
}

// The same program without a plant passes: what is caught above is the plant.
TEST(Plants, NothingIsCaughtWithoutAPlant) {
  plants::active = plants::kNone;
  for (uint64_t seed = 1; seed <= 7; ++seed) {
    Coverage coverage;
    int64_t done = 0;
    EXPECT_EQ(Simulate(seed, 500, &coverage, &done), "");
  }
}

}  // namespace
}  // namespace livequant
