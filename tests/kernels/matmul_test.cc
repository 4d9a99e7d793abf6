// kernels/matmul.h against a scalar chain (bits) and an f64 sum (error bound), on every ISA that this machine has.
#include "kernels/matmul.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "kernels/for_each_isa.h"
#include "support/property.h"
#include "support/values.h"

namespace livequant {
namespace {

// A matrix of stored weights, their exact values and their packed form.
struct Weights {
  DType dtype;
  int64_t n, k;
  std::vector<std::byte> stored;
  std::vector<float> value;  // [n][k]
};

float F16Value(uint16_t h) {
  const int exponent = (h >> 10) & 31, fraction = h & 1023;
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                        : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  return (h & 0x8000) != 0 ? -magnitude : magnitude;
}

Weights MakeWeights(Rng& rng, DType dtype, int64_t n, int64_t k) {
  Weights w{dtype, n, k, {}, {}};
  w.stored.resize(static_cast<size_t>(n * k * DTypeBytes(dtype)));
  w.value.resize(static_cast<size_t>(n * k));
  for (size_t i = 0; i < w.value.size(); ++i) {
    const auto x = static_cast<float>(rng.Normal());
    if (dtype == DType::kF32) {
      w.value[i] = x;
      std::memcpy(w.stored.data() + 4 * i, &x, 4);
      continue;
    }
    uint16_t bits;
    if (dtype == DType::kBF16) {
      bits = static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
      w.value[i] = std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
    } else {  // any finite f16, subnormals included
      bits = static_cast<uint16_t>(rng.Next() & 0xBFFF);
      w.value[i] = F16Value(bits);
    }
    std::memcpy(w.stored.data() + 2 * i, &bits, 2);
  }
  return w;
}

PackedMatrix Packed(const Weights& w) {
  auto packed = PackedMatrix::Pack(w.dtype, w.stored.data(), w.n, w.k);
  LQ_CHECK(packed.ok());
  return *std::move(packed);
}

// The definition of y[m][n].
float Chain(const float* x, const float* w, int64_t k, bool fused) {
  float acc = 0;
  for (int64_t i = 0; i < k; ++i) acc = fused ? std::fma(x[i], w[i], acc) : acc + x[i] * w[i];
  return acc;
}

TEST(MatMul, EqualsTheChainBitForBitOnEveryIsaThreadCountAndStride) {
  ThreadPool one(1), two(2), three(3);
  ForEachIsa([&](const char* isa) {
    const bool fused = std::string(MatMulArithmetic()) == "f32_fma_chain";
    SCOPED_TRACE(isa);
    ForAll(40, [&](Rng& rng) {
      const DType dtype = rng.Pick({DType::kF32, DType::kF16, DType::kBF16});
      const int64_t m = rng.Range(1, 40), n = rng.Range(1, 200);
      const int64_t k = rng.Chance(0.2) ? rng.Range(500, 1100) : rng.Range(1, 150);
      const int64_t x_stride = k + rng.Range(0, 5), y_stride = n + rng.Range(0, 5);
      const Weights w = MakeWeights(rng, dtype, n, k);
      const PackedMatrix packed = Packed(w);
      const auto x = Normals(rng, m * x_stride + 1);
      std::vector<float> y(static_cast<size_t>(m * y_stride + 1), -7.0f);
      ThreadPool& pool = *rng.Pick({&one, &two, &three});
      const int shift = rng.Chance(0.5);  // not aligned to more than a float
      MatMul({x.data() + shift, m, k, x_stride}, packed, {y.data() + shift, m, n, y_stride}, pool);
      for (int64_t r = 0; r < m; ++r) {
        for (int64_t c = 0; c < n; ++c) {
          const float expected = Chain(x.data() + shift + r * x_stride, w.value.data() + c * k, k, fused);
          ASSERT_EQ(std::bit_cast<uint32_t>(expected),
                    std::bit_cast<uint32_t>(y[static_cast<size_t>(shift + r * y_stride + c)]))
              << DTypeName(dtype) << " m " << m << " n " << n << " k " << k << " at " << r << "," << c;
        }
        for (int64_t c = n; c < y_stride && r + 1 < m; ++c) {  // between rows nothing is written
          ASSERT_EQ(y[static_cast<size_t>(shift + r * y_stride + c)], -7.0f);
        }
      }
    });
  });
}

TEST(MatMul, RowBitsDoNotDependOnMNeighboursThreadsOrIsa) {
  Rng rng(11);
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{352, 256}, {130, 1031}}) {
      const Weights w = MakeWeights(rng, dtype, n, k);
      const PackedMatrix packed = Packed(w);
      const auto row = Normals(rng, k);
      std::vector<std::vector<uint32_t>> seen;  // one per kind of arithmetic
      std::vector<std::string> kinds;
      ForEachIsa([&](const char* isa) {
        for (int64_t m = 1; m <= 64; ++m) {
          const int threads = static_cast<int>(m % 3) + 1;
          ThreadPool pool(threads);
          auto x = Normals(rng, m * k);
          const int64_t at = rng.Range(0, m - 1);
          std::memcpy(x.data() + at * k, row.data(), static_cast<size_t>(k) * sizeof(float));
          std::vector<float> y(static_cast<size_t>(m * n));
          MatMul({x.data(), m, k}, packed, {y.data(), m, n}, pool);
          std::vector<uint32_t> bits(static_cast<size_t>(n));
          std::memcpy(bits.data(), y.data() + at * n, bits.size() * sizeof(uint32_t));
          const std::string kind = MatMulArithmetic();
          size_t i = 0;
          while (i < kinds.size() && kinds[i] != kind) ++i;
          if (i == kinds.size()) {
            kinds.push_back(kind);
            seen.push_back(bits);
          }
          ASSERT_EQ(seen[i], bits) << isa << " m " << m << " row " << at << " threads " << threads;
        }
      });
    }
  }
}

