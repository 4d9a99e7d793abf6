// Bytes drive the owner's operations against the list-of-rows oracle (tests/cache/owner/owner_simulator.h). The first
// byte picks the schema and limits, all others are decisions.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "cache/owner/owner_simulator.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  livequant::Coverage coverage;
  try {
    livequant::OwnerSimulator simulator(data[0], livequant::Choices(data + 1, size - 1), &coverage);
    while (!simulator.done() && simulator.operations() < 500) simulator.Step();
    simulator.Drain();
  } catch (const livequant::SimulationError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::abort();
  }
  return 0;
}
