// Sentences of cache/owner/owner.h that the trace does not reach: batches and failures, receipts, leases, limits,
// pinned rows, windows, closed forms, and that the steady state allocates nothing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cache/owner/heap_counter.h"
#include "cache/owner/owner_fixture.h"
#include "support/property.h"

namespace livequant {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// The closure pairs of the presets, at their real sizes.
std::vector<std::pair<const char*, ClassSpec>> PresetClosures() {
  return {{"f16, fp8, int8", {.k = {-1, 1}, .v = {-1, 1}, .coded_rows = 128, .exact_rows = 32}},
          {"qserve", {.k = {0, 1}, .v = {0, 1}, .coded_rows = 128, .exact_rows = 32}},
          {"kivi", KiviB()},
          {"kivi_sync", {.k = {97, 32}, .v = {97, 32}, .group = 32, .coded_rows = 128, .exact_rows = 32}},
          {"tiles", {.k = {0, 128}, .v = {0, 128}, .group = 128, .coded_rows = 128, .exact_rows = 32}}};
}

TEST(OwnerBytes, CensusOfASequenceThatOnlyGrewIsTheClosedForm) {
  for (const auto& [name, base] : PresetClosures())
    for (const int pinned : {0, 1, 4, 40})
      for (const int window : {0, 300}) {
        ClassSpec spec = base;
        spec.pinned = pinned;
        spec.window = window;
        spec.head_dim = 32;
        SCOPED_TRACE(std::string(name) + ", pinned " + std::to_string(pinned) + ", window " + std::to_string(window));
        Fixture x({spec}, 1024, 80);
        const SeqId seq = x.Open();
        Rng rng(7);
        for (int64_t len = 0; len <= 3 * 128 + 5;) {
          const LedgerBytes census = x.owner->Census(), ledger = Ledger(x.schema, len);
          ASSERT_EQ(census.codes, ledger.codes) << len;
          ASSERT_EQ(census.qparams, ledger.qparams) << len;
          ASSERT_EQ(census.residual, ledger.residual) << len;
          ASSERT_EQ(census.exact_prefix, ledger.exact_prefix) << len;
          ASSERT_EQ(census.pages, ledger.pages) << len;
          ASSERT_EQ(census.slack, ledger.slack) << len;
          ASSERT_EQ(x.owner->used_bytes(), census.total() + census.slack) << len;
          const int rows = rng.Chance(0.7) ? 1 : static_cast<int>(rng.Range(2, 40));
          x.Append(seq, rows);
          len += rows;
        }
      }
}

// cache_core.md 8, invariant 8, and 2: exact rows at rest.
TEST(OwnerBytes, PagesOfASequenceThatOnlyGrew) {
  for (const auto& [name, spec] : PresetClosures()) {
    SCOPED_TRACE(name);
    Fixture x({spec}, 1024, 80);
    const SeqId seq = x.Open();
    for (int64_t len = 1; len <= 3 * 128; ++len) {
      x.Append(seq, 1);
      const SeqRow row = x.Row(seq);
      for (int t = 0; t < 2; ++t) {
        const Closure closure = t == kK ? spec.k : spec.v;
        const int64_t f = closure.frontier(len);
        ASSERT_EQ(row.f[t], f);
        ASSERT_LE(len - f, closure.max_exact_rows());
        const auto tensor = static_cast<TensorIndex>(t);
        ASSERT_EQ(x.owner->pool(0, tensor, kCoded).used_pages(), (f + 127) / 128);
        ASSERT_EQ(x.owner->pool(0, tensor, kExact).used_pages(), len > f ? (len + 31) / 32 - f / 32 : 0);
      }
    }
  }
}

TEST(OwnerSteadyState, BeginPrepareSealPublishForkReorderTruncateAbortAllocateNothing) {
  Fixture x({KiviB()});
  const SeqId a = x.Open(), b = x.owner->Fork(a)->seq;
  const AppendRequest batch[2] = {{a, 3, Mode::kAll}, {b, 4, Mode::kPrefix}};
  TxnId ids[2] = {};
  const SeqId group[2] = {a, b};
  const int parents[2] = {1, 1};
  int64_t wrong = 0;
  const int64_t before = HeapAllocations();
  for (int i = 0; i < 400; ++i) {
    wrong += !x.owner->Begin(batch, ids).ok();
    for (const TxnId id : ids) wrong += !x.owner->MarkPrepared(id, 0).ok();
    wrong += !x.owner->Seal(ids[1], 2).ok();
    wrong += !x.owner->Publish(ids[0], 3).ok();
    if (i % 3 == 0)
      x.owner->Abort(ids[1]);
    else
      wrong += !x.owner->Publish(ids[1], 2).ok();
    const auto fork = x.owner->Fork(a);
    {
      const auto lease = x.owner->Acquire(fork->seq);
      wrong += !lease.ok();
    }
    wrong += !x.owner->Release(fork->seq).ok();
    if (i % 50 == 49) wrong += !x.owner->Reorder(group, parents).ok();
    if (i % 20 == 19) wrong += !x.owner->Truncate(a, x.owner->length(a) - 10).ok();
  }
  EXPECT_EQ(HeapAllocations(), before);
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(x.owner->stats().closed_groups, 12);
  x.Check();
}

// Fail the kth request of a site, k = 1, 2, 3 ... until the call succeeds; each failure leaves everything as it was.
TEST(OwnerFaults, EveryFailedAllocationChangesNothing) {
  for (int site = 0; site < kAllocationSites; ++site) {
    SCOPED_TRACE(AllocationSiteName(static_cast<AllocationSite>(site)));
    Fixture x({KiviB(), {.k = {0, 1}, .v = {0, 1}, .coded_rows = 128, .exact_rows = 32}});
    const SeqId a = x.Open();
    x.Append(a, 600);
    const SeqId b = x.owner->Fork(a)->seq;
    x.Append(a, 1);
    int64_t failures = 0;
    const auto exhaust = [&](const char* name, auto call) {
      SCOPED_TRACE(name);
      for (int k = 1; k < 100; ++k) {
        const int64_t used = x.owner->used_bytes();
        const LedgerBytes census = x.owner->Census();
        const std::vector<int> state_a = x.State(a), state_b = x.State(b);
        const uint64_t generation_a = x.owner->generation(a), generation_b = x.owner->generation(b);
        x.faults.fail_at[site] = k;
        const Status s = call();
        const bool fired = x.faults.fail_at[site] == 0;
        x.faults.fail_at[site] = 0;
        x.Check();
        ASSERT_EQ(s.ok(), !fired) << s.ToString();
        if (!fired) return;
        ++failures;
        ASSERT_EQ(s.code(), Code::kOutOfPages);
        ASSERT_EQ(x.owner->used_bytes(), used);
        ASSERT_EQ(x.owner->Census(), census);
        ASSERT_EQ(x.State(a), state_a);
        ASSERT_EQ(x.State(b), state_b);
        ASSERT_EQ(x.owner->generation(a), generation_a);
        ASSERT_EQ(x.owner->generation(b), generation_b);
      }
      FAIL() << "never succeeded";
    };
    TxnId ids[2] = {};
    exhaust("begin", [&] {
      const AppendRequest batch[2] = {{a, 200, Mode::kAll}, {b, 8, Mode::kPrefix}};
      return x.owner->Begin(batch, ids);
    });
    for (const TxnId id : ids) x.owner->Abort(id);
    exhaust("open", [&] { return x.owner->Open().status(); });
    exhaust("fork", [&] { return x.owner->Fork(a).status(); });
    exhaust("reorder", [&] {
      const SeqId group[2] = {a, b};
      const int parents[2] = {1, 0};
      return x.owner->Reorder(group, parents).status();
    });
    exhaust("truncate", [&] { return x.owner->Truncate(a, 520).status(); });
    EXPECT_GT(failures, 0);
    EXPECT_EQ(x.owner->stats().out_of_pages, failures);
  }
}

TEST(OwnerBegin, APoolTooSmallNamesThePlaneAndBothNumbers) {
  Fixture x({KiviB()}, 2048, /*pages=*/5);
  const SeqId seq = x.Open();
  x.Append(seq, 128);
  const auto id = x.Begin(seq, 1000);
  ASSERT_EQ(id.status().code(), Code::kOutOfPages);
  EXPECT_THAT(id.status().message(), HasSubstr("class 0 K coded pages: needs 7, free 4"));
  x.Check();
  EXPECT_THAT(x.State(seq), ElementsAre(128, 128, 0));
}

TEST(OwnerBegin, MalformedBatchesAreRefusedWhole) {
  Fixture x({KiviB()}, 256);
  const SeqId a = x.Open(), b = x.Open();
  TxnId ids[2] = {};
  const auto begin = [&](AppendRequest first, AppendRequest second) {
    const AppendRequest batch[2] = {first, second};
    const Status s = x.owner->Begin(batch, ids);
    EXPECT_EQ(x.owner->used_bytes(), 0);
    x.Check();
    return s;
  };
  EXPECT_EQ(begin({a, 1}, {a, 1}).code(), Code::kInvalidArgument);
  EXPECT_EQ(begin({a, 1}, {b, 0}).code(), Code::kInvalidArgument);
  EXPECT_EQ(begin({a, 1}, {b, -3}).code(), Code::kInvalidArgument);
  const Status longer = begin({a, 1}, {b, 257});
  EXPECT_EQ(longer.code(), Code::kOutOfRange);
  EXPECT_THAT(longer.message(), HasSubstr("257"));
  EXPECT_THAT(longer.message(), HasSubstr("256"));
  EXPECT_EQ(begin({a, 1}, {99, 1}).code(), Code::kClosed);
  const AppendRequest one[1] = {{a, 1}};
  EXPECT_EQ(x.owner->Begin(one, ids).code(), Code::kInvalidArgument);
}

TEST(OwnerPublish, OneEffectAndTheSameReceiptForEver) {
  Fixture x({KiviB()});
  const SeqId seq = x.Open();
  const TxnId id = *x.Begin(seq, 5);
  x.Prepare(id);
  const Receipt first = *x.owner->Publish(id, 5);
  EXPECT_EQ(first.first, 0);
  EXPECT_EQ(first.rows, 5);
  EXPECT_EQ(first.generation, x.owner->generation(seq));
  x.Append(seq, 2);
  const Receipt again = *x.owner->Publish(id, 5);
  EXPECT_EQ(again.generation, first.generation);
  EXPECT_EQ(again.rows, 5);
  EXPECT_EQ(x.owner->length(seq), 7);
  EXPECT_EQ(x.owner->FindReceipt(id)->txn, id);
  EXPECT_EQ(x.owner->FindReceipt(12345).status().code(), Code::kNotFound);
  EXPECT_EQ(x.owner->Get(id).status().code(), Code::kFailedTxn);
}

TEST(OwnerPublish, TwoTransactionsOnOneBaseTheSecondIsStale) {
  Fixture x({KiviB()});
  const SeqId seq = x.Open();
  x.Append(seq, 10);
  const TxnId a = *x.Begin(seq, 1), b = *x.Begin(seq, 2);
  x.Prepare(a);
  x.Prepare(b);
  EXPECT_TRUE(x.owner->Publish(b, 2).ok());
  EXPECT_EQ(x.owner->Publish(a, 1).status().code(), Code::kStale);
  EXPECT_EQ(x.owner->Publish(a, 1).status().code(), Code::kFailedTxn);
  EXPECT_EQ(x.owner->length(seq), 12);
  x.Check();
}

TEST(OwnerLease, ARetiredViewLivesUntilItsLastLeaseEnds) {
  Fixture x({KiviB()});
  const SeqId seq = x.Open();
  x.Append(seq, 300);
  const int64_t used = x.owner->used_bytes();
  {
    auto first = x.owner->Acquire(seq);
    Owner::Lease second = *x.owner->Acquire(seq);
    ASSERT_TRUE(x.owner->Release(seq).ok());
    EXPECT_EQ(x.owner->stats().deferred_reclaims, 1);
    EXPECT_EQ(x.owner->used_bytes(), used);
    EXPECT_EQ(second.length(), 300);
    Owner::Lease moved = std::move(second);
    second = Owner::Lease();
    *first = Owner::Lease();
    EXPECT_EQ(x.owner->used_bytes(), used);
    EXPECT_EQ(moved.rows()[0].f[kK], 256);
    x.Check();
  }
  EXPECT_EQ(x.owner->used_bytes(), 0);
  EXPECT_EQ(x.owner->Acquire(seq).status().code(), Code::kClosed);
  EXPECT_EQ(x.owner->length(seq), -1);
  EXPECT_EQ(x.owner->generation(seq), 0u);
  EXPECT_NE(x.Open(), seq);  // the slot is used again under another name
  EXPECT_EQ(x.owner->Release(seq).status().code(), Code::kClosed);
}

// Sinks of 4 rows in mid-group: the first K group is [4, 32), a short one; the pinned page stays.
TEST(OwnerPinned, CodedRowsStartAfterThePinnedOnes) {
  ClassSpec spec = KiviB();
  spec.pinned = 4;
  Fixture x({spec});
  const SeqId seq = x.Open();
  x.GrowTo(seq, 3);
  EXPECT_THAT(x.Starts(seq, kK, kExact), ElementsAre(0));
  x.GrowTo(seq, 128);
  EXPECT_THAT(x.State(seq), ElementsAre(128, 128, 0));
  EXPECT_THAT(x.Starts(seq, kK, kCoded), ElementsAre(4));
  EXPECT_THAT(x.Starts(seq, kK, kExact), ElementsAre(0));
  EXPECT_EQ(x.owner->stats().short_groups, 1);
  EXPECT_EQ(x.owner->scars(seq, 0), 0);
  x.GrowTo(seq, 300);
  EXPECT_THAT(x.Starts(seq, kV, kCoded), ElementsAre(4, 128));
  EXPECT_THAT(x.Starts(seq, kV, kExact), ElementsAre(0, 160, 192, 224, 256, 288));
  ASSERT_TRUE(x.owner->Truncate(seq, 2).ok());
  x.Check();
  EXPECT_THAT(x.Starts(seq, kK, kCoded), IsEmpty());
  EXPECT_THAT(x.Starts(seq, kK, kExact), ElementsAre(0));
  x.GrowTo(seq, 140);
}

TEST(OwnerWindow, PagesLeaveWholeAndTruncateSaysHowFarItCanGoBack) {
  Fixture x({{.k = {-1, 1}, .v = {-1, 1}, .coded_rows = 128, .exact_rows = 32, .pinned = 2, .window = 200}});
  const SeqId seq = x.Open();
  x.GrowTo(seq, 327);
  EXPECT_THAT(x.Starts(seq, kK, kCoded),
              ElementsAre(2, 128, 256));  // row 127 is the first that position 327 - 200 needs
  x.GrowTo(seq, 328);
  EXPECT_THAT(x.Starts(seq, kK, kCoded), ElementsAre(128, 256));
  EXPECT_THAT(x.Starts(seq, kK, kExact), ElementsAre(0));
  EXPECT_EQ(x.owner->stats().window_drops, 2);  // K and V
  x.GrowTo(seq, 400);
  const Status s = x.owner->Truncate(seq, 327).status();
  EXPECT_EQ(s.code(), Code::kOutOfRange);
  EXPECT_THAT(s.message(), HasSubstr("shortest length 328"));
  EXPECT_TRUE(x.owner->Truncate(seq, 328).ok());
  x.Check();
  EXPECT_TRUE(x.owner->Truncate(seq, 2).ok());  // pinned rows need no window
  x.Check();
}

// Each scar takes an entry. A table that is full of them refuses the next closure before anything changed.
TEST(OwnerLimitsTest, ATableFullOfScarsRefusesTheNextClosure) {
  Fixture x({{.k = {0, 128}, .v = {0, 128}, .group = 128, .coded_rows = 128, .exact_rows = 32}}, 128, 200);
  const SeqId seq = x.Open();
  Status last;
  int scars = 0;
  for (int n = 1; n < 128 && last.ok(); ++n) {
    const auto id = x.Begin(seq, static_cast<int>(128 - x.owner->length(seq)));
    last = id.status();
    if (!last.ok()) break;
    x.Prepare(*id);
    ASSERT_TRUE(x.owner->Publish(*id, x.owner->Get(*id)->count).ok());
    ASSERT_TRUE(x.owner->Truncate(seq, n).ok());
    scars = x.owner->scars(seq, 0);
    x.Check();
  }
  EXPECT_EQ(last.code(), Code::kOutOfPages);
  EXPECT_THAT(last.message(), HasSubstr("table entries"));
  EXPECT_GE(scars, 64);
  EXPECT_TRUE(x.owner->Truncate(seq, 0).ok());
  x.Append(seq, 128);
}

TEST(OwnerLimitsTest, CreateNamesTheLimitThatDoesNotFit) {
  const CacheSchema schema = SchemaOf({KiviB()});
  OwnerLimits good;
  good.max_len = 128;
  good.pages.assign(4, 8);
  good.allocate_memory = false;
  EXPECT_TRUE(Owner::Create(schema, good).ok());
  const auto refused = [&](auto change) {
    OwnerLimits limits = good;
    change(limits);
    return Owner::Create(schema, limits).status();
  };
  EXPECT_THAT(refused([](OwnerLimits& l) { l.max_sequences = 0; }).message(), HasSubstr("max_sequences 0"));
  EXPECT_THAT(refused([](OwnerLimits& l) { l.max_views = -1; }).message(), HasSubstr("max_views -1"));
  EXPECT_THAT(refused([](OwnerLimits& l) { l.max_len = 0; }).message(), HasSubstr("max_len 0"));
  EXPECT_THAT(refused([](OwnerLimits& l) { l.max_step_rows = 129; }).message(), HasSubstr("max_step_rows 129"));
  EXPECT_THAT(refused([](OwnerLimits& l) { l.pages.resize(3); }).message(), HasSubstr("pages of 3 planes"));
  EXPECT_EQ(refused([](OwnerLimits& l) { l.pages[2] = -1; }).code(), Code::kInvalidArgument);
}

TEST(OwnerReorder, MalformedGroupsAreRefused) {
  Fixture x({KiviB()});
  const SeqId a = x.Open(), b = x.Open();
  const SeqId twice[2] = {a, a}, pair[2] = {a, b};
  const int zero[2] = {0, 0}, outside[2] = {0, 2}, negative[2] = {-1, 0}, one[1] = {0};
  EXPECT_EQ(x.owner->Reorder(twice, zero).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(x.owner->Reorder(pair, outside).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(x.owner->Reorder(pair, negative).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(x.owner->Reorder(pair, one).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(x.owner->Reorder({}, {}).status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(x.owner->Reorder(pair, zero).ok());
}

TEST(OwnerTruncate, NumbersOutsideTheSequenceAreRefused) {
  Fixture x({KiviB()});
  const SeqId seq = x.Open();
  x.Append(seq, 10);
  for (const int64_t len : {int64_t{-1}, int64_t{11}, int64_t{1} << 31, int64_t{1} << 62}) {
    const Status s = x.owner->Truncate(seq, len).status();
    EXPECT_EQ(s.code(), Code::kInvalidArgument);
    EXPECT_THAT(s.message(), HasSubstr("10 rows"));
  }
  EXPECT_THAT(x.State(seq), ElementsAre(10, 0, 0));
}

}  // namespace
}  // namespace livequant