TEST(MatMul, ErrorAgainstF64StaysWithinTheChainsBound) {
  ThreadPool pool(2);
  ForEachIsa([&](const char* isa) {
    SCOPED_TRACE(isa);
    ForAll(20, [&](Rng& rng) {
      const int64_t m = rng.Range(1, 16), n = rng.Range(1, 100), k = rng.Range(1, 600);
      const Weights w = MakeWeights(rng, rng.Pick({DType::kF32, DType::kF16, DType::kBF16}), n, k);
      const auto x = Normals(rng, m * k);
      std::vector<float> y(static_cast<size_t>(m * n));
      MatMul({x.data(), m, k}, Packed(w), {y.data(), m, n}, pool);
      for (int64_t r = 0; r < m; ++r) {
        for (int64_t c = 0; c < n; ++c) {
          double sum = 0, size = 0;
          for (int64_t i = 0; i < k; ++i) {
            const double term =
                double{x[static_cast<size_t>(r * k + i)]} * double{w.value[static_cast<size_t>(c * k + i)]};
            sum += term;
            size += std::abs(term);
          }
          // k roundings of a sum, and one of each product where it is not fused, each at most 2^-24 of the terms so
          // far.
          EXPECT_LE(std::abs(y[static_cast<size_t>(r * n + c)] - sum), size * static_cast<double>(k + 2) * 0x1p-24);
        }
      }
    });
  });
}

TEST(MatMul, NanAndInfStayInTheirRowAndColumn) {
  ThreadPool pool(1);
  Rng rng(3);
  const int64_t m = 5, n = 40, k = 20;
  Weights w = MakeWeights(rng, DType::kF32, n, k);
  const float inf = std::numeric_limits<float>::infinity();
  std::memcpy(w.stored.data() + (33 * k + 4) * 4, &inf, 4);
  auto x = Normals(rng, m * k);
  x[2 * k + 7] = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> y(m * n);
  MatMul({x.data(), m, k}, Packed(w), {y.data(), m, n}, pool);
  for (int64_t r = 0; r < m; ++r) {
    for (int64_t c = 0; c < n; ++c) {
      const float v = y[static_cast<size_t>(r * n + c)];
      if (r == 2) {
        EXPECT_TRUE(std::isnan(v));
      } else {
        EXPECT_EQ(std::isinf(v), c == 33);
        EXPECT_FALSE(std::isnan(v));
      }
    }
  }
}

TEST(PackedMatrix, CountsPaddedBytesAndRefusesWhatItCannotHold) {
  const std::vector<float> zeros(33 * 3);
  const auto packed = PackedMatrix::Pack(DType::kF32, zeros.data(), 33, 3);
  ASSERT_TRUE(packed.ok());
  EXPECT_EQ((*packed).bytes(), 2 * 32 * 3 * 4);
  EXPECT_EQ((*packed).n(), 33);
  EXPECT_EQ((*packed).k(), 3);
  EXPECT_EQ(PackedMatrix::Pack(DType::kFp8E4M3, zeros.data(), 1, 1).status().code(), Code::kUnsupported);
  EXPECT_EQ(PackedMatrix::Pack(DType::kF32, zeros.data(), 0, 4).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(PackedMatrix::Pack(DType::kF32, zeros.data(), 4, -1).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(PackedMatrix::Pack(DType::kF32, zeros.data(), int64_t{1} << 40, int64_t{1} << 40).status().code(),
            Code::kOutOfRange);
}

TEST(MatMul, NoRowsAreNoWork) {
  ThreadPool pool(2);
  const float w[2] = {1, 2};
  const auto packed = PackedMatrix::Pack(DType::kF32, w, 2, 1);
  ASSERT_TRUE(packed.ok());
  MatMul({nullptr, 0, 1}, *packed, {nullptr, 0, 2}, pool);
}

}  // namespace
}  // namespace livequant
