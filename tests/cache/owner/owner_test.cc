// The transitions of cache_core.md 5, one by one, and its trace (6), on pages without bytes.
#include "cache/owner/owner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cache/owner/owner_fixture.h"

namespace livequant {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(OwnerTrace, RowByRowAsInCacheCore6) {
  Fixture x({KiviB()});
  Owner& owner = *x.owner;
  const SeqId a = x.Open();

  // prefill 512
  x.Append(a, 512);
  EXPECT_THAT(x.State(a), ElementsAre(512, 512, 384));
  EXPECT_THAT(x.Starts(a, kK, kCoded), ElementsAre(0, 128, 256, 384));
  EXPECT_THAT(x.Starts(a, kV, kCoded), ElementsAre(0, 128, 256));
  EXPECT_THAT(x.Starts(a, kK, kExact), IsEmpty());
  EXPECT_THAT(x.Starts(a, kV, kExact), ElementsAre(384, 416, 448, 480));

  // decode 1
  x.Append(a, 1);
  EXPECT_THAT(x.State(a), ElementsAre(513, 512, 385));
  EXPECT_THAT(x.Starts(a, kK, kExact), ElementsAre(512));
  EXPECT_THAT(x.Starts(a, kV, kExact), ElementsAre(384, 416, 448, 480, 512));
  EXPECT_THAT(x.Starts(a, kV, kCoded), ElementsAre(0, 128, 256, 384));

  // to 600; V exact 416 was dropped at len 576
  x.GrowTo(a, 575);
  EXPECT_THAT(x.Starts(a, kV, kExact), ElementsAre(416, 448, 480, 512, 544));
  x.GrowTo(a, 576);
  EXPECT_THAT(x.Starts(a, kV, kExact), ElementsAre(448, 480, 512, 544));
  x.GrowTo(a, 600);
  EXPECT_THAT(x.State(a), ElementsAre(600, 512, 472));
  EXPECT_THAT(x.Starts(a, kK, kExact), ElementsAre(512, 544, 576));
  EXPECT_THAT(x.Starts(a, kV, kExact), ElementsAre(448, 480, 512, 544, 576));

  // fork B: four root references; no page, no row, no node copied
  const OwnerStats before_fork = owner.stats();
  const int64_t used_before_fork = owner.used_bytes();
  const SeqId b = owner.Fork(a)->seq;
  x.Check();
  EXPECT_EQ(owner.stats().roots_built, before_fork.roots_built);
  EXPECT_EQ(owner.stats().blocks_built, before_fork.blocks_built);
  EXPECT_EQ(owner.stats().rows_copied, before_fork.rows_copied);
  EXPECT_EQ(owner.used_bytes(), used_before_fork);
  for (int t = 0; t < 2; ++t)
    for (int form = 0; form < 2; ++form) EXPECT_EQ(x.Row(a).root[t][form], x.Row(b).root[t][form]);

  // A appends: row 600 and V row 472 in place, under B's view
  const OwnerStats before_a = owner.stats();
  x.Append(a, 1);
  EXPECT_THAT(x.State(a), ElementsAre(601, 512, 473));
  EXPECT_EQ(owner.stats().pages_taken, before_a.pages_taken);
  EXPECT_EQ(x.Pages(a, kK, kExact), x.Pages(b, kK, kExact));
  EXPECT_EQ(owner.pool(0, kK, kExact).meta(x.Pages(a, kK, kExact).back()).mark, 25);
  EXPECT_EQ(owner.pool(0, kV, kCoded).meta(x.Pages(a, kV, kCoded).back()).mark, 89);

  // B appends: 24 exact K rows, 24 exact V rows, 88 coded V rows into three fresh pages
  const OwnerStats before_b = owner.stats();
  x.Append(b, 1);
  EXPECT_THAT(x.State(b), ElementsAre(601, 512, 473));
  EXPECT_EQ(owner.stats().pages_taken, before_b.pages_taken + 3);
  EXPECT_EQ(owner.stats().pages_copied, before_b.pages_copied + 3);
  EXPECT_EQ(owner.stats().rows_copied, before_b.rows_copied + 24 + 24 + 88);
  EXPECT_NE(x.Pages(a, kK, kExact).back(), x.Pages(b, kK, kExact).back());
  EXPECT_EQ(x.Pages(a, kK, kExact)[1], x.Pages(b, kK, kExact)[1]);
  EXPECT_EQ(x.Pages(a, kK, kCoded), x.Pages(b, kK, kCoded));

