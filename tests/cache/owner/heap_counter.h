// Counts calls of operator new in this program, so that a test can show that a call takes nothing from the heap.
#pragma once

#include <cstdint>

namespace livequant {
int64_t HeapAllocations();
}  // namespace livequant
