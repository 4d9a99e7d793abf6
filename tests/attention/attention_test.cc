// The generic path against the definition, and the definition against formulas that share nothing with it.
#include "attention/attention.h"

#include <cmath>
#include <limits>

#include "attention/pager.h"
#include "support/effort.h"

namespace livequant {
namespace {

constexpr double kNegInf = -std::numeric_limits<double>::infinity();

void CheckAgainstReference(const TestCache& cache, int threads = 1) {
  ExpectNear(cache.Generic(threads), cache.Reference(), cache.Tolerance());
}

TEST(Attention, GenericMatchesTheReferenceForEveryCodingHeadSizeAndRatio) {
  for (int dim : {32, 64, 80, 96, 128, 256})
    for (int group : {1, 2, 3, 4, 5, 7, 8, 16})
      for (const TestFormat& format : TestFormats(dim)) {
        SCOPED_TRACE(testing::Message() << format.name << " dim " << dim << " group " << group);
        Rng rng(static_cast<uint64_t>(dim * 100 + group));
        const int kv_heads = group > 4 ? 1 : 2;
        const LayerSchema layer = MakeLayer(format, kv_heads, dim);
        const int len = static_cast<int>(rng.Range(1, dim * group > 1024 ? 200 : 520));
        const int count = static_cast<int>(rng.Range(1, std::min(len, 12)));
        const TestCache cache(layer, kStepwise, nullptr, {MakeSequence(rng, layer, len, count)}, group * kv_heads,
                              MakeQueries(rng, int64_t{count} * group * kv_heads * dim), rng);
        CheckAgainstReference(cache);
        if (testing::Test::HasFailure()) return;
      }
}

TEST(Attention, EveryResidueOfPageAndGroup) {
  for (const TestFormat& format : TestFormats(32)) {
    const LayerSchema layer = MakeLayer(format, 1, 32);
    for (int len = 1; len <= 2 * 128 + 2 * 32 + 3; len += kInstrumented ? 3 : 1) {  // 3: still each residue of 32
      SCOPED_TRACE(testing::Message() << format.name << " len " << len);
      Rng rng(static_cast<uint64_t>(len));
      const TestCache cache(layer, kStepwise, nullptr, {MakeSequence(rng, layer, len, 1)}, 1, MakeQueries(rng, 32),
                            rng);
      CheckAgainstReference(cache);
      if (testing::Test::HasFailure()) return;
    }
  }
}

// Random steps: batches, drafts, chunks, scars, rows coded ahead, windows, pinned rows, contracts, pre-RoPE keys.
TEST(Attention, GenericMatchesTheReferenceOnRandomSteps) {
  int mixed_tiles = 0, scars = 0, windows = 0;
  ForAll(Effort(300, 8), [&](Rng& rng) {
    const int dim = rng.Pick({32, 64, 80, 6});
    std::vector<TestFormat> formats = TestFormats(dim == 6 ? 32 : dim);
    if (dim == 6) formats.resize(3);  // any head size: native codings have no group to divide it
    const TestFormat format = formats[static_cast<size_t>(rng.Range(0, static_cast<int64_t>(formats.size()) - 1))];
    const int kv_heads = static_cast<int>(rng.Range(1, 2)), group = static_cast<int>(rng.Range(1, 3));
    LayerSchema layer = MakeLayer(format, kv_heads, dim);
    const bool by_group = format.k.axis == ScaleAxis::kChannel;
    if (rng.Chance(0.3)) layer.window = static_cast<int>(rng.Range(1, 400)), ++windows;
    if (rng.Chance(0.3)) layer.pinned_rows = static_cast<int>(rng.Range(1, 150));
    const bool pre = rng.Chance(0.4);
    RopeConfig rope{.dims = rng.Chance(0.3) ? dim / 2 / 2 * 2 : dim,
                    .pairing = rng.Chance(0.5) ? RopePairing::kHalfSplit : RopePairing::kInterleaved};
    const RopeTable table(rope, dim, 1200);
    if (pre) layer.k_stage = RopeStage::kPre;
    const int read_step = rng.Pick({kStepwise, kStepwise, 64, 512, kPromptReadStep});
    std::vector<TestSequence> sequences;
    int rows = 0;
    for (int64_t n = rng.Range(1, 3); n > 0; --n) {
      const int len = static_cast<int>(rng.Range(1, 900));
      const int count =
          static_cast<int>(rng.Chance(0.5) ? rng.Range(1, std::min(len, 8)) : rng.Range(1, std::min(len, 200)));
      TestSequence s = MakeSequence(rng, layer, len, count);
      rows += count;
      for (int t : {kK, kV}) {
        if (rng.Chance(0.4)) s.ahead[t] = static_cast<int>(rng.Range(0, 130));
        for (int64_t i = rng.Chance(0.4) ? rng.Range(1, 3) : 0; i > 0; --i)
          s.scars[t].push_back(static_cast<int>(rng.Range(0, len))), ++scars;
      }
      if (rng.Chance(0.3)) s.exact_scars.push_back(static_cast<int>(rng.Range(0, len)));
      sequences.push_back(std::move(s));
    }
    SCOPED_TRACE(testing::Message() << format.name << " dim " << dim << " window " << layer.window << " pinned "
                                    << layer.pinned_rows << " read_step " << read_step << " pre " << pre);
    const TestCache cache(layer, read_step, &table, std::move(sequences), group * kv_heads,
                          MakeQueries(rng, int64_t{rows} * group * kv_heads * dim), rng);
    for (int i = 0; i < cache.view().sequences; ++i)
      mixed_tiles += by_group && cache.view().seq[i].staged[kV] % 128 != 0;
    CheckAgainstReference(cache, static_cast<int>(rng.Range(1, 3)));
  });
  EXPECT_GT(mixed_tiles, Effort(20, 8));
  EXPECT_GT(scars, Effort(50, 8));
  EXPECT_GT(windows, Effort(50, 8));
}

// P6: leaves and nodes merged are the joint softmax: histories of more than a node, first leaves hidden from some
// queries of a block or from all of them, weights concentrated in one segment.
TEST(Attention, MergedLeavesAndNodesAreTheJointSoftmax) {
  for (int window : {0, 1, 100, 257, 2100})
    for (int len : {255, 256, 257, 2047, 2048, 2049, 4500}) {
      SCOPED_TRACE(testing::Message() << "window " << window << " len " << len);
      Rng rng(static_cast<uint64_t>(window + len));
      const LayerSchema layer = MakeLayer(TestFormats(32)[1], 1, 32, window);
      const int count = static_cast<int>(rng.Range(1, 130));
      TestSequence s = MakeSequence(rng, layer, len, count);
      for (int j = 0; j < len; ++j)  // one leaf in three holds nearly all weight
        if (j / kLeafRows % 3 == 1)
          for (int c = 0; c < 32; ++c) s.k[static_cast<size_t>(j * 32 + c)] *= 6;
      const TestCache cache(layer, kStepwise, nullptr, {std::move(s)}, 1, MakeQueries(rng, int64_t{count} * 32), rng);
      CheckAgainstReference(cache, 2);
      if (testing::Test::HasFailure()) return;
    }
}

// P6 in double: any number of segments, empty and fully masked ones among them, in any association from the left.
TEST(Attention, SegmentedMergeIsTheJointSoftmaxInDouble) {
  struct State {
    double m = kNegInf, l = 0, o = 0;
  };
  const auto merge = [](const State& a, const State& b) {
    if (b.l == 0) return a;
    if (a.l == 0) return b;
    const double m = std::max(a.m, b.m), wa = std::exp(a.m - m), wb = std::exp(b.m - m);
    return State{m, a.l * wa + b.l * wb, a.o * wa + b.o * wb};
  };
  ForAll(Effort(500, 8), [&](Rng& rng) {
    State joint, folded;
    std::vector<std::pair<double, double>> all;
    for (int64_t segments = rng.Range(1, 9); segments > 0; --segments) {
      std::vector<std::pair<double, double>> rows(static_cast<size_t>(rng.Range(0, 20)));
      const bool masked = rng.Chance(0.2);
      for (auto& [s, v] : rows) s = masked ? kNegInf : rng.Normal() * 20, v = rng.Normal();
      const auto state = [](const std::vector<std::pair<double, double>>& of) {
        State x;
        for (const auto& [s, v] : of) x.m = std::max(x.m, s);
        if (x.m == kNegInf) return State{};
        for (const auto& [s, v] : of) x.l += std::exp(s - x.m), x.o += std::exp(s - x.m) * v;
        return x;
      };
      folded = merge(folded, state(rows));
      all.insert(all.end(), rows.begin(), rows.end());
      joint = state(all);
    }
    EXPECT_EQ(folded.m, joint.m);
    if (joint.l > 0) {
      EXPECT_NEAR(folded.o / folded.l, joint.o / joint.l, 1e-12);
    }
  });
}

// P5: the scales and zeros folded into query, score and weight, from the page's own codes, against decoded rows.
struct Folded {
  const BlockFormat& f;
  const std::byte* block;

