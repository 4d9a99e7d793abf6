// kv/planes.h: the rows of one sequence at rest as a few dense arrays, for files: what a page holds of them, byte for
// byte, without the page.
//
// A page's head block is codes | scales | zeros with alignment between (docs/formats/page.md). Here the live rows of
// all pages of a head follow each other:
//   codes   [heads][frontier - pinned][row_bytes]
//   scales  [heads][owners][each] of the coding's qparam dtype; zeros the same, where the coding has them
//           row axis:     an owner is a row, each = head_dim / group
//           channel axis: an owner is a group of positions [g * group, (g + 1) * group), each = head_dim; the first
//                         group may begin at `pinned`, and has then qparams over the rows from there on
//   exact   [heads][pinned + rows - frontier][head_dim] of exact_dtype: pinned rows, then those above the frontier
// Normative: docs/formats/rows.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/span2d.h"
#include "base/status.h"
#include "kv/kv_cache.h"
#include "schema/layout.h"

namespace livequant {

// Sizes of the arrays of one layer and tensor in a sequence of `rows` that only grew.
struct PlaneShape {
  int64_t heads = 0, rows = 0, pinned = 0, frontier = 0;  // pinned <= frontier <= rows, but for rows < pinned
  int64_t row_bytes = 0;                                  // of codes
  int64_t owners = 0, each = 0;                           // of scales and of zeros; 0 where none are stored
  bool has_zeros = false;
  int64_t coded_rows() const { return frontier - pinned; }
  int64_t exact_rows() const { return pinned + rows - frontier; }
};
// REQUIRES the layer to have passed Validate, rows >= 0.
PlaneShape ShapeOfPlanes(const LayerSchema& layer, TensorIndex tensor, int64_t rows);

struct Planes {
  PlaneShape shape;
  std::vector<std::byte> codes, scales, zeros, exact;
};

// What `lease` sees of one layer and tensor. kUnsupported: a window, whose dropped rows no file could hold, or a group
// that a truncate cut in two.
Result<Planes> ReadPlanes(const KvCache& cache, const Owner::Lease& lease, int layer, TensorIndex tensor);

// Rows [0, shape.rows) of one head as f32, as KvCache::ReadRows gives them, into out [rows][head_dim] (any stride). The
// spans hold all heads. kInvalidArgument names a span that is not as long as the shape says.
struct PlaneBytes {
  std::span<const std::byte> codes, scales, zeros, exact;
};
Status DecodePlanes(const LayerSchema& layer, TensorIndex tensor, const PlaneShape& shape, const PlaneBytes& bytes,
                    int head, MatrixView<float> out);

}  // namespace livequant
