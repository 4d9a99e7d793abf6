// kernels/round_rows.h against RoundTo, bit for bit, on every ISA.
#include "kernels/round_rows.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/rng.h"
#include "kernels/for_each_isa.h"
#include "numeric/float_formats.h"

namespace livequant {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

float Rounded(DType t, float x) { return static_cast<float>(RoundTo(t, x)); }

// Every f16 and bf16 value, the midpoints between neighbours and both sides of each; those that round to something
// finite.
std::vector<float> EdgesOf(DType t) {
  std::vector<float> x;
  const auto add = [&](uint32_t bits) {
    const float v = std::bit_cast<float>(bits);
    if (std::isfinite(Rounded(t, v))) x.push_back(v);
  };
  for (uint32_t i = 0; i < 65536; ++i) {
    for (const uint32_t low : {0u, 1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) add(i << 16 | low);
    const float v = F16ToFloat(static_cast<uint16_t>(i));
    if (!std::isfinite(v)) continue;
    const float next = F16ToFloat(static_cast<uint16_t>(i + 1));
    const uint32_t middle = std::bit_cast<uint32_t>(std::isfinite(next) ? v / 2 + next / 2 : v);
    for (const uint32_t bits : {std::bit_cast<uint32_t>(v), middle - 1, middle, middle + 1}) add(bits);
  }
  return x;
}

TEST(RoundRowsTo, EqualsTheScalarDefinition) {
  for (const DType t : kTypes) {
    const std::vector<float> x = EdgesOf(t);
    ForEachIsa([&](const char* isa) {
      // An odd width: whole vectors and a rest.
      const int64_t cols = 77, rows = static_cast<int64_t>(x.size()) / cols;
      std::vector<float> y = x;
      ASSERT_TRUE(RoundRowsTo(t, {y.data(), rows, cols}));
      for (int64_t i = 0; i < rows * cols; ++i) {
        const auto at = static_cast<size_t>(i);
        ASSERT_EQ(std::bit_cast<uint32_t>(y[at]), std::bit_cast<uint32_t>(Rounded(t, x[at])))
            << isa << " " << DTypeName(t) << " " << std::hexfloat << x[at];
      }
    });
  }
}

TEST(NarrowValues, GivesTheBitsOfTheScalarDefinition) {
  for (const DType t : {DType::kF16, DType::kBF16}) {
    const std::vector<float> x = EdgesOf(t);
    ForEachIsa([&](const char* isa) {
      std::vector<uint16_t> out(x.size() + 1, 0xABCD);
      const auto count = static_cast<int64_t>(x.size()) / 77 * 77;  // whole vectors and a rest
      NarrowValues(t, x.data(), count, reinterpret_cast<std::byte*>(out.data()));
      for (size_t i = 0; i < static_cast<size_t>(count); ++i)
        ASSERT_EQ(out[i], t == DType::kF16 ? F16FromFloat(x[i]) : Bf16FromFloat(x[i]))
            << isa << " " << DTypeName(t) << " " << std::hexfloat << x[i];
      ASSERT_EQ(out[static_cast<size_t>(count)], 0xABCD) << isa;
    });
  }
}

TEST(RoundRowsTo, StopsAtTheRowThatDoesNotFit) {
  const auto nan = std::numeric_limits<float>::quiet_NaN();
  for (const DType t : kTypes)
    for (const float magnitude : {kInfinity, nan,
                                  t == DType::kF16    ? 65520.0f
                                  : t == DType::kBF16 ? 0x1.FFp127f
                                                      : kInfinity})
      for (const float bad : {magnitude, -magnitude})
        ForEachIsa([&](const char* isa) {
          for (int64_t c = 0; c < 37; ++c) {
            std::vector<float> x(4 * 40, 1.0009765f);
            x[static_cast<size_t>(0 * 40 + 38)] = bad;  // behind the row: a stride is no row
            x[static_cast<size_t>(2 * 40 + c)] = bad;
            std::vector<float> y = x;
            ASSERT_FALSE(RoundRowsTo(t, {y.data(), 4, 37, 40})) << isa << " " << c;
            for (size_t i = 0; i < x.size(); ++i) {
              const bool before = i < 80 && i % 40 < 37;
              ASSERT_EQ(std::bit_cast<uint32_t>(y[i]), std::bit_cast<uint32_t>(before ? Rounded(t, x[i]) : x[i]))
                  << isa << " " << i;
            }
          }
        });
}

}  // namespace
}  // namespace livequant
