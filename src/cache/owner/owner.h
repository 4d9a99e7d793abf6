// cache/owner/owner.h: sequences, views, page tables, transactions, frontiers, fork, truncate, leases. Bytes and
// counts, no floats; kv/ runs the copies and encodes that a transaction lists. Spec: cache_core.md 1-6 and 8
// (normative).
//
// Invariants (CheckInvariants tests them all): len >= f; live rows lie below their page's mark; each row in [pinned, f)
// has one coded page (but for what left the window), each row in [0, pinned) and [f, len) one exact page; every
// reference count equals the edges counted from views; a published view never changes; a retired view lives only under
// a lease.
//
// Life of a step:  Begin -> (kv prepares every layer, MarkPrepared each) -> Seal -> Publish.  Anything else -> Abort.
// Begin reserves all that the step may need; nothing after it allocates. Publish can be refused for one reason only:
// kStale.
//
// Receipts: every accepted transition has one, fixed in size, in a ring of OwnerLimits::receipts. A caller may name a
// transition by an id of its own (1 .. 2^63 - 1, rising). The same id again gives the same receipt and no second
// effect; with other content kIdMismatch; an id that left the ring kIdExpired. A refused transition leaves its id free.
// So who lost a reply asks again.
//
// Thread safe: one lock guards every structural step, and no value is read or written under it. Rows of pages are
// written only inside the slots that a transaction claimed. Capacity of everything is fixed at Create.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "cache/ledger/ledger.h"
#include "cache/pages/page_pool.h"
#include "schema/cache_view.h"
#include "schema/layout.h"
#include "schema/schema.h"

