// kv/key_spike.h: keys that one scale a row serves badly: a channel far above the others takes the whole alphabet.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace livequant {

// A key row of one head whose largest channel is over kKeySpikeRatio times its median (of magnitudes; the upper one of
// an even count).
inline constexpr float kKeySpikeRatio = 30;
struct KeySpike {
  int layer = 0, head = 0;
  int64_t position = 0;
  int channel = 0;                // of the largest magnitude, the first of equals
  float largest = 0, median = 0;  // magnitudes
  // Infinite where the median is 0.
  float ratio() const { return largest / median; }
  // Which of two is reported: the larger ratio, then the lower layer, head and position.
  bool Beats(const KeySpike& other) const;
};

// Channel, largest and median of `row` if their ratio is over kKeySpikeRatio and at least `at_least` (another row's
// ratio, or 0); layer, head and position are the caller's. Two passes over the row, and the median by bisection
// only where there may be a spike. REQUIRES finite values; rows of one value have none.
std::optional<KeySpike> FindKeySpike(std::span<const float> row, float at_least);

}  // namespace livequant
