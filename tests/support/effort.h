// support/effort.h: how much of a long test an instrumented build runs. The plain build runs all of it; a sanitizer looks
// at each access of a smaller sample, many times slower.
#pragma once

namespace livequant {

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define LIVEQUANT_ASAN 1
#elif __has_feature(thread_sanitizer)
#define LIVEQUANT_TSAN 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define LIVEQUANT_ASAN 1
#elif defined(__SANITIZE_THREAD__)
#define LIVEQUANT_TSAN 1
#endif

#ifdef LIVEQUANT_TSAN
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif
#ifdef LIVEQUANT_ASAN
inline constexpr bool kInstrumented = true;
#else
inline constexpr bool kInstrumented = kThreadSanitizer;
#endif

// `full` in a plain build, else a `part`th of it, at least `least`.
constexpr int Effort(int full, int part, int least = 1) {
  if (!kInstrumented) return full;
  return full / part > least ? full / part : least;
}

}  // namespace livequant