namespace livequant {

// A name, not an index: a slot that is opened again gets another id, so the id of a released sequence stays closed.
using SeqId = uint32_t;

// Where Begin, Open, Fork, Reorder and Truncate take something from a fixed pool.
enum class AllocationSite : uint8_t { kPage, kBlock, kRoot, kView, kTxn, kSequence };
inline constexpr int kAllocationSites = 6;
const char* AllocationSiteName(AllocationSite site);

// The seam through which a test makes a pool look dry. fail_at[site] counts down at each request made there; the
// request that brings it to 0 fails as a dry pool does. 0 = no fault. Read and written under the owner's lock.
struct AllocationFaults {
  int fail_at[kAllocationSites] = {};
  int64_t fired[kAllocationSites] = {};
};

struct OwnerLimits {
  int max_sequences = 1;       // open at once
  int max_views = 0;           // published + private + leased, also the most transactions; 0 = 4 * max_sequences + 8
  int64_t max_len = 0;         // rows of the longest sequence: fixes the capacity of roots
  int max_step_rows = 0;       // rows of the largest request of Begin: fixes what a transaction can list; 0 = max_len
  int receipts = 0;            // accepted transitions whose receipts are kept; 0 = 4 * max_views
  uint64_t id = 0;             // of this owner, in its receipts; 0 = the next number of this process
  std::vector<int64_t> pages;  // by plane: [class * 4 + tensor * 2 + form]
  // For all pages, aligned to Owner::kMemoryAlignment and PoolBytes(schema, pages, that) long, to outlive the owner;
  // null: each pool maps its own.
  std::byte* memory = nullptr;
  bool allocate_memory = true;         // false: pages without bytes, for tests of the state machine alone
  AllocationFaults* faults = nullptr;  // must outlive the owner; null outside tests
};

enum class Mode : uint8_t {
  kAll,     // all rows of the step or none
  kPrefix,  // publish takes any prefix of them (drafts)
};

// Of the owner's transitions, or given by the caller: 1 .. 2^63 - 1, rising. Never names two things that were accepted.
using TxnId = uint64_t;

struct AppendRequest {
  SeqId seq;
  int rows;  // >= 1; under kPrefix the transaction may hold fewer (cache_core.md 5, begin)
  Mode mode = Mode::kAll;
  TxnId id = 0;          // the caller's; 0 = the owner makes one
  uint64_t content = 0;  // the caller's digest of the rows: compared when the id comes again
};

// Row slots [from, to) of `page`, which only this transaction may write.
struct Claim {
  uint8_t cls, tensor, form;
  uint32_t page;
  int32_t from, to;  // slots
  int32_t position;  // of slot `from`
};
// Rows in slots [from, to) of `src` go to the same slots of `dst`, codes and qparams, bit for bit, for all layers of
// the class.
struct PageCopy {
  uint8_t cls, tensor, form;
  uint32_t src, dst;
  int32_t from, to;
};
// Rows [from, to) of K or V are to be encoded into their coded pages of the private view.
struct CloseJob {
  uint8_t cls, tensor;
  int32_t from, to;
  bool at_seal;  // needs every row accepted: runs in Seal, not when a layer is prepared
};

enum class Transition : uint8_t { kOpen, kAppend, kFork, kReorder, kTruncate, kRelease };
inline constexpr int kTransitions = 6;
const char* TransitionName(Transition transition);  // "open", "append", ...

// What one accepted transition did.
struct Receipt {
  uint64_t owner = 0;  // OwnerLimits::id
  TxnId txn = 0;       // the caller's id, or one of the owner's own (the highest bit set)
  Transition transition = Transition::kOpen;
  SeqId seq = 0;     // opened, appended to, truncated, released; the child of a fork; the first member of a reorder
  SeqId parent = 0;  // of a fork
  // Of `seq`. Reorder: member i of the group has generation + i after it. Before an open or a fork 0.
  uint64_t generation_before = 0, generation = 0;
  int64_t length = 0;                // rows of `seq` after it; of a release the rows that it had
  int64_t first = 0;                 // append: position of the first row
  int32_t rows = 0;                  // append: rows published; reorder: members
  std::array<uint8_t, 32> schema{};  // Digest of the owner's schema
  bool operator==(const Receipt&) const = default;
};

// What kv needs to run a transaction. Valid until Publish or Abort.
struct TxnView {
  TxnId id;
  SeqId seq;
  int32_t first, count;
  Mode mode;
  std::span<const Claim> claims;
  std::span<const PageCopy> copies;
  std::span<const CloseJob> jobs;
  std::span<const SeqRow> rows;  // by class; first_query is left 0 for kv to fill in its copy
};

// Counters since Create. Tests read them to show that what they mean to test really happened.
struct OwnerStats {
  int64_t opens = 0, begins = 0, publishes = 0, aborts = 0, stale = 0, forks = 0, truncates = 0, reorders = 0,
          releases = 0;
  int64_t closed_rows[2] = {0, 0}, closed_groups = 0, short_groups = 0, scars = 0, draft_cuts = 0;
  // Work done, rolled back work included. A block counts as a whole (512 bytes) and a root by its fixed capacity,
  // whatever they hold.
  int64_t pages_taken = 0, pages_copied = 0, rows_copied = 0, entries_written = 0, blocks_built = 0, roots_built = 0;
  int64_t table_bytes_copied = 0;
  int64_t marks_returned = 0;  // claims whose unused slots went back
  int64_t window_drops = 0;    // coded pages that left a window
  int64_t out_of_pages = 0, deferred_reclaims = 0;
  int64_t repeats = 0;   // transitions that came again and got their receipt
  int64_t reclaims = 0;  // releases whose last view is gone
};

class Owner {
 public:
  // Builds every pool; after it nothing allocates but error messages, Census and CheckInvariants. REQUIRES
  // Validate(schema).ok(). kInvalidArgument, kOutOfRange name the limit that does not fit.
  static Result<std::unique_ptr<Owner>> Create(const CacheSchema& schema, const OwnerLimits& limits);
  static constexpr int64_t kMemoryAlignment = 4096;
  ~Owner();

  // `id` of these five: the caller's id of the transition, 0 = the owner makes one; a bad one is kInvalidArgument,
  // kIdMismatch or kIdExpired, and nothing changed.
  //
  // A new empty sequence. kOutOfPages: no free slot or view.
  Result<Receipt> Open(TxnId id = 0);
  // A sequence that shares every row of `parent`; the same cost at any length. A fork fences nothing. kClosed,
  // kOutOfPages.
  Result<Receipt> Fork(SeqId parent, TxnId id = 0);
  // Member i of `group` continues as group[parents[i]] was; all members move in one publication, older transactions go
  // stale. kInvalidArgument: no member, unequal lengths, a member twice, a parent outside the group. kClosed,
  // kOutOfPages. On an error nothing changed.
  Result<Receipt> Reorder(std::span<const SeqId> group, std::span<const int> parents, TxnId id = 0);
  // Keeps rows [0, len) and fences, len == length(seq) included. Codes of kept rows never change: cutting a K group
  // leaves a scar, and f may exceed frontier(len) (closed ahead). kInvalidArgument: len beyond the sequence.
  // kOutOfRange: a window of the schema has dropped rows that the query at position `len` sees; the message names the
  // shortest length. kClosed, kOutOfPages.
  Result<Receipt> Truncate(SeqId seq, int64_t len, TxnId id = 0);
  // Fences now, reclaims when the last lease on its views ends; that consumes the receipt, once (Reclaimed). kClosed:
  // already released, or never opened.
  Result<Receipt> Release(SeqId seq, TxnId id = 0);

