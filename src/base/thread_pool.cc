// base/thread_pool.cc: one slot a worker, in which the caller leaves a ticket.
//
// Invariants
//   A loop gives thread t index t and hands out the others, if there are more than threads, through `next`. Worker t's
//   index lies in its slot as a ticket; whoever takes the ticket (sets it to 0) runs it: the worker, or the caller once
//   it has nothing else to do. So a loop never waits for a worker that did not take its ticket, one that wakes late or
//   that the system does not run, and costs what its indices cost also on a machine with more threads than cores.
//   The job in a slot is written only while its ticket is 0 and its last taker is done, and read only by whoever took
//   the ticket. A slot is one cache line that nobody else writes: opening a loop moves it to the worker, closing it
//   moves it back, and with no more indices than threads nothing else moves.
#include "base/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/check.h"

namespace livequant {
namespace {

constexpr uint32_t kStop = ~uint32_t{0};               // a ticket that ends its worker; no loop has it
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

// What the threads of a team share. A mark is written by its thread alone and read by all others.
struct Team::Shared {
  struct alignas(64) Mark {
    std::atomic<uint64_t> barriers{0};  // that this thread has come to, over all teams of the pool
    uint64_t counters = 0;              // its own count, kept between teams
  };
  // Indices of loops with more of them than threads: one of three in turn. While one is in use the next is made ready;
  // the barrier of the loop before says that nobody takes from that one any more.
  struct alignas(64) Counter {
    std::atomic<int64_t> next{0};
  };
  std::unique_ptr<Mark[]> marks;
  Counter counters[3];
  bool crowded = false;
};

void Team::Barrier() {
  if (threads_ == 1) return;
  const uint64_t mine = ++barriers_;
  shared_->marks[static_cast<size_t>(thread_)].barriers.store(mine, std::memory_order_release);
  for (int t = 0; t < threads_; ++t) {
    if (t == thread_) continue;
    const std::atomic<uint64_t>& other = shared_->marks[static_cast<size_t>(t)].barriers;
    SpinUntil([&] { return other.load(std::memory_order_acquire) >= mine; }, kCallerHotSpin,
              std::chrono::nanoseconds(0), shared_->crowded);
  }
}

void Team::OpenCounter() {
  ++counters_;
  if (thread_ == 0) shared_->counters[(counters_ + 1) % 3].next.store(threads_, std::memory_order_relaxed);
}

int64_t Team::Next() { return shared_->counters[counters_ % 3].next.fetch_add(1, std::memory_order_relaxed); }

struct ThreadPool::State {
  struct alignas(64) Slot {
    std::atomic<uint32_t> ticket{0};  // number of a loop, kStop, or 0
    std::atomic<uint32_t> done{0};    // number of the last loop that the worker took part in and left
    Call call = nullptr;
    void* body = nullptr;
    int64_t count = 0;
    alignas(64) std::byte copy[kBodyBytes];
  };
  alignas(64) std::atomic<int64_t> next{0};
  alignas(64) std::unique_ptr<Slot[]> slots;  // of workers 1, 2, ...
  uint32_t loop = 0;                          // number of the last loop, never 0 once there was one
  bool open = false;
  bool crowded = false;
  Team::Shared team;
  std::vector<std::thread> workers;

  // Indices beyond the first of each thread.
  void Drain(Call call, void* body, int64_t count, int thread, int64_t threads) {
    if (count <= threads) return;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) call(body, i, thread);
  }

  void Work(int thread, int64_t threads) {
    Slot& slot = slots[static_cast<size_t>(thread - 1)];
    for (;;) {
      const auto posted = [&] { return slot.ticket.load(std::memory_order_relaxed) != 0; };
      if (!SpinUntil(posted, kWorkerHotSpin, kSpin, crowded)) slot.ticket.wait(0, std::memory_order_relaxed);
      uint32_t ticket = slot.ticket.load(std::memory_order_relaxed);
      if (ticket == kStop) return;
      if (ticket == 0 || !slot.ticket.compare_exchange_strong(ticket, 0, std::memory_order_acquire)) continue;
      slot.call(slot.body, thread, thread);
      Drain(slot.call, slot.body, slot.count, thread, threads);
      slot.done.store(ticket, std::memory_order_release);
    }
  }
};

ThreadPool::ThreadPool(int threads) : threads_(threads), state_(std::make_unique<State>()) {
  LQ_CHECK(threads >= 1);
  const unsigned cores = std::thread::hardware_concurrency();  // 0: not known
  state_->crowded = cores != 0 && static_cast<unsigned>(threads) > cores;
  state_->team.crowded = state_->crowded;
  state_->team.marks = std::make_unique<Team::Shared::Mark[]>(static_cast<size_t>(threads));
  state_->team.counters[1].next.store(threads, std::memory_order_relaxed);  // the first that is opened
  state_->slots = std::make_unique<State::Slot[]>(static_cast<size_t>(threads - 1));
  state_->workers.reserve(static_cast<size_t>(threads - 1));
  for (int t = 1; t < threads; ++t)
    state_->workers.emplace_back([state = state_.get(), t, threads] { state->Work(t, threads); });
}

ThreadPool::~ThreadPool() {
  for (size_t w = 0; w < state_->workers.size(); ++w) {
    state_->slots[w].ticket.store(kStop, std::memory_order_release);
    state_->slots[w].ticket.notify_one();
  }
  for (std::thread& worker : state_->workers) worker.join();
}

Team ThreadPool::Join(int thread) {
  Team team;
  if (threads_ == 1) return team;
  const Team::Shared::Mark& mark = state_->team.marks[static_cast<size_t>(thread)];
  team.shared_ = &state_->team;
  team.thread_ = thread, team.threads_ = threads_;
  team.barriers_ = mark.barriers.load(std::memory_order_relaxed), team.counters_ = mark.counters;
  return team;
}

void ThreadPool::Leave(const Team& team) {
  if (threads_ > 1) state_->team.marks[static_cast<size_t>(team.thread_)].counters = team.counters_;
}

void ThreadPool::Run(int64_t count, Call call, void* body, size_t copied_bytes) {
  State& s = *state_;
  LQ_CHECK(!s.open);  // loops do not nest
  s.open = true;
  s.loop = s.loop + 1 == kStop ? 1 : s.loop + 1;
  if (count > threads_) s.next.store(threads_, std::memory_order_relaxed);
  const int64_t posted = std::min<int64_t>(count, threads_) - 1;
  for (int64_t w = 0; w < posted; ++w) {
    State::Slot& slot = s.slots[static_cast<size_t>(w)];
    slot.call = call, slot.body = body, slot.count = count;
    if (copied_bytes > 0) slot.body = std::memcpy(slot.copy, body, copied_bytes);
    slot.ticket.store(s.loop, std::memory_order_release);
    slot.ticket.notify_one();  // a system call only if the worker is parked
  }
  call(body, 0, 0);
  s.Drain(call, body, count, 0, threads_);
  for (int64_t w = 0; w < posted; ++w) {
    State::Slot& slot = s.slots[static_cast<size_t>(w)];
    uint32_t ticket = s.loop;
    if (slot.ticket.load(std::memory_order_relaxed) == ticket &&
        slot.ticket.compare_exchange_strong(ticket, 0, std::memory_order_relaxed)) {
      call(body, w + 1, 0);
    } else {
      SpinUntil([&] { return slot.done.load(std::memory_order_acquire) == s.loop; }, kCallerHotSpin,
                std::chrono::nanoseconds(0), s.crowded);
    }
  }
  s.open = false;
}

}  // namespace livequant
