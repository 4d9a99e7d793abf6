// Several threads on one owner: each writes its own sequences on real pages while others fork them, lease them, and
// read. Run under TSan.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <latch>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/rng.h"
#include "cache/owner/mini_codec.h"
#include "cache/owner/owner.h"
#include "cache/owner/row_oracle.h"
#include "cache/owner/schemas.h"

namespace livequant {
namespace {

constexpr int kWriters = 3;
constexpr int kSteps = 1000;
constexpr int kMaxLen = 80;

// A leased snapshot on its way to a reader.
struct Snapshot {
  Owner::Lease lease;
  OracleSequence rows;
};

class Storm {
 public:
  explicit Storm(const ClassSpec& spec) : schema_(SchemaOf({spec})), schedule_(schema_) {
    OwnerLimits limits;
    limits.max_sequences = kWriters * 2;
    limits.max_views = kWriters * 8 + 40;
    limits.max_len = kMaxLen;
    limits.pages.assign(4, 600);
    auto made = Owner::Create(schema_, limits);
    LQ_CHECK(made.ok());
    owner_ = *std::move(made);
    codec_ = std::make_unique<MiniCodec>(schema_, *owner_);
  }

  void Run() {
    std::vector<std::thread> threads;
    std::thread reader([this] { Read(); });
    for (int w = 0; w < kWriters; ++w) threads.emplace_back([this, w] { Write(w); });
    for (std::thread& t : threads) t.join();
    stop_ = true;
    reader.join();
    EXPECT_TRUE(queue_.empty());
    EXPECT_EQ(Failure(), "");
    const Status s = owner_->CheckInvariants();
    EXPECT_TRUE(s.ok()) << s.ToString();
    EXPECT_EQ(owner_->used_bytes(), 0);
    EXPECT_GT(reads_.load(), 0);
    EXPECT_GT(owner_->stats().pages_copied, 0);
    EXPECT_GT(owner_->stats().deferred_reclaims, 0);
    EXPECT_GT(owner_->stats().closed_rows[kV], 0);
  }

 private:
  std::string Failure() {
    const std::lock_guard lock(mutex_);
    return failure_;
  }
  void Report(const std::string& what) {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = what;
  }

  std::string Check(std::span<const SeqRow> rows, const OracleSequence& oracle) const {
    for (int layer = 0; layer < schedule_.layers(); ++layer) {
      const SeqRow& row = rows[static_cast<size_t>(codec_->cls(layer))];
      if (row.len != oracle.len()) return "another length";
      for (int t = 0; t < 2; ++t)
        for (int j = 0; j < row.len; ++j) {
          const OracleRow& r = oracle.rows[static_cast<size_t>(j)];
          const std::string wrong = codec_->Compare(row, layer, t, j < row.f[t], j, RowHash(r.write, layer, t),
                                                    r.digest[static_cast<size_t>(layer)][static_cast<size_t>(t)]);
          if (!wrong.empty()) return wrong;
        }
    }
    return "";
  }

  // One step of a sequence that this thread owns.
  bool Step(SeqId seq, OracleSequence* oracle, Rng* rng) {
    const bool draft = rng->Chance(0.3);
    const int asked = static_cast<int>(rng->Range(1, 6));
    const AppendRequest request{seq, asked, draft ? Mode::kPrefix : Mode::kAll};
    TxnId id = 0;
    if (!owner_->Begin({&request, 1}, {&id, 1}).ok()) return false;
    const TxnView txn = *owner_->Get(id);
    std::vector<uint64_t> writes;
    for (int i = 0; i < txn.count; ++i) writes.push_back(rng->Next());
    for (int layer = 0; layer < schedule_.layers(); ++layer) {
      codec_->Prepare(txn, layer, writes);
      if (!owner_->MarkPrepared(id, layer).ok()) return false;
    }
    if (rng->Chance(0.1)) {
      owner_->Abort(id);
      return true;
    }
    const int accepted = draft ? static_cast<int>(rng->Range(1, txn.count)) : txn.count;
    const auto due = owner_->Seal(id, accepted);
    if (!due.ok()) return false;
    for (const CloseJob& job : *due)
      for (const int layer : owner_->classes()[job.cls].layers) codec_->Encode(txn, layer, job, writes);
    if (!owner_->Publish(id, accepted).ok()) return false;
    oracle->Append(schedule_, writes, accepted);
    return true;
  }

