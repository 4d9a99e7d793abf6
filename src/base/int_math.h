// base/int_math.h: integer division that rounds by name.
#pragma once

#include <cstdint>

namespace livequant {

// value / by, rounded up. REQUIRES value >= 0, by > 0, and that value + by - 1 does not overflow.
constexpr int64_t CeilDiv(int64_t value, int64_t by) { return (value + by - 1) / by; }

}  // namespace livequant
