// base/thread_pool.h: one pool; fork-join loops, and teams: all threads run the same code and meet at barriers. No
// allocation per loop.
//
// Invariants: a loop returns after every index has run; index i runs once; the caller's thread works too, so a pool of
// one thread runs everything inline. Loops and teams do not nest. Workers spin for about 50 us after a loop, then park.
//
// Which of the two: a fork and its join send a cache line there and back, a barrier sends one each way at once, and
// what is too small to be shared out every thread does for itself instead of waiting for it. So many short loops in a
// row are a team's. But a loop goes on without a worker that does not come, and a team waits for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace livequant {

// One thread's part in ThreadPool::Together. Every thread of the team makes the same calls in the same order.
class Team {
 public:
  Team() = default;  // of one thread: a loop runs inline, a barrier is nothing

  int thread() const { return thread_; }
  int threads() const { return threads_; }

  // [begin, end) of `count` things: this thread's even share of them.
  struct Range {
    int64_t begin, end;
  };
  Range Share(int64_t count) const { return {count * thread_ / threads_, count * (thread_ + 1) / threads_}; }

  // Returns when all threads have come; what they wrote before is seen after.
  void Barrier();

  // body(index, thread) for each index in [0, count), on any thread; thread t begins with index t, the others are
  // handed out one at a time in rising order. Ends in a barrier.
  template <class Body>
  void For(int64_t count, Body&& body) {
    if (threads_ == 1) {
      for (int64_t i = 0; i < count; ++i) body(i, 0);
      return;
    }
    if (thread_ < count) body(int64_t{thread_}, thread_);
    if (count > threads_) {
      OpenCounter();
      for (int64_t i; (i = Next()) < count;) body(i, thread_);
    }
    Barrier();
  }

 private:
  friend class ThreadPool;
  struct Shared;
  void OpenCounter();
  int64_t Next();
  Shared* shared_ = nullptr;
  int thread_ = 0, threads_ = 1;
  uint64_t barriers_ = 0, counters_ = 0;  // come to, opened: equal on all threads between barriers
};

class ThreadPool {
 public:
  // `threads` >= 1, the caller included.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Calls body(index, thread) for each index in [0, count), thread in [0, threads()). Thread t begins with index t,
  // unless it comes late and the caller takes it over; the others are handed out one at a time in rising order, so the
  // longest should come first. Called from one thread at a time. A small body that is trivially copyable is copied into
  // what a worker waits for: what it captures by value is there at once, what it captures by reference must be fetched
  // from the caller's cache, one dependent miss after the other. REQUIRES body not to change its captures.
  template <class Body>
  void For(int64_t count, Body&& body) {
    using Fn = std::remove_reference_t<Body>;
    if (threads_ == 1 || count <= 1) {
      for (int64_t i = 0; i < count; ++i) body(i, 0);
      return;
    }
    constexpr bool kCopied = std::is_trivially_copyable_v<std::remove_const_t<Fn>> && sizeof(Fn) <= kBodyBytes;
    Run(
        count, [](void* fn, int64_t index, int thread) { (*static_cast<Fn*>(fn))(index, thread); },
        const_cast<void*>(static_cast<const void*>(&body)), kCopied ? sizeof(Fn) : 0);
  }

  // body(Team&) on every thread of the pool at once; returns when all have returned. Called from one thread at a time.
  template <class Body>
  void Together(Body&& body) {
    For(threads_, [&](int64_t thread, int) {
      Team team = Join(static_cast<int>(thread));
      body(team);
      Leave(team);
    });
  }

 private:
  static constexpr size_t kBodyBytes = 128;
  using Call = void (*)(void*, int64_t, int);
  void Run(int64_t count, Call call, void* body, size_t copied_bytes);
  Team Join(int thread);
  void Leave(const Team& team);
  struct State;
  int threads_;
  std::unique_ptr<State> state_;
};

}  // namespace livequant
