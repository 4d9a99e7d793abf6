// schema/layout.h: where each byte of a page is, derived from the schema and written nowhere else.
//
// Canonical packing (packing_version 1). A page holds the rows of one aligned range of positions in one plane
// (class, K or V, coded or exact), for all layers of the class:
//     page       = layer blocks, in rising layer order        at layer_offset[i]
//     layer block = head blocks, in rising head order          at head * head_stride
//     head block = codes, then scales, then minima or offsets  (each plane 64-byte aligned in canonical order)
//   codes   row r of the page at r * row_bytes; code j of a row in bits [j*bits, (j+1)*bits) of its row, little end
//   first.
//           row_bytes = head_dim * bits / 8, whole bytes: no byte holds bits of two rows.
//   kRow    scales[r * groups + g], then zeros[r * groups + g]      groups = head_dim / group
//   kChannel scales[g * head_dim + c], then zeros[g * head_dim + c] g = row / group within the page
//   exact   row r at r * head_dim * DTypeBytes(exact_dtype); no qparams.
// Normative text with a worked example: docs/formats/page.md
#pragma once

#include <cstdint>
#include <vector>

#include "schema/schema.h"

namespace livequant {

// Codes, scales and zeros start at multiples of this, so that a plane of a page never shares a cache line with another.
inline constexpr int64_t kPlaneAlignment = 64;

enum TensorIndex : int { kK = 0, kV = 1 };
enum FormIndex : int { kCoded = 0, kExact = 1 };

// One KV head of one layer within a page. Offsets in bytes from the head block's start.
struct HeadBlock {
  int rows = 0;               // row slots
  int64_t row_bytes = 0;      // codes of one row
  int64_t scales_offset = 0;  // == bytes of codes, aligned
  int64_t zeros_offset = 0;   // == bytes of codes and scales, each aligned; == bytes where none are stored
  int64_t bytes = 0;          // whole block
  int groups_per_row = 0;     // kRow
  int groups_per_page = 0;    // kChannel
};
// REQUIRES for all three: the layer passed Validate(), so that no division here has a remainder.
HeadBlock CodedHeadBlock(const LayerSchema& layer, TensorIndex tensor);
HeadBlock ExactHeadBlock(const LayerSchema& layer, TensorIndex tensor);

// One plane of a class.
struct PlaneLayout {
  int64_t page_bytes = 0;
  int rows = 0;                       // row slots of a page
  std::vector<int64_t> layer_offset;  // by index within the class
  std::vector<int64_t> head_stride;
};
PlaneLayout LayoutPlane(const CacheSchema& schema, const LayerClass& cls, TensorIndex tensor, FormIndex form);

}  // namespace livequant
