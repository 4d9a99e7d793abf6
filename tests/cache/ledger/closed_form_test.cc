// tests/cache/ledger/closed_form_test.cc: the closed form against an enumeration that walks rows, groups and pages one
// by one and shares no arithmetic with it (P17).
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "cache/ledger/forms.h"
#include "cache/ledger/ledger.h"
#include "support/property.h"

namespace livequant {
namespace {

int64_t AlignUp64(int64_t n) {
  while (n % 64 != 0) ++n;
  return n;
}

// Appends `tokens` rows one at a time and keeps, for each layer and tensor, the form of each row and the pages that
// hold one.
LedgerBytes Enumerate(const CacheSchema& schema, int64_t tokens) {
  LedgerBytes sum;
  int64_t allocated = 0;
  for (const LayerSchema& layer : schema.layers)
    for (const bool key : {true, false}) {
      const TensorCoding& c = key ? layer.k : layer.v;
      const Closure& closure = key ? layer.k_closure : layer.v_closure;
      int64_t coded_to = 0;
      for (int64_t n = 1; n <= tokens; ++n) {  // close what is lag + 1 or more rows old, whole steps at a time
        while (n - (coded_to + closure.step) >= closure.lag && coded_to + closure.step <= n) coded_to += closure.step;
      }
      std::set<int64_t> coded_pages, exact_pages, groups;
      int64_t coded = 0, exact = 0, pinned = 0;
      for (int64_t row = 0; row < tokens; ++row) {
        if (row < layer.pinned_rows) {
          ++pinned;
          exact_pages.insert(row / layer.exact_page_rows);
        } else if (layer.window != 0 && tokens - row > layer.window) {
          continue;  // seen by no query again
        } else if (row < coded_to) {
          ++coded;
          coded_pages.insert(row / layer.coded_page_rows);
          if (c.axis == ScaleAxis::kChannel) groups.insert(row / c.group);
        } else {
          ++exact;
          exact_pages.insert(row / layer.exact_page_rows);
        }
      }
      const int64_t d = layer.head_dim, q = c.qparam == DType::kF32 ? 4 : 2;
      const int64_t planes = !c.has_qparams() ? 0 : c.zero == ZeroConvention::kSymmetric ? 1 : 2;
      const int64_t row_qparams = c.axis == ScaleAxis::kRow ? d / c.group * planes * q : 0;
      const int64_t e = layer.exact_dtype == DType::kF32 ? 4 : 2;
      const int64_t h = layer.num_kv_heads;
      sum.codes += h * coded * d * c.bits / 8;
      sum.qparams += h * (coded * row_qparams + static_cast<int64_t>(groups.size()) * d * planes * q);
      sum.residual += h * exact * d * e;
      sum.exact_prefix += h * pinned * d * e;
      if (c.axis == ScaleAxis::kTensor) sum.artifact += 4;

      // One head block of a page, plane by plane.
      const int64_t p = layer.coded_page_rows;
      const int64_t codes = p * d * c.bits / 8;
      const int64_t plane = planes == 0 ? 0 : c.axis == ScaleAxis::kRow ? p * (d / c.group) * q : p / c.group * d * q;
      const int64_t coded_block = AlignUp64(codes) + planes * AlignUp64(plane);
      const int64_t exact_codes = layer.exact_page_rows * d * e, exact_block = AlignUp64(exact_codes);
      const int64_t nc = static_cast<int64_t>(coded_pages.size()), ne = static_cast<int64_t>(exact_pages.size());
      sum.pages += h * (nc * (coded_block - codes - planes * plane) + ne * (exact_block - exact_codes));
      allocated += h * (nc * coded_block + ne * exact_block);
    }
  sum.slack = allocated - sum.total();
  return sum;
}

void ExpectSame(const LedgerBytes& a, const LedgerBytes& b) {
  EXPECT_EQ(a.codes, b.codes);
  EXPECT_EQ(a.qparams, b.qparams);
  EXPECT_EQ(a.residual, b.residual);
  EXPECT_EQ(a.sparse, b.sparse);
  EXPECT_EQ(a.exact_prefix, b.exact_prefix);
  EXPECT_EQ(a.pages, b.pages);
  EXPECT_EQ(a.slack, b.slack);
  EXPECT_EQ(a.artifact, b.artifact);
}

// Pages of a sequence that only grew, without window or pinned rows, as cache_core.md 8 states them.
int64_t PoolBytesOfInvariant8(const CacheSchema& schema, int64_t tokens) {
  const std::vector<LayerClass> classes = LayerClasses(schema);
  std::vector<int64_t> pages;
  for (const LayerClass& cls : classes)
    for (int t = 0; t < 2; ++t) {
      const int64_t f = cls.closure[t].frontier(tokens);
      pages.push_back((f + cls.coded_page_rows - 1) / cls.coded_page_rows);
      pages.push_back(tokens > f ? (tokens + cls.exact_page_rows - 1) / cls.exact_page_rows - f / cls.exact_page_rows
                                 : 0);
    }
  return PoolBytes(schema, pages);
}

TEST(ClosedForm, EqualsTheEnumerationForEveryFormAndLengthUpToThreeR) {
  for (const std::string& name : FormNames()) {
    SCOPED_TRACE(name);
    const CacheSchema schema = Forms(name, 2, 2, 64);
    for (int64_t tokens = 0; tokens <= 3 * 128; ++tokens) {
      SCOPED_TRACE(tokens);
      const LedgerBytes form = Ledger(schema, tokens);
      ExpectSame(form, Enumerate(schema, tokens));
      EXPECT_EQ(PoolBytesOfInvariant8(schema, tokens), form.total() + form.slack);
      if (HasFailure()) return;
    }
  }
}

// Any two forms, geometries with padding (groups of 128 rows with head size 4, 20, ...), windows, pinned rows, page
// sizes.
LayerSchema AnyLayer(Rng& rng) {
  const int dim = rng.Pick({4, 20, 32, 64, 80});
  LayerSchema layer;
  layer.num_kv_heads = static_cast<int>(rng.Range(1, 3));
  layer.head_dim = dim;
  layer.coded_page_rows = rng.Pick({32, 128, 256});
  layer.exact_page_rows = rng.Pick({8, 32, 64});
  layer.exact_dtype = rng.Pick({DType::kF16, DType::kF32, DType::kBF16});
  layer.pinned_rows = rng.Chance(0.5) ? 0 : static_cast<int>(rng.Range(1, 150));
  for (const bool key : {true, false}) {
    TensorCoding& c = key ? layer.k : layer.v;
    Closure& closure = key ? layer.k_closure : layer.v_closure;
    closure.step = rng.Pick({1, 3, 32, 96, 128});
    closure.lag = static_cast<int>(rng.Range(closure.step == 1 ? -1 : 0, 130));
    switch (rng.Range(0, 3)) {
      case 0:
        c = {.dtype = DType::kF32, .bits = 32};
        break;
      case 1:
        c = {.kind = CodeKind::kScaledFp, .dtype = DType::kFp8E5M2, .bits = 8, .axis = ScaleAxis::kTensor};
        break;
      case 2:
        c = {.kind = CodeKind::kInteger,
             .bits = rng.Pick({2, 4, 8}),
             .axis = ScaleAxis::kRow,
             .group = dim / rng.Pick({1, 2, 4})};
        c.zero = rng.Pick({ZeroConvention::kSymmetric, ZeroConvention::kMinimum, ZeroConvention::kFloatOffset});
        c.qparam = rng.Pick({DType::kF16, DType::kF32});
        break;
      default:
        closure.step = rng.Pick({32, 96, 128});
        closure.lag = static_cast<int>(rng.Range(0, 130));
        c = {.kind = CodeKind::kInteger,
             .bits = rng.Pick({2, 4, 8}),
             .axis = ScaleAxis::kChannel,
             .group = rng.Pick({8, 16, 32}),
             .zero = ZeroConvention::kMinimum};
        c.qparam = rng.Pick({DType::kF16, DType::kF32});
    }
  }
  if (rng.Chance(0.3)) {
    const Closure &k = layer.k_closure, &v = layer.v_closure;
    layer.window = static_cast<int>(std::max({1, k.lag + k.step, v.lag + v.step}) + rng.Range(0, 300));
  }
  return layer;
}

TEST(ClosedForm, EqualsTheEnumerationForAnySchema) {
  int padded = 0, windowed = 0, pinned = 0;
  ForAll(300, [&](Rng& rng) {
    CacheSchema schema;
    for (int64_t i = rng.Range(1, 3); i > 0; --i) schema.layers.push_back(AnyLayer(rng));
    if (rng.Chance(0.5)) schema.layers.push_back(schema.layers[0]);  // like layers become one segment
    const Status valid = Validate(schema);
    ASSERT_TRUE(valid.ok()) << valid.ToString();
    for (int i = 0; i < 4; ++i) {
      const int64_t tokens = rng.Range(0, 900);
      SCOPED_TRACE(tokens);
      const LedgerBytes form = Ledger(schema, tokens);
      ExpectSame(form, Enumerate(schema, tokens));
      EXPECT_GE(form.slack, 0);
      padded += form.pages > 0;
    }
    for (const LayerSchema& layer : schema.layers) windowed += layer.window > 0, pinned += layer.pinned_rows > 0;
  });
  EXPECT_GT(padded, 20);
  EXPECT_GT(windowed, 20);
  EXPECT_GT(pinned, 20);
}

// Frontier formulas of both schedules (P9, the arithmetic half): methods.md 4.4 and 4.5.
TEST(Schedules, VectorsOfTheTwoSchedules) {
  const Closure sync{3, 2};  // R 4, G 2
  constexpr int kSync[][3] = {{1, 0, 1}, {2, 0, 2}, {3, 0, 3}, {4, 0, 4},  {5, 2, 3}, {6, 2, 4},
                              {7, 4, 3}, {8, 4, 4}, {9, 6, 3}, {10, 6, 4}, {11, 8, 3}};
  for (const auto& [t, closed, tail] : kSync) {
    EXPECT_EQ(sync.frontier(t), closed) << t;
    EXPECT_EQ(t - sync.frontier(t), tail) << t;
  }
  const Closure k{0, 4}, v{4, 1};
  constexpr int kSplit[][5] = {{6, 4, 2, 2, 4},    {7, 4, 3, 3, 4},  {8, 8, 0, 4, 4},   {9, 8, 1, 5, 4},
                               {10, 8, 2, 6, 4},   {11, 8, 3, 7, 4}, {12, 12, 0, 8, 4}, {13, 12, 1, 9, 4},
                               {14, 12, 2, 10, 4}, {3, 0, 3, 0, 3},  {4, 4, 0, 0, 4},   {5, 4, 1, 1, 4}};
  for (const auto& [t, kq, kt, vq, vt] : kSplit) {
    EXPECT_EQ(k.frontier(t), kq) << t;
    EXPECT_EQ(t - k.frontier(t), kt) << t;
    EXPECT_EQ(v.frontier(t), vq) << t;
    EXPECT_EQ(t - v.frontier(t), vt) << t;
  }
  const LayerSchema kivi = FormLayer("kivi2", 1, 32), both = FormLayer("kivi2_sync", 1, 32);
  constexpr int kR128[][5] = {{4000, 3968, 32, 3872, 128},
                              {4096, 4096, 0, 3968, 128},
                              {4223, 4096, 127, 4095, 128},
                              {4224, 4224, 0, 4096, 128}};
  for (const auto& [t, kq, kt, vq, vt] : kR128) {
    EXPECT_EQ(kivi.k_closure.frontier(t), kq);
    EXPECT_EQ(t - kq, kt);
    EXPECT_EQ(kivi.v_closure.frontier(t), vq);
    EXPECT_EQ(t - vq, vt);
  }
  EXPECT_EQ(both.k_closure.frontier(4000), 3872);
}

TEST(Schedules, ClosedFormsForEveryLengthAndParameter) {
  for (const int g : {1, 2, 8, 32})
    for (const int r : {g, 2 * g, 4 * g, 128})
      for (int64_t t = 0; t <= 1000; ++t) {
        const Closure sync{r - g + 1, g}, k{0, r}, v{r, 1};
        int64_t closed = 0;  // by simulation: while the tail is longer than R close the oldest G rows
        while (t - closed > r) closed += g;
        ASSERT_EQ(sync.frontier(t), closed) << "R " << r << " G " << g << " T " << t;
        ASSERT_EQ(sync.frontier(t), t <= r ? 0 : g * ((t - r + g - 1) / g));
        ASSERT_EQ(k.frontier(t), t / r * r);
        ASSERT_EQ(v.frontier(t), std::max<int64_t>(0, t - r));
        ASSERT_LE(t - sync.frontier(t), sync.max_exact_rows());
        ASSERT_LE(t - k.frontier(t), k.max_exact_rows());
        ASSERT_LE(t - v.frontier(t), v.max_exact_rows());
      }
  const Closure own{-1, 1}, next{0, 1};
  EXPECT_EQ(own.max_exact_rows(), 0);
  EXPECT_EQ(next.max_exact_rows(), 0);
  for (int64_t t = 0; t < 100; ++t) {
    EXPECT_EQ(own.frontier(t), t);
    EXPECT_EQ(next.frontier(t), t);
    EXPECT_EQ(CodedRowsRead(own, kStepwise, t), t + 1) << "its own row, too";
    EXPECT_EQ(CodedRowsRead(next, kStepwise, t), t);
  }
}

TEST(LedgerBytes, SumsEveryTerm) {
  const LedgerBytes a{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  LedgerBytes b = a;
  b += a;
  EXPECT_EQ(b, (LedgerBytes{2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22}));
  EXPECT_EQ(a.total(), 1 + 2 + 3 + 4 + 5 + 6);
}

}  // namespace
}  // namespace livequant