  int Code(int row, int c) const {
    const int bits = f.coding.bits, at = c * bits;
    const int byte = std::to_integer<int>(block[row * f.block.row_bytes + at / 8]);
    const int code = (byte >> (at % 8)) & ((1 << bits) - 1);
    return f.coding.zero == ZeroConvention::kSymmetric && code >= 1 << (bits - 1) ? code - (1 << bits) : code;
  }
  double Qparam(int64_t offset, int64_t index) const {
    uint16_t h;
    std::memcpy(&h, block + offset + 2 * index, 2);
    const int exponent = (h >> 10) & 31, fraction = h & 1023;
    const double magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    return h >> 15 ? -magnitude : magnitude;
  }
  int64_t Index(int row, int c) const {
    return f.coding.axis == ScaleAxis::kRow ? int64_t{row} * f.block.groups_per_row + c / f.coding.group
                                            : int64_t{row / f.coding.group} * f.head_dim + c;
  }
  double Scale(int row, int c) const { return Qparam(f.block.scales_offset, Index(row, c)); }
  // What is added to code * scale.
  double Shift(int row, int c) const {
    if (f.coding.zero == ZeroConvention::kSymmetric) return 0;
    const double z = Qparam(f.block.zeros_offset, Index(row, c));
    return f.coding.zero == ZeroConvention::kMinimum ? z : -z * Scale(row, c);
  }
};

TEST(Attention, FoldedScalesEqualDecodedRows) {
  ForAll(120, [](Rng& rng) {
    const int dim = 64, len = static_cast<int>(rng.Range(1, 4)) * 32;
    const ScaleAxis axis = rng.Pick({ScaleAxis::kRow, ScaleAxis::kChannel});
    const ZeroConvention zero =
        rng.Pick({ZeroConvention::kSymmetric, ZeroConvention::kMinimum, ZeroConvention::kFloatOffset});
    const int bits = zero == ZeroConvention::kFloatOffset ? rng.Pick({4, 8}) : rng.Pick({2, 4, 8});
    // K per row (scale outside the dot) and per channel (inside); V per row, folded into the weight, whole or in
    // groups.
    TestFormat format{"",
                      axis == ScaleAxis::kChannel ? Integer(bits, axis, 32, ZeroConvention::kMinimum)
                                                  : Integer(bits, axis, dim, zero),
                      Integer(bits, ScaleAxis::kRow, rng.Pick({16, 32, 64}), zero)};
    if (axis == ScaleAxis::kChannel) format.k_closure = {0, 32};
    const LayerSchema layer = MakeLayer(format, 1, dim);
    TestSequence s = MakeSequence(rng, layer, len, 1);
    s.ahead[kK] = 1000;
    const TestCache cache(layer, kStepwise, nullptr, {std::move(s)}, 1, MakeQueries(rng, dim), rng);
    const float* q = cache.q().data();
    const CacheView& view = cache.view();
    // The last row may be exact (it closes with its own step only if the closure says so): take coded rows of this
    // query.
    const auto rows_k = view.coded_rows(0, kK, len - 1), rows_v = view.coded_rows(0, kV, len - 1);
    ASSERT_EQ(rows_v, len);
    std::vector<double> p(static_cast<size_t>(len)), o(static_cast<size_t>(dim));
    const Folded k{cache.plan().format[kK][kCoded],
                   rows_k > 0 ? view.head_block(kK, kCoded, view.entry(0, kK, kCoded, 0).page, 0) : nullptr};
    const Folded v{cache.plan().format[kV][kCoded], view.head_block(kV, kCoded, view.entry(0, kV, kCoded, 0).page, 0)};
    const double scale = 1 / std::sqrt(double(dim));
    double top = kNegInf, sum = 0, q_sum = 0;
    for (int c = 0; c < dim; ++c) q_sum += q[c];
    for (int j = 0; j < len; ++j) {
      double dot = 0, shift = 0;
      if (j >= rows_k) {
        for (int c = 0; c < dim; ++c) dot += double{q[c]} * cache.sequence(0).k[static_cast<size_t>(j * dim + c)];
      } else if (axis == ScaleAxis::kChannel) {
        for (int c = 0; c < dim; ++c) dot += q[c] * k.Scale(j, c) * k.Code(j, c), shift += q[c] * k.Shift(j, c);
      } else {
        for (int c = 0; c < dim; ++c) dot += double{q[c]} * k.Code(j, c);
        dot *= k.Scale(j, 0), shift = q_sum * k.Shift(j, 0);
      }
      p[static_cast<size_t>(j)] = scale * (dot + shift);
      top = std::max(top, p[static_cast<size_t>(j)]);
    }
    for (double& w : p) sum += w = std::exp(w - top);
    const int group = v.f.coding.group;
    for (int g = 0; g < dim; g += group) {
      double shift = 0;
      for (int j = 0; j < len; ++j) {
        const double w = p[static_cast<size_t>(j)] / sum, folded = w * v.Scale(j, g);
        shift += w * v.Shift(j, g);
        for (int c = g; c < g + group; ++c) o[static_cast<size_t>(c)] += folded * v.Code(j, c);
      }
      for (int c = g; c < g + group; ++c) o[static_cast<size_t>(c)] += shift;
    }
    const std::vector<float> decoded = cache.Reference();
    double biggest = 0;
    for (double x : o) biggest = std::max(biggest, std::fabs(x));
    for (int c = 0; c < dim; ++c)
      EXPECT_NEAR(decoded[static_cast<size_t>(c)], o[static_cast<size_t>(c)], 1e-6 * biggest) << c;
  });
}

// P7: rotating a decoded key at its position equals un-rotating the query for it, for both pairings, with pinned rows
// post-RoPE.
TEST(Attention, RotatedKeyEqualsUnrotatedQuery) {
  ForAll(60, [](Rng& rng) {
    const int dim = 32, len = static_cast<int>(rng.Range(1, 300)), pinned = static_cast<int>(rng.Range(0, 5));
    const RopeConfig config{
        .theta = 1e4, .dims = 0, .pairing = rng.Pick({RopePairing::kHalfSplit, RopePairing::kInterleaved})};
    const RopeTable table(config, dim, 300);
    LayerSchema layer = MakeLayer(TestFormats(dim)[0], 1, dim, 0, pinned);
    layer.k_stage = RopeStage::kPre;
    const TestCache cache(layer, kStepwise, &table, {MakeSequence(rng, layer, len, 1)}, 1, MakeQueries(rng, dim), rng);
    const bool half_split = config.pairing == RopePairing::kHalfSplit;
    const TestSequence& s = cache.sequence(0);
    std::vector<double> p(static_cast<size_t>(len)), o(static_cast<size_t>(dim));
    double top = kNegInf, sum = 0;
    for (int j = 0; j < len; ++j) {
      double dot = 0;
      for (int i = 0; i < dim / 2; ++i) {
        const int x = half_split ? i : 2 * i, y = half_split ? i + dim / 2 : 2 * i + 1;
        const double angle = j < pinned ? 0 : j * std::pow(1e4, -2.0 * i / dim);
        const double qx = cache.q()[static_cast<size_t>(x)], qy = cache.q()[static_cast<size_t>(y)];
        dot += (std::cos(angle) * qx + std::sin(angle) * qy) * s.k[static_cast<size_t>(j * dim + x)];
        dot += (std::cos(angle) * qy - std::sin(angle) * qx) * s.k[static_cast<size_t>(j * dim + y)];
      }
      p[static_cast<size_t>(j)] = dot / std::sqrt(double(dim));
      top = std::max(top, p[static_cast<size_t>(j)]);
    }
    for (double& w : p) sum += w = std::exp(w - top);
    double biggest = 0;
    for (int j = 0; j < len; ++j)
      for (int c = 0; c < dim; ++c)
        o[static_cast<size_t>(c)] += p[static_cast<size_t>(j)] / sum * s.v[static_cast<size_t>(j * dim + c)];
    for (float x : s.v) biggest = std::max(biggest, std::fabs(double{x}));
    const std::vector<float> got = cache.Reference();
    for (int c = 0; c < dim; ++c) EXPECT_NEAR(got[static_cast<size_t>(c)], o[static_cast<size_t>(c)], 2e-5 * biggest);
    CheckAgainstReference(cache);
  });
}

// P14 for attention: rows that the cache accepts, however odd, give finite and exact answers.
TEST(Attention, ZeroConstantAndHugeRows) {
  for (const TestFormat& format : TestFormats(64))
    for (float level : {0.0f, 3.0f, 3e4f, 1e-7f}) {
      SCOPED_TRACE(testing::Message() << format.name << " level " << level);
      if (format.k.kind == CodeKind::kScaledFp && level > 100) continue;  // saturates by its definition
      Rng rng(3);
      const LayerSchema layer = MakeLayer(format, 1, 64);
      TestSequence s = MakeSequence(rng, layer, 300, 2);
      std::fill(s.k.begin(), s.k.end(), level);
      std::fill(s.v.begin(), s.v.end(), level);
      const TestCache cache(layer, kStepwise, nullptr, {std::move(s)}, 2, MakeQueries(rng, 2 * 2 * 64), rng);
      const std::vector<float> got = cache.Generic(), want = cache.Reference();
      // All keys are equal up to their form, so weights are nearly equal and the answer is the level as the forms hold
      // it.
      ExpectNear(got, want, cache.Tolerance());
    }
}

// The dead slots of the test cache do hold NaN: a kernel that dropped them by a zero weight would fail every test
// above.
TEST(Attention, ZeroWeightInsteadOfSelectWouldBeSeen) {
  for (const TestFormat& format : TestFormats(64)) {
    SCOPED_TRACE(format.name);
    Rng rng(5);
    const LayerSchema layer = MakeLayer(format, 1, 64);
    const TestCache cache(layer, kStepwise, nullptr, {MakeSequence(rng, layer, 300, 1)}, 1, MakeQueries(rng, 64), rng);
    const CacheView& view = cache.view();
    const int coded = view.seq[0].staged[kV];
    ASSERT_NE(coded % 128, 0);
    const int last = view.seq[0].entries[kV][kCoded] - 1;
    std::vector<float> page(128 * 64);
    const BlockFormat& f = cache.plan().format[kV][kCoded];
    DecodeRowsReference(f, view.head_block(kV, kCoded, view.entry(0, kV, kCoded, last).page, 0), 0,
                        MatrixView<float>(page.data(), 128, 64));
    float planted = 0;
    for (int j = 0; j < 128; ++j) planted += (j < coded % 128 ? 1.0f : 0.0f) * page[static_cast<size_t>(j * 64)];
    EXPECT_TRUE(std::isnan(planted));
    for (float x : cache.Generic()) EXPECT_TRUE(std::isfinite(x));
  }
}

}  // namespace
}  // namespace livequant
