// numeric/packed_bits.h: streams of b-bit codes. Code j is in bits [j*b, (j+1)*b) of the stream, little end first.
//
// Invariants: a stream of n codes has PackedBytes(n, b) bytes; unused high bits of its last byte are zero. A code
// touches at most two bytes. Any b in 1..8; the cache uses 2, 3, 4 and 8. Normative text: docs/formats/packing.md
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/check.h"

namespace livequant {

// Bytes of a stream of `count` codes of `bits` bits.
constexpr int64_t PackedBytes(int64_t count, int bits) { return (count * bits + 7) / 8; }

// Writes the low `bits` bits of `code`; other codes keep theirs.
constexpr void PutCode(std::byte* stream, int64_t j, int bits, uint32_t code) {
  const int64_t first_bit = j * bits;
  std::byte* p = stream + first_bit / 8;
  const int shift = static_cast<int>(first_bit % 8);
  const uint32_t mask = ((1u << bits) - 1) << shift, field = (code << shift) & mask;
  p[0] = (p[0] & ~static_cast<std::byte>(mask & 0xFF)) | static_cast<std::byte>(field & 0xFF);
  if (shift + bits > 8) {
    p[1] = (p[1] & ~static_cast<std::byte>(mask >> 8)) | static_cast<std::byte>(field >> 8);
  }
}

// Code j, unsigned.
constexpr uint32_t GetCode(const std::byte* stream, int64_t j, int bits) {
  const int64_t first_bit = j * bits;
  const std::byte* p = stream + first_bit / 8;
  const int shift = static_cast<int>(first_bit % 8);
  uint32_t field = std::to_integer<uint32_t>(p[0]);
  if (shift + bits > 8) field |= std::to_integer<uint32_t>(p[1]) << 8;
  return (field >> shift) & ((1u << bits) - 1);
}

// The value of a two's complement field of `bits` bits.
constexpr int32_t SignExtend(uint32_t code, int bits) {
  const uint32_t sign = 1u << (bits - 1);
  return static_cast<int32_t>(code ^ sign) - static_cast<int32_t>(sign);
}

// codes [n] -> out [PackedBytes(n, bits)]; only the low `bits` bits of each code count.
inline void PackCodes(std::span<const uint8_t> codes, int bits, std::span<std::byte> out) {
  LQ_CHECK(bits >= 1 && bits <= 8 && static_cast<int64_t>(out.size()) == PackedBytes(std::ssize(codes), bits));
  for (std::byte& b : out) b = std::byte{0};
  for (size_t j = 0; j < codes.size(); ++j) PutCode(out.data(), static_cast<int64_t>(j), bits, codes[j]);
}

// in [PackedBytes(n, bits)] -> codes [n], unsigned.
inline void UnpackCodes(std::span<const std::byte> in, int bits, std::span<uint8_t> codes) {
  LQ_CHECK(bits >= 1 && bits <= 8 && static_cast<int64_t>(in.size()) == PackedBytes(std::ssize(codes), bits));
  for (size_t j = 0; j < codes.size(); ++j) {
    codes[j] = static_cast<uint8_t>(GetCode(in.data(), static_cast<int64_t>(j), bits));
  }
}

}  // namespace livequant
