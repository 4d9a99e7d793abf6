// model/safetensors_source.cc: see safetensors_source.h.
#include "model/safetensors_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>

namespace livequant {

Result<std::unique_ptr<SafetensorsSource>> SafetensorsSource::Make(const std::map<std::string, TensorInfo>& tensors,
                                                                   const std::optional<Fp8Scheme>& scheme) {
  std::unique_ptr<SafetensorsSource> source(new SafetensorsSource(tensors));
  std::vector<std::string> scales;
  LQ_ASSIGN_OR_RETURN(source->fp8_, PairFp8Scales(tensors, scheme, &scales));
  for (const auto& [name, t] : tensors) {
    if (std::binary_search(scales.begin(), scales.end(), name)) continue;
    SourceTensor entry{.shape = t.shape, .stored = t.dtype, .stored_bytes = static_cast<int64_t>(t.bytes.size())};
    if (t.dtype == "F32") {
      entry.dtype = DType::kF32;
    } else if (t.dtype == "F16") {
      entry.dtype = DType::kF16;
    } else if (t.dtype == "BF16") {
      entry.dtype = DType::kBF16;
    } else if (const auto fp8 = source->fp8_.find(name); fp8 != source->fp8_.end()) {
      entry.dtype = DType::kBF16;
      entry.stored += ", " + scheme->Text();
      entry.stored_bytes += static_cast<int64_t>(fp8->second.scales->bytes.size());
    } else {
      source->refused_.emplace(
          name, Status(Code::kUnsupported,
                       fmt::format("tensor {} is {}; F32, F16, BF16 and F8_E4M3 with scales are read", name, t.dtype)));
      continue;
    }
    source->tensors_.emplace(name, std::move(entry));
  }
  return source;
}

void SafetensorsSource::Read(const std::string& name, int64_t first, int64_t count, std::byte* out) const {
  const SourceTensor& t = tensors_.at(name);
  LQ_CHECK(first >= 0 && count >= 0 && first + count <= t.rows());
  if (const auto fp8 = fp8_.find(name); fp8 != fp8_.end()) {
    fp8->second.Decode(first, count, out);
    return;
  }
  const int64_t row_bytes = t.cols() * DTypeBytes(t.dtype);
  if (count * row_bytes > 0)
    std::memcpy(out, infos_.at(name).bytes.data() + first * row_bytes, static_cast<size_t>(count * row_bytes));
}

SafetensorsSource::Fp8Report SafetensorsSource::ReportFp8() const {
  Fp8Report report;
  for (const auto& [name, m] : fp8_) {
    const int64_t rows = m.codes->shape[0], cols = m.codes->shape[1];
    std::vector<std::byte> row(static_cast<size_t>(cols) * 2);
    ++report.tensors;
    report.values += rows * cols;
    for (int64_t r = 0; r < rows; ++r) report.rounded += m.Decode(r, 1, row.data());
  }
  return report;
}

}  // namespace livequant
