// base/thread_pool.cc: a gate that workers enter while a loop is open.
//
// Invariants
//   `gate` holds kOpen while the caller hands out indices, and the number of workers inside in its low bits. The job
//   fields are written only while gate == 0, and read only by the caller and by workers that are counted in gate. A
//   loop never waits for a worker that did not enter: one that wakes late, or that the system does not run, finds the
//   gate closed. So a loop costs what its indices cost, also on a machine with more threads than cores. `epoch` counts
//   loops (and the end); workers wait for it to change. It orders nothing: `gate` does. All of it lies in one cache
//   line: a worker that polls `epoch` gets the job with it, and one more transfer, for its own count in `gate`, brings
//   it in. (A loop of two indices of 4 us costs 0.6 us beside them on a Zen 5; over four lines it cost 0.85 us.)
#include "base/thread_pool.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/check.h"

namespace livequant {
namespace {

constexpr uint32_t kOpen = 1u << 31;
constexpr auto kSpin = std::chrono::microseconds(50);  // after this a worker parks
// After this a spinning thread offers its core to others: the caller soon, since the worker that it waits for may need
// that very core; a worker only when no loop of the same step can be about to open, since a yield costs a system call.
constexpr auto kCallerHotSpin = std::chrono::microseconds(5);
constexpr auto kWorkerHotSpin = std::chrono::microseconds(25);

inline void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until done() or until `limit` is over (zero: no limit); true if done. Yields after `hot`, or at once where the
// pool has more threads than the machine has cores, so that whoever must make progress can.
template <class Done>
bool SpinUntil(Done&& done, std::chrono::nanoseconds hot, std::chrono::nanoseconds limit, bool crowded) {
  using Clock = std::chrono::steady_clock;
  for (int i = 0; i < 64; ++i) {
    if (done()) return true;
    Pause();
  }
  const Clock::time_point start = Clock::now();
  for (;;) {
    for (int i = 0; i < 16; ++i) {
      if (done()) return true;
      Pause();
    }
    const auto waited = Clock::now() - start;
    if (limit.count() > 0 && waited >= limit) return false;
    if (crowded || waited >= hot) std::this_thread::yield();
  }
}

}  // namespace

struct ThreadPool::State {
  alignas(64) std::atomic<uint32_t> epoch{0};
  std::atomic<uint32_t> gate{0};
  std::atomic<int64_t> next{0};
  int64_t count = 0;
  Call call = nullptr;
  void* body = nullptr;
  std::atomic<bool> stop{false};
  alignas(64) bool crowded = false;
  std::vector<std::thread> workers;

  void Drain(int thread) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) call(body, i, thread);
  }

  void Work(int thread) {
    for (uint32_t seen = 0;;) {
      const auto changed = [&] { return epoch.load(std::memory_order_acquire) != seen; };
      if (!SpinUntil(changed, kWorkerHotSpin, kSpin, crowded)) epoch.wait(seen, std::memory_order_acquire);
      seen = epoch.load(std::memory_order_acquire);
      if (stop.load(std::memory_order_relaxed)) return;
      uint32_t g = gate.load(std::memory_order_relaxed);
      while ((g & kOpen) != 0) {
        if (!gate.compare_exchange_weak(g, g + 1, std::memory_order_acquire, std::memory_order_relaxed)) continue;
        Drain(thread);
        gate.fetch_sub(1, std::memory_order_release);
        break;
      }
    }
  }
};

ThreadPool::ThreadPool(int threads) : threads_(threads), state_(std::make_unique<State>()) {
  LQ_CHECK(threads >= 1);
  const unsigned cores = std::thread::hardware_concurrency();  // 0: not known
  state_->crowded = cores != 0 && static_cast<unsigned>(threads) > cores;
  state_->workers.reserve(static_cast<size_t>(threads - 1));
  for (int t = 1; t < threads; ++t) state_->workers.emplace_back([state = state_.get(), t] { state->Work(t); });
}

ThreadPool::~ThreadPool() {
  state_->stop.store(true, std::memory_order_relaxed);
  state_->epoch.fetch_add(1, std::memory_order_release);
  state_->epoch.notify_all();
  for (std::thread& worker : state_->workers) worker.join();
}

void ThreadPool::Run(int64_t count, Call call, void* body) {
  State& s = *state_;
  LQ_CHECK(s.gate.load(std::memory_order_relaxed) == 0);  // loops do not nest
  s.count = count;
  s.call = call;
  s.body = body;
  s.next.store(0, std::memory_order_relaxed);
  s.gate.store(kOpen, std::memory_order_release);
  s.epoch.fetch_add(1, std::memory_order_release);
  s.epoch.notify_all();  // a system call only if somebody is parked
  s.Drain(0);
  s.gate.fetch_and(~kOpen, std::memory_order_acq_rel);
  SpinUntil([&] { return s.gate.load(std::memory_order_acquire) == 0; }, kCallerHotSpin, std::chrono::nanoseconds(0),
            s.crowded);
}

}  // namespace livequant
