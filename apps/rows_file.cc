// apps/rows_file.cc: see rows_file.h.
#include "apps/rows_file.h"

#include <fmt/format.h>

#include <algorithm>

#include "io/file.h"

namespace livequant::app {
namespace {

const char* SafetensorsName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "F32";
    case DType::kF16:
      return "F16";
    case DType::kBF16:
      return "BF16";
    case DType::kFp8E4M3:
      return "F8_E4M3";
    case DType::kFp8E5M2:
      return "F8_E5M2";
  }
  return "?";
}

}  // namespace

std::string RowName(TensorIndex tensor, int layer) { return fmt::format("{}.{}", kTensorNames[tensor], layer); }

bool Part::present() const {
  return std::all_of(shape.begin(), shape.end(), [](int64_t n) { return n > 0; });
}

std::vector<Part> PartsOf(const LayerSchema& layer, TensorIndex tensor, const PlaneShape& s) {
  const TensorCoding& coding = tensor == kK ? layer.k : layer.v;
  const char* qparam = SafetensorsName(coding.qparam);
  return {{"codes", "U8", {s.heads, s.coded_rows(), s.row_bytes}},
          {"scales", qparam, {s.heads, s.owners, s.each}},
          {"zeros", qparam, {s.heads, s.has_zeros ? s.owners : 0, s.each}},
          {"exact", SafetensorsName(layer.exact_dtype), {s.heads, s.exact_rows(), layer.head_dim}}};
}

std::string PartName(TensorIndex tensor, int layer, const char* part) {
  return fmt::format("{}.{}.{}", kTensorNames[tensor], layer, part);
}

Status AddCodedRows(const KvCache& cache, const Owner::Lease& lease, int layer, TensorIndex tensor, CodedRows* out) {
  LQ_ASSIGN_OR_RETURN(Planes p, ReadPlanes(cache, lease, layer, tensor));
  out->planes.push_back(std::make_unique<Planes>(std::move(p)));
  const Planes& stored = *out->planes.back();
  const std::vector<std::byte>* data[4] = {&stored.codes, &stored.scales, &stored.zeros, &stored.exact};
  const std::vector<Part> parts = PartsOf(cache.schema().layers[static_cast<size_t>(layer)], tensor, stored.shape);
  for (size_t i = 0; i < parts.size(); ++i) {
    out->bytes[i] += static_cast<int64_t>(data[i]->size());
    if (parts[i].present())
      out->tensors[PartName(tensor, layer, parts[i].name)] = {parts[i].dtype, parts[i].shape, *data[i]};
  }
  return {};
}

nlohmann::json RopeJson(const CacheSchema& schema) {
  nlohmann::json rope;
  for (const SchemaField& field : SchemaFields(schema))
    if (field.name.starts_with("rope")) rope[field.name] = field.value;
  return rope;
}

std::string ContentDigest(const std::map<std::string, TensorInfo>& tensors) {
  Sha256 digest;
  for (const auto& [name, t] : tensors) {
    digest.Add(name);
    digest.Add(t.bytes);
  }
  return digest.Hex();
}

}  // namespace livequant::app
