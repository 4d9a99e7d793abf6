// P13: every width, odd lengths, byte-exact vectors of methods.md 4.10, 8.2 and 9.6.
#include "numeric/packed_bits.h"

#include <gtest/gtest.h>

#include <vector>

#include "support/property.h"

namespace livequant {
namespace {

std::vector<int> Packed(std::vector<uint8_t> codes, int bits) {
  std::vector<std::byte> out(static_cast<size_t>(PackedBytes(std::ssize(codes), bits)), std::byte{0xAA});
  PackCodes(codes, bits, out);
  std::vector<int> bytes;
  for (std::byte b : out) bytes.push_back(std::to_integer<int>(b));
  return bytes;
}

TEST(PackedBits, PublishedVectors) {
  EXPECT_EQ(Packed({0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3}, 2), (std::vector<int>{0xE4, 0xE4, 0xE4, 0xE4}));
  EXPECT_EQ(Packed({3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 2), (std::vector<int>{3, 0, 0, 0}));
  EXPECT_EQ(Packed({1, 3, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 2), (std::vector<int>{0x2D, 0, 0, 0}));
  EXPECT_EQ(Packed({0, 1, 2, 3, 4, 5, 6, 7}, 4), (std::vector<int>{0x10, 0x32, 0x54, 0x76}));
  EXPECT_EQ(Packed({15, 0, 8, 0, 0, 0, 0, 1}, 4), (std::vector<int>{0x0F, 0x08, 0x00, 0x10}));
  EXPECT_EQ(Packed({1, 2, 3, 4, 5, 6, 7, 8}, 4), (std::vector<int>{0x21, 0x43, 0x65, 0x87}));
  EXPECT_EQ(Packed({0, 1, 2, 3, 4, 5, 6, 7}, 3), (std::vector<int>{0x88, 0xC6, 0xFA}));
  EXPECT_EQ(Packed({4, static_cast<uint8_t>(-7), 2, 5}, 4), (std::vector<int>{0x94, 0x52}));
  EXPECT_EQ(Packed({0, 255, 128, 64}, 8), (std::vector<int>{0, 255, 128, 64}));
}

TEST(PackedBits, EveryWidthAndOddLengthRoundTrips) {
  ForAll(2000, [](Rng& rng) {
    const int bits = rng.Pick({2, 3, 4, 5, 6, 7, 8});
    std::vector<uint8_t> codes(static_cast<size_t>(rng.Range(0, 67)));
    for (uint8_t& c : codes) c = static_cast<uint8_t>(rng.Range(0, (1 << bits) - 1));
    std::vector<std::byte> stream(static_cast<size_t>(PackedBytes(std::ssize(codes), bits)), std::byte{0xFF});
    PackCodes(codes, bits, stream);
    std::vector<uint8_t> back(codes.size());
    UnpackCodes(stream, bits, back);
    EXPECT_EQ(back, codes);
    const int64_t used = std::ssize(codes) * bits;
    if (used % 8 != 0) {
      EXPECT_EQ(std::to_integer<int>(stream.back()) >> (used % 8), 0);
    }
    if (codes.empty()) return;
    const auto j = static_cast<size_t>(rng.Range(0, std::ssize(codes) - 1));  // rewriting one code leaves the others
    codes[j] = static_cast<uint8_t>(rng.Range(0, (1 << bits) - 1));
    PutCode(stream.data(), static_cast<int64_t>(j), bits, codes[j]);
    UnpackCodes(stream, bits, back);
    EXPECT_EQ(back, codes);
  });
}

TEST(PackedBits, FieldsAreTwosComplement) {
  for (int bits = 2; bits <= 8; ++bits) {
    for (int v = -(1 << (bits - 1)); v < 1 << (bits - 1); ++v) {
      std::byte stream[2] = {};
      PutCode(stream, 0, bits, static_cast<uint32_t>(v));
      EXPECT_EQ(SignExtend(GetCode(stream, 0, bits), bits), v) << bits;
    }
  }
}

}  // namespace
}  // namespace livequant