  // Begins one transaction a request, all or none, under one lock; out[i] belongs to requests[i]. A sequence may appear
  // once. A request whose id names an open transaction gets that one again. kOutOfPages names the plane, the pages
  // needed (by the requests up to the one that failed) and the pages free; nothing was taken. kInvalidArgument: rows <
  // 1, a sequence or an id twice. kOutOfRange: rows beyond max_step_rows or max_len. kClosed. kAccepted: the id was
  // published (FindReceipt); kIdMismatch, kIdExpired. Nothing changed.
  Status Begin(std::span<const AppendRequest> requests, std::span<TxnId> out);
  // kFailedTxn: published, aborted or never begun. The spans live until Publish, Abort or an error that aborts.
  Result<TxnView> Get(TxnId txn) const;
  // `layer` is complete in the private view. kDuplicateLayer, kInvalidArgument abort the transaction. kFailedTxn as for
  // Get.
  Status MarkPrepared(TxnId txn, int layer);
  // A NaN or Inf row was seen: the transaction can only be aborted. A finished transaction is left alone.
  void Poison(TxnId txn);
  // The rows that will be published; returns the at_seal jobs that are due (all of them if accepted == count, else
  // none), valid as the spans of Get are. Once, after every layer was prepared: kMissingLayer, kNonFinite,
  // kInvalidArgument abort. cache_core.md 5.
  Result<std::span<const CloseJob>> Seal(TxnId txn, int accepted);
  // accepted == count under kAll (Seal is optional), 1..count under kPrefix after Seal(accepted). kMissingLayer,
  // kNonFinite and kInvalidArgument abort; else kStale, which aborts too, is the only refusal. A published id returns
  // its receipt again, or kIdMismatch if it had other rows; kIdExpired. kFailedTxn: aborted, or never begun.
  Result<Receipt> Publish(TxnId txn, int accepted);
  // Frees everything. Repeating it, or naming a finished transaction, does nothing.
  void Abort(TxnId txn);
  // The receipt of an accepted transition. kIdExpired: it left the ring. kNotFound: not accepted so far.
  Result<Receipt> FindReceipt(TxnId txn) const;
  // Whether the receipt of a release was consumed: no view of the sequence is left, its storage went back. Errors as
  // FindReceipt's; kInvalidArgument: not a release.
  Result<bool> Reclaimed(TxnId release) const;

  // Rows of an open sequence; -1 if it is closed.
  int64_t length(SeqId seq) const;
  // Rises with each publish, truncate and reorder of the sequence and is never used twice; 0 if it is closed.
  uint64_t generation(SeqId seq) const;
  // Groups of K (or V, where its groups run along rows) of class `cls` that a truncate cut and a later closure began
  // anew, plus the one that is cut now. Two states are equal iff lengths, frontiers, scars and live rows are. -1 if the
  // sequence is closed.
  int scars(SeqId seq, int cls) const;

  // A snapshot that keeps its rows alive until the lease ends (its end takes the owner's lock; the owner must still
  // live). rows()[class].count is 0 and staged == f. Reading needs no lock.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept;
    Lease& operator=(Lease&& other) noexcept;
    ~Lease();
    std::span<const SeqRow> rows() const;
    int64_t length() const;

   private:
    friend class Owner;
    Owner* owner_ = nullptr;
    int view_ = -1;
  };
  // kClosed. Never fails for want of memory.
  Result<Lease> Acquire(SeqId seq);

  // The view of one layer for kernels: plane addresses and strides, closures, tables. `seq` and `sequences` are left to
  // the caller.
  CacheView ViewOfLayer(int layer) const;
  const std::vector<LayerClass>& classes() const;
  int class_of_layer(int layer) const;
  const PagePool& pool(int cls, TensorIndex tensor, FormIndex form) const;

  // Bytes reachable from all views, private ones included, each page once, split as the ledger splits them, plus slack
  // (slots that no view reads), `shared` (what the current views of more than one sequence reach) and `tables` (used
  // blocks and roots).
  LedgerBytes Census() const;
  // Pages handed out times their allocated size, over all pools.
  int64_t used_bytes() const;
  OwnerStats stats() const;
  // ok, or kDataLoss with the first broken invariant of cache_core.md 8 (1-4, 7, 10, disjoint claims and the free
  // lists; 5, 6 and 9 are about bytes and time: the random test checks them).
  Status CheckInvariants() const;

 private:
  Owner();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace livequant
