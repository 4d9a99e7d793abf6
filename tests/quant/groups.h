// tests/quant/groups.h: groups of values over the whole range that a quantizer claims to take.
#pragma once

#include <cmath>
#include <vector>

#include "numeric/float_formats.h"
#include "quant/group.h"
#include "support/property.h"

namespace livequant {

inline Group AsGroup(const std::vector<float>& x) { return {x.data(), std::ssize(x), 1}; }

// 1 to 128 values: magnitudes 2^-30 to 2^18, sometimes far from zero, one-sided, repeated, zero, or constant.
inline std::vector<float> AnyGroup(Rng& rng) {
  std::vector<float> x(static_cast<size_t>(rng.Range(1, 128)));
  const double spread = std::ldexp(1.0, static_cast<int>(rng.Range(-30, 18)));
  const double offset = rng.Chance(0.5) ? 0 : spread * std::ldexp(rng.Normal(), static_cast<int>(rng.Range(-3, 9)));
  const bool one_sided = rng.Chance(0.2), f16 = rng.Chance(0.5), constant = rng.Chance(0.1);
  for (float& v : x) {
    double value = rng.Chance(0.1) ? 0 : rng.Normal() * spread * (rng.Chance(0.02) ? 30 : 1);
    if (one_sided) value = std::fabs(value);
    value += offset;
    v = static_cast<float>(f16 && std::fabs(value) < 65504 ? RoundToF16(value) : value);
    if (constant) v = x[0];
  }
  return x;
}

}  // namespace livequant
