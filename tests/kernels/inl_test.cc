// kernels/cpu/exp-inl.h and tile_gemm-inl.h, compiled per ISA as their users compile them.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/cpu/targets.h"
#include "kernels/for_each_isa.h"
#include "support/property.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/inl_test.cc"
#include "hwy/foreach_target.h"
// After foreach_target.
#include "hwy/highway.h"
#include "kernels/cpu/exp-inl.h"
#include "kernels/cpu/tile_gemm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace livequant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// y[i] = e^x[i] for a multiple of 16 values.
void ExpAll(const float* x, float* y, size_t n) {
  const hn::CappedTag<float, 16> df;
  for (size_t i = 0; i < n; i += hn::Lanes(df)) hn::StoreU(Exp(df, hn::LoadU(df, x + i)), df, y + i);
}

void TileGemmTest(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t m, int64_t n,
                  int64_t k, bool accumulate) {
  TileGemm(a, lda, b, ldb, c, ldc, m, n, k, accumulate);
}

void TileDotsTest(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t m, int64_t n,
                  int64_t k) {
  TileDots(a, lda, b, ldb, c, ldc, m, n, k);
}

bool Fused() { return HWY_NATIVE_FMA != 0; }

}  // namespace HWY_NAMESPACE
}  // namespace livequant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace livequant {
namespace {
HWY_EXPORT(ExpAll);
HWY_EXPORT(TileGemmTest);
HWY_EXPORT(TileDotsTest);
HWY_EXPORT(Fused);

constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<float> ExpOf(std::vector<float> x) {
  const size_t n = x.size();
  x.resize((n + 15) / 16 * 16);
  std::vector<float> y(x.size());
  HWY_DYNAMIC_DISPATCH(ExpAll)(x.data(), y.data(), x.size());
  y.resize(n);
  return y;
}

// |y - e^x| in units in the last place of f32 at e^x.
double UlpError(float x, float y) {
  const double exact = std::exp(double{x});
  int exponent;
  std::frexp(exact, &exponent);
  return std::abs(double{y} - exact) / std::ldexp(1.0, std::max(exponent - 24, -149));
}

TEST(Exp, WithinTwoUlpWhereASoftmaxNeedsIt) {
  ForEachIsa([](const char* isa) {
    double worst = 0;
    std::vector<float> x;
    // Every 4001st f32 of [-87, -2^-30], then random points of the wider range.
    for (uint32_t bits = std::bit_cast<uint32_t>(-0x1p-30f); bits <= std::bit_cast<uint32_t>(-87.0f); bits += 4001) {
      x.push_back(std::bit_cast<float>(bits));
    }
    Rng rng(1);
    for (int i = 0; i < 100000; ++i) x.push_back(static_cast<float>(rng.Uniform(-87, 88.7)));
    const auto y = ExpOf(x);
    for (size_t i = 0; i < x.size(); ++i) worst = std::max(worst, UlpError(x[i], y[i]));
    EXPECT_LE(worst, 2.0) << isa;
    RecordProperty(std::string("worst_ulp_") + isa, std::to_string(worst));
  });
}

TEST(Exp, SubnormalResultsAreRoundedOnce) {
  ForEachIsa([](const char* isa) {
    Rng rng(2);
    std::vector<float> x(20000);
    for (float& v : x) v = static_cast<float>(rng.Uniform(-104.5, -87));
    const auto y = ExpOf(x);
    for (size_t i = 0; i < x.size(); ++i) ASSERT_LE(UlpError(x[i], y[i]), 2.0) << isa << " " << x[i];
  });
}

TEST(Exp, Ends) {
  ForEachIsa([](const char* isa) {
    SCOPED_TRACE(isa);
    const auto y = ExpOf({0.0f, -0.0f, -kInf, kInf, std::numeric_limits<float>::quiet_NaN(), -104, -1e30f, 89, 1e30f,
                          std::numeric_limits<float>::denorm_min()});
    EXPECT_EQ(y[0], 1.0f);
    EXPECT_EQ(y[1], 1.0f);
    EXPECT_EQ(y[2], 0.0f);
    EXPECT_EQ(y[3], kInf);
    EXPECT_TRUE(std::isnan(y[4]));
    EXPECT_EQ(y[5], 0.0f);
    EXPECT_EQ(y[6], 0.0f);
    EXPECT_EQ(y[7], kInf);
    EXPECT_EQ(y[8], kInf);
    EXPECT_EQ(y[9], 1.0f);
  });
}

TEST(Exp, SameBitsOnEveryIsaWithAFusedMultiplyAdd) {
  Rng rng(3);
  std::vector<float> x(40000);
  for (float& v : x) v = static_cast<float>(rng.Uniform(-110, 90));
  std::vector<float> seen[2];
  ForEachIsa([&](const char* isa) {
    auto& first = seen[HWY_DYNAMIC_DISPATCH(Fused)()];
    const auto y = ExpOf(x);
    if (first.empty()) first = y;
    EXPECT_EQ(std::memcmp(first.data(), y.data(), y.size() * sizeof(float)), 0) << isa;
  });
}

// rows x cols normal values at a stride: exactly the elements that exist, so that a sanitizer sees any read beyond
// them.
std::vector<float> Matrix(Rng& rng, int64_t rows, int64_t cols, int64_t stride) {
  std::vector<float> x(rows == 0 ? 0 : static_cast<size_t>((rows - 1) * stride + cols));
  for (float& v : x) v = static_cast<float>(rng.Normal());
  return x;
}

TEST(TileGemm, EqualsTheChainBitForBit) {
  ForEachIsa([](const char* isa) {
    SCOPED_TRACE(isa);
    const bool fused = HWY_DYNAMIC_DISPATCH(Fused)();
    ForAll(120, [&](Rng& rng) {
      const int64_t m = rng.Range(0, 66), k = rng.Range(0, 70);
      const int64_t n = rng.Chance(0.5) ? 16 * rng.Range(1, 9) : rng.Range(0, 150);
      const int64_t lda = k + rng.Range(0, 4), ldb = n + rng.Range(0, 4), ldc = n + rng.Range(0, 4);
      const bool accumulate = rng.Chance(0.5);
      const auto a = Matrix(rng, m, k, lda), b = Matrix(rng, k, n, ldb), c = Matrix(rng, m, n, ldc);
      auto out = c;
      HWY_DYNAMIC_DISPATCH(TileGemmTest)(a.data(), lda, b.data(), ldb, out.data(), ldc, m, n, k, accumulate);
      for (int64_t r = 0; r < m; ++r) {
        for (int64_t j = 0; j < ldc; ++j) {
          const auto at = static_cast<size_t>(r * ldc + j);
          if (at >= c.size()) continue;
          float expected = c[at];
          if (j < n) {
            expected = accumulate ? c[at] : 0.0f;
            for (int64_t i = 0; i < k; ++i) {
              const float x = a[static_cast<size_t>(r * lda + i)], w = b[static_cast<size_t>(i * ldb + j)];
              expected = fused ? std::fma(x, w, expected) : expected + x * w;
            }
          }
          ASSERT_EQ(std::bit_cast<uint32_t>(expected), std::bit_cast<uint32_t>(out[at]))
              << "m " << m << " n " << n << " k " << k << " at " << r << "," << j << " accumulate " << accumulate;
        }
      }
    });
  });
}

// The definition in tile_gemm-inl.h, in scalars.
float Dot(const std::vector<float>& x, const std::vector<float>& w, bool fused) {
  float chain[16] = {};
  for (size_t i = 0; i < x.size(); ++i)
    chain[i % 16] = i < 16 ? x[i] * w[i] : fused ? std::fma(x[i], w[i], chain[i % 16]) : chain[i % 16] + x[i] * w[i];
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) chain[i] += chain[i + half];
  return chain[0];
}

