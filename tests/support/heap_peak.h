// tests/support/heap_peak.h: the most bytes that operator new of this program ever held. Link heap_peak.cc.
#pragma once

#include <cstdint>

namespace livequant {
// Starts anew from what is held now.
void ResetHeapPeak();
// Most bytes held since, beyond what was held then.
int64_t HeapPeak();
}  // namespace livequant
