#include "support/heap_peak.h"

#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<int64_t> held = 0, peak = 0, base = 0;

void* Take(size_t size) {
  void* p = std::malloc(size == 0 ? 1 : size);
  if (p == nullptr) throw std::bad_alloc();
  const int64_t now = held += static_cast<int64_t>(malloc_usable_size(p));
  for (int64_t seen = peak; now > seen && !peak.compare_exchange_weak(seen, now);) {
  }
  return p;
}
void Give(void* p) {
  if (p != nullptr) held -= static_cast<int64_t>(malloc_usable_size(p));
  std::free(p);
}
}  // namespace

namespace livequant {
void ResetHeapPeak() {
  base = held.load();
  peak = held.load();
}
int64_t HeapPeak() { return peak - base; }
}  // namespace livequant

void* operator new(size_t size) { return Take(size); }
void operator delete(void* p) noexcept { Give(p); }
void operator delete(void* p, size_t) noexcept { Give(p); }
