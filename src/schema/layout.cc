#include "schema/layout.h"

namespace livequant {
namespace {

constexpr int64_t AlignPlane(int64_t bytes) {
  return (bytes + kPlaneAlignment - 1) / kPlaneAlignment * kPlaneAlignment;
}

HeadBlock Lay(const TensorCoding& coding, int head_dim, int rows) {
  HeadBlock block;
  block.rows = rows;
  block.row_bytes = int64_t{head_dim} * coding.bits / 8;
  int64_t qparams = 0;  // of one plane
  if (coding.axis == ScaleAxis::kRow) {
    block.groups_per_row = head_dim / coding.group;
    qparams = int64_t{rows} * block.groups_per_row;
  } else if (coding.axis == ScaleAxis::kChannel) {
    block.groups_per_page = rows / coding.group;
    qparams = int64_t{block.groups_per_page} * head_dim;
  }
  const int64_t plane = AlignPlane(qparams * DTypeBytes(coding.qparam));
  block.scales_offset = AlignPlane(rows * block.row_bytes);
  block.zeros_offset = block.scales_offset + plane;
  block.bytes = block.zeros_offset + (coding.qparams_per_group() == 2 ? plane : 0);
  return block;
}

}  // namespace

HeadBlock CodedHeadBlock(const LayerSchema& layer, TensorIndex tensor) {
  return Lay(tensor == kK ? layer.k : layer.v, layer.head_dim, layer.coded_page_rows);
}

HeadBlock ExactHeadBlock(const LayerSchema& layer, TensorIndex) {
  TensorCoding exact;
  exact.dtype = layer.exact_dtype;
  exact.bits = 8 * DTypeBytes(layer.exact_dtype);
  return Lay(exact, layer.head_dim, layer.exact_page_rows);
}

PlaneLayout LayoutPlane(const CacheSchema& schema, const LayerClass& cls, TensorIndex tensor, FormIndex form) {
  PlaneLayout plane;
  plane.rows = form == kCoded ? cls.coded_page_rows : cls.exact_page_rows;
  for (const int index : cls.layers) {
    const LayerSchema& layer = schema.layers[static_cast<size_t>(index)];
    const HeadBlock block = form == kCoded ? CodedHeadBlock(layer, tensor) : ExactHeadBlock(layer, tensor);
    LQ_CHECK(block.rows == plane.rows);
    plane.layer_offset.push_back(plane.page_bytes);
    plane.head_stride.push_back(block.bytes);
    plane.page_bytes += block.bytes * layer.num_kv_heads;
  }
  return plane;
}

}  // namespace livequant
