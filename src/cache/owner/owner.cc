// cache/owner/owner.cc: the transitions of cache_core.md 5. Each checks everything first, then changes everything.
#include "cache/owner/owner.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "base/check.h"
#include "cache/owner/impl.h"
#include "cache/owner/tables.h"
#include "cache/pages/plants.h"

namespace livequant {
namespace {

constexpr int kSlotBits = 16;  // of a TxnId: the rest is a serial number
constexpr int kReceiptsPerView = 4;

std::string Text(int64_t value) { return std::to_string(value); }
int32_t AlignDown(int32_t value, int32_t to) { return value / to * to; }
int64_t CeilDiv(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Sequence slot of an id; ids of one slot differ by the number of slots.
int SlotOf(SeqId seq, size_t slots) { return static_cast<int>(seq % slots); }

Status CheckLimits(const OwnerLimits& limits, size_t planes) {
  if (limits.max_sequences < 1 || limits.max_sequences >= 1 << kSlotBits)
    return Status(Code::kInvalidArgument, "max_sequences " + Text(limits.max_sequences) + ", limit 1..65535");
  if (limits.max_views < 0 || limits.max_views >= 1 << kSlotBits)
    return Status(Code::kInvalidArgument, "max_views " + Text(limits.max_views) + ", limit 0..65535");
  if (limits.max_len < 1 || limits.max_len > std::numeric_limits<int32_t>::max() / 2)
    return Status(Code::kInvalidArgument, "max_len " + Text(limits.max_len) + ", limit 1..1073741823");
  if (limits.max_step_rows < 0 || limits.max_step_rows > limits.max_len)
    return Status(Code::kInvalidArgument,
                  "max_step_rows " + Text(limits.max_step_rows) + ", limit 0..max_len " + Text(limits.max_len));
  if (limits.pages.size() != planes)
    return Status(Code::kInvalidArgument, "pages of " + Text(static_cast<int64_t>(limits.pages.size())) +
                                              " planes given, the schema has " + Text(static_cast<int64_t>(planes)));
  return {};
}

}  // namespace

const char* AllocationSiteName(AllocationSite site) {
  switch (site) {
    case AllocationSite::kPage:
      return "page";
    case AllocationSite::kBlock:
      return "block";
    case AllocationSite::kRoot:
      return "root";
    case AllocationSite::kView:
      return "view";
    case AllocationSite::kTxn:
      return "transaction";
    case AllocationSite::kSequence:
      return "sequence";
  }
  LQ_CHECK(false);
}

Owner::Owner() : impl_(std::make_unique<Impl>()) {}
Owner::~Owner() = default;

Result<std::unique_ptr<Owner>> Owner::Create(const CacheSchema& schema, const OwnerLimits& given) {
  std::unique_ptr<Owner> owner(new Owner);
  Impl& s = *owner->impl_;
  s.schema = schema;
  s.classes = LayerClasses(schema);
  LQ_CHECK(!s.classes.empty() && s.classes.size() < 256);
  s.planes = s.num_classes() * 4;
  LQ_RETURN_IF_ERROR(CheckLimits(given, static_cast<size_t>(s.planes)));
  s.limits = given;
  OwnerLimits& limits = s.limits;
  if (limits.max_views == 0) limits.max_views = std::min(4 * limits.max_sequences + 8, (1 << kSlotBits) - 1);
  if (limits.max_step_rows == 0) limits.max_step_rows = static_cast<int>(limits.max_len);

  s.class_of_layer.resize(schema.layers.size());
  s.index_in_class.resize(schema.layers.size());
  int64_t roots = 0, blocks = 0, max_claims = 0;
  int widest = 1;
  std::vector<PagePool*> pools;
  for (int c = 0; c < s.num_classes(); ++c) {
    const LayerClass& cls = s.classes[static_cast<size_t>(c)];
    ClassInfo info;
    info.window = cls.window;
    info.pinned = cls.pinned_rows;
    for (int t = 0; t < 2; ++t) info.closure[t] = cls.closure[t];
    for (size_t i = 0; i < cls.layers.size(); ++i) {
      const LayerSchema& layer = schema.layers[static_cast<size_t>(cls.layers[i])];
      s.class_of_layer[static_cast<size_t>(cls.layers[i])] = c;
      s.index_in_class[static_cast<size_t>(cls.layers[i])] = static_cast<int>(i);
      for (int t = 0; t < 2; ++t) {
        const TensorCoding& coding = t == kK ? layer.k : layer.v;
        if (coding.axis == ScaleAxis::kChannel) info.group[t] = std::lcm(info.group[t], coding.group);
      }
    }
    for (int t = 0; t < 2; ++t) {
      LQ_CHECK(info.closure[t].step % info.group[t] == 0 && cls.coded_page_rows % info.group[t] == 0);
      LQ_CHECK(info.closure[t].lag >= 0 || info.closure[t].step == 1);
      for (int form = 0; form < 2; ++form) {
        const int plane = Impl::PlaneIndex(c, t, form);
        info.layout[t][form] = LayoutPlane(schema, cls, static_cast<TensorIndex>(t), static_cast<FormIndex>(form));
        const int page_rows = info.layout[t][form].rows;
        LQ_ASSIGN_OR_RETURN(std::unique_ptr<PagePool> pool,
                            PagePool::Create(limits.pages[static_cast<size_t>(plane)], info.layout[t][form].page_bytes,
                                             page_rows, limits.allocate_memory));
        pools.push_back(pool.get());
        s.pools.push_back(std::move(pool));
        // Coded tables grow with the sequence and by one entry a scar (64 are provided for); exact tables hold the
        // pinned rows, the rows that a closure keeps open and those of one step.
        const int64_t whole = CeilDiv(limits.max_len, page_rows);
        const int64_t open = CeilDiv(info.pinned, page_rows) +
                             CeilDiv(int64_t{info.closure[t].max_exact_rows()} + limits.max_step_rows, page_rows) + 3;
        const int64_t entries = form == kCoded ? whole + kBlockEntries : std::min(whole, open);
        s.max_entries.push_back(static_cast<int>(entries));
        widest = std::max(widest, static_cast<int>(entries));
        // Every view with tables of its own, and for each the table that a publish may have to build.
        const int64_t table_blocks = CeilDiv(entries, kBlockEntries);
        roots += 2 * int64_t{limits.max_views};
        blocks += 2 * table_blocks * limits.max_views;
        max_claims += limits.max_step_rows / page_rows + 4;
      }
    }
    s.info.push_back(std::move(info));
  }
  LQ_ASSIGN_OR_RETURN(s.tables, PageTables::Create(std::move(pools), widest, roots, blocks));

  const size_t views = static_cast<size_t>(limits.max_views);
  s.views.resize(views);
  s.rows.resize(views * s.classes.size());
  s.sequences.resize(static_cast<size_t>(limits.max_sequences));
  s.receipts.resize(views * kReceiptsPerView);
  s.txns.resize(views);
  for (int i = limits.max_views - 1; i >= 0; --i) {
    s.free_views.push_back(i);
    s.free_txns.push_back(i);
  }
  for (int i = limits.max_sequences - 1; i >= 0; --i) {
    s.free_sequences.push_back(i);
    // The first Open of slot i adds max_sequences: ids start at max_sequences, and 0 names no sequence.
    s.sequences[static_cast<size_t>(i)].id = static_cast<SeqId>(i);
  }
  for (Txn& txn : s.txns) {
    txn.prepared.resize((schema.layers.size() + 63) / 64);
    txn.exact_from.resize(s.classes.size() * 2);
    txn.claims.reserve(static_cast<size_t>(max_claims));
    txn.notes.reserve(static_cast<size_t>(max_claims));
    txn.copies.reserve(static_cast<size_t>(s.planes) * 2);
    txn.jobs.reserve(static_cast<size_t>(s.planes));
  }
  s.pieces.reserve(static_cast<size_t>(max_claims));
  s.added.reserve(static_cast<size_t>(max_claims));
  s.batch_pages.resize(static_cast<size_t>(s.planes));
  s.new_views.reserve(static_cast<size_t>(limits.max_sequences));
  return owner;
}

// --- what a view holds ---

RowRange Owner::Impl::CodedRows(const SeqRow& row, int cls, int tensor) const {
  return {info[static_cast<size_t>(cls)].pinned, row.staged[tensor]};
}

ExactRows Owner::Impl::ExactRowsOf(const SeqRow& row, int cls, int tensor, const Txn* txn) const {
  const int32_t pinned = info[static_cast<size_t>(cls)].pinned, before = row.len - row.count;
  ExactRows out;
  out.part[0] = {0, std::min(pinned, row.len)};
  out.part[1] = {std::max(pinned, row.f[tensor]), before};
  if (txn != nullptr) out.part[2] = {std::max(pinned, txn->exact_from[static_cast<size_t>(cls * 2 + tensor)]), row.len};
  return out;
}

// What is left of a table when `len` rows exist of which f are coded. The kept entries of a table of `row` are found
// from both ends, so the cost is that of what goes.
Kept Owner::Impl::Keep(int cls, int tensor, int form, const SeqRow& row, int32_t len, int32_t f) const {
  const ClassInfo& c = info[static_cast<size_t>(cls)];
  const int plane = PlaneIndex(cls, tensor, form);
  const RootId root = row.root[tensor][form];
  const int entries = row.entries[tensor][form];
  const int32_t end = form == kCoded ? f : len;
  Kept kept;
  kept.to = entries;
  while (kept.to > 0 && static_cast<int32_t>(tables->entry(root, kept.to - 1).start) >= end) --kept.to;
  if (form == kExact) {
    const int32_t pinned = LQ_PLANT(kPinnedDropped) ? 0 : std::min(c.pinned, len);
    while (kept.prefix < kept.to && static_cast<int32_t>(tables->entry(root, kept.prefix).start) < pinned)
      ++kept.prefix;
    kept.from = kept.prefix;
    if (f >= len) {
      kept.from = kept.to;  // no row is left exact but the pinned ones
    } else if (LQ_PLANT(kExactDroppedEarly)) {
      while (kept.from < kept.to && static_cast<int32_t>(tables->entry(root, kept.from).start) < f) ++kept.from;
    } else {
      while (kept.from < kept.to && EntryEnd(plane, root, entries, kept.from) <= f) ++kept.from;
    }
  } else if (c.window > 0) {
    const int32_t seen = len - c.window + (LQ_PLANT(kWindowTooNarrow) ? page_rows(plane) : 0);
    while (kept.from < kept.to && EntryEnd(plane, root, entries, kept.from) <= seen) ++kept.from;
  }
  if (kept.from == kept.prefix)
    kept.prefix = kept.from = kept.to;  // nothing goes before: one prefix, whose blocks are shared
  return kept;
}

// --- pools that may run dry ---

bool Owner::Impl::Faulted(AllocationSite site) {
  if (limits.faults == nullptr) return false;
  const size_t i = static_cast<size_t>(site);
  if (limits.faults->fail_at[i] == 0 || --limits.faults->fail_at[i] > 0) return false;
  ++limits.faults->fired[i];
  return true;
}

Status Owner::Impl::Need(AllocationSite site, const char* what, int plane, int64_t need, int64_t free) {
  if (need <= free && !Faulted(site)) return {};
  ++stats.out_of_pages;
  return Status(Code::kOutOfPages, (plane < 0 ? std::string() : PlaneName(plane) + " ") + what + ": needs " +
                                       Text(need) + ", free " + Text(free));
}

Status Owner::Impl::NeedNodes(int64_t n_roots, int64_t n_blocks) {
  if (n_roots > 0)
    LQ_RETURN_IF_ERROR(Need(AllocationSite::kRoot, "page table roots", -1, n_roots, tables->free_roots()));
  if (n_blocks > 0)
    LQ_RETURN_IF_ERROR(Need(AllocationSite::kBlock, "page table blocks", -1, n_blocks, tables->free_blocks()));
  return {};
}

std::string Owner::Impl::PlaneName(int plane) const {
  return "class " + Text(plane / 4) + (plane / 2 % 2 == kK ? " K" : " V") + (plane % 2 == kCoded ? " coded" : " exact");
}

// --- names ---

SequenceMeta* Owner::Impl::Find(SeqId seq) {
  SequenceMeta& meta = sequences[static_cast<size_t>(SlotOf(seq, sequences.size()))];
  return meta.open && meta.id == seq ? &meta : nullptr;
}
const SequenceMeta* Owner::Impl::Find(SeqId seq) const { return const_cast<Impl*>(this)->Find(seq); }
Status Owner::Impl::Closed(SeqId seq) const { return Status(Code::kClosed, "sequence " + Text(seq) + " is not open"); }

Txn* Owner::Impl::FindTxn(TxnId id) {
  const size_t slot = static_cast<size_t>(id & ((1u << kSlotBits) - 1));
  return slot < txns.size() && txns[slot].open && txns[slot].id == id ? &txns[slot] : nullptr;
}
const Txn* Owner::Impl::FindTxn(TxnId id) const { return const_cast<Impl*>(this)->FindTxn(id); }
Status Owner::Impl::Failed(TxnId id) const {
  return Status(Code::kFailedTxn, "transaction " + Text(static_cast<int64_t>(id)) + " is finished or was never begun");
}

// --- views ---

int Owner::Impl::TakeView(ViewMeta::State state) {
  LQ_CHECK(!free_views.empty());
  const int view = free_views.back();
  free_views.pop_back();
  views[static_cast<size_t>(view)] = {.state = state};
  return view;
}

void Owner::Impl::FreeView(int view) {
  LQ_CHECK(views[static_cast<size_t>(view)].leases == 0 || LQ_PLANT(kReclaimUnderReader));
  SeqRow* const r = view_rows(view);
  for (int c = 0; c < num_classes(); ++c)
    for (int t = 0; t < 2; ++t)
      for (int form = 0; form < 2; ++form) tables->Unref(r[c].root[t][form]);
  views[static_cast<size_t>(view)].state = ViewMeta::kFree;
  free_views.push_back(view);
}

void Owner::Impl::CloneRows(int from, int to) {
  const SeqRow* const a = view_rows(from);
  SeqRow* const b = view_rows(to);
  for (int c = 0; c < num_classes(); ++c) {
    b[c] = a[c];
    for (int t = 0; t < 2; ++t)
      for (int form = 0; form < 2; ++form) tables->Ref(b[c].root[t][form]);
  }
}

void Owner::Impl::Retire(int view) {
  ViewMeta& meta = views[static_cast<size_t>(view)];
  meta.state = ViewMeta::kRetired;
  if (meta.leases > 0) ++stats.deferred_reclaims;
  if (meta.leases == 0 || LQ_PLANT(kReclaimUnderReader)) FreeView(view);
}

void Owner::Impl::EndLease(int view) {
  ViewMeta& meta = views[static_cast<size_t>(view)];
  if (LQ_PLANT(kReclaimUnderReader) && meta.leases == 0) return;
  LQ_CHECK(meta.leases > 0);
  if (--meta.leases == 0 && meta.state == ViewMeta::kRetired) FreeView(view);
}

// `view` becomes what the sequence is: a new generation, which makes every older transaction stale.
void Owner::Impl::Install(SequenceMeta& seq, int view) {
  const int old = seq.view;
  ViewMeta& meta = views[static_cast<size_t>(view)];
  meta.state = ViewMeta::kCurrent;
  seq.generation = meta.generation = ++generations;
  seq.view = view;
  if (old >= 0) Retire(old);
}

// --- sequences ---

Result<SeqId> Owner::Open() {
  Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  LQ_RETURN_IF_ERROR(
      s.Need(AllocationSite::kSequence, "sequences", -1, 1, static_cast<int64_t>(s.free_sequences.size())));
  LQ_RETURN_IF_ERROR(s.Need(AllocationSite::kView, "views", -1, 1, static_cast<int64_t>(s.free_views.size())));
  const int view = s.TakeView(ViewMeta::kCurrent);
  std::fill_n(s.view_rows(view), s.num_classes(), SeqRow{});
  const int slot = s.free_sequences.back();
  s.free_sequences.pop_back();
  SequenceMeta& seq = s.sequences[static_cast<size_t>(slot)];
  seq.id += static_cast<SeqId>(s.sequences.size());
  seq.open = true;
  seq.view = -1;
  s.Install(seq, view);
  return seq.id;
}

Result<SeqId> Owner::Fork(SeqId parent_id) {
  Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  const SequenceMeta* parent = s.Find(parent_id);
  if (parent == nullptr) return s.Closed(parent_id);
  LQ_RETURN_IF_ERROR(
      s.Need(AllocationSite::kSequence, "sequences", -1, 1, static_cast<int64_t>(s.free_sequences.size())));
  LQ_RETURN_IF_ERROR(s.Need(AllocationSite::kView, "views", -1, 1, static_cast<int64_t>(s.free_views.size())));
  const int view = s.TakeView(ViewMeta::kCurrent);
  s.CloneRows(parent->view, view);
  const int slot = s.free_sequences.back();
  s.free_sequences.pop_back();
  SequenceMeta& seq = s.sequences[static_cast<size_t>(slot)];
  seq.id += static_cast<SeqId>(s.sequences.size());
  seq.open = true;
  seq.view = -1;
  s.Install(seq, view);
  ++s.stats.forks;
  return seq.id;
}

Status Owner::Reorder(std::span<const SeqId> group, std::span<const int> parents) {
  Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  if (group.size() != parents.size())
    return Status(Code::kInvalidArgument, "reorder: " + Text(static_cast<int64_t>(group.size())) + " members, " +
                                              Text(static_cast<int64_t>(parents.size())) + " parents");
  ++s.batches;
  for (size_t i = 0; i < group.size(); ++i) {
    SequenceMeta* member = s.Find(group[i]);
    if (member == nullptr) return s.Closed(group[i]);
    if (member->batch == s.batches)
      return Status(Code::kInvalidArgument, "reorder: sequence " + Text(group[i]) + " stands in the group twice");
    member->batch = s.batches;
    if (parents[i] < 0 || static_cast<size_t>(parents[i]) >= group.size())
      return Status(Code::kInvalidArgument, "reorder: parent " + Text(parents[i]) + " of member " +
                                                Text(static_cast<int64_t>(i)) + ", the group has " +
                                                Text(static_cast<int64_t>(group.size())));
  }
  if (group.empty()) return {};
  LQ_RETURN_IF_ERROR(s.Need(AllocationSite::kView, "views", -1, static_cast<int64_t>(group.size()),
                            static_cast<int64_t>(s.free_views.size())));
  s.new_views.clear();
  for (size_t i = 0; i < group.size(); ++i) {
    const int view = s.TakeView(ViewMeta::kCurrent);
    s.CloneRows(s.Find(group[static_cast<size_t>(parents[i])])->view, view);
    if (LQ_PLANT(kReorderLeavesTails)) {
      for (int c = 0; c < s.num_classes(); ++c)
        for (int t = 0; t < 2; ++t) {
          SeqRow& to = s.view_rows(view)[c];
          const SeqRow& own = s.view_rows(s.Find(group[i])->view)[c];
          s.tables->Ref(own.root[t][kExact]);
          s.tables->Unref(to.root[t][kExact]);
          to.root[t][kExact] = own.root[t][kExact];
          to.entries[t][kExact] = own.entries[t][kExact];
        }
    }
    s.new_views.push_back(view);
  }
  for (size_t i = 0; i < group.size(); ++i) {
    SequenceMeta& member = *s.Find(group[i]);
    const uint64_t generation = member.generation;
    s.Install(member, s.new_views[i]);
    if (LQ_PLANT(kNoFenceReorder)) member.generation = generation;
  }
  ++s.stats.reorders;
  return {};
}

Status Owner::Truncate(SeqId id, int64_t len) {
  Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  SequenceMeta* seq = s.Find(id);
  if (seq == nullptr) return s.Closed(id);
  const int32_t old_len = s.view_len(seq->view);
  if (len < 0 || len > old_len)
    return Status(Code::kInvalidArgument,
                  "truncate: sequence " + Text(id) + " has " + Text(old_len) + " rows, asked for " + Text(len));
  const int32_t n = static_cast<int32_t>(len);

  // What each table keeps, what that takes, and whether a window still has the rows that position n sees.
  int64_t roots = 0, blocks = 0;
  const SeqRow* const old_rows = s.view_rows(seq->view);
  const auto frontier = [&](int c, int t) {
    if (LQ_PLANT(kTruncateKeepsFrontier) && n % s.info[static_cast<size_t>(c)].group[t] != 0) return old_rows[c].f[t];
    if (LQ_PLANT(kFrontierMovesBack))
      return static_cast<int32_t>(
          std::min<int64_t>(old_rows[c].f[t], s.info[static_cast<size_t>(c)].closure[t].frontier(n)));
    return std::min(old_rows[c].f[t], n);
  };
  const auto keep = [&](int c, int t, int form) {
    Kept kept = s.Keep(c, t, form, old_rows[c], n, frontier(c, t));
    if (LQ_PLANT(kEntryByPosition) && form == kCoded)
      kept.to = std::min(old_rows[c].entries[t][form],
                         static_cast<int>(CeilDiv(frontier(c, t), s.page_rows(Impl::PlaneIndex(c, t, form)))));
    return kept;
  };
  for (int c = 0; c < s.num_classes(); ++c)
    for (int t = 0; t < 2; ++t) {
      const ClassInfo& info = s.info[static_cast<size_t>(c)];
      const SeqRow& row = old_rows[c];
      if (info.window > 0 && n < old_len && n > info.pinned && row.f[t] > info.pinned) {
        const int32_t low =
            row.entries[t][kCoded] > 0 ? static_cast<int32_t>(s.tables->entry(row.root[t][kCoded], 0).start) : row.f[t];
        if (low > info.pinned && low > n - info.window)
          return Status(Code::kOutOfRange, "truncate: sequence " + Text(id) + " cannot go back to " + Text(len) +
                                               " rows: rows before " + Text(low) + " left the window of " +
                                               Text(info.window) + "; shortest length " + Text(low + info.window));
      }
      for (int form = 0; form < 2; ++form) {
        const Kept kept = keep(c, t, form);
        if (kept.count() == row.entries[t][form] || kept.count() == 0) continue;
        roots += 1;
        blocks += PageTables::BlocksNeeded(kept.prefix, kept.to - kept.from, 0);
      }
    }
  LQ_RETURN_IF_ERROR(s.Need(AllocationSite::kView, "views", -1, 1, static_cast<int64_t>(s.free_views.size())));
  LQ_RETURN_IF_ERROR(s.NeedNodes(roots, blocks));

  const int view = s.TakeView(ViewMeta::kCurrent);
  s.CloneRows(seq->view, view);
  for (int c = 0; c < s.num_classes(); ++c) {
    SeqRow& row = s.view_rows(view)[c];
    for (int t = 0; t < 2; ++t) {
      if (LQ_PLANT(kTruncateSkipsTensor) && t == kV) continue;
      const ClassInfo& info = s.info[static_cast<size_t>(c)];
      const int32_t f = frontier(c, t);
      if (n < row.f[t] && n > info.pinned && n % info.group[t] != 0) ++s.stats.scars;
      for (int form = 0; form < 2; ++form) s.Cut(c, t, form, row, keep(c, t, form));
      row.f[t] = row.staged[t] = f;
    }
    row.len = n;
  }
  const uint64_t generation = seq->generation;
  s.Install(*seq, view);
  if (LQ_PLANT(kNoFenceTruncate)) seq->generation = generation;
  ++s.stats.truncates;
  return {};
}

Status Owner::Release(SeqId id) {
  Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  SequenceMeta* seq = s.Find(id);
  if (seq == nullptr) return s.Closed(id);
  seq->open = false;
  if (LQ_PLANT(kDoubleRelease)) s.tables->Unref(s.view_rows(seq->view)[0].root[kK][kCoded]);
  s.Retire(seq->view);
  seq->view = -1;
  if (!LQ_PLANT(kNoFenceRelease)) seq->generation = ++s.generations;
  s.free_sequences.push_back(SlotOf(id, s.sequences.size()));
  ++s.stats.releases;
  return {};
}

// --- begin ---

// Rows of a draft that starts at `len`: no group that holds draft rows may close under later drafts (cache_core.md 5,
// begin).
int Owner::Impl::DraftRows(int32_t len, int rows) {
  int n = rows;
  if (LQ_PLANT(kDraftNotCut)) return n;
  for (const ClassInfo& c : info)
    for (const Closure& closure : c.closure) {
      if (closure.step == 1) continue;
      // The first m > len with raw(m) > len closes a group of drafts; the draft may reach it with its last row.
      const int64_t first_past = (int64_t{len} / closure.step + 1) * closure.step;  // smallest raw value beyond len
      const int64_t m = first_past + closure.lag;                                   // the length at which it appears
      n = static_cast<int>(std::min<int64_t>(n, m - len));
    }
  if (n < rows) ++stats.draft_cuts;
  return n;
}

// Claims slots for the rows of `ranges` (sorted, disjoint) in one plane of the private view; takes pages, lists copies,
// builds the table. All that can fail is asked first; then nothing fails. may_drop_*: what publish may have to remove
// from the table.
Status Owner::Impl::Extend(Txn& txn, int cls, int tensor, int form, std::span<const RowRange> ranges,
                           bool may_drop_front, bool may_drop_back) {
  const int plane = PlaneIndex(cls, tensor, form);
  const ClassInfo& c = info[static_cast<size_t>(cls)];
  PagePool& pool = *pools[static_cast<size_t>(plane)];
  SeqRow& row = view_rows(txn.next)[cls];
  const RootId root = row.root[tensor][form];
  const int entries = row.entries[tensor][form];
  const int32_t page_rows = pool.rows();

  // Plan: one piece a page.
  pieces.clear();
  const Entry last = entries > 0 ? tables->entry(root, entries - 1) : Entry{};
  int32_t tail_page =
      entries > 0 ? AlignDown(static_cast<int32_t>(last.start), page_rows) : -1;  // position of its slot 0
  int32_t tail_mark = entries > 0 ? pool.meta(last.page).mark : 0;
  bool tail_is_new = false;
  int64_t fresh = 0;
  for (const RowRange& range : ranges)
    for (int32_t from = range.from; from < range.to;) {
      const int32_t edge = AlignDown(from, page_rows), to = std::min(range.to, edge + page_rows);
      Impl::Piece piece{Piece::kFresh, from, to};
      if (tail_page == edge) {
        const bool scar = form == kCoded && !tail_is_new && from % c.group[tensor] != 0 && !LQ_PLANT(kScarIgnored);
        if (tail_is_new) piece.kind = Piece::kSamePage;
        // Rows of a cut group cannot join it: its qparams exist. They start a page of their own.
        else if (scar)
          piece.kind = Piece::kFresh;
        // The mark rule. A mark below the first row means slots that no row needs (coded rows between pinned and open
        // ones).
        else if (tail_mark <= from - edge || LQ_PLANT(kMarkIgnored))
          piece.kind = Piece::kInPlace;
        else if (LQ_PLANT(kScarIgnored) && from % c.group[tensor] != 0)
          piece.kind = Piece::kInPlace;
        else
          piece.kind = Piece::kCopy;
      }
      if (piece.kind == Piece::kFresh || piece.kind == Piece::kCopy) {
        ++fresh;
        tail_is_new = true;
      }
      tail_page = edge;
      tail_mark = to - edge;
      pieces.push_back(piece);
      from = to;
    }
  const bool replace = !pieces.empty() && pieces[0].kind == Piece::kCopy;
  const int prefix = entries - (replace ? 1 : 0), total = prefix + static_cast<int>(fresh);
  const int64_t build_roots = fresh > 0 ? 1 : 0;
  const int64_t build_blocks = fresh > 0 ? PageTables::BlocksNeeded(prefix, 0, static_cast<int>(fresh)) : 0;
  may_drop_back = may_drop_back && fresh > 0;
  const int64_t spare_roots = total > 0 && (may_drop_front || may_drop_back) ? 1 : 0;
  const int64_t spare_blocks = spare_roots == 0 ? 0 : may_drop_front ? CeilDiv(total, kBlockEntries) : 1;

  // Ask.
  if (total > max_entries[static_cast<size_t>(plane)])
    return Need(AllocationSite::kBlock, "table entries (each scar takes one)", plane, total,
                max_entries[static_cast<size_t>(plane)]);
  if (fresh > 0)
    LQ_RETURN_IF_ERROR(Need(AllocationSite::kPage, "pages", plane, batch_pages[static_cast<size_t>(plane)] + fresh,
                            batch_pages[static_cast<size_t>(plane)] + pool.free_pages()));
  LQ_RETURN_IF_ERROR(NeedNodes(build_roots + spare_roots, build_blocks + spare_blocks));

  // Take.
  batch_pages[static_cast<size_t>(plane)] += fresh;
  tables->Reserve(spare_roots, spare_blocks);
  txn.reserved_roots += spare_roots;
  txn.reserved_blocks += spare_blocks;
  added.clear();
  uint32_t page = last.page;
  const auto cls8 = static_cast<uint8_t>(cls), tensor8 = static_cast<uint8_t>(tensor),
             form8 = static_cast<uint8_t>(form);
  for (const Piece& piece : pieces) {
    const int32_t edge = AlignDown(piece.from, page_rows);
    const bool takes = piece.kind == Piece::kFresh || piece.kind == Piece::kCopy;
    if (takes) {
      page = pool.Take();
      ++stats.pages_taken;
      uint32_t start = static_cast<uint32_t>(piece.from);
      if (piece.kind == Piece::kCopy) {
        ++stats.pages_copied;
        // Live rows of the shared page: [start, piece.from) in a coded page, pinned rows and [f, piece.from) in an
        // exact one.
        RowRange live[2] = {{static_cast<int32_t>(last.start), piece.from}, {}};
        if (form == kExact) {
          live[0] = {static_cast<int32_t>(last.start), std::min(c.pinned, piece.from)};
          live[1] = {std::max({static_cast<int32_t>(last.start), c.pinned, row.f[tensor]}), piece.from};
        }
        start = static_cast<uint32_t>(piece.from);
        for (const RowRange& r : live) {
          if (r.empty()) continue;
          start = std::min(start, static_cast<uint32_t>(r.from));
          if (LQ_PLANT(kTailNotCopied)) continue;
          txn.copies.push_back({cls8, tensor8, form8, last.page, page, r.from - edge,
                                r.to - edge - (LQ_PLANT(kCopyMissesRow) && r.to - r.from > 1 ? 1 : 0)});
          stats.rows_copied += r.to - r.from;
        }
      }
      added.push_back({page, start});
    }
    // The rows that a copy brings are handed out, whatever becomes of this step.
    if (piece.kind == Piece::kCopy) pool.set_mark(page, piece.from - edge);
    const uint16_t before = pool.meta(page).mark;
    pool.set_mark(page, piece.to - edge);
    txn.claims.push_back({cls8, tensor8, form8, page, piece.from - edge, piece.to - edge, piece.from});
    txn.notes.push_back({before, takes});
  }
  if (fresh > 0) {
    row.root[tensor][form] = tables->Build(plane, root, prefix, prefix, prefix, added);
    row.entries[tensor][form] = total;
    tables->Unref(root);
  }
  return {};
}

Status Owner::Impl::BeginOne(const AppendRequest& request, TxnId* out) {
  LQ_RETURN_IF_ERROR(Need(AllocationSite::kTxn, "transactions", -1, 1, static_cast<int64_t>(free_txns.size())));
  LQ_RETURN_IF_ERROR(Need(AllocationSite::kView, "views", -1, 1, static_cast<int64_t>(free_views.size())));
  SequenceMeta& seq = *Find(request.seq);
  const int txn_slot = free_txns.back();
  free_txns.pop_back();
  Txn& txn = txns[static_cast<size_t>(txn_slot)];
  LQ_CHECK(!txn.open && txn.claims.empty() && txn.copies.empty() && txn.jobs.empty());
  txn.open = true;
  txn.id = ++serial << kSlotBits | static_cast<TxnId>(txn_slot);
  txn.seq = request.seq;
  txn.slot = SlotOf(request.seq, sequences.size());
  txn.base = seq.view;
  txn.generation = seq.generation;
  txn.mode = request.mode;
  txn.poisoned = false;
  txn.sealed = -1;
  txn.layers_left = static_cast<int>(schema.layers.size());
  txn.seal_jobs = 0;
  std::fill(txn.prepared.begin(), txn.prepared.end(), 0);
  ++views[static_cast<size_t>(txn.base)].leases;
  txn.next = TakeView(ViewMeta::kPrivate);
  CloneRows(txn.base, txn.next);

  const bool draft = request.mode == Mode::kPrefix;
  const int32_t len = view_len(txn.base), n = draft ? DraftRows(len, request.rows) : request.rows, end = len + n;
  txn.first = len;
  txn.count = n;
  *out = txn.id;
  const auto fail = [&](Status why) {
    Abort(txn);
    --stats.aborts;  // the caller never had this transaction
    *out = 0;
    return why;
  };
  for (int c = 0; c < num_classes(); ++c) {
    const ClassInfo& cls = info[static_cast<size_t>(c)];
    SeqRow& row = view_rows(txn.next)[c];
    for (int t = 0; t < 2; ++t) {
      const Closure& closure = cls.closure[t];
      const int32_t f = row.f[t], to = std::max(f, static_cast<int32_t>(closure.frontier(end)));
      // Rows whose code depends on nothing else, and all rows of a step that cannot shrink, are coded when they are
      // prepared.
      const bool at_once = !draft || closure.immediate();
      const int32_t staged = at_once ? to : std::min(to, std::max(f, static_cast<int32_t>(closure.raw(end - 1))));
      const int32_t exact_from = at_once ? std::max(len, to) : len;
      txn.exact_from[static_cast<size_t>(c * 2 + t)] = exact_from;
      row.staged[t] = staged;

      const RowRange coded[1] = {{std::max(f, cls.pinned), to}};
      RowRange exact[2] = {{len, std::min(cls.pinned, end)}, {std::max(exact_from, cls.pinned), end}};
      if (exact[0].to >= exact[1].from && !exact[0].empty()) {  // one range where no coded rows lie between
        exact[0].to = std::max(exact[0].to, exact[1].to);
        exact[1] = {};
      }
      if (Status s = Extend(txn, c, t, kCoded, coded, cls.window > 0, draft); !s.ok()) return fail(std::move(s));
      if (Status s = Extend(txn, c, t, kExact, exact, to > f, draft); !s.ok()) return fail(std::move(s));
      const auto c8 = static_cast<uint8_t>(c), t8 = static_cast<uint8_t>(t);
      if (const int32_t first = coded[0].from; first < staged) txn.jobs.push_back({c8, t8, first, staged, false});
    }
    row.len = end;
    row.count = n;
  }
  txn.seal_jobs = txn.jobs.size();
  for (int c = 0; c < num_classes(); ++c)
    for (int t = 0; t < 2; ++t) {
      const SeqRow& row = view_rows(txn.next)[c];
      const ClassInfo& cls = info[static_cast<size_t>(c)];
      const int32_t to = std::max(row.f[t], static_cast<int32_t>(cls.closure[t].frontier(end)));
      if (const int32_t first = std::max(row.staged[t], cls.pinned); first < to)
        txn.jobs.push_back({static_cast<uint8_t>(c), static_cast<uint8_t>(t), first, to, true});
    }
  if (LQ_PLANT(kLengthBeforePublish))
    for (int c = 0; c < num_classes(); ++c) view_rows(txn.base)[c].len = end;
  return {};
}

Status Owner::Begin(std::span<const AppendRequest> requests, std::span<TxnId> out) {
  Impl& s = *impl_;
  if (requests.size() != out.size())
    return Status(Code::kInvalidArgument, "begin: " + Text(static_cast<int64_t>(requests.size())) +
                                              " requests, room for " + Text(static_cast<int64_t>(out.size())) +
                                              " transactions");
  {
    const std::lock_guard lock(s.mutex);
    ++s.batches;
    for (const AppendRequest& r : requests) {
      SequenceMeta* seq = s.Find(r.seq);
      if (seq == nullptr) return s.Closed(r.seq);
      const auto name = [&] { return "begin: sequence " + Text(r.seq); };  // only an error allocates
      if (seq->batch == s.batches) return Status(Code::kInvalidArgument, name() + " stands in the batch twice");
      seq->batch = s.batches;
      if (r.rows < 1) return Status(Code::kInvalidArgument, name() + ": " + Text(r.rows) + " rows, at least 1");
      if (r.rows > s.limits.max_step_rows)
        return Status(Code::kOutOfRange,
                      name() + ": " + Text(r.rows) + " rows in a step, limit " + Text(s.limits.max_step_rows));
      const int32_t len = s.view_len(seq->view);
      if (len + int64_t{r.rows} > s.limits.max_len)
        return Status(Code::kOutOfRange,
                      name() + ": " + Text(len) + " + " + Text(r.rows) + " rows, limit " + Text(s.limits.max_len));
    }
    std::fill(s.batch_pages.begin(), s.batch_pages.end(), 0);
    for (size_t i = 0; i < requests.size(); ++i) {
      Status status = s.BeginOne(requests[i], &out[i]);
      if (status.ok()) continue;
      // Newest first, so that each mark goes back to what it was.
      for (size_t k = i; k-- > 0 && !LQ_PLANT(kBatchNotAtomic);) {
        s.Abort(*s.FindTxn(out[k]));
        --s.stats.aborts;
        out[k] = 0;
      }
      return status;
    }
    s.stats.begins += static_cast<int64_t>(requests.size());
  }
  // Outside the lock: nobody else knows these pages yet.
  if (!LQ_PLANT(kFreshNotPoisoned))
    for (const TxnId id : out) {
      const Txn& txn = s.txns[static_cast<size_t>(id & ((1u << kSlotBits) - 1))];
      for (size_t i = 0; i < txn.claims.size(); ++i) {
        const Claim& claim = txn.claims[i];
        if (txn.notes[i].fresh)
          s.pools[static_cast<size_t>(Impl::PlaneIndex(claim.cls, claim.tensor, claim.form))]->Poison(claim.page);
      }
    }
  return {};
}

// --- between begin and publish ---

Result<TxnView> Owner::Get(TxnId id) const {
  const Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  const Txn* txn = s.FindTxn(id);
  if (txn == nullptr) return s.Failed(id);
  return TxnView{.id = id,
                 .seq = txn->seq,
                 .first = txn->first,
                 .count = txn->count,
                 .mode = txn->mode,
                 .claims = txn->claims,
                 .copies = txn->copies,
                 .jobs = txn->jobs,
                 .rows = {s.view_rows(txn->next), s.classes.size()}};
}

Status Owner::MarkPrepared(TxnId id, int layer) {
  Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  Txn* txn = s.FindTxn(id);
  if (txn == nullptr) return s.Failed(id);
  if (layer < 0 || static_cast<size_t>(layer) >= s.schema.layers.size()) {
    s.Abort(*txn);
    return Status(Code::kInvalidArgument, "prepare: layer " + Text(layer) + ", the schema has " +
                                              Text(static_cast<int64_t>(s.schema.layers.size())));
  }
  uint64_t& word = txn->prepared[static_cast<size_t>(layer) / 64];
  const uint64_t bit = uint64_t{1} << (layer % 64);
  if ((word & bit) != 0) {
    s.Abort(*txn);
    return Status(Code::kDuplicateLayer, "prepare: layer " + Text(layer) + " twice in one transaction");
  }
  word |= bit;
  --txn->layers_left;
  return {};
}

void Owner::Poison(TxnId id) {
  Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  if (Txn* txn = s.FindTxn(id); txn != nullptr) txn->poisoned = true;
}

namespace {

// What a caller may have done wrong before seal and publish.
Status CheckComplete(const Txn& txn, int layers, int accepted, const char* step) {
  const auto name = [&] { return std::string(step) + ": transaction of sequence " + Text(txn.seq); };
  if (txn.poisoned) return Status(Code::kNonFinite, name() + " holds a row that is not finite");
  if (txn.layers_left != 0 && !LQ_PLANT(kPublishMissingLayer))
    return Status(Code::kMissingLayer,
                  name() + ": " + Text(txn.layers_left) + " of " + Text(layers) + " layers not prepared");
  if (txn.mode == Mode::kAll ? accepted != txn.count : accepted < 1 || accepted > txn.count)
    return Status(Code::kInvalidArgument, name() + ": " + Text(accepted) + " of " + Text(txn.count) + " rows accepted" +
                                              (txn.mode == Mode::kAll ? ", all or none" : ""));
  return {};
}

}  // namespace

Result<std::span<const CloseJob>> Owner::Seal(TxnId id, int accepted) {
  Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  Txn* txn = s.FindTxn(id);
  if (txn == nullptr) return s.Failed(id);
  Status status = CheckComplete(*txn, static_cast<int>(s.schema.layers.size()), accepted, "seal");
  if (status.ok() && txn->sealed >= 0)
    status = Status(Code::kInvalidArgument, "seal: transaction of sequence " + Text(txn->seq) + " was sealed with " +
                                                Text(txn->sealed) + " rows, now " + Text(accepted));
  if (!status.ok()) {
    s.Abort(*txn);
    return status;
  }
  txn->sealed = accepted;
  const std::span<const CloseJob> jobs(txn->jobs);
  // Rows past `accepted` are not there: the closures that need all rows have nothing to close.
  if (accepted == txn->count || LQ_PLANT(kClosurePastAccepted)) return jobs.subspan(txn->seal_jobs);
  return jobs.subspan(jobs.size());
}

// --- publish and abort ---

// Replaces one table of a view by what it keeps.
void Owner::Impl::Cut(int cls, int tensor, int form, SeqRow& row, const Kept& kept) {
  const int plane = PlaneIndex(cls, tensor, form);
  RootId& root = row.root[tensor][form];
  int32_t& entries = row.entries[tensor][form];
  if (kept.count() == entries) return;
  const RootId old = root;
  root = tables->Build(plane, old, kept.prefix, kept.from, kept.to, {});
  entries = kept.count();
  tables->Unref(old);
}

void Owner::Impl::Finish(Txn& txn) {
  txn.open = false;
  txn.claims.clear();
  txn.notes.clear();
  txn.copies.clear();
  txn.jobs.clear();
  free_txns.push_back(static_cast<int>(txn.id & ((1u << kSlotBits) - 1)));
}

void Owner::Impl::Abort(Txn& txn) {
  for (size_t i = txn.claims.size(); i-- > 0;) {
    const Claim& claim = txn.claims[i];
    PagePool& pool = *pools[static_cast<size_t>(PlaneIndex(claim.cls, claim.tensor, claim.form))];
    if (pool.meta(claim.page).mark == claim.to) pool.set_mark(claim.page, txn.notes[i].mark_before);
  }
  tables->Unreserve(txn.reserved_roots, txn.reserved_blocks);
  txn.reserved_roots = txn.reserved_blocks = 0;
  if (!LQ_PLANT(kAbortLeaks)) FreeView(txn.next);
  EndLease(txn.base);
  Finish(txn);
  ++stats.aborts;
}

Result<Receipt> Owner::Publish(TxnId id, int accepted) {
  Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  Txn* txn = s.FindTxn(id);
  if (txn == nullptr) {
    const Receipt& receipt = s.receipts[(id >> kSlotBits) % s.receipts.size()];
    if (id != 0 && receipt.txn == id && !LQ_PLANT(kPublishRepeats)) return receipt;
    return s.Failed(id);
  }
  Status status = CheckComplete(*txn, static_cast<int>(s.schema.layers.size()), accepted, "publish");
  if (status.ok() && (txn->mode == Mode::kPrefix || txn->sealed >= 0) && txn->sealed != accepted)
    status =
        Status(Code::kInvalidArgument, "publish: " + Text(accepted) + " rows of sequence " + Text(txn->seq) +
                                           (txn->sealed < 0 ? ", not sealed" : ", sealed with " + Text(txn->sealed)));
  SequenceMeta& seq = s.sequences[static_cast<size_t>(txn->slot)];
  if (status.ok() && (seq.generation != txn->generation || (!seq.open && !LQ_PLANT(kNoFenceRelease)))) {
    ++s.stats.stale;
    status = Status(Code::kStale, "publish: sequence " + Text(txn->seq) + " moved on since the transaction began");
  }
  if (!status.ok()) {
    s.Abort(*txn);
    return status;
  }

  const int32_t len = txn->first + accepted;
  s.tables->Unreserve(txn->reserved_roots, txn->reserved_blocks);
  txn->reserved_roots = txn->reserved_blocks = 0;
  SeqRow* const next = s.view_rows(txn->next);
  // Marks first: the claims know nothing of the tables.
  for (size_t i = txn->claims.size(); i-- > 0;) {
    const Claim& claim = txn->claims[i];
    const ClassInfo& info = s.info[claim.cls];
    const int32_t used =
        claim.form == kExact ? len
        : LQ_PLANT(kFrontierIsStaged)
            ? next[claim.cls].staged[claim.tensor]
            : std::max(next[claim.cls].f[claim.tensor], static_cast<int32_t>(info.closure[claim.tensor].frontier(len)));
    const int32_t end = claim.position + claim.to - claim.from;  // of the claimed rows
    if (used >= end) continue;
    PagePool& pool = *s.pools[static_cast<size_t>(Impl::PlaneIndex(claim.cls, claim.tensor, claim.form))];
    if (pool.meta(claim.page).mark != claim.to) continue;
    const bool none = used <= claim.position || (LQ_PLANT(kMarkBackTooFar));
    pool.set_mark(claim.page, none ? txn->notes[i].mark_before : claim.from + used - claim.position);
    ++s.stats.marks_returned;
  }
  for (int c = 0; c < s.num_classes(); ++c) {
    SeqRow& row = next[c];
    const ClassInfo& info = s.info[static_cast<size_t>(c)];
    for (int t = 0; t < 2; ++t) {
      const int32_t before = row.f[t];
      int32_t f = std::max(before, static_cast<int32_t>(info.closure[t].frontier(len)));
      if (LQ_PLANT(kFrontierIsStaged)) f = std::min(len, row.staged[t]);
      if (LQ_PLANT(kClosurePastAccepted) && accepted < txn->count)
        f = std::min(len, std::max(before, static_cast<int32_t>(info.closure[t].frontier(txn->first + txn->count))));
      if (LQ_PLANT(kLengthWithoutFrontier)) f = before;
      for (int form = 0; form < 2; ++form) {
        const Kept kept = s.Keep(c, t, form, row, len, f);
        if (form == kCoded) s.stats.window_drops += kept.from - kept.prefix;
        s.Cut(c, t, form, row, kept);
      }
      const int32_t first = std::max(before, info.pinned), group = info.group[t];
      if (first < f) {
        s.stats.closed_rows[t] += f - first;
        if (group > 1) {
          s.stats.closed_groups += CeilDiv(f, group) - first / group;
          if (first % group != 0) ++s.stats.short_groups;
        }
      }
      row.f[t] = row.staged[t] = f;
    }
    row.len = len;
    row.count = 0;
  }
  s.EndLease(txn->base);
  s.Install(seq, txn->next);
  ++s.stats.publishes;
  const Receipt receipt{
      .txn = id, .seq = txn->seq, .generation = seq.generation, .first = txn->first, .rows = accepted};
  s.receipts[(id >> kSlotBits) % s.receipts.size()] = receipt;
  s.Finish(*txn);
  return receipt;
}

void Owner::Abort(TxnId id) {
  Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  if (Txn* txn = s.FindTxn(id); txn != nullptr) s.Abort(*txn);
}

Result<Receipt> Owner::FindReceipt(TxnId id) const {
  const Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  const Receipt& receipt = s.receipts[(id >> kSlotBits) % s.receipts.size()];
  if (id != 0 && receipt.txn == id) return receipt;
  return Status(Code::kNotFound, "no receipt of transaction " + Text(static_cast<int64_t>(id)) +
                                     ": it was not published, or the ring of " +
                                     Text(static_cast<int64_t>(s.receipts.size())) + " moved on");
}

// --- reading ---

int64_t Owner::length(SeqId id) const {
  const Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  const SequenceMeta* seq = s.Find(id);
  return seq == nullptr ? -1 : s.view_len(seq->view);
}

uint64_t Owner::generation(SeqId id) const {
  const Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  const SequenceMeta* seq = s.Find(id);
  return seq == nullptr ? 0 : seq->generation;
}

int Owner::scars(SeqId id, int cls) const {
  const Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  LQ_CHECK(cls >= 0 && cls < s.num_classes());
  const SequenceMeta* seq = s.Find(id);
  if (seq == nullptr) return -1;
  const SeqRow& row = s.view_rows(seq->view)[cls];
  const ClassInfo& info = s.info[static_cast<size_t>(cls)];
  int scars = 0;
  for (int t = 0; t < 2; ++t) {
    for (int i = 0; i < row.entries[t][kCoded]; ++i) {
      const auto start = static_cast<int32_t>(s.tables->entry(row.root[t][kCoded], i).start);
      if (start > info.pinned && start % info.group[t] != 0) ++scars;
    }
    if (row.f[t] > info.pinned && row.f[t] % info.group[t] != 0) ++scars;
  }
  return scars;
}

Result<Owner::Lease> Owner::Acquire(SeqId id) {
  Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  const SequenceMeta* seq = s.Find(id);
  if (seq == nullptr) return s.Closed(id);
  ++s.views[static_cast<size_t>(seq->view)].leases;
  Lease lease;
  lease.owner_ = this;
  lease.view_ = seq->view;
  return lease;
}

Owner::Lease::Lease(Lease&& other) noexcept
    : owner_(std::exchange(other.owner_, nullptr)), view_(std::exchange(other.view_, -1)) {}

Owner::Lease& Owner::Lease::operator=(Lease&& other) noexcept {
  if (this == &other) return *this;
  Lease old(std::move(*this));
  owner_ = std::exchange(other.owner_, nullptr);
  view_ = std::exchange(other.view_, -1);
  return *this;
}

Owner::Lease::~Lease() {
  if (owner_ == nullptr) return;
  const std::lock_guard lock(owner_->impl_->mutex);
  owner_->impl_->EndLease(view_);
}

std::span<const SeqRow> Owner::Lease::rows() const {
  if (owner_ == nullptr) return {};
  return {owner_->impl_->view_rows(view_), owner_->impl_->classes.size()};
}

int64_t Owner::Lease::length() const { return owner_ == nullptr ? 0 : rows()[0].len; }

CacheView Owner::ViewOfLayer(int layer) const {
  const Impl& s = *impl_;
  LQ_CHECK(layer >= 0 && static_cast<size_t>(layer) < s.class_of_layer.size());
  const int c = s.class_of_layer[static_cast<size_t>(layer)];
  const auto index = static_cast<size_t>(s.index_in_class[static_cast<size_t>(layer)]);
  const ClassInfo& info = s.info[static_cast<size_t>(c)];
  CacheView view{};
  for (int t = 0; t < 2; ++t) {
    for (int form = 0; form < 2; ++form) {
      const PlaneLayout& layout = info.layout[t][form];
      view.plane[t][form] = {.base = s.pools[static_cast<size_t>(Impl::PlaneIndex(c, t, form))]->base(),
                             .page_stride = layout.page_bytes,
                             .layer_offset = layout.layer_offset[index],
                             .head_stride = layout.head_stride[index],
                             .rows = layout.rows};
    }
    view.closure[t] = info.closure[t];
  }
  view.read_step = s.schema.read_step;
  view.window = info.window;
  view.pinned = info.pinned;
  view.roots = s.tables->root_data();
  view.root_stride = s.tables->root_stride();
  view.blocks = s.tables->block_data();
  return view;
}

const std::vector<LayerClass>& Owner::classes() const { return impl_->classes; }

int Owner::class_of_layer(int layer) const {
  LQ_CHECK(layer >= 0 && static_cast<size_t>(layer) < impl_->class_of_layer.size());
  return impl_->class_of_layer[static_cast<size_t>(layer)];
}

const PagePool& Owner::pool(int cls, TensorIndex tensor, FormIndex form) const {
  LQ_CHECK(cls >= 0 && cls < impl_->num_classes());
  return *impl_->pools[static_cast<size_t>(Impl::PlaneIndex(cls, tensor, form))];
}

int64_t Owner::used_bytes() const {
  const std::lock_guard lock(impl_->mutex);
  int64_t bytes = 0;
  for (const auto& pool : impl_->pools) bytes += pool->used_bytes();
  return bytes;
}

OwnerStats Owner::stats() const {
  const Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  OwnerStats out = s.stats;
  out.entries_written = s.tables->entries_written();
  out.blocks_built = s.tables->blocks_built();
  out.roots_built = s.tables->roots_built();
  out.table_bytes_copied = out.blocks_built * int64_t{kBlockEntries * sizeof(Entry)} +
                           out.roots_built * int64_t{s.tables->root_stride()} * int64_t{sizeof(uint32_t)};
  return out;
}

}  // namespace livequant
