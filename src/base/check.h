// base/check.h: a broken invariant ends the process. User input never reaches a check: it gets a Status.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace livequant::internal {
[[noreturn]] inline void CheckFailed(const char* file, int line, const char* what) {
  std::fprintf(stderr, "%s:%d: invariant broken: %s\n", file, line, what);
  std::abort();
}
}  // namespace livequant::internal

// Stays on in release builds: going on with wrong rows is worse than stopping.
#define LQ_CHECK(condition)                                                        \
  do {                                                                             \
    if (!(condition)) [[unlikely]]                                                 \
      ::livequant::internal::CheckFailed(__FILE__, __LINE__, #condition);          \
  } while (false)
