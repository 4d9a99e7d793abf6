// kv/key_spike.cc: see key_spike.h. Magnitudes are compared as integers, which orders them the same and vectorizes;
// nothing is allocated.
#include "kv/key_spike.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <tuple>

#include "base/check.h"

namespace livequant {
namespace {

int32_t Magnitude(float x) { return std::bit_cast<int32_t>(x) & 0x7FFFFFFF; }

}  // namespace

bool KeySpike::Beats(const KeySpike& other) const {
  if (ratio() != other.ratio()) return ratio() > other.ratio();
  return std::tie(layer, head, position) < std::tie(other.layer, other.head, other.position);
}

std::optional<KeySpike> FindKeySpike(std::span<const float> row, float at_least) {
  const size_t n = row.size(), middle = n / 2;
  LQ_CHECK(n > 0);
  int32_t largest = 0;
  for (const float x : row) largest = std::max(largest, Magnitude(x));
  const float top = std::bit_cast<float>(largest);
  // No median above this can make a spike; rounding is settled below.
  const int32_t most = Magnitude(std::nextafter(top / std::max(kKeySpikeRatio, at_least), top));
  const auto at_most = [&](int32_t limit) {
    size_t count = 0;
    for (const float x : row) count += Magnitude(x) <= limit;
    return count;
  };
  if (at_most(most) <= middle || largest == 0) return {};

  // The median is the least magnitude that more than half of the row does not pass; `most` is one such.
  int32_t low = 0, high = most;
  while (low < high) {
    const int32_t mid = low + (high - low) / 2;
    if (at_most(mid) > middle)
      high = mid;
    else
      low = mid + 1;
  }
  KeySpike spike;
  while (Magnitude(row[static_cast<size_t>(spike.channel)]) != largest) ++spike.channel;
  spike.largest = top;
  spike.median = std::bit_cast<float>(low);
  if (!(spike.ratio() > kKeySpikeRatio && spike.ratio() >= at_least)) return {};
  return spike;
}

}  // namespace livequant
