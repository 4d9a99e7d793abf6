// Truncate, fork, reorder and leases against the list-of-rows oracle (P10, P11): no stale row is ever read.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "kv/kv_support.h"

namespace livequant {
namespace {

class BranchTest : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Cases, BranchTest, ::testing::ValuesIn(CaseNames()), CaseTestName);

constexpr int kBranchRows = 437;

// A sequence in the cache beside the oracle's idea of it. Each append takes a stream of its own, so no two writes are
// alike.
struct Pair {
  SeqId seq;
  Shadow shadow;
};

void Append(Harness& h, Pair& p, uint64_t stream, int64_t rows, int chunk, bool check_attention) {
  for (int64_t done = 0; done < rows && !::testing::Test::HasFailure();) {
    const int64_t n = std::min<int64_t>(chunk, rows - done);
    const std::vector<Id> ids = Ids(stream, p.shadow.len(), p.shadow.len() + n);
    const Shadow before = p.shadow;
    p.shadow.Append(ids);
    const std::vector<RowOutput> outputs = h.AppendAll(p.seq, ids, chunk, check_attention);
    if (check_attention) ExpectAttention(h, outputs, before, p.shadow);
    done += n;
  }
}

// P10. Every kind of place: group interior and edge, page edge, exact tail, last row, nothing, all, inside pinned rows.
TEST_P(BranchTest, TruncateLeavesNoStaleRow) {
  const CacheSchema schema = CaseSchema(GetParam(), 2, 1, 32);
  Harness h(schema, {.sequences = 3});
  Pair whole{h.Open(), Shadow(schema)};
  Append(h, whole, 1, kBranchRows, 200, false);
  ExpectThreeClosures(h);
  const std::vector<std::byte> untouched = h.State(whole.seq);
  uint64_t stream = 100;
  for (const int64_t len : {0, 3, 32, 96, 101, 127, 128, 129, 200, 256, 300, 309, 384, 400, 416, 436, 437}) {
    SCOPED_TRACE("truncate to " + std::to_string(len));
    auto fork = h.owner().Fork(whole.seq);
    ASSERT_TRUE(fork.ok()) << fork.status().ToString();
    Pair p{fork->seq, whole.shadow};
    ASSERT_TRUE(h.owner().Truncate(p.seq, len).ok());
    p.shadow.Truncate(len);
    h.ExpectSound();
    ExpectRows(h, p.seq, p.shadow);
    // Re-append over the cut: a row alone, then past the next closures.
    Append(h, p, ++stream, 1, 1, true);
    ExpectRows(h, p.seq, p.shadow);
    Append(h, p, ++stream, 150, 50, false);
    ExpectRows(h, p.seq, p.shadow);
    // And once more inside what was just written.
    const int64_t again = len + 77;
    ASSERT_TRUE(h.owner().Truncate(p.seq, again).ok());
    p.shadow.Truncate(again);
    Append(h, p, ++stream, 70, 70, true);
    ExpectRows(h, p.seq, p.shadow);
    h.ExpectSound();
    if (HasFailure()) return;
    ASSERT_TRUE(h.owner().Release(p.seq).ok());
  }
  EXPECT_EQ(h.State(whole.seq), untouched);
  if (KiviLike(schema)) {
    EXPECT_GT(h.owner().stats().scars, 0);
    EXPECT_GT(h.owner().stats().short_groups, 0);
  }
  ASSERT_TRUE(h.owner().Release(whole.seq).ok());
  EXPECT_EQ(h.owner().used_bytes(), 0);
  EXPECT_EQ(h.owner().Truncate(whole.seq, 0).ok(), false);
}

// A scar shows in the state: the same rows closed in other company are another state.
TEST(Branch, AStateKnowsWhichRowsClosedTogether) {
  const CacheSchema schema = CaseSchema("kivi2", 1, 1, 32);
  Harness h(schema);
  const SeqId straight = h.Open(), cut = h.Open();
  h.AppendAll(straight, Ids(1, 0, 300), 300, false);
  h.AppendAll(cut, Ids(1, 0, 300), 300, false);
  EXPECT_EQ(h.State(straight), h.State(cut));
  ASSERT_TRUE(h.owner().Truncate(cut, 100).ok());
  h.AppendAll(cut, Ids(1, 100, 300), 200, false);
  EXPECT_EQ(h.owner().length(cut), 300);
  EXPECT_NE(h.State(straight), h.State(cut));
}

// P11. Siblings write the same slots and never see each other.
TEST_P(BranchTest, ForkSharesAndCopiesOnWrite) {
  const CacheSchema schema = CaseSchema(GetParam(), 2, 1, 32);
  Harness h(schema, {.sequences = 4});
  for (const int64_t len : {390, 128, 77}) {
    SCOPED_TRACE("fork at " + std::to_string(len));
    Pair parent{h.Open(), Shadow(schema)};
    Append(h, parent, 1, len, 256, false);
    const std::vector<std::byte> before = h.State(parent.seq);
    const int64_t bytes = h.owner().used_bytes();
    std::vector<Pair> children;
    for (int i = 0; i < 2; ++i) {
      auto fork = h.owner().Fork(parent.seq);
      ASSERT_TRUE(fork.ok());
      children.push_back({fork->seq, parent.shadow});
      EXPECT_EQ(h.State(fork->seq), before);
    }
    EXPECT_EQ(h.owner().used_bytes(), bytes);
    const int64_t copied = h.owner().stats().rows_copied;
    Append(h, children[0], 2, 1, 1, true);
    EXPECT_EQ(h.State(parent.seq), before);
    Append(h, children[1], 3, 1, 1, true);
    if (len % 32 != 0) {
      EXPECT_GT(h.owner().stats().rows_copied, copied) << "the second writer of a slot must copy";
    }
    Append(h, children[0], 4, 140, 45, false);
    Append(h, children[1], 5, 140, 140, true);
    EXPECT_EQ(h.State(parent.seq), before);
    Append(h, parent, 6, 3, 1, true);
    for (const Pair& p : children) ExpectRows(h, p.seq, p.shadow);
    ExpectRows(h, parent.seq, parent.shadow);
    for (const Pair& p : children) ASSERT_TRUE(h.owner().Release(p.seq).ok());
    ExpectRows(h, parent.seq, parent.shadow);
    ASSERT_TRUE(h.owner().Release(parent.seq).ok());
    EXPECT_EQ(h.owner().used_bytes(), 0);
    if (HasFailure()) return;
  }
}

TEST_P(BranchTest, ReorderMovesBeamsWithDuplicates) {
  const CacheSchema schema = CaseSchema(GetParam(), 1, 1, 32);
  Harness h(schema, {.sequences = 4});
  std::vector<Pair> beams;
  beams.push_back({h.Open(), Shadow(schema)});
  Append(h, beams[0], 1, 380, 380, false);
  for (int i = 1; i < 4; ++i) {
    auto fork = h.owner().Fork(beams[0].seq);
    ASSERT_TRUE(fork.ok());
    beams.push_back({fork->seq, beams[0].shadow});
  }
  std::vector<SeqId> group;
  for (const Pair& p : beams) group.push_back(p.seq);
  uint64_t stream = 10;
  for (const std::vector<int>& parents : {std::vector<int>{0, 0, 2, 1}, {3, 3, 3, 3}, {1, 0, 3, 2}, {2, 2, 1, 1}}) {
    std::vector<StepInput> inputs;
    std::vector<Shadow> before;
    for (Pair& p : beams) {
      inputs.push_back({p.seq, Ids(++stream, p.shadow.len(), p.shadow.len() + 3)});
      before.push_back(p.shadow);
      p.shadow.Append(inputs.back().ids);
    }
    const auto outputs = h.Append(inputs);
    for (size_t i = 0; i < beams.size(); ++i) ExpectAttention(h, outputs[i], before[i], beams[i].shadow);
    ASSERT_TRUE(h.owner().Reorder(group, parents).ok());
    std::vector<Shadow> moved;
    for (const int parent : parents) moved.push_back(beams[static_cast<size_t>(parent)].shadow);
    for (size_t i = 0; i < beams.size(); ++i) beams[i].shadow = moved[i];
    h.ExpectSound();
    for (const Pair& p : beams) ExpectRows(h, p.seq, p.shadow);
    if (HasFailure()) return;
  }
  ExpectThreeClosures(h);
}

// A reorder takes all its views or none: with every one but the last in a reader's hands nothing moves.
TEST_P(BranchTest, AReorderThatFindsNoRoomLeavesEveryBeam) {
  const CacheSchema schema = CaseSchema(GetParam(), 1, 1, 32);
  Harness h(schema, {.sequences = 3});
  std::vector<SeqId> group = {h.Open()};
  h.AppendAll(group[0], Ids(1, 0, 200), 200, false);
  for (uint64_t i = 1; i < 3; ++i) {
    auto fork = h.owner().Fork(group[0]);
    ASSERT_TRUE(fork.ok());
    group.push_back(fork->seq);
    h.AppendAll(fork->seq, Ids(10 + i, 200, 207), 7, false);
  }
  h.AppendAll(group[0], Ids(10, 200, 207), 7, false);
  std::vector<Owner::Lease> readers;
  const std::vector<int> parents = {2, 2, 0};
  for (int moved = 0;; ++moved) {
    std::vector<std::vector<std::byte>> states;
    std::vector<uint64_t> generations;
    for (const SeqId seq : group) {
      states.push_back(h.State(seq));
      generations.push_back(h.owner().generation(seq));
      auto lease = h.owner().Acquire(seq);
      ASSERT_TRUE(lease.ok());
      readers.push_back(*std::move(lease));
    }
    const int64_t used = h.owner().used_bytes();
    const auto receipt = h.owner().Reorder(group, parents);
    h.ExpectSound();
    if (receipt.ok()) {
      ASSERT_LT(moved, 20) << "the views never ran out";
      for (size_t i = 0; i < group.size(); ++i) EXPECT_EQ(h.State(group[i]), states[static_cast<size_t>(parents[i])]);
      EXPECT_EQ(h.owner().used_bytes(), used) << "a reorder takes no page";
      continue;
    }
    EXPECT_EQ(receipt.status().code(), Code::kOutOfPages);
    EXPECT_GT(moved, 1);
    for (size_t i = 0; i < group.size(); ++i) {
      EXPECT_EQ(h.State(group[i]), states[i]);
      EXPECT_EQ(h.owner().generation(group[i]), generations[i]);
    }
    break;
  }
  readers.clear();
  EXPECT_TRUE(h.owner().Reorder(group, parents).ok());
  h.ExpectSound();
}

// A random walk over everything at once.
TEST_P(BranchTest, RandomOperationsAgreeWithTheListOfRows) {
  const CacheSchema schema = CaseSchema(GetParam(), 1, 1, 32);
  ForAll(2, [&](Rng& rng) {
    Harness h(schema, {.sequences = 4, .max_len = 640});
    std::vector<Pair> live;
    live.push_back({h.Open(), Shadow(schema)});
    Append(h, live[0], 1, 385, 385, false);
    uint64_t stream = 1;
    for (int op = 0; op < 25 && !HasFailure(); ++op) {
      const size_t at = static_cast<size_t>(rng.Range(0, static_cast<int64_t>(live.size()) - 1));
      Pair& p = live[at];
      const int64_t room = 640 - p.shadow.len();
      switch (rng.Range(0, 5)) {
        case 0:
        case 1:
          if (room > 0)
            Append(h, p, ++stream, std::min<int64_t>(room, rng.Range(1, 5)), static_cast<int>(rng.Range(1, 5)), true);
          break;
        case 2:
          if (room > 0) Append(h, p, ++stream, std::min<int64_t>(room, rng.Range(1, 140)), 512, false);
          break;
        case 3: {
          const int64_t len =
              rng.Chance(0.7) ? std::max<int64_t>(0, p.shadow.len() - rng.Range(0, 150)) : rng.Range(0, p.shadow.len());
          ASSERT_TRUE(h.owner().Truncate(p.seq, len).ok());
          p.shadow.Truncate(len);
          break;
        }
        case 4:
          if (live.size() < 4) {
            auto fork = h.owner().Fork(p.seq);
            ASSERT_TRUE(fork.ok());
            live.push_back({fork->seq, p.shadow});
          }
          break;
        case 5:
          if (live.size() > 1) {
            ASSERT_TRUE(h.owner().Release(p.seq).ok());
            live.erase(live.begin() + static_cast<int64_t>(at));
          }
          break;
      }
      h.ExpectSound();
      for (const Pair& each : live) ExpectRows(h, each.seq, each.shadow);
      const LedgerBytes census = h.owner().Census();
      ASSERT_EQ(h.owner().used_bytes(), census.total() + census.slack);
    }
    ExpectThreeClosures(h);
  });
}

TEST_P(BranchTest, ALeaseKeepsThePredecessor) {
  const CacheSchema schema = CaseSchema(GetParam(), 1, 1, 32);
  Harness h(schema, {.sequences = 2});
  Pair p{h.Open(), Shadow(schema)};
  Append(h, p, 1, 390, 390, false);
  const std::vector<std::byte> before = h.State(p.seq);
  {
    auto lease = h.owner().Acquire(p.seq);
    ASSERT_TRUE(lease.ok());
    std::vector<std::vector<RowOutput>> outputs;
    const StepInput input{p.seq, Ids(2, 390, 420)};
    auto step = h.Run({&input, 1}, &outputs);
    ASSERT_TRUE(step.ok());
    EXPECT_EQ(h.cache().StateBytes(*lease), before) << "prepared, not yet published";
    EXPECT_EQ(h.State(p.seq), before) << "nothing is public before publish";
    ASSERT_TRUE(step->Publish().ok());
    EXPECT_EQ(h.cache().StateBytes(*lease), before);
    EXPECT_NE(h.State(p.seq), before);
    h.AppendAll(p.seq, Ids(3, 420, 560), 140, false);
    ASSERT_TRUE(h.owner().Truncate(p.seq, 10).ok());
    h.AppendAll(p.seq, Ids(4, 10, 300), 290, false);
    EXPECT_EQ(h.cache().StateBytes(*lease), before);
    ASSERT_TRUE(h.owner().Release(p.seq).ok());
    EXPECT_EQ(h.cache().StateBytes(*lease), before);
    EXPECT_GT(h.owner().used_bytes(), 0);
    h.ExpectSound();
  }
  EXPECT_EQ(h.owner().used_bytes(), 0);
}

// Readers on other threads while a writer appends, truncates and appends again: each lease is one whole state.
TEST(Branch, ReadersSeeWholeStatesWhileAWriterWorks) {
  for (const char* name : {"kivi2", "qserve8"}) {
    const CacheSchema schema = CaseSchema(name, 1, 1, 32);
    constexpr int kFirst = 100, kLast = 290;
    std::vector<std::vector<std::byte>> want(kLast + 1);
    {
      Harness h(schema, {.threads = 1});
      const SeqId seq = h.Open();
      h.AppendAll(seq, Ids(1, 0, kFirst), 512, false);
      want[kFirst] = h.State(seq);
      for (int n = kFirst + 1; n <= kLast; ++n) {
        h.AppendAll(seq, Ids(1, n - 1, n), 1, false);
        want[n] = h.State(seq);
      }
    }
    Harness h(schema, {.threads = 1});
    const SeqId seq = h.Open();
    h.AppendAll(seq, Ids(1, 0, kFirst), 512, false);
    std::atomic<bool> done{false};
    std::atomic<int> wrong{0}, reads{0};
    std::vector<std::thread> readers;
    for (int r = 0; r < 2; ++r)
      readers.emplace_back([&] {
        while (!done.load()) {
          auto lease = h.owner().Acquire(seq);
          if (!lease.ok()) {
            ++wrong;
            continue;
          }
          if (h.cache().StateBytes(*lease) != want[static_cast<size_t>(lease->length())]) ++wrong;
          ++reads;
        }
      });
    for (int n = kFirst + 1; n <= kLast; ++n) h.AppendAll(seq, Ids(1, n - 1, n), 1, /*attend=*/n % 10 == 0);
    while (reads.load() < 10) std::this_thread::yield();
    done = true;
    for (std::thread& t : readers) t.join();
    EXPECT_EQ(wrong.load(), 0);
    EXPECT_GE(reads.load(), 10);
    EXPECT_EQ(h.State(seq), want[kLast]);
  }
}

// Steps of two threads at once, each with its own sequence and pool.
TEST(Branch, StepsOfTwoThreadsDoNotMeet) {
  const CacheSchema schema = CaseSchema("mixed", 4, 1, 32);
  Harness h(schema, {.threads = 1});
  Harness alone(schema, {.threads = 1});
  const SeqId reference = alone.Open();
  std::vector<std::byte> want[2];
  for (uint64_t i = 0; i < 2; ++i) {
    ASSERT_TRUE(alone.owner().Truncate(reference, 0).ok());
    alone.AppendAll(reference, Ids(i, 0, 300), 20, false);
    want[i] = alone.State(reference);
  }
  const SeqId seq[2] = {h.Open(), h.Open()};
  std::atomic<int> failed{0};
  std::vector<std::thread> writers;
  for (uint64_t i = 0; i < 2; ++i)
    writers.emplace_back([&, i] {
      ThreadPool pool(1);
      std::vector<float> k(20 * 32), v(20 * 32), q(20 * 64), out(20 * 64);
      for (int64_t at = 0; at < 300; at += 20) {
        const AppendRequest request{seq[i], 20};
        auto step = h.cache().Begin({&request, 1});
        if (!step.ok()) {
          ++failed;
          return;
        }
        for (int layer = 0; layer < 4; ++layer) {
          const std::vector<Id> ids = Ids(i, at, at + 20);
          for (size_t r = 0; r < ids.size(); ++r) {
            FillRow(ids[r], layer, kK, std::span(k).subspan(r * 32, 32));
            FillRow(ids[r], layer, kV, std::span(v).subspan(r * 32, 32));
          }
          if (!step->Prepare(layer, k.data(), v.data(), pool).ok()) ++failed;
          if (!step->Attend(layer, q.data(), 2, 1.0f, out.data(), pool).ok()) ++failed;
        }
        if (!step->Publish().ok()) ++failed;
      }
    });
  for (std::thread& t : writers) t.join();
  EXPECT_EQ(failed.load(), 0);
  for (int i : {0, 1}) EXPECT_EQ(h.State(seq[i]), want[i]);
  h.ExpectSound();
}

}  // namespace
}  // namespace livequant
