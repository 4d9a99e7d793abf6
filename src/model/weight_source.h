// model/weight_source.h: where weights come from, whatever the file. A source says what each tensor is and gives its
// rows; nothing is widened or dequantized before somebody asks for those rows, so that a model is never in memory
// twice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/status.h"
#include "numeric/dtype.h"

namespace livequant {

struct SourceTensor {
  std::vector<int64_t> shape;  // a matrix is [outputs][inputs], a vector one row
  std::string stored;          // dtype as the file names it: "BF16", "Q8_0", "F8_E4M3 with scales per row", ...
  // What Read gives: kF32, kF16 or kBF16.
  DType dtype = DType::kF32;
  int64_t stored_bytes = 0;  // scales included
  int64_t rows() const { return shape.size() < 2 ? 1 : shape[0]; }
  int64_t cols() const {
    int64_t n = 1;
    for (size_t i = shape.size() < 2 ? 0 : 1; i < shape.size(); ++i) n *= shape[i];
    return n;
  }
};

class WeightSource {
 public:
  virtual ~WeightSource() = default;
  // By Hugging Face's names. A tensor of a dtype that can't be read as weights is not in the map but in refused().
  const std::map<std::string, SourceTensor>& tensors() const { return tensors_; }
  // Why a tensor that is in the file can't be read, by name.
  const std::map<std::string, Status>& refused() const { return refused_; }
  // Rows [first, first + count) of a tensor as `dtype` of its entry, row major, into `out` (any alignment). REQUIRES
  // the tensor and the rows to exist. Threads: any number may read at once.
  virtual void Read(const std::string& name, int64_t first, int64_t count, std::byte* out) const = 0;

 protected:
  WeightSource() = default;
  std::map<std::string, SourceTensor> tensors_;
  std::map<std::string, Status> refused_;
};

}  // namespace livequant
