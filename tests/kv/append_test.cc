// Appends: the bytes depend on the rows alone, not on how they were cut, batched or threaded (P9, P21), and cost what
// the ledger says (P17).
#include <gtest/gtest.h>

#include <algorithm>

#include "cache/ledger/ledger.h"
#include "kv/kv_support.h"
#include "support/effort.h"

namespace livequant {
namespace {

// Past three K closures of the KIVI presets (3 * 128), into a fourth, ending inside a group and a page.
constexpr int kRows = 437;

class AppendTest : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Cases, AppendTest, ::testing::ValuesIn(CaseNames()), CaseTestName);

void ExpectCutsAgree(const CacheSchema& schema, std::initializer_list<int> chunks, Rng* rng) {
  const std::vector<Id> ids = Ids(1, 0, kRows);
  std::vector<std::byte> want_state;
  std::vector<RowOutput> want;
  {
    Harness h(schema, {.sequences = 1, .threads = 1});
    const SeqId seq = h.Open();
    want = h.AppendAll(seq, ids, 1);
    want_state = h.State(seq);
    ExpectThreeClosures(h);
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_FALSE(want_state.empty());
  for (const int chunk : chunks) {
    SCOPED_TRACE("chunk " + std::to_string(chunk));
    Harness h(schema, {.sequences = 1});
    const SeqId seq = h.Open();
    const std::vector<RowOutput> got = h.AppendAll(seq, ids, chunk);
    EXPECT_EQ(h.State(seq), want_state);
    ExpectSameOutputs(got, want);
    ExpectThreeClosures(h);
    if (::testing::Test::HasFailure()) return;
  }
  if (rng == nullptr) return;
  Harness h(schema, {.sequences = 1});
  const SeqId seq = h.Open();
  std::vector<RowOutput> got;
  for (size_t at = 0; at < ids.size() && !::testing::Test::HasFailure();) {
    const size_t n = std::min<size_t>(ids.size() - at, static_cast<size_t>(rng->Range(1, rng->Pick({2, 40, 200}))));
    for (RowOutput& row : h.AppendAll(seq, std::span(ids).subspan(at, n), static_cast<int>(n)))
      got.push_back(std::move(row));
    at += n;
  }
  EXPECT_EQ(h.State(seq), want_state);
  ExpectSameOutputs(got, want);
}

TEST_P(AppendTest, EveryCutGivesTheSameBytesAndOutputs) {
  ForAll(1, [&](Rng& rng) { ExpectCutsAgree(CaseSchema(GetParam(), 2, 1, 32), {512, 128, 7}, &rng); });
}

TEST(AppendAtModelShape, EveryCutGivesTheSameBytesAndOutputs) {
  for (const char* name : {"kivi2", "mixed"}) {
    SCOPED_TRACE(name);
    ExpectCutsAgree(CaseSchema(name, 8, 2, 64), {512, 7}, nullptr);
  }
}

// Under chunk:C and prompt a different cut reads other forms, but stores the same bytes.
TEST(Append, StoredBytesDoNotDependOnTheContract) {
  for (const char* name : {"kivi2", "kivi2_sync", "qserve4"}) {
    std::vector<std::byte> want;
    for (const int read_step : {kStepwise, 64, kPromptReadStep})
      for (const int chunk : {512, 33}) {
        CacheSchema schema = CaseSchema(name, 1, 1, 32);
        schema.read_step = read_step;
        Harness h(schema);
        const SeqId seq = h.Open();
        h.AppendAll(seq, Ids(1, 0, kRows), chunk);
        if (want.empty()) want = h.State(seq);
        EXPECT_EQ(h.State(seq), want) << name << " " << read_step << " " << chunk;
      }
  }
}

TEST_P(AppendTest, EveryRowIsReadBackAsTheFormatSays) {
  Harness h(CaseSchema(GetParam(), 2, 2, 64));
  Shadow shadow(h.schema());
  const SeqId seq = h.Open();
  for (const int64_t to : {1, 45, 128, 300, kRows}) {
    const std::vector<Id> ids = Ids(1, shadow.len(), to);
    h.AppendAll(seq, ids, 512, /*attend=*/false);
    shadow.Append(ids);
    ExpectRows(h, seq, shadow);
  }
  for (int layer : {0, 1})
    for (int tensor : {kK, kV})
      EXPECT_LE(shadow.WorstErrorOverBound(layer, tensor), 1.0) << "layer " << layer << " " << tensor;
  ExpectThreeClosures(h);
}

// methods.md 4.4 (R 4, G 2) and 4.5 (R 4): {T, K closed, V closed}.
struct FrontierRow {
  int rows, k, v;
};
CacheSchema SmallGroups(Closure k, Closure v) {
  CacheSchema schema = CaseSchema("kivi2", 1, 1, 32);
  schema.layers[0].k.group = 2;
  schema.layers[0].k_closure = k;
  schema.layers[0].v_closure = v;
  return schema;
}
void ExpectFrontiers(const CacheSchema& schema, int first, const std::vector<FrontierRow>& table) {
  Harness h(schema, {.allow_fallback = true});
  const SeqId seq = h.Open();
  int64_t len = 0;
  for (const FrontierRow& row : table) {
    h.AppendAll(seq, Ids(1, len, row.rows), first);
    len = row.rows;
    auto lease = h.owner().Acquire(seq);
    ASSERT_TRUE(lease.ok());
    EXPECT_EQ(lease->rows()[0].f[kK], row.k) << "T " << row.rows;
    EXPECT_EQ(lease->rows()[0].f[kV], row.v) << "T " << row.rows;
  }
}
TEST(Append, FrontiersOfScheduleA) {
  ExpectFrontiers(SmallGroups({3, 2}, {3, 2}), 1,
                  {{1, 0, 0},
                   {2, 0, 0},
                   {3, 0, 0},
                   {4, 0, 0},
                   {5, 2, 2},
                   {6, 2, 2},
                   {7, 4, 4},
                   {8, 4, 4},
                   {9, 6, 6},
                   {10, 6, 6},
                   {11, 8, 8}});
  ExpectFrontiers(SmallGroups({3, 2}, {3, 2}), 11, {{11, 8, 8}});
  ExpectFrontiers(CaseSchema("kivi2_sync", 1, 1, 32), 1, {{128, 0, 0}, {129, 32, 32}, {160, 32, 32}, {161, 64, 64}});
}
TEST(Append, FrontiersOfScheduleB) {
  ExpectFrontiers(
      SmallGroups({0, 4}, {4, 1}), 6,
      {{6, 4, 2}, {7, 4, 3}, {8, 8, 4}, {9, 8, 5}, {10, 8, 6}, {11, 8, 7}, {12, 12, 8}, {13, 12, 9}, {14, 12, 10}});
  ExpectFrontiers(SmallGroups({0, 4}, {4, 1}), 3,
                  {{3, 0, 0}, {4, 4, 0}, {5, 4, 1}, {6, 4, 2}, {7, 4, 3}, {8, 8, 4}, {9, 8, 5}, {10, 8, 6}});
}
TEST(Append, FrontiersOfScheduleBAtFullSize) {
  Harness h(CaseSchema("kivi2", 1, 1, 32), {.sequences = 1, .max_len = 4300});
  const SeqId seq = h.Open();
  int64_t len = 0;
  for (const FrontierRow& row : std::initializer_list<FrontierRow>{
           {4000, 3968, 3872}, {4096, 4096, 3968}, {4223, 4096, 4095}, {4224, 4224, 4096}}) {
    h.AppendAll(seq, Ids(1, len, row.rows), 512, /*attend=*/false);
    len = row.rows;
    auto lease = h.owner().Acquire(seq);
    ASSERT_TRUE(lease.ok());
    EXPECT_EQ(lease->rows()[0].f[kK], row.k);
    EXPECT_EQ(lease->rows()[0].f[kV], row.v);
  }
  EXPECT_GE(h.owner().stats().closed_rows[kK], 4224);
}

// P17: pool bytes, the census of reachable pages and the closed form, at every length up to 3 R + 5.
TEST_P(AppendTest, PoolBytesAreTheLedgers) {
  Harness h(CaseSchema(GetParam(), 2, 1, 32));
  const SeqId seq = h.Open();
  EXPECT_EQ(h.owner().used_bytes(), 0);
  for (int64_t t = 0; t <= 3 * 128 + 5; ++t) {
    const LedgerBytes want = Ledger(h.schema(), t), census = h.owner().Census();
    ASSERT_EQ(h.owner().used_bytes(), want.total() + want.slack) << "T " << t;
    ASSERT_EQ(h.owner().used_bytes(), census.total() + census.slack) << "T " << t;
    ASSERT_EQ(census.codes, want.codes) << "T " << t;
    ASSERT_EQ(census.qparams, want.qparams) << "T " << t;
    ASSERT_EQ(census.residual, want.residual) << "T " << t;
    ASSERT_EQ(census.exact_prefix, want.exact_prefix) << "T " << t;
    ASSERT_EQ(census.pages, want.pages) << "T " << t;
    h.AppendAll(seq, Ids(1, t, t + 1), 1, /*attend=*/false);
    if (HasFailure()) return;
  }
  ExpectThreeClosures(h);
  EXPECT_TRUE(h.owner().Release(seq).ok());
  EXPECT_EQ(h.owner().used_bytes(), 0);
}

// P21: unequal sequences, some in prefill and some decoding in one batch, against each of them alone.
TEST_P(AppendTest, NeighboursInABatchChangeNothing) {
  const CacheSchema schema = CaseSchema(GetParam(), 2, 1, 32);
  constexpr int kSequences = 4;
  const int lengths[kSequences] = {400, 1, 131, 290};
  // Rows of each sequence at each of five steps, 0 = not in the batch.
  const int plan[5][kSequences] = {{200, 1, 100, 0}, {190, 0, 1, 140}, {1, 0, 29, 129}, {8, 0, 1, 1}, {1, 0, 0, 20}};
  Harness batch(schema);
  SeqId seq[kSequences];
  int64_t len[kSequences] = {0, 0, 0, 0};
  std::vector<RowOutput> outputs[kSequences];
  for (SeqId& s : seq) s = batch.Open();
  for (const auto& rows : plan) {
    std::vector<StepInput> inputs;
    std::vector<int> who;
    for (int i = 0; i < kSequences; ++i) {
      if (rows[i] == 0) continue;
      inputs.push_back({seq[i], Ids(static_cast<uint64_t>(i), len[i], len[i] + rows[i])});
      who.push_back(i);
      len[i] += rows[i];
    }
    auto got = batch.Append(inputs);
    if (HasFailure()) return;
    for (size_t i = 0; i < who.size(); ++i)
      for (RowOutput& row : got[i]) outputs[who[i]].push_back(std::move(row));
  }
  ExpectThreeClosures(batch);
  for (int i = 0; i < kSequences; ++i) {
    ASSERT_EQ(len[i], lengths[i]);
    Harness alone(schema, {.sequences = 1, .threads = 1});
    const SeqId only = alone.Open();
    ExpectSameOutputs(outputs[i], alone.AppendAll(only, Ids(static_cast<uint64_t>(i), 0, lengths[i]), 512));
    EXPECT_EQ(batch.State(seq[i]), alone.State(only)) << "sequence " << i;
  }
}

TEST(Append, LayersMayComeInAnyOrder) {
  const CacheSchema schema = CaseSchema("mixed", 4, 1, 32);
  Harness forward(schema), backward(schema);
  const SeqId a = forward.Open(), b = backward.Open();
  const std::vector<Id> ids = Ids(1, 0, 200);
  forward.AppendAll(a, ids, 200, /*attend=*/false);
  const AppendRequest request{b, 200};
  auto step = backward.cache().Begin({&request, 1});
  ASSERT_TRUE(step.ok());
  for (const int layer : {3, 1, 0, 2}) {
    std::vector<float> k(200 * 32), v(200 * 32);
    for (size_t r = 0; r < ids.size(); ++r) {
      FillRow(ids[r], layer, kK, std::span(k).subspan(r * 32, 32));
      FillRow(ids[r], layer, kV, std::span(v).subspan(r * 32, 32));
    }
    ASSERT_TRUE(step->Prepare(layer, k.data(), v.data(), backward.pool()).ok());
  }
  ASSERT_TRUE(step->Publish().ok());
  EXPECT_EQ(forward.State(a), backward.State(b));
}

// An append costs the same at any length: entries, copies and blocks are those of its own rows.
TEST(Append, CostDoesNotGrowWithTheHistory) {
  constexpr int64_t kLong = Effort(131072, 8);
  for (const char* name : {"f16", "kivi2", "int4"}) {
    SCOPED_TRACE(name);
    Harness h(CaseSchema(name, 1, 1, 32), {.sequences = 1, .max_len = kLong + 512});
    const SeqId seq = h.Open();
    const auto cost_of = [&](int64_t from) {
      const OwnerStats before = h.owner().stats();
      h.AppendAll(seq, Ids(1, from, from + 256), 1, /*attend=*/false);
      const OwnerStats after = h.owner().stats();
      return std::vector<int64_t>{
          after.entries_written - before.entries_written, after.rows_copied - before.rows_copied,
          after.blocks_built - before.blocks_built,       after.roots_built - before.roots_built,
          after.pages_taken - before.pages_taken,         after.pages_copied - before.pages_copied};
    };
    h.AppendAll(seq, Ids(1, 0, 1024), 512, /*attend=*/false);
    const std::vector<int64_t> at_1k = cost_of(1024);
    h.AppendAll(seq, Ids(1, 1280, kLong), 512, /*attend=*/false);
    const std::vector<int64_t> at_the_end = cost_of(kLong);
    EXPECT_EQ(at_1k, at_the_end);
    EXPECT_GT(at_1k[0], 0);
    EXPECT_EQ(at_1k[1], 0);
  }
}

}  // namespace
}  // namespace livequant
