// kernels/ops.h against double precision, on every ISA; the RoPE vectors of methods.md 5.12 and property P7.
#include "kernels/ops.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/for_each_isa.h"
#include "kernels/matmul.h"
#include "support/property.h"
#include "support/values.h"

namespace livequant {
namespace {

constexpr double kUlp = 0x1p-24;  // half an ulp of 1.0f: one rounding
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<uint32_t> Bits(const std::vector<float>& x) {
  std::vector<uint32_t> bits(x.size());
  std::memcpy(bits.data(), x.data(), x.size() * sizeof(float));
  return bits;
}

// Bits of make() must be the same on every ISA (of one arithmetic, if `arithmetic`).
template <class Make>
void ExpectSameBitsOnEveryIsa(bool arithmetic, Make&& make) {
  std::vector<std::string> kinds;
  std::vector<std::vector<uint32_t>> seen;
  ForEachIsa([&](const char* isa) {
    const std::string kind = arithmetic ? MatMulArithmetic() : "any";
    const auto bits = Bits(make());
    for (size_t i = 0; i < kinds.size(); ++i) {
      if (kinds[i] == kind) {
        EXPECT_EQ(seen[i], bits) << isa;
        return;
      }
    }
    kinds.push_back(kind);
    seen.push_back(bits);
  });
}

TEST(RmsNorm, MatchesTheVectorOfMethods14) {
  const std::vector<float> x = {1, -2, 0.5f, 3}, gamma = {1, 0.5f, 2, 1.5f};
  const double y[] = {0.52981287, -0.52981287, 0.52981287, 2.38415791};
  ForEachIsa([&](const char* isa) {
    std::vector<float> out(4);
    RmsNormRows({x.data(), 1, 4}, gamma.data(), 1e-6f, {out.data(), 1, 4});
    for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(out[i], y[i], 3e-7) << isa;
  });
}

TEST(RmsNorm, StaysWithinItsBoundInPlaceAndWithStrides) {
  ForEachIsa([](const char* isa) {
    SCOPED_TRACE(isa);
    ForAll(60, [](Rng& rng) {
      const int64_t rows = rng.Range(1, 5), cols = rng.Range(1, 700), stride = cols + rng.Range(0, 3);
      const auto x = Normals(rng, rows * stride, std::exp(rng.Uniform(-8, 8)));
      const auto gamma = Normals(rng, cols);
      const float eps = rng.Pick({1e-5f, 1e-6f, 0.1f});
      auto y = x;
      RmsNormRows({y.data(), rows, cols, stride}, gamma.data(), eps, {y.data(), rows, cols, stride});
      for (int64_t r = 0; r < rows; ++r) {
        double squares = 0;
        for (int64_t c = 0; c < cols; ++c) squares += std::pow(double{x[static_cast<size_t>(r * stride + c)]}, 2);
        const double rms = std::sqrt(squares / static_cast<double>(cols) + double{eps});
        for (int64_t c = 0; c < cols; ++c) {
          const auto i = static_cast<size_t>(r * stride + c);
          const double expected = double{x[i]} / rms * double{gamma[static_cast<size_t>(c)]};
          EXPECT_LE(std::abs(y[i] - expected),
                    std::abs(expected) * (static_cast<double>(cols) / 16 + 10) * kUlp + 1e-44);
        }
        for (int64_t c = cols; c < stride; ++c) {
          const auto i = static_cast<size_t>(r * stride + c);
          EXPECT_EQ(x[i], y[i]);
        }
      }
    });
  });
}

TEST(RmsNorm, SameBitsOnEveryIsaAndInAnyCompany) {
  Rng rng(5);
  for (const int64_t cols : {1, 15, 16, 17, 256, 1000}) {
    const auto x = Normals(rng, 3 * cols), gamma = Normals(rng, cols);
    const auto run = [&](int64_t first, int64_t rows) {
      std::vector<float> y(static_cast<size_t>(rows * cols));
      RmsNormRows({x.data() + first * cols, rows, cols}, gamma.data(), 1e-5f, {y.data(), rows, cols});
      return y;
    };
    ExpectSameBitsOnEveryIsa(false, [&] { return run(0, 3); });
    const auto all = Bits(run(0, 3)), alone = Bits(run(2, 1));
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(), all.begin() + 2 * cols));
  }
}

TEST(SiluMul, StaysWithinItsBound) {
  ForEachIsa([](const char* isa) {
    SCOPED_TRACE(isa);
    ForAll(60, [](Rng& rng) {
      const int64_t rows = rng.Range(1, 4), cols = rng.Range(1, 300), stride = cols + rng.Range(0, 3);
      auto g = Normals(rng, rows * stride, rng.Pick({0.1, 1.0, 15.0}));
      const auto u = Normals(rng, rows * stride);
      for (float& v : g) v = std::fmin(std::fmax(v, -87.0f), 87.0f);
      std::vector<float> y(g.size(), -3.0f);
      SiluMulRows({g.data(), rows, cols, stride}, {u.data(), rows, cols, stride}, {y.data(), rows, cols, stride});
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < stride; ++c) {
          const auto i = static_cast<size_t>(r * stride + c);
          if (c >= cols) {
            EXPECT_EQ(y[i], -3.0f);
            continue;
          }
          const double expected = double{g[i]} / (1 + std::exp(-double{g[i]})) * double{u[i]};
          EXPECT_LE(std::abs(y[i] - expected), std::abs(expected) * 6 * kUlp + 1e-37) << g[i];
        }
      }
    });
  });
}

