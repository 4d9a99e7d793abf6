// cache/owner/impl.h: the state behind Owner, shared by owner.cc (pools, views, reading), sequences.cc and txn.cc (the
// transitions) and audit.cc (census, invariants). Not for others.
//
// Everything here is guarded by `mutex`, except what a lease or a transaction lets its holder read without it: the
// SeqRows of its view, the table entries that they name, and the lists of its own transaction.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/int_math.h"
#include "base/rng.h"
#include "cache/owner/owner.h"
#include "cache/owner/receipts.h"
#include "cache/owner/tables.h"

namespace livequant {

inline constexpr int kSlotBits = 16;  // of the owner's own ids: above them a serial number, then kOwnId

inline std::string Text(int64_t value) { return std::to_string(value); }
inline int32_t AlignDown(int32_t value, int32_t to) { return value / to * to; }
std::string IdText(TxnId id);
// One number for what a transition was asked to do: compared when its id comes again.
template <class... T>
uint64_t Content(Transition transition, T... parts) {
  uint64_t fold = static_cast<uint64_t>(transition) + 1;
  ((fold = Mix64(fold ^ Mix64(static_cast<uint64_t>(parts)))), ...);
  return fold;
}
// Sequence slot of an id; ids of one slot differ by the number of slots.
inline int SlotOf(SeqId seq, size_t slots) { return static_cast<int>(seq % slots); }

// Positions [from, to).
struct RowRange {
  int32_t from = 0, to = 0;
  bool empty() const { return from >= to; }
};

// The exact rows of a view: pinned rows, committed rows that are not coded, rows of a step in flight.
struct ExactRows {
  RowRange part[3];
};

struct ClassInfo {
  Closure closure[2];
  int group[2] = {1, 1};  // rows of the largest group along rows among the layers; 1 = every row carries its qparams
  int32_t window = 0, pinned = 0;
  PlaneLayout layout[2][2];
};

struct ViewMeta {
  enum State : uint8_t { kFree, kCurrent, kPrivate, kRetired };
  State state = kFree;
  uint64_t generation = 0;
  int32_t leases = 0;  // readers, and transactions whose base this is
  int lineage = -1;
};

// All views that one sequence ever had, until the last is gone: what a release waits for.
struct Lineage {
  int32_t views = 0;
  TxnId release = 0;  // 0: the sequence is open
};

struct SequenceMeta {
  bool open = false;
  SeqId id = 0;
  int view = -1, lineage = -1;
  uint64_t generation = 0;
  uint64_t batch = 0;  // of the last call that named it: finds repeats
};

struct ClaimNote {
  uint16_t mark_before;
  bool fresh;  // the page was taken by this transaction
};

struct Txn {
  TxnId id = 0;
  bool open = false;
  SeqId seq = 0;
  int slot = 0;          // of the sequence
  uint64_t content = 0;  // fold of the request
  uint64_t batch = 0;    // of the Begin that made it
  int base = -1, next = -1;
  uint64_t generation = 0;  // of the sequence when the transaction began
  int32_t first = 0, count = 0;
  Mode mode = Mode::kAll;
  bool poisoned = false;
  int sealed = -1;
  int layers_left = 0;
  size_t seal_jobs = 0;                             // jobs[seal_jobs ..) run at seal
  int64_t reserved_roots = 0, reserved_blocks = 0;  // for the tables that publish may have to build
  std::vector<uint64_t> prepared;                   // a bit a layer
  std::vector<int32_t> exact_from;                  // [class * 2 + tensor]: first row of the step that has exact slots
  // Capacity fixed at Create.
  std::vector<Claim> claims;
  std::vector<ClaimNote> notes;
  std::vector<PageCopy> copies;
  std::vector<CloseJob> jobs;
};

// What a table keeps: entries [0, prefix) and [from, to).
struct Kept {
  int prefix = 0, from = 0, to = 0;
  int count() const { return prefix + to - from; }
};

struct Owner::Impl {
  // Fixed at Create.
  CacheSchema schema;
  OwnerLimits limits;
  std::vector<LayerClass> classes;
  std::vector<ClassInfo> info;
  std::vector<int> class_of_layer, index_in_class;
  std::vector<std::unique_ptr<PagePool>> pools;  // [plane]
  std::vector<int> max_entries;                  // [plane]
  int planes = 0;

