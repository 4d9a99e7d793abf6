// kernels/ceiling.cc: see kernels/ceiling.h.
#include "kernels/ceiling.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <new>

#include "base/check.h"
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/ceiling.cc"
#include "hwy/foreach_target.h"
// After foreach_target.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace livequant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::CappedTag<float, 16>;
using VF = hn::Vec<DF>;

// `rounds` times 12 independent multiply-adds (16-register machines keep them all); returns a value that depends on
// them. Every chain starts elsewhere: equal chains would be merged by the compiler and measure three times what the
// machine can do.
float FmaRounds(int64_t rounds, float x) {
  const DF df;
  const VF a = hn::Set(df, x), b = hn::Set(df, 1.0f - x);
  const auto start = [df, x](float i) HWY_ATTR { return hn::Set(df, x + i * 0.01f); };
  VF c0 = start(0), c1 = start(1), c2 = start(2), c3 = start(3), c4 = start(4), c5 = start(5);
  VF c6 = start(6), c7 = start(7), c8 = start(8), c9 = start(9), c10 = start(10), c11 = start(11);
  for (int64_t i = 0; i < rounds; ++i) {
    c0 = hn::MulAdd(c0, a, b);
    c1 = hn::MulAdd(c1, a, b);
    c2 = hn::MulAdd(c2, a, b);
    c3 = hn::MulAdd(c3, a, b);
    c4 = hn::MulAdd(c4, a, b);
    c5 = hn::MulAdd(c5, a, b);
    c6 = hn::MulAdd(c6, a, b);
    c7 = hn::MulAdd(c7, a, b);
    c8 = hn::MulAdd(c8, a, b);
    c9 = hn::MulAdd(c9, a, b);
    c10 = hn::MulAdd(c10, a, b);
    c11 = hn::MulAdd(c11, a, b);
  }
  const VF s = hn::Add(hn::Add(hn::Add(c0, c1), hn::Add(c2, c3)), hn::Add(hn::Add(c4, c5), hn::Add(c6, c7)));
  return hn::GetLane(hn::Add(s, hn::Add(hn::Add(c8, c9), hn::Add(c10, c11))));
}
int64_t FmaFlopsPerRound() { return 12 * 2 * static_cast<int64_t>(hn::MaxLanes(DF())); }

// Ors everything in [p, p + bytes) together; bytes a multiple of 1024, p aligned to a cache line.
uint32_t ReadAll(const std::byte* p, int64_t bytes) {
  using DU = hn::CappedTag<uint32_t, 16>;
  const DU du;
  constexpr int64_t kStep = static_cast<int64_t>(hn::MaxLanes(DU()));
  const auto* from = reinterpret_cast<const uint32_t*>(p);
  const int64_t stream = bytes / 4 / 4;  // u32 words of one stream, a multiple of 64
  auto a = hn::Zero(du), b = a, c = a, d = a;
  for (int64_t i = 0; i < stream; i += 2 * kStep) {
    a = hn::Or(a, hn::Or(hn::Load(du, from + i), hn::Load(du, from + i + kStep)));
    b = hn::Or(b, hn::Or(hn::Load(du, from + stream + i), hn::Load(du, from + stream + i + kStep)));
    c = hn::Or(c, hn::Or(hn::Load(du, from + 2 * stream + i), hn::Load(du, from + 2 * stream + i + kStep)));
    d = hn::Or(d, hn::Or(hn::Load(du, from + 3 * stream + i), hn::Load(du, from + 3 * stream + i + kStep)));
  }
  HWY_ALIGN uint32_t lanes[16] = {};
  hn::Store(hn::Or(hn::Or(a, b), hn::Or(c, d)), du, lanes);
  uint32_t all = 0;
  for (const uint32_t v : lanes) all |= v;
  return all;
}

}  // namespace HWY_NAMESPACE
}  // namespace livequant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace livequant {
namespace {
HWY_EXPORT(FmaRounds);
HWY_EXPORT(FmaFlopsPerRound);
HWY_EXPORT(ReadAll);

constexpr size_t kAlignment = 4096;
constexpr double kRepeatSeconds = 0.002;  // short, so that some repeats run undisturbed on a busy machine

// Seconds that each thread's share of one loop took, from the first start to the last end. One index a thread.
template <class Body>
double Seconds(ThreadPool& pool, Body&& body) {
  const auto start = std::chrono::steady_clock::now();
  pool.For(pool.threads(), body);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Best rate of `work` units a round: finds a number of rounds that takes kRepeatSeconds, then repeats it.
template <class Round>
double BestRate(ThreadPool& pool, double work, int repeats, Round&& round) {
  LQ_CHECK(repeats >= 1);
  int64_t rounds = 1;
  double seconds = 0;
  while ((seconds = Seconds(pool, [&](int64_t i, int) { round(i, rounds); })) < kRepeatSeconds) {
    rounds = std::max(rounds + 1, static_cast<int64_t>(static_cast<double>(rounds) *
                                                       std::min(8.0, 1.2 * kRepeatSeconds / std::max(seconds, 1e-9))));
  }
  double best = work * static_cast<double>(rounds) / seconds;
  for (int r = 1; r < repeats; ++r) {
    seconds = Seconds(pool, [&](int64_t i, int) { round(i, rounds); });
    best = std::max(best, work * static_cast<double>(rounds) / seconds);
  }
  return best;
}

struct AlignedDelete {
  void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t(kAlignment)); }
};
}  // namespace

