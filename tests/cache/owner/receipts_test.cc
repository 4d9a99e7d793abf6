// Receipts and the ids of callers, on pages without bytes.
#include "cache/owner/receipts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <type_traits>

#include "cache/owner/heap_counter.h"
#include "cache/owner/owner_fixture.h"
#include "support/property.h"

namespace livequant {
namespace {

using ::testing::HasSubstr;

static_assert(std::is_trivially_copyable_v<Receipt> && sizeof(Receipt) == 104);

TEST(IdMap, AgreesWithAStandardMap) {
  ForAll(50, [](Rng& rng) {
    const int64_t most = rng.Range(1, 40);
    IdMap map(most);
    std::map<TxnId, int64_t> want;
    for (int i = 0; i < 400; ++i) {
      const TxnId id = static_cast<TxnId>(rng.Range(1, 60));
      if (rng.Chance(0.5)) {
        map.Erase(id);
        want.erase(id);
      } else if (want.count(id) == 0 && static_cast<int64_t>(want.size()) < most) {
        map.Insert(id, i);
        want[id] = i;
      }
      for (TxnId k = 0; k <= 60; ++k) ASSERT_EQ(map.Find(k), want.count(k) != 0 ? want[k] : -1) << k;
    }
  });
}

TEST(ReceiptRing, KeepsTheLastOnesAndKnowsWhatLeft) {
  ReceiptRing ring(3);
  for (const TxnId id : {TxnId{5}, kOwnId | 7, TxnId{3}}) ring.Add({.txn = id}, id * 2);
  EXPECT_EQ(ring.Find(5)->content, 10u);
  EXPECT_FALSE(ring.Expired(4));
  ring.Add({.txn = 9}, 18);  // 5 leaves
  EXPECT_EQ(ring.Find(5), nullptr);
  EXPECT_TRUE(ring.Expired(5));
  EXPECT_TRUE(ring.Expired(4)) << "never used, but nobody can tell";
  EXPECT_FALSE(ring.Expired(3)) << "still there";
  EXPECT_FALSE(ring.Expired(6));
  EXPECT_FALSE(ring.Expired(kOwnId | 7));
  ring.Add({.txn = 10}, 20);  // the owner's own leaves
  EXPECT_TRUE(ring.Expired(kOwnId | 7));
  EXPECT_FALSE(ring.Expired(kOwnId | 8));
}

class OwnerIds : public ::testing::Test {
 protected:
  // A receipt that must be there.
  Receipt Must(const Result<Receipt>& receipt) {
    LQ_CHECK(receipt.ok());
    return *receipt;
  }
  Fixture x_{{KiviB()}, 1024, 100, 4};
};

TEST_F(OwnerIds, EveryTransitionTellsWhatItDidAndRepeatsItOnly) {
  Owner& owner = *x_.owner;
  const Receipt open = Must(owner.Open(1));
  const SeqId a = open.seq;
  EXPECT_EQ(open.transition, Transition::kOpen);
  EXPECT_EQ(open.generation_before, 0u);
  EXPECT_EQ(open.txn, 1u);

  const AppendRequest request{.seq = a, .rows = 300, .id = 2, .content = 42};
  TxnId txn = 0;
  ASSERT_TRUE(owner.Begin({&request, 1}, {&txn, 1}).ok());
  EXPECT_EQ(txn, 2u);
  x_.Prepare(txn);
  const int64_t used = owner.used_bytes();
  ASSERT_TRUE(owner.Begin({&request, 1}, {&txn, 1}).ok()) << "begun, not published: the same transaction";
  EXPECT_EQ(owner.used_bytes(), used);
  EXPECT_EQ(owner.FindReceipt(2).status().code(), Code::kNotFound);
  const Receipt append = Must(owner.Publish(2, 300));
  EXPECT_EQ(append.length, 300);
  EXPECT_EQ(append.generation_before, open.generation);
  EXPECT_EQ(append.generation, owner.generation(a));
  EXPECT_EQ(owner.Begin({&request, 1}, {&txn, 1}).code(), Code::kAccepted);

  const Receipt fork = Must(owner.Fork(a, 3));
  EXPECT_EQ(fork.parent, a);
  EXPECT_EQ(fork.length, 300);
  const SeqId b = fork.seq, group[2] = {a, b};
  const int parents[2] = {1, 1}, others[2] = {0, 1};
  const Receipt reorder = Must(owner.Reorder(group, parents, 4));
  EXPECT_EQ(reorder.rows, 2);
  EXPECT_EQ(owner.generation(a), reorder.generation);
  EXPECT_EQ(owner.generation(b), reorder.generation + 1);
  const Receipt truncate = Must(owner.Truncate(b, 290, 5));
  EXPECT_EQ(truncate.length, 290);
  EXPECT_EQ(truncate.generation_before, reorder.generation + 1);
  const Receipt release = Must(owner.Release(b, 6));
  EXPECT_EQ(release.length, 290);
  for (const Receipt& r : {open, append, fork, reorder, truncate, release}) {
    EXPECT_EQ(r.owner, open.owner);
    EXPECT_EQ(r.schema, open.schema);
    EXPECT_EQ(Must(owner.FindReceipt(r.txn)), r);
  }
  EXPECT_NE(open.owner, Fixture({KiviB()}).owner->Open()->owner);

  const OwnerStats before = owner.stats();
  const uint64_t generation = owner.generation(a);
  EXPECT_EQ(Must(owner.Open(1)), open);
  EXPECT_EQ(Must(owner.Publish(2, 300)), append);
  EXPECT_EQ(Must(owner.Fork(a, 3)), fork);
  EXPECT_EQ(Must(owner.Reorder(group, parents, 4)), reorder);
  EXPECT_EQ(Must(owner.Truncate(b, 290, 5)), truncate) << "of a sequence that is closed by now";
  EXPECT_EQ(Must(owner.Release(b, 6)), release);
  EXPECT_EQ(owner.stats().repeats, before.repeats + 6);
  EXPECT_EQ(owner.generation(a), generation);
  x_.Check();

  // Other content under a known id: of another kind, and of the same.
  for (const TxnId id : {1, 2, 3, 4, 6}) EXPECT_EQ(owner.Truncate(a, 10, id).status().code(), Code::kIdMismatch) << id;
  EXPECT_EQ(owner.Publish(2, 299).status().code(), Code::kIdMismatch);
  EXPECT_EQ(owner.Fork(b, 3).status().code(), Code::kIdMismatch);
  EXPECT_EQ(owner.Reorder(group, others, 4).status().code(), Code::kIdMismatch);
  EXPECT_EQ(owner.Truncate(b, 291, 5).status().code(), Code::kIdMismatch);
  EXPECT_EQ(owner.Release(a, 6).status().code(), Code::kIdMismatch);
  const AppendRequest other{.seq = a, .rows = 300, .id = 2, .content = 43};
  EXPECT_EQ(owner.Begin({&other, 1}, {&txn, 1}).code(), Code::kIdMismatch);
  EXPECT_THAT(owner.Release(a, 5).status().message(),
              HasSubstr("id 5 stands for another transition: truncate of sequence"));
  EXPECT_EQ(owner.length(a), 300);
  x_.Check();
}

TEST_F(OwnerIds, ARefusedTransitionLeavesItsIdFree) {
  Owner& owner = *x_.owner;
  const SeqId a = owner.Open(10)->seq;
  EXPECT_EQ(owner.Truncate(a, 1, 11).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(owner.FindReceipt(11).status().code(), Code::kNotFound);
  EXPECT_EQ(owner.Fork(a + 1, 11).status().code(), Code::kClosed);
  const AppendRequest request{.seq = a, .rows = 5, .id = 11};
  TxnId txn = 0;
  ASSERT_TRUE(owner.Begin({&request, 1}, {&txn, 1}).ok());
  EXPECT_EQ(owner.Truncate(a, 0, 11).status().code(), Code::kIdMismatch) << "begun under it";
  owner.Abort(11);
  EXPECT_EQ(owner.Publish(11, 5).status().code(), Code::kFailedTxn);
  EXPECT_TRUE(owner.Truncate(a, 0, 11).ok());
  x_.Check();
}

TEST_F(OwnerIds, BadIdsAreRefused) {
  Owner& owner = *x_.owner;
  EXPECT_EQ(owner.Open(kOwnId).status().code(), Code::kInvalidArgument);
  EXPECT_THAT(owner.Open(kOwnId).status().message(), HasSubstr("9223372036854775807"));
  const SeqId a = owner.Open()->seq, b = owner.Open()->seq;
  const AppendRequest twice[2] = {{.seq = a, .rows = 1, .id = 7}, {.seq = b, .rows = 1, .id = 7}};
  TxnId ids[2] = {};
  EXPECT_EQ(owner.Begin(twice, ids).code(), Code::kInvalidArgument);
  EXPECT_EQ(owner.used_bytes(), 0);
  EXPECT_EQ(owner.stats().begins, 0);
  EXPECT_EQ(owner.Get(7).status().code(), Code::kFailedTxn);
  x_.Check();
  // One of a batch goes on, the other is new: then the new one alone is taken back.
  ASSERT_TRUE(owner.Begin({twice, 1}, {ids, 1}).ok());
  const AppendRequest mixed[2] = {{.seq = a, .rows = 1, .id = 7}, {.seq = b, .rows = 1, .id = 8}};
  x_.faults.fail_at[static_cast<int>(AllocationSite::kView)] = 1;
  EXPECT_EQ(owner.Begin(mixed, ids).code(), Code::kOutOfPages);
  EXPECT_TRUE(owner.Get(7).ok());
  ASSERT_TRUE(owner.Begin(mixed, ids).ok());
  x_.Check();
  for (const TxnId id : ids) owner.Abort(id);
  EXPECT_EQ(owner.used_bytes(), 0);
}

TEST(OwnerReceipts, TheRingHasTheDepthThatIsStated) {
  OwnerLimits limits;
  limits.max_sequences = 2;
  limits.max_len = 256;
  limits.receipts = 5;
  limits.allocate_memory = false;
  const CacheSchema schema = SchemaOf({KiviB()});
  limits.pages.assign(4, 10);
  auto owner = *Owner::Create(schema, limits);
  const SeqId a = owner->Open(1)->seq;
  for (TxnId id = 2; id <= 6; ++id) {
    ASSERT_TRUE(owner->FindReceipt(1).ok()) << id;
    ASSERT_TRUE(owner->Truncate(a, 0, id).ok());
  }
  const uint64_t generation = owner->generation(a);
  EXPECT_EQ(owner->Open(1).status().code(), Code::kIdExpired);
  EXPECT_THAT(owner->Open(1).status().message(), HasSubstr("older than the last 5 receipts"));
  EXPECT_EQ(owner->FindReceipt(1).status().code(), Code::kIdExpired);
  EXPECT_EQ(owner->Truncate(a, 0, 1).status().code(), Code::kIdExpired);
  EXPECT_TRUE(owner->Truncate(a, 0, 2).ok());
  EXPECT_EQ(owner->generation(a), generation);
  limits.receipts = -1;
  EXPECT_THAT(Owner::Create(schema, limits).status().message(), HasSubstr("receipts -1"));
}

TEST_F(OwnerIds, AReleaseReceiptIsConsumedOnceWhenTheLastViewGoes) {
  Owner& owner = *x_.owner;
  const SeqId a = x_.Open();
  x_.Append(a, 200);
  const TxnId held = *x_.Begin(a, 3);
  auto lease = std::make_optional(*owner.Acquire(a));
  const Receipt release = Must(owner.Release(a));
  EXPECT_FALSE(*owner.Reclaimed(release.txn));
  EXPECT_EQ(Must(owner.Open()).seq % 4, a % 4) << "the slot is free at once, under another name";
  lease.reset();
  EXPECT_FALSE(*owner.Reclaimed(release.txn)) << "a transaction still reads it";
  x_.Check();
  EXPECT_EQ(owner.stats().reclaims, 0);
  owner.Abort(held);
  EXPECT_TRUE(*owner.Reclaimed(release.txn));
  EXPECT_EQ(owner.stats().reclaims, 1);
  EXPECT_EQ(owner.used_bytes(), 0);
  x_.Check();
  EXPECT_EQ(owner.Reclaimed(12345).status().code(), Code::kNotFound);
  const Receipt open = Must(owner.Open());
  EXPECT_EQ(owner.Reclaimed(open.txn).status().code(), Code::kInvalidArgument);
}

TEST_F(OwnerIds, NothingIsAllocatedForIdsAndReceipts) {
  Owner& owner = *x_.owner;
  const SeqId a = x_.Open();
  TxnId next = 0, txn = 0;
  int64_t wrong = 0;
  const int64_t before = HeapAllocations();
  for (int i = 0; i < 600; ++i) {
    const AppendRequest request{.seq = a, .rows = 1, .id = ++next};
    for (int again = 0; again < 2; ++again) wrong += !owner.Begin({&request, 1}, {&txn, 1}).ok();
    wrong += !owner.MarkPrepared(txn, 0).ok();
    for (int again = 0; again < 2; ++again) wrong += !owner.Publish(txn, 1).ok();
    const auto fork = owner.Fork(a, ++next);
    wrong += !(*owner.Fork(a, next) == *fork);
    wrong += !owner.Release(fork->seq, ++next).ok();
    wrong += !*owner.Reclaimed(next);
  }
  EXPECT_EQ(HeapAllocations(), before);
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(owner.length(a), 600);
}

}  // namespace
}  // namespace livequant
