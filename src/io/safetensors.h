// io/safetensors.h: tensors of a safetensors file, by name. Nothing is copied; every offset is checked before it is
// used.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "io/file.h"

namespace livequant {

struct TensorInfo {
  std::string dtype;                 // as in the file: "BF16", "F32", ...
  std::vector<int64_t> shape;        // its product, zeros left out, times the bytes of the dtype fits in 63 bits
  std::span<const std::byte> bytes;  // row major, little endian, at any alignment: read with memcpy
};

class Safetensors {
 public:
  // The whole `file` in, its tensors out; they point into it. `what` names it in messages.
  // Refuses: a header that is longer than the file or 100 MiB, repeated names, unknown dtypes and fields, sizes that
  // overflow or differ from shape x dtype, overlaps, holes, bytes beyond the last tensor. Each message names the
  // tensor, the value and the limit. kDataLoss: the file is shorter than it says. kUnsupported: dtype. kOutOfRange: too
  // long or too large. kInvalidArgument: everything else. Source: huggingface/safetensors, README "Format".
  // `metadata`, if not null, receives the strings of __metadata__.
  static Result<std::map<std::string, TensorInfo>> ParseHeader(std::span<const std::byte> file, std::string_view what,
                                                               std::map<std::string, std::string>* metadata = nullptr);

  // One file. kNotFound, kIo besides what ParseHeader gives.
  static Result<Safetensors> OpenFile(const std::string& path);

  // A model directory: model.safetensors (also where an index lies beside it, as Hugging Face's loader chooses), or
  // model.safetensors.index.json with its shards: file names without a folder, each tensor listed once and really in
  // the shard that the index names, no shard with a tensor that the index doesn't list, metadata.total_size, if there,
  // the bytes of all tensors. kNotFound: neither is there.
  static Result<Safetensors> OpenDirectory(const std::string& directory);
  // Valid as long as this object.
  const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }
  // __metadata__ of a single file; empty for shards, whose strings nobody joins.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  // The files, in the order of their names.
  const std::vector<std::string>& paths() const { return paths_; }

 private:
  std::vector<MappedFile> files_;
  std::vector<std::string> paths_;
  std::map<std::string, TensorInfo> tensors_;
  std::map<std::string, std::string> metadata_;
};

// The bytes of a safetensors file with these tensors, laid out in the order of their names behind a header that is
// padded to 8 bytes. REQUIRES each dtype to be known and bytes to be shape x dtype, as ParseHeader wants them; names
// and strings to be UTF-8.
std::string SafetensorsText(const std::map<std::string, TensorInfo>& tensors,
                            const std::map<std::string, std::string>& metadata);

}  // namespace livequant