  // A to 640: four K groups close into page @512; the exact pages leave A, @512 and @544 live on in B
  const OwnerStats before_close = owner.stats();
  x.GrowTo(a, 640);
  EXPECT_THAT(x.State(a), ElementsAre(640, 640, 512));
  EXPECT_EQ(owner.stats().closed_groups, before_close.closed_groups + 4);
  EXPECT_THAT(x.Starts(a, kK, kCoded), ElementsAre(0, 128, 256, 384, 512));
  EXPECT_THAT(x.Starts(a, kK, kExact), IsEmpty());
  EXPECT_THAT(x.Starts(b, kK, kExact), ElementsAre(512, 544, 576));

  // A drafts 8 at 700, accepts 3
  x.GrowTo(a, 700);
  EXPECT_THAT(x.State(a), ElementsAre(700, 640, 572));
  const uint32_t v_page = x.Pages(a, kV, kCoded).back();
  auto draft = x.Begin(a, 8, Mode::kPrefix);
  ASSERT_TRUE(draft.ok());
  TxnView txn = *owner.Get(*draft);
  EXPECT_EQ(txn.count, 8);
  EXPECT_EQ(txn.rows[0].f[kV], 572);
  EXPECT_EQ(txn.rows[0].staged[kV], 579);
  EXPECT_EQ(txn.rows[0].staged[kK], 640);
  ASSERT_EQ(txn.jobs.size(), 2u);
  EXPECT_EQ(txn.jobs[0].tensor, kV);
  EXPECT_THAT((std::vector<int>{txn.jobs[0].from, txn.jobs[0].to, txn.jobs[0].at_seal}), ElementsAre(572, 579, 0));
  EXPECT_THAT((std::vector<int>{txn.jobs[1].from, txn.jobs[1].to, txn.jobs[1].at_seal}), ElementsAre(579, 580, 1));
  EXPECT_EQ(owner.pool(0, kV, kCoded).meta(v_page).mark, 580 - 512);
  x.Prepare(*draft);
  auto due = owner.Seal(*draft, 3);
  ASSERT_TRUE(due.ok());
  EXPECT_TRUE(due->empty());
  ASSERT_TRUE(owner.Publish(*draft, 3).ok());
  x.Check();
  EXPECT_THAT(x.State(a), ElementsAre(703, 640, 575));
  EXPECT_EQ(owner.pool(0, kV, kCoded).meta(v_page).mark, 575 - 512);  // marks go back
  EXPECT_EQ(owner.pool(0, kK, kExact).meta(x.Pages(a, kK, kExact).back()).mark,
            703 - 672);  // 32 at most; rows 704.. were on a page that is gone

  // a draft of 8 at 764 is cut to 4: K closes at 768
  x.GrowTo(a, 764);
  draft = x.Begin(a, 8, Mode::kPrefix);
  ASSERT_TRUE(draft.ok());
  EXPECT_EQ(owner.Get(*draft)->count, 4);
  owner.Abort(*draft);
  x.Check();
  EXPECT_EQ(owner.pool(0, kV, kCoded).meta(x.Pages(a, kV, kCoded).back()).mark, 764 - 128 - 512);

  // A at 764 truncates to 630: scar in K group 608..639, closed ahead
  ASSERT_TRUE(owner.Truncate(a, 630).ok());
  x.Check();
  EXPECT_THAT(x.State(a), ElementsAre(630, 630, 630));
  EXPECT_EQ(owner.scars(a, 0), 1);
  EXPECT_THAT(x.Starts(a, kK, kCoded), ElementsAre(0, 128, 256, 384, 512));
  EXPECT_THAT(x.Starts(a, kK, kExact), IsEmpty());
  EXPECT_THAT(x.Starts(a, kV, kExact), IsEmpty());

  // A appends, to 640: K rows 630..639 exact in page @630, then a short group of 10 in fresh K page @630
  x.GrowTo(a, 639);
  EXPECT_THAT(x.Starts(a, kK, kExact), ElementsAre(630));
  EXPECT_THAT(x.State(a), ElementsAre(639, 630, 630));
  const int64_t short_groups = owner.stats().short_groups;
  x.GrowTo(a, 640);
  EXPECT_THAT(x.State(a), ElementsAre(640, 640, 630));
  EXPECT_EQ(owner.stats().short_groups, short_groups + 1);
  EXPECT_THAT(x.Starts(a, kK, kCoded), ElementsAre(0, 128, 256, 384, 512, 630));
  EXPECT_EQ(owner.scars(a, 0), 1);

  // to 768: K .. @512, @630, @640; V page @512 was copied once (its mark was 124, row 630 is slot 118)
  const uint32_t v_before = x.Pages(a, kV, kCoded)[4];
  EXPECT_EQ(owner.pool(0, kV, kCoded).meta(v_before).mark, 124);
  const OwnerStats before_768 = owner.stats();
  x.GrowTo(a, 768);
  EXPECT_THAT(x.State(a), ElementsAre(768, 768, 640));
  EXPECT_THAT(x.Starts(a, kK, kCoded), ElementsAre(0, 128, 256, 384, 512, 630, 640));
  EXPECT_THAT(x.Starts(a, kV, kCoded), ElementsAre(0, 128, 256, 384, 512));
  EXPECT_NE(x.Pages(a, kV, kCoded)[4], v_before);
  EXPECT_EQ(owner.stats().pages_copied, before_768.pages_copied + 1);
  EXPECT_EQ(owner.stats().rows_copied, before_768.rows_copied + 118);

