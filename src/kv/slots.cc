// kv/slots.cc: see kv/slots.h.
#include "kv/slots.h"

#include <algorithm>
#include <cstring>

namespace livequant {
namespace {

// Bytes of the scales (or zeros) that one row or one group along rows owns.
int64_t QparamBytes(const BlockFormat& format) {
  const int64_t count = format.coding.axis == ScaleAxis::kRow ? format.block.groups_per_row : format.head_dim;
  return count * DTypeBytes(format.coding.qparam);
}

bool HasZeros(const BlockFormat& format) { return format.coding.qparams_per_group() == 2; }

void AppendInt(std::vector<std::byte>& out, int32_t value) {
  for (int i = 0; i < 4; ++i) out.push_back(static_cast<std::byte>(static_cast<uint32_t>(value) >> (8 * i)));
}

}  // namespace

void CopySlots(const BlockFormat& format, const std::byte* src, std::byte* dst, int from, int to) {
  const HeadBlock& block = format.block;
  LQ_CHECK(0 <= from && from <= to && to <= block.rows);
  if (from == to) return;
  const auto copy = [&](int64_t offset, int64_t bytes) {
    std::memcpy(dst + offset, src + offset, static_cast<size_t>(bytes));
  };
  copy(from * block.row_bytes, (to - from) * block.row_bytes);
  if (!format.coding.has_qparams()) return;
  int64_t first = from, last = to;  // owners of qparams: rows, or groups of rows
  if (format.coding.axis == ScaleAxis::kChannel) {
    first = from / format.coding.group;
    last = (to + format.coding.group - 1) / format.coding.group;
  }
  const int64_t each = QparamBytes(format);
  copy(block.scales_offset + first * each, (last - first) * each);
  if (HasZeros(format)) copy(block.zeros_offset + first * each, (last - first) * each);
}

void AppendSlots(const BlockFormat& format, const std::byte* block, int slot, int rows, int32_t position,
                 std::vector<std::byte>& out) {
  const HeadBlock& layout = format.block;
  LQ_CHECK(0 <= slot && slot + rows <= layout.rows);
  const bool along_rows = format.coding.axis == ScaleAxis::kChannel;
  const int64_t each = format.coding.has_qparams() ? QparamBytes(format) : 0;
  for (int end = slot + rows; slot < end;) {
    int take = 1;
    int64_t owner = slot;
    if (along_rows) {
      owner = slot / format.coding.group;
      take = std::min<int>(end, static_cast<int>(owner + 1) * format.coding.group) - slot;
      AppendInt(out, position);
      AppendInt(out, take);
    }
    AppendBytes(out, block + slot * layout.row_bytes, take * layout.row_bytes);
    if (each > 0) AppendBytes(out, block + layout.scales_offset + owner * each, each);
    if (each > 0 && HasZeros(format)) AppendBytes(out, block + layout.zeros_offset + owner * each, each);
    slot += take;
    position += take;
  }
}

}  // namespace livequant
