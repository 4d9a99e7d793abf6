// A seeded simulation of the owner: random operations on real (tiny) pages against a list of rows for each sequence.
//
// After every operation: the owner's own invariants, pool == census + slack, and all rows of the sequences that the
// operation touched, of one other sequence, lease and open transaction, bit for bit; everything that is reachable every
// few operations and after every failure. At the end all is released and every pool must be empty. Throws
// SimulationError at the first difference.
//
// Most transitions carry an id. Replies get lost (set_losses): the caller asks again and must get the same receipt and
// no second effect, so that a run with losses is the run without them (history()).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/rng.h"
#include "cache/owner/mini_codec.h"
#include "cache/owner/owner.h"
#include "cache/owner/row_oracle.h"
#include "cache/owner/schemas.h"

namespace livequant {

struct SimulationError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Where decisions come from: a seed, or the bytes of a fuzzer (then the run ends with them).
class Choices {
 public:
  explicit Choices(uint64_t seed) : rng_(seed) {}
  Choices(const uint8_t* data, size_t size) : rng_(0), data_(data), size_(size), bytes_(true) {}
  bool done() const { return bytes_ && at_ >= size_; }
  int Range(int lo, int hi) {
    if (!bytes_) return static_cast<int>(rng_.Range(lo, hi));
    const int span = hi - lo + 1;
    int value = 0;
    for (int covered = 1; covered < span && at_ < size_; covered <<= 8) value = value << 8 | data_[at_++];
    return lo + static_cast<int>(static_cast<unsigned>(value) % static_cast<unsigned>(span));
  }
  bool Chance(int percent) { return Range(0, 99) < percent; }

 private:
  Rng rng_;
  const uint8_t* data_ = nullptr;
  size_t size_ = 0, at_ = 0;
  bool bytes_ = false;
};

// What really happened, by name. A test demands that none of the names in Required() is zero.
class Coverage {
 public:
  void Add(const std::string& name, int64_t n = 1) { counts_[name] += n; }
  void Merge(const Coverage& other) {
    for (const auto& [name, n] : other.counts_) counts_[name] += n;
  }
  int64_t operator[](const std::string& name) const {
    const auto it = counts_.find(name);
    return it == counts_.end() ? 0 : it->second;
  }
  const std::map<std::string, int64_t>& counts() const { return counts_; }
  static const std::vector<std::string>& Required();

 private:
  std::map<std::string, int64_t> counts_;
};

class OwnerSimulator {
 public:
  // Which schema and limits: `seed` picks one of every closure pair of the presets, pinned rows, windows, page rows,
  // pool sizes.
  OwnerSimulator(uint64_t seed, Choices choices, Coverage* coverage);
  ~OwnerSimulator();
  OwnerSimulator(const OwnerSimulator&) = delete;
  OwnerSimulator& operator=(const OwnerSimulator&) = delete;

  // One operation and the checks after it.
  void Step();
  // false: only what the list of rows, the byte counts and the return values show; the owner's own CheckInvariants is
  // left out.
  void set_check_invariants(bool on) { check_invariants_ = on; }
  // Percent of accepted transitions with an id whose reply is lost. Decided apart from everything else.
  void set_losses(int percent) { losses_ = percent; }
  // Lengths, generations and bytes after each operation, folded.
  uint64_t history() const { return history_; }
  // Ends everything in random order and demands that nothing is left.
  void Drain();
  bool done() const { return choices_.done(); }
  int64_t operations() const { return operations_; }
  const std::string& config() const { return config_; }
  // What the last operations were, newest last.
  std::string Trace() const;

 private:
  struct Live {
    SeqId id = 0;
    OracleSequence rows;
    bool only_grew = true;
  };
  struct Held {
    TxnId id = 0;
    SeqId seq = 0;
    Mode mode = Mode::kAll;
    std::vector<uint64_t> writes;
    OracleSequence base;
    const char* stale = nullptr;  // why, once the sequence has moved on
    AppendRequest request;
  };
  struct Reader {
    Owner::Lease lease;
    SeqId seq = 0;
    OracleSequence rows;
    int64_t until = 0;  // long holds: not closed before this operation
  };
  // Runs a transition under an id; `other`: something else under that id.
  using Call = std::function<Result<Receipt>(TxnId id, bool other)>;
  struct Past {
    Receipt receipt;
    int64_t order;  // among all accepted transitions
    Call again;
  };
  enum class Fate { kPublish, kPartial, kHold, kAbort, kMisuse };

  void Pick(uint64_t seed);
  void Note(std::string what);
  [[noreturn]] void Fail(const std::string& what) const;
  void Demand(bool ok, const std::string& what) const {
    if (!ok) Fail(what);
  }
  // True if the call went through; false if it was refused for want of room, which must have changed nothing.
  bool Went(const Status& status, const char* what);

  // owner_simulator_receipts.cc
  TxnId NextId();
  bool Lost() { return losses_ > 0 && loss_rng_.Range(0, 99) < losses_; }
  Result<Receipt> Do(Transition transition, SeqId seq, int64_t length, const Call& call);
  void CheckReceipt(const Receipt& receipt, Transition transition, TxnId id, SeqId seq, uint64_t before,
                    int64_t length) const;
  void Remember(const Receipt& receipt, Call again);
  void AskAgain();
  void CheckReclaimed() const;

  void OpenOne();
  void Append(int rows, Mode mode, Fate fate);
  void AppendBatch();
  void Run(Held& held);
  void CheckFresh(const TxnView& txn);
  void CheckQueries(const Held& held, const TxnView& txn);
  void Finish(Held held, int accepted);
  void Misuse(Held held);
  void FinishHeld(bool abort);
  void Fork();
  void Reorder();
  void Truncate();
  void Release();
  void OpenReader();
  void CloseReader();
  void ArmFault();
  void Disarm();

  void CheckView(std::span<const SeqRow> rows, const OracleSequence& oracle, const std::string& name) const;
  void CheckHeld(const Held& held) const;
  void CheckSome();
  void CheckAll();
  Live& AnyLive() { return *live_[static_cast<size_t>(choices_.Range(0, static_cast<int>(live_.size()) - 1))]; }
  Live* FindLive(SeqId id);
  void Moved(Live& live, const char* cause);

  Choices choices_;
  Coverage* coverage_;
  std::string config_;
  CacheSchema schema_;
  OwnerLimits limits_;
  AllocationFaults faults_;
  bool tight_ = false;  // pools so small that they run dry on their own
  int64_t max_len_ = 0;
  std::unique_ptr<OracleSchedule> schedule_;
  std::unique_ptr<Owner> owner_;
  std::unique_ptr<MiniCodec> codec_;
  std::vector<std::unique_ptr<Live>> live_;
  std::vector<Held> held_;
  std::vector<Reader> readers_;
  std::vector<Past> past_;
  std::string schema_digest_;
  TxnId ids_ = 0;
  int64_t accepted_ = 0;  // transitions: receipts that went through the ring
  int losses_ = 0;
  Rng loss_rng_{0x105535};
  uint64_t history_ = 0;
  std::vector<Live*> touched_;
  std::vector<std::string> trace_;
  bool armed_ = false, check_all_ = false, check_invariants_ = true;
  uint64_t writes_ = 0;
  int64_t operations_ = 0;
};

// Runs one seed for `operations`; "" or what went wrong, with a replay command. `done` counts operations that passed.
std::string Simulate(uint64_t seed, int64_t operations, Coverage* coverage, int64_t* done);

}  // namespace livequant