TEST(SiluMul, EndsOfTheRange) {
  const std::vector<float> g = {-kInf, -200, -95, 0, 95, 200, kInf, kNan}, u(8, 2.0f);
  ForEachIsa([&](const char* isa) {
    SCOPED_TRACE(isa);
    std::vector<float> y(8);
    SiluMulRows({g.data(), 1, 8}, {u.data(), 1, 8}, {y.data(), 1, 8});
    EXPECT_TRUE(std::isnan(y[0]));  // -inf / inf, as the formula says
    EXPECT_EQ(y[1], 0);
    EXPECT_NEAR(y[2], 0, 1e-36);
    EXPECT_EQ(y[3], 0);
    EXPECT_EQ(y[4], 190);
    EXPECT_EQ(y[5], 400);
    EXPECT_EQ(y[6], kInf);
    EXPECT_TRUE(std::isnan(y[7]));
  });
}

TEST(SiluMul, SameBitsOnEveryIsaWithAFusedMultiplyAdd) {
  Rng rng(6);
  const auto g = Normals(rng, 999, 6), u = Normals(rng, 999);
  ExpectSameBitsOnEveryIsa(true, [&] {
    std::vector<float> y(999);
    SiluMulRows({g.data(), 3, 333}, {u.data(), 3, 333}, {y.data(), 3, 333});
    return y;
  });
}

TEST(AddRows, AddsEveryElementOnce) {
  ForEachIsa([](const char* isa) {
    SCOPED_TRACE(isa);
    ForAll(30, [](Rng& rng) {
      const int64_t rows = rng.Range(1, 4), cols = rng.Range(1, 70), xs = cols + rng.Range(0, 3),
                    ys = cols + rng.Range(0, 3);
      const auto x = Normals(rng, rows * xs), y = Normals(rng, rows * ys);
      auto out = y;
      AddRows({x.data(), rows, cols, xs}, {out.data(), rows, cols, ys});
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < ys; ++c) {
          const float old = y[static_cast<size_t>(r * ys + c)];
          EXPECT_EQ(out[static_cast<size_t>(r * ys + c)], c < cols ? old + x[static_cast<size_t>(r * xs + c)] : old);
        }
      }
    });
  });
}

TEST(Rope, MatchesTheVectorsOfMethods512) {
  const RopeTable table({.theta = 10000.0, .dims = 0, .pairing = RopePairing::kHalfSplit}, 4, 16);
  ForEachIsa([&](const char* isa) {
    SCOPED_TRACE(isa);
    std::vector<float> k = {1, 0.5f, -0.25f, 2}, q = {0.2f, -1, 0.7f, 0.4f};
    const std::vector<int32_t> three = {3}, seven = {7};
    RopeRows({k.data(), 1, 4}, 1, 4, three, table);
    const double r3[] = {-.9547125, .4397840, .3886181, 2.0140978};
    for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(k[i], r3[i], 3e-7);
    RopeRows({q.data(), 1, 4}, 1, 4, seven, table);
    double dot = 0;
    for (size_t i = 0; i < 4; ++i) dot += double{q[i]} * double{k[i]};
    EXPECT_NEAR(dot, .7630442777, 5e-7);  // rotate the key ...
    const RopeTable difference({.theta = 10000.0, .dims = 0, .pairing = RopePairing::kHalfSplit}, 4, 16);
    std::vector<float> raw_k = {1, 0.5f, -0.25f, 2}, back = {0.2f, -1, 0.7f, 0.4f};
    const std::vector<int32_t> four = {4};
    RopeRows({back.data(), 1, 4}, 1, 4, four, difference);
    dot = 0;
    for (size_t i = 0; i < 4; ++i) dot += double{back[i]} * double{raw_k[i]};
    EXPECT_NEAR(dot, .7630442777, 5e-7);  // ... or the query by 7 - 3 and the key not at all
  });
}

