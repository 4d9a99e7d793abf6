// base/thread_pool.h: one pool, fork-join loops, no allocation per loop.
//
// Invariants: a loop returns after every index has run; index i runs once; the caller's thread works too, so a pool of
// one thread runs everything inline. Loops do not nest. Workers spin for about 50 us after a loop, then park.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace livequant {

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

 private:
  static constexpr size_t kBodyBytes = 128;
  using Call = void (*)(void*, int64_t, int);
  void Run(int64_t count, Call call, void* body, size_t copied_bytes);
  struct State;
  int threads_;
  std::unique_ptr<State> state_;
};

}  // namespace livequant
