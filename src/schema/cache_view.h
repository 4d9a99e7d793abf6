// schema/cache_view.h: the plain structs that attention kernels read, the same on host and device (cache_core.md 7).
// Nothing here owns memory or knows a method.
#pragma once

#include <cstddef>
#include <cstdint>

#include "schema/schema.h"

namespace livequant {

// A page and the first position that it serves in this table. Rows of entry i:
//   [start, min(align_down(start, rows) + rows, start of entry i+1, end of the plane)).
// Entries are sorted by start; gaps and two pages for one range (a scar) are ordinary: never index by position / rows.
struct Entry {
  uint32_t page, start;
};
inline constexpr int kBlockEntries = 64;

// The rows of one sequence in one layer class during a step.
struct SeqRow {
  int32_t len;          // rows that exist, the step's own included
  int32_t count;        // rows of the step
  int32_t first_query;  // index of the step's first row among all rows of the batch; its position is len - count
  int32_t f[2];         // K, V: rows that were coded when the step began
  int32_t staged[2];    // K, V: rows whose codes can be read now
  uint32_t root[2][2];  // [K,V][coded,exact]
  int32_t entries[2][2];
};

// One plane of one layer.
struct PlaneView {
  const std::byte* base;
  int64_t page_stride, layer_offset;
  int64_t head_stride;
  int32_t rows;
};

struct CacheView {
  PlaneView plane[2][2];  // [K,V][coded,exact]
  Closure closure[2];
  int32_t read_step, window, pinned;
  const SeqRow* seq;  // one a sequence
  int32_t sequences;
  const uint32_t* roots;  // root r: block ids at roots[r * root_stride ...]
  int32_t root_stride;
  const Entry* blocks;  // block b: entries at blocks[b * kBlockEntries ...]

  const Entry& entry(int sequence, int tensor, int form, int index) const {
    const uint32_t block = roots[int64_t{seq[sequence].root[tensor][form]} * root_stride + index / kBlockEntries];
    return blocks[int64_t{block} * kBlockEntries + index % kBlockEntries];
  }
  const std::byte* head_block(int tensor, int form, uint32_t page, int head) const {
    const PlaneView& p = plane[tensor][form];
    return p.base + page * p.page_stride + p.layer_offset + head * p.head_stride;
  }
  // Rows that the query at position q of `sequence` reads in coded form (cache_core.md 2). Pinned rows are exact
  // always.
  int64_t coded_rows(int sequence, int tensor, int64_t q) const {
    const int64_t read = CodedRowsRead(closure[tensor], read_step, q), before = seq[sequence].f[tensor];
    return read > before ? read : before;
  }
};

}  // namespace livequant
