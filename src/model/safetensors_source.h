// model/safetensors_source.h: the tensors of safetensors files as weights.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "base/status.h"
#include "io/safetensors.h"
#include "model/fp8_weights.h"
#include "model/weight_source.h"

namespace livequant {

class SafetensorsSource final : public WeightSource {
 public:
  // `tensors` must outlive the source. F32, F16 and BF16 are read as they are, F8_E4M3 with its scales as bf16 (as
  // PairFp8Scales, whose errors come out of here); tensors of other dtypes are refused one by one.
  static Result<std::unique_ptr<SafetensorsSource>> Make(const std::map<std::string, TensorInfo>& tensors,
                                                         const std::optional<Fp8Scheme>& scheme);
  void Read(const std::string& name, int64_t first, int64_t count, std::byte* out) const override;

  // What rounding to bf16 does to the F8_E4M3 matrices; decodes all of them.
  struct Fp8Report {
    int64_t tensors = 0, values = 0, rounded = 0;  // rounded: values that bf16 does not hold exactly
  };
  Fp8Report ReportFp8() const;

 private:
  explicit SafetensorsSource(const std::map<std::string, TensorInfo>& tensors) : infos_(tensors) {}
  const std::map<std::string, TensorInfo>& infos_;
  std::map<std::string, Fp8Matrix> fp8_;
};

}  // namespace livequant