double MeasureFmaGflops(ThreadPool& pool, int repeats) {
  const auto kernel = HWY_DYNAMIC_DISPATCH(FmaRounds);
  const double flops = static_cast<double>(HWY_DYNAMIC_DISPATCH(FmaFlopsPerRound)()) * pool.threads();
  // The values stay in (0, 1]: no subnormals, no inf.
  return BestRate(pool, flops, repeats,
                  [&](int64_t, int64_t rounds) {
                    volatile float keep = kernel(rounds, 0.5f);
                    (void)keep;
                  }) /
         1e9;
}

double MeasureReadGbps(ThreadPool& pool, int64_t bytes, int repeats) {
  const int threads = pool.threads();
  const int64_t share = bytes / threads / 1024 * 1024;
  LQ_CHECK(share >= 4096);
  const std::unique_ptr<std::byte, AlignedDelete> buffer(
      static_cast<std::byte*>(::operator new[](static_cast<size_t>(share * threads), std::align_val_t(kAlignment))));
  std::fill_n(buffer.get(), share * threads, std::byte{1});
  const auto kernel = HWY_DYNAMIC_DISPATCH(ReadAll);
  return BestRate(pool, static_cast<double>(share) * threads, repeats,
                  [&](int64_t i, int64_t rounds) {
                    volatile uint32_t keep = 0;
                    for (int64_t r = 0; r < rounds; ++r) keep = kernel(buffer.get() + i * share, share);
                    (void)keep;
                  }) /
         1e9;
}

std::string CacheLevelOf(int64_t bytes, int threads) {
  LQ_CHECK(threads >= 1);
  struct Level {
    const char* name;
    int64_t bytes;
    bool shared;
  };
  const Level levels[] = {{"L1d", sysconf(_SC_LEVEL1_DCACHE_SIZE), false},
                          {"L2", sysconf(_SC_LEVEL2_CACHE_SIZE), false},
                          {"L3", sysconf(_SC_LEVEL3_CACHE_SIZE), true}};
  bool known = false;
  for (const Level& level : levels) {
    if (level.bytes <= 0) continue;
    known = true;
    if ((level.shared ? bytes : bytes / threads) <= level.bytes) {
      return std::string(level.name) + " (" + std::to_string(level.bytes / 1024) + " KiB)";
    }
  }
  return known ? "memory" : "cache sizes unknown";
}

}  // namespace livequant
#endif  // HWY_ONCE
