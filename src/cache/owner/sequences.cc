// cache/owner/sequences.cc: the transitions of whole sequences: open, fork, reorder, truncate, release (cache_core.md
// 5). Each checks everything first, then changes everything.
#include "cache/owner/owner.h"

#include <algorithm>
#include <string>

#include "base/check.h"
#include "cache/owner/impl.h"
#include "cache/owner/tables.h"
#include "cache/pages/plants.h"

namespace livequant {

namespace {

// A receipt of `seq` as it is now.
Receipt Of(Transition transition, TxnId id, const SequenceMeta& seq, uint64_t generation_before, int64_t length) {
  return {.txn = id,
          .transition = transition,
          .seq = seq.id,
          .generation_before = generation_before,
          .generation = seq.generation,
          .length = length};
}

}  // namespace

Result<Receipt> Owner::Open(TxnId id) {
  Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  const uint64_t content = Content(Transition::kOpen);
  LQ_ASSIGN_OR_RETURN(const Receipt again, s.Repeated(id, content));
  if (again.txn != 0) return again;
  LQ_RETURN_IF_ERROR(
      s.Need(AllocationSite::kSequence, "sequences", -1, 1, static_cast<int64_t>(s.free_sequences.size())));
  LQ_RETURN_IF_ERROR(s.Need(AllocationSite::kView, "views", -1, 1, static_cast<int64_t>(s.free_views.size())));
  SequenceMeta& seq = s.NewSequence();
  const int view = s.TakeView(ViewMeta::kCurrent, seq.lineage);
  std::fill_n(s.view_rows(view), s.num_classes(), SeqRow{});
  s.Install(seq, view);
  ++s.stats.opens;
  return s.Accept(Of(Transition::kOpen, id != 0 ? id : s.OwnId(0), seq, 0, 0), content);
}

SequenceMeta& Owner::Impl::NewSequence() {
  const int slot = free_sequences.back();
  free_sequences.pop_back();
  SequenceMeta& seq = sequences[static_cast<size_t>(slot)];
  seq.id += static_cast<SeqId>(sequences.size());
  seq.open = true;
  seq.view = -1;
  seq.lineage = TakeLineage();
  return seq;
}

Result<Receipt> Owner::Fork(SeqId parent_id, TxnId id) {
  Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  const uint64_t content = Content(Transition::kFork, parent_id);
  LQ_ASSIGN_OR_RETURN(const Receipt again, s.Repeated(id, content));
  if (again.txn != 0) return again;
  const SequenceMeta* parent = s.Find(parent_id);
  if (parent == nullptr) return s.Closed(parent_id);
  LQ_RETURN_IF_ERROR(
      s.Need(AllocationSite::kSequence, "sequences", -1, 1, static_cast<int64_t>(s.free_sequences.size())));
  LQ_RETURN_IF_ERROR(s.Need(AllocationSite::kView, "views", -1, 1, static_cast<int64_t>(s.free_views.size())));
  SequenceMeta& seq = s.NewSequence();
  const int view = s.TakeView(ViewMeta::kCurrent, seq.lineage);
  s.CloneRows(parent->view, view);
  s.Install(seq, view);
  ++s.stats.forks;
  Receipt receipt = Of(Transition::kFork, id != 0 ? id : s.OwnId(0), seq, 0, s.view_len(view));
  receipt.parent = parent_id;
  return s.Accept(receipt, content);
}

Result<Receipt> Owner::Reorder(std::span<const SeqId> group, std::span<const int> parents, TxnId id) {
  Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  if (group.empty()) return Status(Code::kInvalidArgument, "reorder: the group has no member");
  if (group.size() != parents.size())
    return Status(Code::kInvalidArgument, "reorder: " + Text(static_cast<int64_t>(group.size())) + " members, " +
                                              Text(static_cast<int64_t>(parents.size())) + " parents");
  uint64_t content = Content(Transition::kReorder, group.size());
  for (size_t i = 0; i < group.size(); ++i) content = Content(Transition::kReorder, content, group[i], parents[i]);
  LQ_ASSIGN_OR_RETURN(const Receipt again, s.Repeated(id, content));
  if (again.txn != 0) return again;
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
  LQ_RETURN_IF_ERROR(s.Need(AllocationSite::kView, "views", -1, static_cast<int64_t>(group.size()),
                            static_cast<int64_t>(s.free_views.size())));
  s.new_views.clear();
  for (size_t i = 0; i < group.size(); ++i) {
    const int view = s.TakeView(ViewMeta::kCurrent, s.Find(group[i])->lineage);
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
  const uint64_t before = s.Find(group[0])->generation;
  for (size_t i = 0; i < group.size(); ++i) {
    SequenceMeta& member = *s.Find(group[i]);
    const uint64_t generation = member.generation;
    s.Install(member, s.new_views[i]);
    if (LQ_PLANT(kNoFenceReorder)) member.generation = generation;
  }
  ++s.stats.reorders;
  const SequenceMeta& first = *s.Find(group[0]);
  Receipt receipt = Of(Transition::kReorder, id != 0 ? id : s.OwnId(0), first, before, s.view_len(first.view));
  receipt.rows = static_cast<int32_t>(group.size());
  return s.Accept(receipt, content);
}

Result<Receipt> Owner::Truncate(SeqId id, int64_t len, TxnId txn) {
  Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  const uint64_t content = Content(Transition::kTruncate, id, len);
  LQ_ASSIGN_OR_RETURN(const Receipt again, s.Repeated(txn, content));
  if (again.txn != 0) return again;
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

  const int view = s.TakeView(ViewMeta::kCurrent, seq->lineage);
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
  return s.Accept(Of(Transition::kTruncate, txn != 0 ? txn : s.OwnId(0), *seq, generation, len), content);
}

Result<Receipt> Owner::Release(SeqId id, TxnId txn) {
  Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  const uint64_t content = Content(Transition::kRelease, id);
  LQ_ASSIGN_OR_RETURN(const Receipt again, s.Repeated(txn, content));
  if (again.txn != 0) return again;
  SequenceMeta* seq = s.Find(id);
  if (seq == nullptr) return s.Closed(id);
  const uint64_t before = seq->generation;
  seq->open = false;
  if (!LQ_PLANT(kNoFenceRelease)) seq->generation = ++s.generations;
  // The receipt stands before the last view can go: whoever drops that consumes it.
  const Receipt receipt =
      s.Accept(Of(Transition::kRelease, txn != 0 ? txn : s.OwnId(0), *seq, before, s.view_len(seq->view)), content);
  s.lineages[static_cast<size_t>(seq->lineage)].release = receipt.txn;
  if (LQ_PLANT(kReclaimedEarly)) s.receipts->Find(receipt.txn)->reclaimed = true;
  if (LQ_PLANT(kDoubleRelease)) s.tables->Unref(s.view_rows(seq->view)[0].root[kK][kCoded]);
  s.Retire(seq->view);
  seq->view = seq->lineage = -1;
  s.free_sequences.push_back(SlotOf(id, s.sequences.size()));
  ++s.stats.releases;
  return receipt;
}

}  // namespace livequant
