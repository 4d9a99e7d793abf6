// io/safetensors.h: tensors of a safetensors file, by name. Nothing is copied; every offset is checked before it is used.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "io/file.h"

namespace livequant {

struct TensorInfo {
  std::string dtype;           // as in the file: "BF16", "F32", ...
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;
};

class Safetensors {
 public:
  // Refuses: a header that is longer than the file or 100 MiB, repeated names, unknown dtypes, sizes that overflow or differ from shape x dtype,
  // overlaps, holes, bytes beyond the last tensor. Each message names the tensor, the value and the limit. `what` names the file.
  static Result<std::map<std::string, TensorInfo>> ParseHeader(std::span<const std::byte> file, std::string_view what);

  // A model directory: model.safetensors, or model.safetensors.index.json with its shards (each name listed once, each shard complete).
  static Result<Safetensors> OpenDirectory(const std::string& directory);
  const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }
  const std::vector<std::string>& paths() const { return paths_; }

 private:
  std::vector<MappedFile> files_;
  std::vector<std::string> paths_;
  std::map<std::string, TensorInfo> tensors_;
};

}  // namespace livequant
