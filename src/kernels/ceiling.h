// kernels/ceiling.h: what this machine can do at best, measured now: the numbers that a kernel's speed is divided by.
//
// Machines are shared and clocks move, so a ceiling counts only beside a result of the same run. Both take the best of
// several repeats of about 2 ms: a ceiling that a neighbour disturbed would flatter the kernel.
#pragma once

#include <cstdint>
#include <string>

#include "base/thread_pool.h"

namespace livequant {

// f32 fused multiply-adds from registers alone, in GFLOP/s (two a lane), all threads of the pool at once, on the
// instruction set that the kernels run on. Without a fused multiply-add: a product and a sum, also
// counted as two.
double MeasureFmaGflops(ThreadPool& pool, int repeats = 20);

// Reads a buffer of `bytes` again and again, every thread its own contiguous share, in 1e9 bytes per second. The share
// is read in 4 streams with full-width loads. REQUIRES bytes >= 4096 a thread.
double MeasureReadGbps(ThreadPool& pool, int64_t bytes, int repeats = 20);

// The smallest cache level that a working set of `bytes`, shared out over `threads` cores, fits in: "L1d (48 KiB)",
// "L2 (1024 KiB)", "L3 (32768 KiB)", or "memory". Sizes are those that the system reports (a virtual machine may report
// the L3 of a whole socket); "cache sizes unknown" if it reports none.
std::string CacheLevelOf(int64_t bytes, int threads);

}  // namespace livequant