  mutable std::mutex mutex;
  std::unique_ptr<PageTables> tables;
  std::vector<ViewMeta> views;
  std::vector<SeqRow> rows;  // [view][class]
  std::vector<int> free_views;
  std::vector<SequenceMeta> sequences;
  std::vector<int> free_sequences;
  std::vector<Txn> txns;
  std::vector<int> free_txns;
  std::vector<Lineage> lineages;
  std::vector<int> free_lineages;
  std::unique_ptr<ReceiptRing> receipts;
  std::unique_ptr<IdMap> given;  // open transactions by the ids of callers
  std::array<uint8_t, 32> schema_digest{};
  uint64_t serial = 0, generations = 0, batches = 0;
  mutable OwnerStats stats;

  // Scratch of one call, capacity fixed at Create.
  struct Piece {
    enum Kind : uint8_t { kInPlace, kSamePage, kCopy, kFresh };
    Kind kind;
    int32_t from, to;
  };
  std::vector<Piece> pieces;
  std::vector<Entry> added;
  std::vector<int64_t> batch_pages;  // [plane]: taken by the batch so far
  std::vector<int> new_views;

  int num_classes() const { return static_cast<int>(classes.size()); }
  static int PlaneIndex(int cls, int tensor, int form) { return cls * 4 + tensor * 2 + form; }
  int page_rows(int plane) const { return pools[static_cast<size_t>(plane)]->rows(); }
  SeqRow* view_rows(int view) { return rows.data() + int64_t{view} * num_classes(); }
  const SeqRow* view_rows(int view) const { return rows.data() + int64_t{view} * num_classes(); }
  int32_t view_len(int view) const { return view_rows(view)[0].len; }

  // End of the range that entry i of a table serves, before the plane's own end cuts it.
  int32_t EntryEnd(int plane, RootId root, int entries, int i) const {
    const int32_t page = page_rows(plane);
    const int32_t edge = static_cast<int32_t>(tables->entry(root, i).start) / page * page + page;
    if (i + 1 >= entries) return edge;
    const int32_t next = static_cast<int32_t>(tables->entry(root, i + 1).start);
    return next < edge ? next : edge;
  }
  RowRange CodedRows(const SeqRow& row, int cls, int tensor) const;
  // `txn` is the transaction whose private view this is, or null.
  ExactRows ExactRowsOf(const SeqRow& row, int cls, int tensor, const Txn* txn) const;
  Kept Keep(int cls, int tensor, int form, const SeqRow& row, int32_t len, int32_t f) const;

  bool Faulted(AllocationSite site);
  // ok, or kOutOfPages: `what` (of a plane, or -1) needs `need`, `free` are there.
  Status Need(AllocationSite site, const char* what, int plane, int64_t need, int64_t free);
  Status NeedNodes(int64_t roots, int64_t blocks);
  std::string PlaneName(int plane) const;

  SequenceMeta* Find(SeqId seq);
  const SequenceMeta* Find(SeqId seq) const;
  Status Closed(SeqId seq) const;
  Txn* FindTxn(TxnId id);
  const Txn* FindTxn(TxnId id) const;
  Status Failed(TxnId id) const;

  TxnId OwnId(int slot) { return kOwnId | ++serial << kSlotBits | static_cast<TxnId>(slot); }
  // What an id says before anything is done. A receipt: accepted before. kInvalidArgument, kIdMismatch, kIdExpired. A
  // receipt with txn 0: go on.
  Result<Receipt> Repeated(TxnId id, uint64_t content);
  Receipt Accept(Receipt receipt, uint64_t content);

  int TakeView(ViewMeta::State state, int lineage);
  int TakeLineage();
  SequenceMeta& NewSequence();  // open, without a view; REQUIRES a free slot
  void FreeView(int view);
  void CloneRows(int from, int to);
  void Retire(int view);
  void EndLease(int view);
  void Install(SequenceMeta& seq, int view);

  int DraftRows(int32_t len, int rows);
  Status BeginOne(const AppendRequest& request, TxnId* out);
  Status Extend(Txn& txn, int cls, int tensor, int form, std::span<const RowRange> ranges, bool may_drop_front,
                bool may_drop_back);
  void Cut(int cls, int tensor, int form, SeqRow& row, const Kept& kept);
  void Abort(Txn& txn);
  void Finish(Txn& txn);
};

}  // namespace livequant
