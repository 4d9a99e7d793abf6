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

}  // namespace livequant
