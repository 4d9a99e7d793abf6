// apps/rows_file.h: how rows at rest are named and laid out in safetensors: what `encode` writes, `decode` reads and
// `run --record` adds to. The bytes: docs/formats/rows.md.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/status.h"
#include "io/safetensors.h"
#include "kv/kv_cache.h"
#include "kv/planes.h"

namespace livequant::app {

inline constexpr const char* kTensorNames[2] = {"k", "v"};

// "k.3".
std::string RowName(TensorIndex tensor, int layer);

// The arrays of one layer and tensor: what each is called, and its shape. An array without values is not in the file.
struct Part {
  const char* name;
  std::string dtype;
  std::vector<int64_t> shape;
  bool present() const;
};
std::vector<Part> PartsOf(const LayerSchema& layer, TensorIndex tensor, const PlaneShape& shape);
// "k.3.codes".
std::string PartName(TensorIndex tensor, int layer, const char* part);

// Tensors by name that stand on bytes kept here.
struct CodedRows {
  std::map<std::string, TensorInfo> tensors;
  std::vector<std::unique_ptr<Planes>> planes;
  int64_t bytes[4] = {};  // codes, scales, zeros, exact
};
// Adds the arrays of one layer and tensor as `lease` sees them. kUnsupported: as ReadPlanes.
Status AddCodedRows(const KvCache& cache, const Owner::Lease& lease, int layer, TensorIndex tensor, CodedRows* out);

// The schema's RoPE fields as text, under the names that schemas are compared by.
nlohmann::json RopeJson(const CacheSchema& schema);

// SHA-256 over names and bytes, in the order of the names.
std::string ContentDigest(const std::map<std::string, TensorInfo>& tensors);

}  // namespace livequant::app
