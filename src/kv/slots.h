// kv/slots.h: rows inside head blocks as bytes, and the walk from positions to page slots. Internal to kv/.
//
// A row's bytes are its codes, then its scales, then its minima or offsets; qparams along rows (kChannel) belong to a
// group of rows and are written once, when the group closes. Byte order and offsets: schema/layout.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/page_codec.h"
#include "schema/cache_view.h"

namespace livequant {

// Appends the `bytes` bytes at `from` to `out`.
inline void AppendBytes(std::vector<std::byte>& out, const std::byte* from, int64_t bytes) {
  out.insert(out.end(), from, from + bytes);
}

// Consecutive positions that lie in consecutive slots of one page.
struct SlotRun {
  uint32_t page;
  int32_t slot;
  int32_t position;  // of `slot`
  int32_t rows;
};

// Calls fn(run) for each run of positions [from, to) of one sequence in one plane, in rising order; positions that no
// entry serves (dropped by a window) are left out. `to` must not exceed what the plane serves: a coded plane below its
// frontier, an exact one below len. O(log entries + runs). Returns the rows that were found.
template <class Fn>
int32_t ForRuns(const CacheView& view, int sequence, int tensor, int form, int32_t from, int32_t to, Fn&& fn) {
  const int32_t entries = view.seq[sequence].entries[tensor][form], page_rows = view.plane[tensor][form].rows;
  if (from >= to || entries == 0) return 0;
  const auto start_of = [&](int32_t i) { return static_cast<int32_t>(view.entry(sequence, tensor, form, i).start); };
  int32_t low = 0, high = entries;  // the first entry that starts beyond `from`
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (start_of(middle) <= from)
      low = middle + 1;
    else
      high = middle;
  }
  int32_t found = 0;
  for (int32_t i = low > 0 ? low - 1 : 0; i < entries; ++i) {
    const int32_t start = start_of(i);
    if (start >= to) break;
    int32_t end = start / page_rows * page_rows + page_rows;
    if (i + 1 < entries && start_of(i + 1) < end) end = start_of(i + 1);
    const int32_t a = start > from ? start : from, b = end < to ? end : to;
    if (a >= b) continue;
    fn(SlotRun{view.entry(sequence, tensor, form, i).page, a % page_rows, a, b - a});
    found += b - a;
  }
  return found;
}

// Copies slots [from, to) of `src` to the same slots of `dst`, bit for bit: codes, the qparams of the rows, and the
// qparams of each group along rows that has a row in the range. No other byte of `dst` is written.
void CopySlots(const BlockFormat& format, const std::byte* src, std::byte* dst, int from, int to);

// Appends the bytes of slots [slot, slot + rows), whose first position is `position`, to `out` in canonical order: row
// by row codes, scales, zeros; for groups along rows, group by group: first position and row count (i32, of the part
// read here), codes, scales, zeros. So the result tells which rows closed together, and nothing of where they lie.
void AppendSlots(const BlockFormat& format, const std::byte* block, int slot, int rows, int32_t position,
                 std::vector<std::byte>& out);

}  // namespace livequant