  void Write(int number) {
    start_.arrive_and_wait();  // nobody is done before the reader runs
    Rng rng(static_cast<uint64_t>(number) + 1);
    SeqId seq = owner_->Open()->seq;
    OracleSequence oracle;
    for (int i = 0; i < kSteps && Failure().empty(); ++i) {
      if (oracle.len() > kMaxLen - 8) {
        const int to = static_cast<int>(rng.Range(0, oracle.len()));
        if (!owner_->Truncate(seq, to).ok()) return Report("truncate failed");
        oracle.Truncate(to);
      }
      if (oracle.len() + 6 <= kMaxLen && !Step(seq, &oracle, &rng)) return Report("a step failed");
      if (rng.Chance(0.3)) {  // a snapshot for the reader, while this thread goes on writing under it
        auto lease = owner_->Acquire(seq);
        if (!lease.ok()) return Report("acquire failed");
        const std::lock_guard lock(mutex_);
        if (queue_.size() < 16) queue_.push_back({*std::move(lease), oracle});
      }
      if (rng.Chance(0.15) &&
          oracle.len() + 6 <= kMaxLen) {  // a branch that writes beside its parent, which may live on or not
        auto child = owner_->Fork(seq);
        if (!child.ok()) return Report("fork failed: " + child.status().ToString());
        OracleSequence branch = oracle;
        if (!Step(child->seq, &branch, &rng)) return Report("a step of a branch failed");
        const bool swap = rng.Chance(0.5);
        if (!owner_->Release(swap ? seq : child->seq).ok()) return Report("release failed");
        if (swap) seq = child->seq, oracle = std::move(branch);
      }
    }
    auto lease = owner_->Acquire(seq);
    if (const std::string wrong = Check(lease->rows(), oracle); !wrong.empty()) Report(wrong);
    if (!owner_->Release(seq).ok()) Report("release failed");
  }

  // Until the writers are done and every snapshot was read: on a loaded machine most reads may come after the last
  // write, but none is left out.
  void Read() {
    start_.arrive_and_wait();
    Rng rng(99);
    std::vector<Snapshot> kept;
    while (true) {
      const bool writers_done = stop_;  // before the look at the queue, so that an empty queue then stays empty
      {
        const std::lock_guard lock(mutex_);
        if (!queue_.empty()) {
          kept.push_back(std::move(queue_.back()));
          queue_.pop_back();
        }
      }
      if (kept.empty()) {
        if (writers_done) return;
        std::this_thread::yield();
        continue;
      }
      const size_t i = static_cast<size_t>(rng.Range(0, static_cast<int64_t>(kept.size()) - 1));
      if (const std::string wrong = Check(kept[i].lease.rows(), kept[i].rows); !wrong.empty())
        Report("a reader: " + wrong);
      ++reads_;
      if (kept.size() > 6 || stop_ || rng.Chance(0.3)) kept.erase(kept.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }

  CacheSchema schema_;
  OracleSchedule schedule_;
  std::unique_ptr<Owner> owner_;
  std::unique_ptr<MiniCodec> codec_;
  std::mutex mutex_;
  std::string failure_;
  std::vector<Snapshot> queue_;
  std::latch start_{kWriters + 1};
  std::atomic<bool> stop_ = false;
  std::atomic<int64_t> reads_ = 0;
};

TEST(OwnerThreads, WritersBranchesAndReadersOfKiviShareNoByte) {
  Storm({.k = {0, 8}, .v = {8, 1}, .group = 4, .coded_rows = 8, .exact_rows = 4, .layers = 2}).Run();
}

TEST(OwnerThreads, WritersBranchesAndReadersOfSynchronizedClosuresShareNoByte) {
  Storm({.k = {7, 4}, .v = {7, 4}, .group = 4, .coded_rows = 16, .exact_rows = 4}).Run();
}

TEST(OwnerThreads, WritersBranchesAndReadersOfRowsCodedAtOnceShareNoByte) {
  Storm({.k = {-1, 1}, .v = {0, 1}, .coded_rows = 16, .exact_rows = 8, .heads = 2}).Run();
}

}  // namespace
}  // namespace livequant