  // truncate 100
  ASSERT_TRUE(owner.Truncate(a, 100).ok());
  x.Check();
  EXPECT_THAT(x.State(a), ElementsAre(100, 100, 100));
  EXPECT_THAT(x.Starts(a, kK, kCoded), ElementsAre(0));
  EXPECT_THAT(x.Starts(a, kV, kCoded), ElementsAre(0));
  EXPECT_THAT(x.Starts(a, kK, kExact), IsEmpty());
  EXPECT_THAT(x.Starts(a, kV, kExact), IsEmpty());

  // to 128: short group 100..127 in K page @100; V exact @100
  x.GrowTo(a, 128);
  EXPECT_THAT(x.State(a), ElementsAre(128, 128, 100));
  EXPECT_THAT(x.Starts(a, kK, kCoded), ElementsAre(0, 100));
  EXPECT_THAT(x.Starts(a, kV, kExact), ElementsAre(100));

  // to 229: V row 100 closes; the 100 live rows of V page @0 are copied, its mark is 128
  x.GrowTo(a, 228);
  EXPECT_EQ(owner.pool(0, kV, kCoded).meta(x.Pages(a, kV, kCoded)[0]).mark, 128);
  const OwnerStats before_229 = owner.stats();
  x.GrowTo(a, 229);
  EXPECT_THAT(x.State(a), ElementsAre(229, 128, 101));
  EXPECT_EQ(owner.stats().rows_copied, before_229.rows_copied + 100);
  EXPECT_THAT(x.Starts(a, kV, kCoded), ElementsAre(0));

  // release A, B: zero
  ASSERT_TRUE(owner.Release(a).ok());
  x.Check();
  EXPECT_GT(owner.used_bytes(), 0);
  EXPECT_THAT(x.State(b), ElementsAre(601, 512, 473));
  ASSERT_TRUE(owner.Release(b).ok());
  x.Check();
  EXPECT_EQ(owner.used_bytes(), 0);
  EXPECT_EQ(owner.Census().tables, 0);
}

TEST(OwnerGrowth, AnAppendCopiesTheSameAtAnyLength) {
  Fixture x({KiviB()}, /*max_len=*/140000, /*pages=*/1200);
  const SeqId seq = x.Open();
  // What 256 single rows and one fork cost, from `len` on.
  const auto measure = [&](int64_t len) {
    while (x.owner->length(seq) < len) {
      const int rows = static_cast<int>(std::min<int64_t>(512, len - x.owner->length(seq)));
      auto id = x.Begin(seq, rows);
      LQ_CHECK(id.ok());
      x.Prepare(*id);
      LQ_CHECK(x.owner->Publish(*id, rows).ok());
    }
    const OwnerStats from = x.owner->stats();
    std::vector<std::vector<int64_t>> steps;
    OwnerStats last = from;
    const auto note = [&] {
      const OwnerStats now = x.owner->stats();
      steps.push_back({now.pages_taken - last.pages_taken, now.rows_copied - last.rows_copied,
                       now.entries_written - last.entries_written, now.blocks_built - last.blocks_built,
                       now.roots_built - last.roots_built, now.table_bytes_copied - last.table_bytes_copied});
      last = now;
    };
    for (int i = 0; i < 256; ++i) {
      auto id = x.Begin(seq, 1);
      LQ_CHECK(id.ok());
      x.Prepare(*id);
      LQ_CHECK(x.owner->Publish(*id, 1).ok());
      note();
    }
    const SeqId fork = x.owner->Fork(seq)->seq;
    note();
    auto id = x.Begin(fork, 1);  // the first row of a branch pays for its tails
    LQ_CHECK(id.ok());
    x.Prepare(*id);
    LQ_CHECK(x.owner->Publish(*id, 1).ok());
    note();
    LQ_CHECK(x.owner->Release(fork).ok());
    return steps;
  };
  const auto at_1k = measure(1024), at_128k = measure(131072);
  EXPECT_EQ(at_1k, at_128k);
  EXPECT_THAT(at_1k[256], ElementsAre(0, 0, 0, 0, 0, 0));  // the fork
  int64_t built = 0;
  for (const auto& step : at_1k) built += step[4];
  EXPECT_GT(built, 0);
  x.Check();
}

}  // namespace
}  // namespace livequant