// P7: <R_m q, R_n k> == <R_(m-n) q, k>, both pairings, partial dims; channels from dims on stay.
TEST(Rope, RotatingTheKeyEqualsUnrotatingTheQuery) {
  ForEachIsa([](const char* isa) {
    SCOPED_TRACE(isa);
    ForAll(60, [](Rng& rng) {
      const int head_dim = static_cast<int>(2 * rng.Range(1, 80)),
                dims = static_cast<int>(2 * rng.Range(1, head_dim / 2));
      const auto pairing = rng.Pick({RopePairing::kHalfSplit, RopePairing::kInterleaved});
      const RopeTable table({.theta = rng.Pick({10000.0, 500000.0}), .dims = dims, .pairing = pairing}, head_dim, 600);
      const auto q = Normals(rng, head_dim), k = Normals(rng, head_dim);
      const auto n = static_cast<int32_t>(rng.Range(0, 299)), m = n + static_cast<int32_t>(rng.Range(0, 299));
      const auto rotated = [&](std::vector<float> x, int32_t position) {
        RopeRows({x.data(), 1, head_dim}, 1, head_dim, std::vector<int32_t>{position}, table);
        return x;
      };
      const auto qm = rotated(q, m), kn = rotated(k, n), qd = rotated(q, m - n);
      double both = 0, back = 0, size = 0;
      for (size_t i = 0; i < q.size(); ++i) {
        both += double{qm[i]} * double{kn[i]};
        back += double{qd[i]} * double{k[i]};
        size += double{q[i]} * double{q[i]} + double{k[i]} * double{k[i]};
      }
      EXPECT_NEAR(both, back, size * 1e-6);
      for (size_t i = static_cast<size_t>(dims); i < q.size(); ++i) EXPECT_EQ(qm[i], q[i]);
    });
  });
}

TEST(Rope, EveryHeadOfEveryRowAgainstTheFormula) {
  ForEachIsa([](const char* isa) {
    SCOPED_TRACE(isa);
    ForAll(30, [](Rng& rng) {
      const int heads = static_cast<int>(rng.Range(1, 4)), head_dim = static_cast<int>(2 * rng.Range(1, 70));
      const int dims = rng.Chance(0.5) ? 0 : static_cast<int>(2 * rng.Range(1, head_dim / 2));
      const int used = dims == 0 ? head_dim : dims;
      const bool half = rng.Chance(0.5);
      const RopeConfig config{
          .theta = 10000.0, .dims = dims, .pairing = half ? RopePairing::kHalfSplit : RopePairing::kInterleaved};
      const RopeTable table(config, head_dim, 100);
      EXPECT_EQ(table.dims(), used);
      const int64_t rows = rng.Range(1, 5), cols = heads * head_dim, stride = cols + rng.Range(0, 3);
      std::vector<int32_t> positions(static_cast<size_t>(rows));
      for (int32_t& p : positions) p = static_cast<int32_t>(rng.Range(0, 99));
      const auto x = Normals(rng, rows * stride);
      auto y = x;
      RopeRows({y.data(), rows, cols, stride}, heads, head_dim, positions, table);
      for (int64_t r = 0; r < rows; ++r) {
        for (int h = 0; h < heads; ++h) {
          const float* in = x.data() + r * stride + h * head_dim;
          const float* out = y.data() + r * stride + h * head_dim;
          for (int i = 0; i < used / 2; ++i) {
            const double angle = positions[static_cast<size_t>(r)] * std::pow(10000.0, -2.0 * i / used);
            const int a = half ? i : 2 * i, b = half ? i + used / 2 : 2 * i + 1;
            const double size = std::hypot(double{in[a]}, double{in[b]});
            EXPECT_NEAR(out[a], in[a] * std::cos(angle) - in[b] * std::sin(angle), 4 * kUlp * size + 1e-30);
            EXPECT_NEAR(out[b], in[b] * std::cos(angle) + in[a] * std::sin(angle), 4 * kUlp * size + 1e-30);
          }
          for (int i = used; i < head_dim; ++i) EXPECT_EQ(in[i], out[i]);
        }
      }
    });
  });
}

TEST(Rope, SameBitsOnEveryIsa) {
  Rng rng(9);
  for (const auto pairing : {RopePairing::kHalfSplit, RopePairing::kInterleaved}) {
    const RopeTable table({.theta = 10000.0, .dims = 60, .pairing = pairing}, 64, 50);
    const auto x = Normals(rng, 2 * 128);
    ExpectSameBitsOnEveryIsa(false, [&] {
      auto y = x;
      RopeRows({y.data(), 2, 128}, 2, 64, std::vector<int32_t>{49, 7}, table);
      return y;
    });
  }
}

TEST(LogSumExp, StaysWithinItsBound) {
  ForEachIsa([](const char* isa) {
    SCOPED_TRACE(isa);
    ForAll(60, [](Rng& rng) {
      const auto x = Normals(rng, rng.Range(1, 5000), rng.Pick({0.1, 3.0, 40.0}));
      double largest = -1e300, sum = 0;
      for (const float v : x) largest = std::max(largest, double{v});
      for (const float v : x) sum += std::exp(double{v} - largest);
      EXPECT_NEAR(LogSumExp(x), largest + std::log(sum), 0x1p-22);
    });
  });
}

TEST(LogSumExp, Ends) {
  EXPECT_EQ(LogSumExp({}), -std::numeric_limits<double>::infinity());
  const std::vector<float> none(3, -kInf), one = {0, kInf, 1}, nan = {1, kNan, kInf}, some = {-kInf, 2};
  EXPECT_EQ(LogSumExp(none), -std::numeric_limits<double>::infinity());
  EXPECT_EQ(LogSumExp(one), std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isnan(LogSumExp(nan)));
  EXPECT_EQ(LogSumExp(some), 2.0);
}

}  // namespace
}  // namespace livequant
