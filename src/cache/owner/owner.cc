// cache/owner/owner.cc: an owner is made, its views are counted, its state is read. The transitions stand in
// sequences.cc and txn.cc.
#include "cache/owner/owner.h"

#include <algorithm>
#include <atomic>
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

constexpr int kReceiptsPerView = 4;
constexpr int kMaxReceipts = 1 << 20;

std::atomic<uint64_t> last_owner{0};

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
  if (limits.receipts < 0 || limits.receipts > kMaxReceipts)
    return Status(Code::kInvalidArgument, "receipts " + Text(limits.receipts) + ", limit 0.." + Text(kMaxReceipts));
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

const char* TransitionName(Transition transition) {
  switch (transition) {
    case Transition::kOpen:
      return "open";
    case Transition::kAppend:
      return "append";
    case Transition::kFork:
      return "fork";
    case Transition::kReorder:
      return "reorder";
    case Transition::kTruncate:
      return "truncate";
    case Transition::kRelease:
      return "release";
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
  if (limits.receipts == 0) limits.receipts = kReceiptsPerView * limits.max_views;
  if (limits.id == 0) limits.id = ++last_owner;
  const std::string digest = Digest(schema);
  LQ_CHECK(digest.size() == 2 * s.schema_digest.size());
  for (size_t i = 0; i < s.schema_digest.size(); ++i)
    s.schema_digest[i] = static_cast<uint8_t>(std::stoi(digest.substr(2 * i, 2), nullptr, 16));

  s.class_of_layer.resize(schema.layers.size());
  s.index_in_class.resize(schema.layers.size());
  int64_t roots = 0, blocks = 0, max_claims = 0;
  int widest = 1;
  std::vector<PagePool*> pools;
  std::byte* memory = limits.memory;
  LQ_CHECK(reinterpret_cast<uintptr_t>(memory) % kMemoryAlignment == 0);
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
        const int64_t count = limits.pages[static_cast<size_t>(plane)], page_bytes = info.layout[t][form].page_bytes;
        LQ_ASSIGN_OR_RETURN(std::unique_ptr<PagePool> pool,
                            PagePool::Create(count, page_bytes, page_rows, limits.allocate_memory, memory));
        if (memory != nullptr) memory += CeilDiv(count * page_bytes, kMemoryAlignment) * kMemoryAlignment;
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
  s.receipts = std::make_unique<ReceiptRing>(limits.receipts);
  s.given = std::make_unique<IdMap>(limits.max_views);
  s.lineages.resize(views);
  s.txns.resize(views);
  for (int i = limits.max_views - 1; i >= 0; --i) {
    s.free_views.push_back(i);
    s.free_txns.push_back(i);
    s.free_lineages.push_back(i);
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
  if ((id & kOwnId) == 0) {
    const int64_t slot = given->Find(id);
    return slot < 0 ? nullptr : &txns[static_cast<size_t>(slot)];
  }
  const size_t slot = static_cast<size_t>(id & ((1u << kSlotBits) - 1));
  return slot < txns.size() && txns[slot].open && txns[slot].id == id ? &txns[slot] : nullptr;
}
const Txn* Owner::Impl::FindTxn(TxnId id) const { return const_cast<Impl*>(this)->FindTxn(id); }
Status Owner::Impl::Failed(TxnId id) const {
  return Status(Code::kFailedTxn, "transaction " + IdText(id) + " is finished or was never begun");
}

// --- receipts ---

std::string IdText(TxnId id) { return ((id & kOwnId) != 0 ? "#" : "") + std::to_string(id & ~kOwnId); }

Result<Receipt> Owner::Impl::Repeated(TxnId id, uint64_t content) {
  if (id == 0) return Receipt{};
  if ((id & kOwnId) != 0)
    return Status(Code::kInvalidArgument,
                  "transaction id " + std::to_string(id) + ", limit 1.." + std::to_string(kOwnId - 1));
  const Accepted* accepted = LQ_PLANT(kIdNotLookedFor) ? nullptr : receipts->Find(id);
  const Txn* txn = FindTxn(id);
  if (accepted != nullptr && (accepted->content == content || LQ_PLANT(kIdContentIgnored))) {
    ++stats.repeats;
    return accepted->receipt;
  }
  if (accepted != nullptr || (txn != nullptr && txn->content != content))
    return Status(Code::kIdMismatch,
                  "transaction id " + IdText(id) + " stands for another transition" +
                      (accepted == nullptr ? std::string(", begun")
                                           : std::string(": ") + TransitionName(accepted->receipt.transition) +
                                                 " of sequence " + Text(accepted->receipt.seq)));
  if (txn == nullptr && receipts->Expired(id) && !LQ_PLANT(kExpiredIdIsNew))
    return Status(Code::kIdExpired,
                  "transaction id " + IdText(id) + " is older than the last " + Text(receipts->depth()) + " receipts");
  return Receipt{};
}

Receipt Owner::Impl::Accept(Receipt receipt, uint64_t content) {
  receipt.owner = limits.id;
  receipt.schema = schema_digest;
  receipts->Add(receipt, content);
  return receipt;
}

Result<Receipt> Owner::FindReceipt(TxnId id) const {
  const Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  if (const Accepted* accepted = s.receipts->Find(id); accepted != nullptr) return accepted->receipt;
  if (s.receipts->Expired(id) && s.FindTxn(id) == nullptr)
    return Status(Code::kIdExpired, "transaction id " + IdText(id) + " is older than the last " +
                                        Text(s.receipts->depth()) + " receipts");
  return Status(Code::kNotFound, "no receipt of transaction id " + IdText(id) + ": nothing was accepted under it");
}

Result<bool> Owner::Reclaimed(TxnId id) const {
  LQ_ASSIGN_OR_RETURN(const Receipt receipt, FindReceipt(id));
  if (receipt.transition != Transition::kRelease)
    return Status(Code::kInvalidArgument, std::string("transaction id ") + IdText(id) + " is of a " +
                                              TransitionName(receipt.transition) + ", not of a release");
  const std::lock_guard lock(impl_->mutex);
  const Accepted* accepted = impl_->receipts->Find(id);
  if (accepted == nullptr) return Status(Code::kIdExpired, "transaction id " + IdText(id) + " left the ring just now");
  return accepted->reclaimed;
}

// --- views ---

int Owner::Impl::TakeView(ViewMeta::State state, int lineage) {
  LQ_CHECK(!free_views.empty());
  const int view = free_views.back();
  free_views.pop_back();
  views[static_cast<size_t>(view)] = {.state = state, .lineage = lineage};
  ++lineages[static_cast<size_t>(lineage)].views;
  return view;
}

// Each has a view, so there are as many as views.
int Owner::Impl::TakeLineage() {
  LQ_CHECK(!free_lineages.empty());
  const int lineage = free_lineages.back();
  free_lineages.pop_back();
  lineages[static_cast<size_t>(lineage)] = {};
  return lineage;
}

void Owner::Impl::FreeView(int view) {
  LQ_CHECK(views[static_cast<size_t>(view)].leases == 0 || LQ_PLANT(kReclaimUnderReader));
  SeqRow* const r = view_rows(view);
  for (int c = 0; c < num_classes(); ++c)
    for (int t = 0; t < 2; ++t)
      for (int form = 0; form < 2; ++form) tables->Unref(r[c].root[t][form]);
  ViewMeta& meta = views[static_cast<size_t>(view)];
  meta.state = ViewMeta::kFree;
  free_views.push_back(view);

  // The last view of a released sequence consumes the receipt of its release.
  Lineage& lineage = lineages[static_cast<size_t>(meta.lineage)];
  LQ_CHECK(lineage.views > 0);
  if (--lineage.views > 0 || lineage.release == 0) return;
  if (Accepted* release = receipts->Find(lineage.release); release != nullptr) {
    LQ_CHECK(!release->reclaimed || LQ_PLANT(kReclaimedEarly));
    release->reclaimed = true;
  }
  ++stats.reclaims;
  free_lineages.push_back(meta.lineage);
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
