// fuzz/page_codec_fuzz.cc: vector decoders against the reference on any bytes, and on rows encoded from any floats.
//
// Input: preset, K or V, head size and a slot in four bytes; then bytes that fill a block, or rows of f32.
#include <algorithm>
#include <cstring>
#include <vector>

#include "fuzz_main.h"
#include "kernels/page_codec.h"
#include "method/method.h"

using namespace livequant;

namespace {

bool SameValue(float a, float b) {
  if (a != a || b != b) return a != a && b != b;  // a NaN's payload is nobody's promise
  return std::memcmp(&a, &b, sizeof a) == 0;
}

void CheckDecoders(const BlockFormat& format, const std::vector<std::byte>& block, int slot, int64_t rows) {
  const DecodeRowsFn kernel = FindDecodeRows(format.coding, nullptr);
  if (kernel == nullptr) return;
  const auto values = static_cast<size_t>(rows * format.head_dim);
  std::vector<float> want(values), got(values, -7.0f);
  DecodeRowsReference(format, block.data(), slot, {want.data(), rows, format.head_dim});
  kernel(format, block.data(), slot, {got.data(), rows, format.head_dim});
  for (size_t i = 0; i < values; ++i) LQ_CHECK(SameValue(want[i], got[i]));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 5) return 0;
  constexpr int kHeadDims[] = {32, 64, 80, 96, 128};
  const auto& presets = PresetNames();
  const auto layer = PresetLayer(presets[data[0] % presets.size()], 1, kHeadDims[data[1] / 4 % 5]);
  if (!layer.ok()) return 0;
  const auto tensor = static_cast<TensorIndex>(data[1] & 1);
  const BlockFormat format = (data[1] & 2) != 0 ? ExactFormat(*layer, tensor) : CodedFormat(*layer, tensor);
  if (format.block.rows == 0) return 0;  // this schema has no rows of that form
  const uint8_t* rest = data + 4;
  const size_t rest_size = size - 4;

  // Any bytes, repeated to fill the block.
  std::vector<std::byte> block(static_cast<size_t>(format.block.bytes));
  for (size_t i = 0; i < block.size(); ++i) block[i] = static_cast<std::byte>(rest[i % rest_size]);
  const int slot = data[2] % format.block.rows;
  const int64_t rows = 1 + data[3] % (format.block.rows - slot);
  CheckDecoders(format, block, slot, rows);

  // Rows of any floats, from the edge of a group.
  const int group = format.coding.axis == ScaleAxis::kChannel ? format.coding.group : 1;
  const int first = slot / group * group;
  const int64_t count = std::min<int64_t>(format.block.rows - first, group == 1 ? 4 : group);
  std::vector<float> x(static_cast<size_t>(count * format.head_dim));
  for (size_t i = 0; i < x.size(); ++i) {
    uint8_t bytes[4];
    for (size_t b = 0; b < 4; ++b) bytes[b] = rest[(4 * i + b) % rest_size];
    std::memcpy(&x[i], bytes, 4);
  }
  if (EncodeRows(format, {x.data(), count, format.head_dim}, first, block.data()).ok())
    CheckDecoders(format, block, first, count);
  return 0;
}
