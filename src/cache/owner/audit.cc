// cache/owner/audit.cc: what the owner's state amounts to, found by walking it from the views alone: the census of
// bytes and the invariants of cache_core.md 8. Slow, allocates, shares no bookkeeping with the transitions.
#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "cache/owner/impl.h"
#include "cache/owner/owner.h"
#include "cache/pages/plants.h"

namespace livequant {
namespace {

// Bytes of one page of a plane by what they hold.
struct PageCost {
  int64_t row = 0;  // codes, or exact values, of one row
  int64_t row_qparams = 0;
  struct Groups {
    int rows;
    int64_t bytes;  // qparams of one group
  };
  std::vector<Groups> groups;  // one a layer whose scales run along rows
  int64_t padding = 0;         // alignment inside the page
};

PageCost CostOf(const CacheSchema& schema, const LayerClass& cls, int tensor, int form) {
  PageCost cost;
  const int rows = form == kCoded ? cls.coded_page_rows : cls.exact_page_rows;
  int64_t page = 0, used = 0;
  for (const int index : cls.layers) {
    const LayerSchema& layer = schema.layers[static_cast<size_t>(index)];
    const auto t = static_cast<TensorIndex>(tensor);
    const HeadBlock block = form == kCoded ? CodedHeadBlock(layer, t) : ExactHeadBlock(layer, t);
    const TensorCoding& coding = tensor == kK ? layer.k : layer.v;
    const int64_t heads = layer.num_kv_heads;
    page += block.bytes * heads;
    cost.row += block.row_bytes * heads;
    used += block.row_bytes * heads * rows;
    if (form == kExact) continue;
    const int64_t group_bytes = coding.qparams_per_group() * DTypeBytes(coding.qparam);
    if (coding.axis == ScaleAxis::kRow) {
      cost.row_qparams += block.groups_per_row * group_bytes * heads;
      used += block.groups_per_row * group_bytes * heads * rows;
    } else if (coding.axis == ScaleAxis::kChannel) {
      cost.groups.push_back({coding.group, group_bytes * layer.head_dim * heads});
      used += group_bytes * layer.head_dim * heads * block.groups_per_page;
    }
  }
  cost.padding = page - used;
  return cost;
}

// How a slot of a page is reached.
enum Reach : uint8_t { kNobody = 0, kSomeView = 1, kOneSequence = 2, kManySequences = 3 };

}  // namespace

LedgerBytes Owner::Census() const {
  const Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  LedgerBytes bytes;
  bytes.tables = s.tables->used_blocks() * int64_t{kBlockEntries * sizeof(Entry)} +
                 s.tables->used_roots() * int64_t{s.tables->root_stride()} * int64_t{sizeof(uint32_t)};
  std::vector<const Txn*> txn_of_view(s.views.size(), nullptr);
  for (const Txn& txn : s.txns)
    if (txn.open) txn_of_view[static_cast<size_t>(txn.next)] = &txn;

  for (int plane = 0; plane < s.planes; ++plane) {
    const int c = plane / 4, t = plane / 2 % 2, form = plane % 2;
    const PagePool& pool = *s.pools[static_cast<size_t>(plane)];
    const int rows = pool.rows();
    const int32_t pinned = s.info[static_cast<size_t>(c)].pinned;
    const PageCost cost = CostOf(s.schema, s.classes[static_cast<size_t>(c)], t, form);
    std::vector<uint8_t> reached(static_cast<size_t>(pool.capacity()), 0);
    std::vector<uint8_t> slots(static_cast<size_t>(pool.capacity() * rows), kNobody);
    std::vector<uint8_t> is_pinned(static_cast<size_t>(pool.capacity() * rows), 0);
    int64_t extra = 0;  // only the plant makes this differ from 0

    for (size_t v = 0; v < s.views.size(); ++v) {
      const ViewMeta& meta = s.views[v];
      if (meta.state == ViewMeta::kFree) continue;
      const SeqRow& row = s.view_rows(static_cast<int>(v))[c];
      const RootId root = row.root[t][form];
      const int entries = row.entries[t][form];
      ExactRows live{};
      if (form == kExact)
        live = s.ExactRowsOf(row, c, t, txn_of_view[v]);
      else
        live.part[0] = s.CodedRows(row, c, t);
      // What left the window is read by nobody, though its page may stay in part.
      const int32_t window = s.info[static_cast<size_t>(c)].window;
      if (form == kCoded && window > 0) live.part[0].from = std::max(live.part[0].from, row.len - row.count - window);
      for (int i = 0; i < entries; ++i) {
        const Entry& e = s.tables->entry(root, i);
        const auto start = static_cast<int32_t>(e.start);
        const int32_t end = s.EntryEnd(plane, root, entries, i), base = start / rows * rows;
        if (LQ_PLANT(kCensusCountsTwice) && reached[e.page] != 0) extra += pool.page_bytes();
        reached[e.page] = 1;
        for (const RowRange& part : live.part)
          for (int32_t p = std::max(start, part.from); p < std::min(end, part.to); ++p) {
            const size_t at = e.page * static_cast<size_t>(rows) + static_cast<size_t>(p - base);
            if (form == kExact && p < pinned) is_pinned[at] = 1;
            uint8_t& slot = slots[at];
            if (meta.state == ViewMeta::kCurrent)
              slot = slot >= kOneSequence ? kManySequences : kOneSequence;
            else
              slot = std::max<uint8_t>(slot, kSomeView);
          }
      }
    }

    for (int64_t page = 0; page < pool.capacity(); ++page) {
      if (reached[static_cast<size_t>(page)] == 0) continue;
      int64_t held = cost.padding;
      bytes.pages += cost.padding;
      const size_t first = static_cast<size_t>(page * rows);
      for (size_t r = first; r < first + static_cast<size_t>(rows); ++r) {
        if (slots[r] == kNobody) continue;
        (form == kCoded ? bytes.codes : is_pinned[r] != 0 ? bytes.exact_prefix : bytes.residual) += cost.row;
        bytes.qparams += cost.row_qparams;
        held += cost.row + cost.row_qparams;
        if (slots[r] == kManySequences) bytes.shared += cost.row + cost.row_qparams;
      }
      for (const PageCost::Groups& g : cost.groups)
        for (size_t r = first; r < first + static_cast<size_t>(rows); r += static_cast<size_t>(g.rows)) {
          const uint8_t most = *std::max_element(slots.begin() + static_cast<std::ptrdiff_t>(r),
                                                 slots.begin() + static_cast<std::ptrdiff_t>(r) + g.rows);
          if (most == kNobody) continue;
          bytes.qparams += g.bytes;
          held += g.bytes;
          if (most == kManySequences) bytes.shared += g.bytes;
        }
      bytes.slack += pool.page_bytes() - held;
    }
    bytes.slack += extra;
  }
  return bytes;
}

namespace {

Status Broken(int number, std::string what) {
  return Status(Code::kDataLoss, "invariant " + Text(number) + ": " + std::move(what));
}

}  // namespace

Status Owner::CheckInvariants() const {
  const Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  const size_t n_views = s.views.size();
  std::vector<const Txn*> txn_of_view(n_views, nullptr);
  std::vector<int> leases_of_txns(n_views, 0), current(n_views, 0);
  int64_t reserved_roots = 0, reserved_blocks = 0, open_txns = 0, open_sequences = 0;
  for (const Txn& txn : s.txns) {
    if (!txn.open) continue;
    ++open_txns;
    if (txn_of_view[static_cast<size_t>(txn.next)] != nullptr)
      return Broken(4, "two transactions share a private view");
    if (s.views[static_cast<size_t>(txn.next)].state != ViewMeta::kPrivate)
      return Broken(4, "a private view is not private");
    txn_of_view[static_cast<size_t>(txn.next)] = &txn;
    ++leases_of_txns[static_cast<size_t>(txn.base)];
    reserved_roots += txn.reserved_roots;
    reserved_blocks += txn.reserved_blocks;
  }
  if (reserved_roots != s.tables->reserved_roots() || reserved_blocks != s.tables->reserved_blocks())
    return Broken(4, "reserved nodes: " + Text(s.tables->reserved_roots()) + " roots and " +
                         Text(s.tables->reserved_blocks()) + " blocks, transactions hold " + Text(reserved_roots) +
                         " and " + Text(reserved_blocks));
  for (const SequenceMeta& seq : s.sequences) {
    if (!seq.open) continue;
    ++open_sequences;
    const ViewMeta& view = s.views[static_cast<size_t>(seq.view)];
    if (view.state != ViewMeta::kCurrent || view.generation != seq.generation)
      return Broken(7, "sequence " + Text(seq.id) + " names a view that is not its current one");
    if (++current[static_cast<size_t>(seq.view)] > 1) return Broken(7, "two sequences share a view");
  }
  if (open_sequences + static_cast<int64_t>(s.free_sequences.size()) != static_cast<int64_t>(s.sequences.size()))
    return Broken(4, "sequence slots: " + Text(open_sequences) + " open and " +
                         Text(static_cast<int64_t>(s.free_sequences.size())) + " free of " +
                         Text(static_cast<int64_t>(s.sequences.size())));
  // 7: a lineage lives as long as its views; a release receipt is consumed when they are gone.
  std::vector<int32_t> views_of(s.lineages.size(), 0);
  for (const ViewMeta& view : s.views)
    if (view.state != ViewMeta::kFree) ++views_of[static_cast<size_t>(view.lineage)];
  int64_t live_lineages = 0;
  for (size_t i = 0; i < s.lineages.size(); ++i) {
    if (views_of[i] == 0) continue;
    ++live_lineages;
    if (s.lineages[i].views != views_of[i])
      return Broken(7, "a lineage counts " + Text(s.lineages[i].views) + " views, " + Text(views_of[i]) + " are live");
    const Accepted* release = s.receipts->Find(s.lineages[i].release);
    if (release != nullptr && release->reclaimed)
      return Broken(7, "the release of sequence " + Text(release->receipt.seq) + " was reclaimed, " +
                           Text(views_of[i]) + " of its views are live");
  }
  if (live_lineages + static_cast<int64_t>(s.free_lineages.size()) != static_cast<int64_t>(s.lineages.size()))
    return Broken(4, "lineages: " + Text(live_lineages) + " live and " +
                         Text(static_cast<int64_t>(s.free_lineages.size())) + " free");
  if (open_txns + static_cast<int64_t>(s.free_txns.size()) != static_cast<int64_t>(s.txns.size()))
    return Broken(4, "transaction slots: " + Text(open_txns) + " open and " +
                         Text(static_cast<int64_t>(s.free_txns.size())) + " free");

  std::vector<uint32_t> root_refs(static_cast<size_t>(s.tables->root_capacity()), 0);
  std::vector<uint32_t> block_refs(static_cast<size_t>(s.tables->block_capacity()), 0);
  std::vector<std::vector<uint32_t>> page_refs;
  for (const auto& pool : s.pools) page_refs.emplace_back(static_cast<size_t>(pool->capacity()), 0);
  int64_t live_views = 0;
  for (size_t v = 0; v < n_views; ++v) {
    const ViewMeta& meta = s.views[v];
    if (meta.state == ViewMeta::kFree) continue;
    ++live_views;
    const std::string name = "view " + Text(static_cast<int64_t>(v));
    if (meta.state == ViewMeta::kRetired && meta.leases == 0) return Broken(7, name + " is retired without a lease");
    if (meta.leases < leases_of_txns[v]) return Broken(7, name + " has fewer leases than transactions based on it");
    if (meta.state == ViewMeta::kCurrent && current[v] == 0) return Broken(4, name + " is current in no sequence");
    if (meta.state == ViewMeta::kPrivate && txn_of_view[v] == nullptr)
      return Broken(4, name + " is private to no transaction");
    const SeqRow* const r = s.view_rows(static_cast<int>(v));
    for (int c = 0; c < s.num_classes(); ++c) {
      const SeqRow& row = r[c];
      const ClassInfo& info = s.info[static_cast<size_t>(c)];
      const int32_t before = row.len - row.count;
      if (row.len != r[0].len || row.count != r[0].count) return Broken(1, name + " has classes of different lengths");
      if ((row.count != 0) != (meta.state == ViewMeta::kPrivate)) return Broken(1, name + " holds rows of no step");
      for (int t = 0; t < 2; ++t) {
        if (row.f[t] < 0 || row.f[t] > before || row.staged[t] < row.f[t] || row.staged[t] > row.len)
          return Broken(1, name + " class " + Text(c) + ": f " + Text(row.f[t]) + ", staged " + Text(row.staged[t]) +
                               ", rows " + Text(before) + " + " + Text(row.count));
        if (meta.state != ViewMeta::kPrivate && row.f[t] < info.closure[t].frontier(row.len))
          return Broken(1, name + " class " + Text(c) + ": f " + Text(row.f[t]) + " behind the closure's frontier " +
                               Text(info.closure[t].frontier(row.len)) + " of " + Text(row.len) + " rows");
        for (int form = 0; form < 2; ++form) {
          const int plane = Impl::PlaneIndex(c, t, form);
          const std::string where = name + " " + s.PlaneName(plane);
          const RootId root = row.root[t][form];
          const int entries = row.entries[t][form];
          const PagePool& pool = *s.pools[static_cast<size_t>(plane)];
          const int32_t rows = pool.rows();
          if (s.tables->entries(root) != entries || (root == kEmptyTable) != (entries == 0))
            return Broken(4, where + ": " + Text(entries) + " entries, its root has " + Text(s.tables->entries(root)));
          if (root != kEmptyTable && s.tables->root_plane(root) != plane)
            return Broken(4, where + " names a root of another plane");
          ++root_refs[root];

          // 2 and 3: each live row lies in exactly one entry and below that page's mark.
          ExactRows live{};
          if (form == kExact) {
            live = s.ExactRowsOf(row, c, t, txn_of_view[v]);
          } else {
            live.part[0] = s.CodedRows(row, c, t);
            if (info.window > 0) live.part[0].from = std::max(live.part[0].from, before - info.window);
          }
          int64_t due = 0, found = 0;
          for (const RowRange& part : live.part) due += part.empty() ? 0 : part.to - part.from;
          int32_t last_end = 0;
          for (int i = 0; i < entries; ++i) {
            const Entry& e = s.tables->entry(root, i);
            if (int64_t{e.page} >= pool.capacity() || pool.meta(e.page).refs == 0)
              return Broken(4, where + " names page " + Text(e.page) + ", which is free");
            const auto start = static_cast<int32_t>(e.start);
            const int32_t end = s.EntryEnd(plane, root, entries, i), base = start / rows * rows;
            if (start < last_end || end <= start)
              return Broken(3, where + ": entry " + Text(i) + " serves [" + Text(start) + ", " + Text(end) +
                                   ") after " + Text(last_end));
            last_end = end;
            int64_t here = 0;
            for (const RowRange& part : live.part) {
              const int32_t from = std::max(start, part.from), to = std::min(end, part.to);
              if (from >= to) continue;
              here += to - from;
              if (to - base > pool.meta(e.page).mark)
                return Broken(2, where + ": row " + Text(to - 1) + " lies in slot " + Text(to - 1 - base) +
                                     " of page " + Text(e.page) + ", mark " + Text(pool.meta(e.page).mark));
            }
            found += here;
            if (here == 0 && meta.state != ViewMeta::kPrivate && !(form == kCoded && info.window > 0))
              return Broken(3, where + ": entry " + Text(i) + " at " + Text(start) + " holds no live row");
          }
          if (found != due)
            return Broken(3, where + ": " + Text(found) + " of " + Text(due) + " live rows have a page");
        }
      }
    }
  }
  if (live_views + static_cast<int64_t>(s.free_views.size()) != static_cast<int64_t>(n_views))
    return Broken(4, "views: " + Text(live_views) + " live and " + Text(static_cast<int64_t>(s.free_views.size())) +
                         " free of " + Text(static_cast<int64_t>(n_views)));

  // 4: references are the edges that start at views.
  int64_t used_roots = 0, used_blocks = 0;
  for (size_t root = 1; root < root_refs.size(); ++root) {
    const auto id = static_cast<RootId>(root);
    if (root_refs[root] > 0) {
      ++used_roots;
      if (s.tables->root_refs(id) != root_refs[root])
        return Broken(4, "root " + Text(id) + ": " + Text(s.tables->root_refs(id)) + " references, " +
                             Text(root_refs[root]) + " views");
      for (int b = 0; b * kBlockEntries < s.tables->entries(id); ++b)
        if (const uint32_t block = s.tables->root_data()[int64_t{id} * s.tables->root_stride() + b];
            ++block_refs[block] == 1) {
          ++used_blocks;
          const auto plane = static_cast<size_t>(s.tables->root_plane(id));
          for (int i = 0; i < s.tables->block_count(block); ++i)
            ++page_refs[plane][s.tables->block_data()[int64_t{block} * kBlockEntries + i].page];
        }
    }
  }
  if (used_roots != s.tables->used_roots() || used_blocks > s.tables->used_blocks() ||
      used_blocks < s.tables->used_blocks())
    return Broken(4, "tables: " + Text(s.tables->used_roots()) + " roots and " + Text(s.tables->used_blocks()) +
                         " blocks used, " + Text(used_roots) + " and " + Text(used_blocks) + " reachable");
  for (size_t block = 0; block < block_refs.size(); ++block)
    if (block_refs[block] > 0 && s.tables->block_refs(static_cast<uint32_t>(block)) != block_refs[block])
      return Broken(4, "block " + Text(static_cast<int64_t>(block)) + " has " +
                           Text(s.tables->block_refs(static_cast<uint32_t>(block))) + " references, " +
                           Text(block_refs[block]) + " roots name it");
  int64_t used_bytes = 0, reached_bytes = 0;
  for (int plane = 0; plane < s.planes; ++plane) {
    const PagePool& pool = *s.pools[static_cast<size_t>(plane)];
    used_bytes += pool.used_bytes();
    for (int64_t page = 0; page < pool.capacity(); ++page) {
      const uint32_t refs = page_refs[static_cast<size_t>(plane)][static_cast<size_t>(page)];
      const PageMeta& meta = pool.meta(static_cast<uint32_t>(page));
      if (meta.refs != refs)
        return Broken(4, s.PlaneName(plane) + " page " + Text(page) + ": " + Text(meta.refs) + " references, " +
                             Text(refs) + " blocks name it");
      if (refs > 0) reached_bytes += pool.page_bytes();
    }
  }
  if (used_bytes != reached_bytes)
    return Broken(10, "pools hold " + Text(used_bytes) + " bytes, " + Text(reached_bytes) + " are reachable");

  // Slots belong to one transaction at most, and lie below the mark while they do.
  for (const Txn& txn : s.txns) {
    if (!txn.open) continue;
    for (const Claim& a : txn.claims) {
      const PagePool& pool = *s.pools[static_cast<size_t>(Impl::PlaneIndex(a.cls, a.tensor, a.form))];
      if (a.from >= a.to || a.to > pool.meta(a.page).mark)
        return Broken(2, "a claim of slots [" + Text(a.from) + ", " + Text(a.to) + ") reaches past mark " +
                             Text(pool.meta(a.page).mark));
      for (const Txn& other : s.txns) {
        if (!other.open) continue;
        for (const Claim& b : other.claims)
          if (&a != &b && a.cls == b.cls && a.tensor == b.tensor && a.form == b.form && a.page == b.page &&
              a.from < b.to && b.from < a.to)
            return Broken(2, "two claims of page " + Text(a.page) + " overlap");
      }
    }
  }
  return {};
}

}  // namespace livequant