TEST(TileDots, EqualsSixteenChainsFoldedAsATreeBitForBit) {
  ForEachIsa([](const char* isa) {
    SCOPED_TRACE(isa);
    const bool fused = HWY_DYNAMIC_DISPATCH(Fused)();
    ForAll(120, [&](Rng& rng) {
      const int64_t m = rng.Range(0, 20), k = rng.Range(0, 200), n = 16 * rng.Range(0, 9);
      const int64_t lda = k + rng.Range(0, 4), ldb = n + rng.Range(0, 4), ldc = n + rng.Range(0, 4);
      const auto a = Matrix(rng, m, k, lda), b = Matrix(rng, k, n, ldb), c = Matrix(rng, m, n, ldc);
      auto out = c;
      HWY_DYNAMIC_DISPATCH(TileDotsTest)(a.data(), lda, b.data(), ldb, out.data(), ldc, m, n, k);
      for (int64_t r = 0; r < m; ++r) {
        for (int64_t j = 0; j < ldc; ++j) {
          const auto at = static_cast<size_t>(r * ldc + j);
          if (at >= c.size()) continue;
          float expected = c[at];
          if (j < n) {
            std::vector<float> x, w;
            for (int64_t i = 0; i < k; ++i) {
              x.push_back(a[static_cast<size_t>(r * lda + i)]);
              w.push_back(b[static_cast<size_t>(i * ldb + j)]);
            }
            expected = Dot(x, w, fused);
          }
          ASSERT_EQ(std::bit_cast<uint32_t>(expected), std::bit_cast<uint32_t>(out[at]))
              << "m " << m << " n " << n << " k " << k << " at " << r << "," << j;
        }
      }
    });
  });
}

}  // namespace
}  // namespace livequant
#endif  // HWY_ONCE
