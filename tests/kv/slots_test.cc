// Rows as bytes: copies touch their own slots only, the walk finds every row once, rounding is to exact_dtype and never
// clamps.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "kv/kv_support.h"
#include "kv/round_rows.h"
#include "kv/slots.h"

namespace livequant {
namespace {

TEST(Slots, ACopyMovesItsRowsAndTouchesNothingElse) {
  for (const std::string& name : CaseNames()) {
    SCOPED_TRACE(name);
    const LayerSchema layer = CaseSchema(name, 1, 1, 64).layers[0];
    for (const BlockFormat& format :
         {CodedFormat(layer, kK), CodedFormat(layer, kV), ExactFormat(layer, kK), ExactFormat(layer, kV)}) {
      const int group = format.coding.axis == ScaleAxis::kChannel ? format.coding.group : 1, rows = format.block.rows;
      ForAll(20, [&](Rng& rng) {
        const int from = static_cast<int>(rng.Range(0, rows / group)) * group;
        const int to = from + static_cast<int>(rng.Range(0, (rows - from) / group)) * group;
        std::vector<float> values = NormalWithOutliers(rng, rows, 64);
        std::vector<std::byte> src(static_cast<size_t>(format.block.bytes)), dst(src.size(), std::byte{0xFF});
        for (int r = 0; r < rows; r += group)
          ASSERT_TRUE(EncodeRows(format, {values.data() + r * 64, group, 64}, r, src.data()).ok());
        CopySlots(format, src.data(), dst.data(), from, to);
        std::vector<float> got(static_cast<size_t>(rows) * 64), want(got.size());
        DecodeRowsReference(format, src.data(), 0, {want.data(), rows, 64});
        DecodeRowsReference(format, dst.data(), 0, {got.data(), rows, 64});
        for (int r = 0; r < rows; ++r)
          for (int c = 0; c < 64; ++c) {
            const size_t i = static_cast<size_t>(r * 64 + c);
            if (r >= from && r < to)
              ASSERT_EQ(got[i], want[i]) << r;
            else
              ASSERT_TRUE(std::isnan(got[i])) << r;  // still poison
          }
      });
    }
  }
}

TEST(Slots, TheWalkFindsEveryRowOnceAndOnlyThose) {
  ForAll(200, [](Rng& rng) {
    // A table with gaps and scars: starts rise, two entries may share a range.
    const int page_rows = rng.Pick({32, 128});
    std::vector<Entry> blocks(4 * kBlockEntries, Entry{~0u, ~0u});
    const uint32_t roots[] = {2, 0, 3, 1};  // entry i lies in block roots[i / 64]
    const int count = static_cast<int>(rng.Range(0, 4 * kBlockEntries));
    int32_t start = static_cast<int32_t>(rng.Range(0, 50));
    std::vector<std::pair<uint32_t, int32_t>> place;  // by position: page, slot; page ~0 = nobody
    std::vector<int32_t> starts;
    for (int i = 0; i < count; ++i) {
      blocks[roots[i / kBlockEntries] * kBlockEntries + i % kBlockEntries] = {static_cast<uint32_t>(1000 + i),
                                                                              static_cast<uint32_t>(start)};
      starts.push_back(start);
      start = rng.Chance(0.6) ? start / page_rows * page_rows + page_rows
                              : start + static_cast<int32_t>(rng.Range(1, 2 * page_rows));
    }
    for (int i = 0; i < count; ++i) {
      int32_t end = starts[static_cast<size_t>(i)] / page_rows * page_rows + page_rows;
      if (i + 1 < count) end = std::min(end, starts[static_cast<size_t>(i + 1)]);
      for (int32_t p = starts[static_cast<size_t>(i)]; p < end; ++p) {
        place.resize(static_cast<size_t>(p) + 1, {~0u, 0});
        place[static_cast<size_t>(p)] = {static_cast<uint32_t>(1000 + i), p % page_rows};
      }
    }
    SeqRow row{};
    row.len = static_cast<int32_t>(place.size());
    row.entries[kV][kExact] = count;
    CacheView view{};
    view.plane[kV][kExact].rows = page_rows;
    view.seq = &row;
    view.sequences = 1;
    view.roots = roots;
    view.root_stride = 4;
    view.blocks = blocks.data();
    const int32_t from = static_cast<int32_t>(rng.Range(0, row.len)),
                  to = static_cast<int32_t>(rng.Range(from, row.len));
    std::vector<std::pair<uint32_t, int32_t>> got(place.size(), {~0u, 0});
    int32_t last = -1;
    const int32_t found = ForRuns(view, 0, kV, kExact, from, to, [&](const SlotRun& run) {
      ASSERT_GT(run.rows, 0);
      ASSERT_GT(run.position, last);
      last = run.position + run.rows - 1;
      for (int32_t i = 0; i < run.rows; ++i) got[static_cast<size_t>(run.position + i)] = {run.page, run.slot + i};
    });
    int32_t want = 0;
    for (int32_t p = 0; p < row.len; ++p) {
      const bool inside = p >= from && p < to && place[static_cast<size_t>(p)].first != ~0u;
      want += inside;
      ASSERT_EQ(got[static_cast<size_t>(p)],
                inside ? place[static_cast<size_t>(p)] : (std::pair<uint32_t, int32_t>{~0u, 0}))
          << p;
    }
    ASSERT_EQ(found, want);
  });
}

TEST(RoundRows, RoundsOnceToTheNearestValue) {
  float x[] = {1.0f, 1.00048828125f, 2049.0f, -2051.0f, 65504.0f, 65519.0f, 1e-9f, 5.9604645e-8f};
  RowFault fault;
  ASSERT_TRUE(RoundRows(DType::kF16, {x, 2, 4}, &fault));
  const float f16[] = {1.0f, 1.0f, 2048.0f, -2052.0f, 65504.0f, 65504.0f, 0.0f, 5.9604645e-8f};
  for (int i = 0; i < 8; ++i) EXPECT_EQ(x[i], f16[i]) << i;
  float y[] = {1.0f, 1.00390625f, 1.01171875f, 3.0e38f};
  ASSERT_TRUE(RoundRows(DType::kBF16, {y, 1, 4}, &fault));
  const float bf16[] = {1.0f, 1.0f, 1.015625f, 2.9991e38f};
  for (int i = 0; i < 3; ++i) EXPECT_EQ(y[i], bf16[i]) << i;
  EXPECT_NEAR(y[3], 3.0e38f, 3.0e38f / 256);
  float z[] = {0.1f, -1e-40f, 3e38f};
  ASSERT_TRUE(RoundRows(DType::kF32, {z, 1, 3}, &fault));
  EXPECT_EQ(z[0], 0.1f);
  EXPECT_EQ(z[1], -1e-40f);
  EXPECT_EQ(z[2], 3e38f);
}

TEST(RoundRows, NamesTheFirstValueThatDoesNotFit) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const struct {
    DType dtype;
    float bad;
  } cases[] = {{DType::kF16, 65520.0f},
               {DType::kF16, -kInf},
               {DType::kBF16, 3.4e38f},
               {DType::kBF16, kInf},
               {DType::kF32, kInf},
               {DType::kF16, std::numeric_limits<float>::quiet_NaN()},
               {DType::kF32, std::numeric_limits<float>::quiet_NaN()}};
  for (const auto& c : cases) {
    float x[3 * 8];
    std::fill(std::begin(x), std::end(x), 1.0f);
    x[1 * 8 + 3] = c.bad;
    x[2 * 8 + 0] = c.bad;
    x[0 * 8 + 6] = c.bad;  // outside the view: a stride is no row
    RowFault fault;
    ASSERT_FALSE(RoundRows(c.dtype, {x, 3, 5, 8}, &fault));
    EXPECT_EQ(fault.row, 1);
    EXPECT_EQ(fault.channel, 3);
    EXPECT_EQ(std::memcmp(&fault.value, &c.bad, sizeof(float)), 0);
  }
}

}  // namespace
}  // namespace livequant
