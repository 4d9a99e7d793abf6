// kv/planes.cc: see kv/planes.h.
#include "kv/planes.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "kernels/page_codec.h"
#include "kv/slots.h"

namespace livequant {
namespace {

int ClassOf(const CacheSchema& schema, int layer) {
  const std::vector<LayerClass> classes = LayerClasses(schema);
  for (size_t c = 0; c < classes.size(); ++c)
    if (std::find(classes[c].layers.begin(), classes[c].layers.end(), layer) != classes[c].layers.end())
      return static_cast<int>(c);
  LQ_CHECK(!"a layer without a class");
  return 0;
}

}  // namespace

PlaneShape ShapeOfPlanes(const LayerSchema& layer, TensorIndex tensor, int64_t rows) {
  const BlockFormat format = CodedFormat(layer, tensor);
  const Closure& closure = tensor == kK ? layer.k_closure : layer.v_closure;
  PlaneShape s;
  s.heads = layer.num_kv_heads;
  s.rows = rows;
  s.pinned = std::min<int64_t>(layer.pinned_rows, rows);
  s.frontier = std::max(s.pinned, closure.frontier(rows));
  s.row_bytes = format.block.row_bytes;
  if (!format.coding.has_qparams()) return s;
  s.has_zeros = format.coding.qparams_per_group() == 2;
  if (format.coding.axis == ScaleAxis::kRow) {
    s.owners = s.coded_rows();
    s.each = format.block.groups_per_row;
  } else {
    const int64_t group = format.coding.group;
    s.owners = s.coded_rows() == 0 ? 0 : (s.frontier + group - 1) / group - s.pinned / group;
    s.each = layer.head_dim;
  }
  return s;
}

Result<Planes> ReadPlanes(const KvCache& cache, const Owner::Lease& lease, int layer, TensorIndex tensor) {
  const LayerSchema& l = cache.schema().layers.at(static_cast<size_t>(layer));
  if (l.window > 0)
    return Status(
        Code::kUnsupported,
        fmt::format("layer {} has a window of {} rows; rows that it dropped are in no page", layer, l.window));
  const SeqRow row = lease.rows()[static_cast<size_t>(ClassOf(cache.schema(), layer))];
  CacheView view = cache.owner().ViewOfLayer(layer);
  view.seq = &row;
  view.sequences = 1;
  Planes p;
  p.shape = ShapeOfPlanes(l, tensor, row.len);
  const BlockFormat coded = CodedFormat(l, tensor), exact = ExactFormat(l, tensor);
  if (std::max<int64_t>(p.shape.pinned, row.f[tensor]) != p.shape.frontier)
    return Status(Code::kUnsupported, fmt::format("layer {}: {} rows are coded; a sequence of {} that only grew has {}",
                                                  layer, row.f[tensor], row.len, p.shape.frontier));
  const auto group = static_cast<int32_t>(coded.coding.axis == ScaleAxis::kChannel ? coded.coding.group : 1);
  const int64_t each = p.shape.each * DTypeBytes(coded.coding.qparam);
  bool cut = false;
  for (int head = 0; head < l.num_kv_heads; ++head) {
    const auto exact_rows = [&](int64_t from, int64_t to) {
      const int32_t found = ForRuns(
          view, 0, tensor, kExact, static_cast<int32_t>(from), static_cast<int32_t>(to), [&](const SlotRun& run) {
            AppendBytes(p.exact, view.head_block(tensor, kExact, run.page, head) + run.slot * exact.block.row_bytes,
                        run.rows * exact.block.row_bytes);
          });
      LQ_CHECK(found == to - from);
    };
    exact_rows(0, p.shape.pinned);
    const int32_t found =
        ForRuns(view, 0, tensor, kCoded, static_cast<int32_t>(p.shape.pinned), static_cast<int32_t>(p.shape.frontier),
                [&](const SlotRun& run) {
                  const std::byte* block = view.head_block(tensor, kCoded, run.page, head);
                  AppendBytes(p.codes, block + run.slot * coded.block.row_bytes, run.rows * coded.block.row_bytes);
                  cut |= run.position % group != 0 && run.position != p.shape.pinned;
                  if (p.shape.owners == 0) return;
                  const int64_t first = run.slot / group, count = (run.slot + run.rows + group - 1) / group - first;
                  AppendBytes(p.scales, block + coded.block.scales_offset + first * each, count * each);
                  if (p.shape.has_zeros)
                    AppendBytes(p.zeros, block + coded.block.zeros_offset + first * each, count * each);
                });
    LQ_CHECK(found == p.shape.coded_rows());
    exact_rows(p.shape.frontier, p.shape.rows);
  }
  if (cut)
    return Status(
        Code::kUnsupported,
        fmt::format("layer {}: a group of {} rows was cut and closed anew; it has two sets of qparams", layer, group));
  return p;
}

Status DecodePlanes(const LayerSchema& layer, TensorIndex tensor, const PlaneShape& shape, const PlaneBytes& bytes,
                    int head, MatrixView<float> out) {
  const BlockFormat coded = CodedFormat(layer, tensor), exact = ExactFormat(layer, tensor);
  const int64_t each = shape.each * DTypeBytes(coded.coding.qparam);
  const struct {
    const char* name;
    std::span<const std::byte> bytes;
    int64_t want;
  } parts[] = {{"codes", bytes.codes, shape.heads * shape.coded_rows() * shape.row_bytes},
               {"scales", bytes.scales, shape.heads * shape.owners * each},
               {"zeros", bytes.zeros, shape.has_zeros ? shape.heads * shape.owners * each : 0},
               {"exact rows", bytes.exact, shape.heads * shape.exact_rows() * exact.block.row_bytes}};
  for (const auto& part : parts)
    if (static_cast<int64_t>(part.bytes.size()) != part.want)
      return Status(Code::kInvalidArgument,
                    fmt::format("{}: {} bytes; the schema needs {}", part.name, part.bytes.size(), part.want));
  LQ_CHECK(head >= 0 && head < shape.heads && out.rows == shape.rows && out.cols == layer.head_dim);

  // One page's block at a time, refilled as a page would be.
  std::vector<std::byte> block;
  const auto rows_of = [&](int64_t first, int64_t count) {
    return MatrixView<float>(out.row(first), count, out.cols, out.stride);
  };
  const auto exact_rows = [&](int64_t from, int64_t to, int64_t index) {
    for (int64_t r = from; r < to;) {
      const int64_t take = std::min<int64_t>(exact.block.rows, to - r);
      block.assign(static_cast<size_t>(exact.block.bytes), std::byte{0xFF});
      std::memcpy(block.data(), bytes.exact.data() + (head * shape.exact_rows() + index) * exact.block.row_bytes,
                  static_cast<size_t>(take * exact.block.row_bytes));
      DecodeRowsReference(exact, block.data(), 0, rows_of(r, take));
      r += take;
      index += take;
    }
  };
  exact_rows(0, shape.pinned, 0);
  const int64_t page = coded.block.rows, group = coded.coding.axis == ScaleAxis::kChannel ? coded.coding.group : 1;
  for (int64_t r = shape.pinned; r < shape.frontier;) {
    const int64_t end = std::min(shape.frontier, r / page * page + page), slot = r % page;
    block.assign(static_cast<size_t>(coded.block.bytes), std::byte{0xFF});
    std::memcpy(block.data() + slot * coded.block.row_bytes,
                bytes.codes.data() + (head * shape.coded_rows() + r - shape.pinned) * coded.block.row_bytes,
                static_cast<size_t>((end - r) * coded.block.row_bytes));
    if (shape.owners > 0) {
      const int64_t first = r / group - shape.pinned / group, count = (end + group - 1) / group - r / group;
      const auto put = [&](std::span<const std::byte> from, int64_t offset) {
        std::memcpy(block.data() + offset + slot / group * each, from.data() + (head * shape.owners + first) * each,
                    static_cast<size_t>(count * each));
      };
      put(bytes.scales, coded.block.scales_offset);
      if (shape.has_zeros) put(bytes.zeros, coded.block.zeros_offset);
    }
    DecodeRowsReference(coded, block.data(), static_cast<int>(slot), rows_of(r, end - r));
    r = end;
  }
  exact_rows(shape.frontier, shape.rows, shape.pinned);
  return {};
}

}  // namespace livequant
