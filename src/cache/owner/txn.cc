// cache/owner/txn.cc: the life of a transaction: begin, prepared, seal, publish, abort (cache_core.md 5). All that can
// fail is asked in begin; publish can be refused for one reason only.
#include "cache/owner/owner.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "cache/owner/impl.h"
#include "cache/owner/tables.h"
#include "cache/pages/plants.h"

namespace livequant {

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

namespace {

uint64_t ContentOf(const AppendRequest& request) {
  return Content(Transition::kAppend, request.seq, request.rows, request.mode, request.content);
}

}  // namespace

Status Owner::Impl::BeginOne(const AppendRequest& request, TxnId* out) {
  LQ_RETURN_IF_ERROR(Need(AllocationSite::kTxn, "transactions", -1, 1, static_cast<int64_t>(free_txns.size())));
  LQ_RETURN_IF_ERROR(Need(AllocationSite::kView, "views", -1, 1, static_cast<int64_t>(free_views.size())));
  SequenceMeta& seq = *Find(request.seq);
  const int txn_slot = free_txns.back();
  free_txns.pop_back();
  Txn& txn = txns[static_cast<size_t>(txn_slot)];
  LQ_CHECK(!txn.open && txn.claims.empty() && txn.copies.empty() && txn.jobs.empty());
  txn.open = true;
  txn.id = request.id != 0 ? request.id : OwnId(txn_slot);
  if (request.id != 0) given->Insert(request.id, txn_slot);
  txn.content = ContentOf(request);
  txn.batch = batches;
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
  txn.next = TakeView(ViewMeta::kPrivate, seq.lineage);
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
  uint64_t batch = 0;
  {
    const std::lock_guard lock(s.mutex);
    batch = ++s.batches;
    for (const AppendRequest& r : requests) {
      LQ_ASSIGN_OR_RETURN(const Receipt again, s.Repeated(r.id, ContentOf(r)));
      if (again.txn != 0)
        return Status(Code::kAccepted, "begin: transaction id " + IdText(r.id) + " was accepted before");
      SequenceMeta* seq = s.Find(r.seq);
      if (seq == nullptr) return s.Closed(r.seq);
      const auto name = [&] { return "begin: sequence " + Text(r.seq); };  // only an error allocates
      if (seq->batch == s.batches) return Status(Code::kInvalidArgument, name() + " stands in the batch twice");
      seq->batch = s.batches;
      if (s.FindTxn(r.id) != nullptr) continue;  // begun, and asked for again
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
    int64_t begun = 0;
    for (size_t i = 0; i < requests.size(); ++i) {
      Status status;
      if (const Txn* open = s.FindTxn(requests[i].id); open == nullptr) {
        status = s.BeginOne(requests[i], &out[i]);
        ++begun;
      } else if (open->batch == batch) {
        status =
            Status(Code::kInvalidArgument, "begin: transaction id " + IdText(open->id) + " stands in the batch twice");
      } else {
        out[i] = open->id;
        ++s.stats.repeats;
      }
      if (status.ok()) continue;
      // Newest first, so that each mark goes back to what it was.
      for (size_t k = i; k-- > 0 && !LQ_PLANT(kBatchNotAtomic);) {
        if (Txn& txn = *s.FindTxn(out[k]); txn.batch == batch) {
          s.Abort(txn);
          --s.stats.aborts;
        }
        out[k] = 0;
      }
      return status;
    }
    s.stats.begins += begun;
  }
  // Outside the lock: nobody else knows these pages yet.
  if (!LQ_PLANT(kFreshNotPoisoned))
    for (const TxnId id : out) {
      const Txn* txn = nullptr;
      {
        const std::lock_guard lock(s.mutex);
        txn = s.FindTxn(id);
      }
      if (txn->batch != batch) continue;  // asked for again: it may hold rows
      for (size_t i = 0; i < txn->claims.size(); ++i) {
        const Claim& claim = txn->claims[i];
        if (txn->notes[i].fresh)
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
  given->Erase(txn.id);
  free_txns.push_back(static_cast<int>(&txn - txns.data()));
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
    const Accepted* before = s.receipts->Find(id);
    if (before == nullptr || LQ_PLANT(kPublishRepeats)) {
      if (!s.receipts->Expired(id)) return s.Failed(id);
      return Status(Code::kIdExpired, "publish: transaction id " + IdText(id) + " is older than the last " +
                                          Text(s.receipts->depth()) + " receipts");
    }
    if (before->receipt.transition != Transition::kAppend || before->receipt.rows != accepted)
      return Status(Code::kIdMismatch, "publish: " + Text(accepted) + " rows under transaction id " + IdText(id) +
                                           ", which was accepted as a " + TransitionName(before->receipt.transition) +
                                           " of " + Text(before->receipt.rows) + " rows");
    ++s.stats.repeats;
    return before->receipt;
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
  const Receipt receipt = s.Accept({.txn = id,
                                    .transition = Transition::kAppend,
                                    .seq = txn->seq,
                                    .generation_before = txn->generation,
                                    .generation = seq.generation,
                                    .length = len,
                                    .first = txn->first,
                                    .rows = accepted},
                                   txn->content);
  s.Finish(*txn);
  return receipt;
}

void Owner::Abort(TxnId id) {
  Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  if (Txn* txn = s.FindTxn(id); txn != nullptr) s.Abort(*txn);
}

}  // namespace livequant
