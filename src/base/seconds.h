// base/seconds.h: how long something took, for reports.
#pragma once

#include <chrono>

namespace livequant {

// Wall-clock seconds from `start` until now.
inline double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace livequant
