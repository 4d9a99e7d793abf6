// kernels/page_codec.h: rows <-> the bytes of one head block (schema/layout.h), for every coding.
//
// The reference functions are the definition: scalar, built on quant/. FindDecodeRows gives the vector kernel of a coding;
// it must equal the reference bit for bit (decoded f32 values: one product, or one fused product-sum, of stored qparams).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/span2d.h"
#include "base/status.h"
#include "schema/layout.h"

namespace livequant {

// How one head block of one tensor is read: resolved once when a cache opens.
struct BlockFormat {
  TensorCoding coding;   // an exact form is a native coding of exact_dtype
  HeadBlock block;
  int head_dim = 0;
};
BlockFormat CodedFormat(const LayerSchema& layer, TensorIndex tensor);
BlockFormat ExactFormat(const LayerSchema& layer, TensorIndex tensor);

// Encodes rows.rows rows [r][head_dim] into slots [slot, slot + rows.rows) of `block`. For a kChannel axis the rows must be whole
// groups or short groups that start or end at a group edge; `slot` fixes the group (slot / group): a group is encoded once.
// kNonFinite: a NaN or Inf, or a value whose qparams leave the range of their dtype. kOutOfRange: refused small scale.
// On failure the bytes of those slots are unspecified. Source: methods.md 1.1, 4.2, 8.2, 9.1.
Status EncodeRows(const BlockFormat& format, MatrixView<const float> rows, int slot, std::byte* block);

// Decodes slots [slot, slot + out.rows) to f32. Poison decodes to NaN.
void DecodeRowsReference(const BlockFormat& format, const std::byte* block, int slot, MatrixView<float> out);

using DecodeRowsFn = void (*)(const BlockFormat& format, const std::byte* block, int slot, MatrixView<float> out);
// The vector kernel that reads `coding`, or nullptr: then only the reference can. `name` (may be null) receives its name.
DecodeRowsFn FindDecodeRows(const TensorCoding& coding, const char** name);

}  // namespace livequant
