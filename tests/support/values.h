// support/values.h: values that tests make, and how they compare them bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "base/rng.h"

namespace livequant {

// `count` normal values of standard deviation `size`.
inline std::vector<float> Normals(Rng& rng, int64_t count, double size = 1) {
  std::vector<float> x(static_cast<size_t>(count));
  for (float& v : x) v = static_cast<float>(rng.Normal() * size);
  return x;
}

// `count` ids of [lowest, vocab).
inline std::vector<int32_t> RandomTokens(Rng& rng, int64_t count, int64_t vocab, int64_t lowest = 0) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) ids.push_back(static_cast<int32_t>(rng.Range(lowest, vocab - 1)));
  return ids;
}

inline bool SameBits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

// The bytes of a text, as the parsers of files take them.
inline std::span<const std::byte> Bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace livequant
