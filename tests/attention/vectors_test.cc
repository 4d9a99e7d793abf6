// The numbers of methods.md 3: folded INT4 attention, softmax Jacobian, per-channel against per-token keys, the merge
// check.
#include "attention/attention.h"

#include <cmath>

#include "attention/pager.h"

namespace livequant {
namespace {

const TensorCoding kInt4Row2 = Integer(4, ScaleAxis::kRow, 2, ZeroConvention::kSymmetric);

// One sequence of rows of `dim` channels, one head; the last row is the query's own. K, V given row by row.
TestCache OneQuery(const TestFormat& format, int dim, std::vector<float> k, std::vector<float> v, std::vector<float> q,
                   int window = 0, DType exact = DType::kF32) {
  LayerSchema layer = MakeLayer(format, 1, dim, window);
  layer.exact_dtype = exact;
  TestSequence s;
  s.len = static_cast<int>(k.size()) / dim, s.count = 1, s.k = std::move(k), s.v = std::move(v);
  Rng rng(1);
  return TestCache(layer, kStepwise, nullptr, {std::move(s)}, 1, std::move(q), rng);
}

void ExpectBoth(const TestCache& cache, const std::vector<double>& want, double reference_tolerance) {
  const std::vector<float> reference = cache.Reference(), generic = cache.Generic();
  for (size_t c = 0; c < want.size(); ++c) {
    EXPECT_NEAR(reference[c], want[c], reference_tolerance) << c;
    EXPECT_NEAR(generic[c], want[c], reference_tolerance + 1e-6) << c;
  }
}

TEST(Vectors, FoldedInt4) {
  const std::vector<float> k{.8f, .2f, -.4f, 1, .1f, -.6f}, v{1, 0, .5f, 2, -1, .25f};
  // q is quantized too: codes 127, -64 with the f32 scale 0x3C010204.
  const uint32_t bits = 0x3C010204u;
  float s_q;
  std::memcpy(&s_q, &bits, 4);
  const TestCache coded = OneQuery({"int4", kInt4Row2, kInt4Row2}, 2, k, v, {127 * s_q, -64 * s_q});
  ExpectBoth(coded, {0.174352092, 0.408045232}, 3e-8);
  // The scores, by values that read the weights: one-hot V is too wide for d = 2, so p is solved from two outputs and
  // sum 1.
  const std::vector<double> p{0.469589456, 0.149682754, 0.380727790};
  ExpectBoth(OneQuery({"", kInt4Row2, Native(DType::kF32)}, 2, k, {1, 0, 0, 1, 0, 0}, {127 * s_q, -64 * s_q}),
             {p[0], p[1]}, 3e-8);

  const TestFormat exact{"f32", Native(DType::kF32), Native(DType::kF32)};
  ExpectBoth(OneQuery(exact, 2, k, v, {1, -.5f}), {0.165351145, 0.397568078}, 3e-8);
  ExpectBoth(OneQuery(exact, 2, k, {1, 0, 0, 1, 0, 0}, {1, -.5f}), {0.469164487, 0.151348114}, 3e-8);
  // What the values' own rounding adds under the quantized weights: coded V minus exact V.
  const std::vector<float> o = coded.Reference();
  const std::vector<float> of_exact_v =
      OneQuery({"", kInt4Row2, Native(DType::kF32)}, 2, k, v, {127 * s_q, -64 * s_q}).Reference();
  EXPECT_NEAR(double{o[0]} - of_exact_v[0], 0.010649048, 1e-7);
  EXPECT_NEAR(double{o[1]} - of_exact_v[1], 0.013497776, 1e-7);
}

TEST(Vectors, SoftmaxAndItsJacobian) {
  const TestFormat exact{"f32", Native(DType::kF32), Native(DType::kF32)};
  const auto weights = [&](std::vector<float> scores) {
    std::vector<float> k;
    for (float s : scores) k.insert(k.end(), {s, 0, 0});
    TestCache cache = OneQuery(exact, 3, k, {1, 0, 0, 0, 1, 0, 0, 0, 1}, {1, 0, 0});
    cache.scale = 1;
    ExpectNear(cache.Generic(), cache.Reference(), 1e-6);
    return cache.Reference();
  };
  const std::vector<float> p = weights({2, 1, -3}), moved = weights({2.1f, .9f, -2.9f});
  const double want_p[] = {0.727475157, 0.267623154, 0.004901689}, want_dp[] = {0.037090492, -0.037340406, 0.000249914};
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(p[i], want_p[i], 1e-7);
    EXPECT_NEAR(double{moved[i]} - p[i], want_dp[i], 3e-7);
  }
}

TEST(Vectors, PerTokenKeysLoseTheSmallChannel) {
  const std::vector<float> k{8, .1f, 7.5f, -.2f, -8, .15f};
  const auto logits = [&](const TensorCoding& coding, const std::vector<float>& want) {
    // Differences of logits are logs of ratios of weights; V = one-hot in three channels needs d = 3, so read them
    // pairwise.
    for (size_t other : {0u, 1u}) {
      std::vector<float> v(6, 0.0f);
      v[other * 2] = 1;  // channel 0 of row `other`; channel 1 of the last row
      v[2 * 2 + 1] = 1;
      TestCache cache = OneQuery({"", coding, Native(DType::kF32)}, 2, k, v, {.0625f, -.03125f});
      cache.scale = 1;
      const std::vector<float> p = cache.Reference();
      EXPECT_NEAR(std::log(double{p[0]} / p[1]), (double{want[other]} - want[2]) / 16, 2e-5);
      ExpectNear(cache.Generic(), p, 1e-6);
    }
  };
  logits(kInt4Row2, {7.9980f, 7.4990f, -7.9980f});
  logits(Native(DType::kF32), {7.95f, 7.6f, -8.075f});
}

TEST(Vectors, MergeCheck) {
  // Scores 1, 2 end leaf 0, score 3 starts leaf 1; a window of 3 hides all else.
  const TestFormat exact{"f32", Native(DType::kF32), Native(DType::kF32)};
  std::vector<float> k(257 * 3, 50.0f), v(257 * 3, 1000.0f);
  for (int i = 0; i < 3; ++i)
    for (int c = 0; c < 3; ++c) {
      k[static_cast<size_t>((254 + i) * 3 + c)] = c == 0 ? static_cast<float>(1 + i) : 0.0f;
      v[static_cast<size_t>((254 + i) * 3 + c)] = c == i ? 1.0f : 0.0f;
    }
  TestCache cache = OneQuery(exact, 3, k, v, {1, 0, 0}, /*window=*/3);
  cache.scale = 1;
  ExpectBoth(cache, {0.09003057, 0.24472847, 0.66524096}, 2e-8);
}

}  // namespace
}  // namespace livequant
