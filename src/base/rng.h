// base/rng.h: seeded random numbers that are the same on every machine (the standard library's distributions are not).
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "base/check.h"

namespace livequant {

// One step of SplitMix64; also a good 64-bit hash of `x`.
constexpr uint64_t Mix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// xoshiro256**, seeded through SplitMix64. Not for secrets.
class Rng {
 public:
  explicit Rng(uint64_t seed) {
    for (uint64_t& s : s_) s = Mix64(seed += 0x9E3779B97F4A7C15u);
  }
  uint64_t Next() {
    const uint64_t result = Rotl(s_[1] * 5, 7) * 9, t = s_[1] << 17;
    s_[2] ^= s_[0];
    s_[3] ^= s_[1];
    s_[1] ^= s_[2];
    s_[0] ^= s_[3];
    s_[2] ^= t;
    s_[3] = Rotl(s_[3], 45);
    return result;
  }
  // Uniform in [lo, hi], both included.
  int64_t Range(int64_t lo, int64_t hi) {
    LQ_CHECK(lo <= hi);
    const uint64_t span = static_cast<uint64_t>(hi - lo) + 1;
    return span == 0 ? static_cast<int64_t>(Next()) : lo + static_cast<int64_t>(Next() % span);
  }
  // Uniform in [0, 1), 53 bits.
  double Uniform() { return static_cast<double>(Next() >> 11) * 0x1p-53; }
  double Uniform(double lo, double hi) { return lo + (hi - lo) * Uniform(); }
  // Standard normal (Box-Muller, one value a call).
  double Normal() {
    const double u = 1.0 - Uniform(), v = Uniform();
    return std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586 * v);
  }
  bool Chance(double p) { return Uniform() < p; }
  template <class T>
  T Pick(std::initializer_list<T> options) {
    return options.begin()[Range(0, static_cast<int64_t>(options.size()) - 1)];
  }

 private:
  static constexpr uint64_t Rotl(uint64_t x, int k) { return (x << k) | (x >> (64 - k)); }
  std::array<uint64_t, 4> s_;
};

}  // namespace livequant
