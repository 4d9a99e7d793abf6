// model/fp8_weights.h: checkpoints whose matrices are F8_E4M3 with scales beside them: what their config.json says of
// it, and the values.
//
//   w[r][c] = e4m3(code[r][c]) * scale       rounded once to bf16, to nearest, ties to even
//
// `X.weight` has its scales in `X.weight_scale` or `X.weight_scale_inv` (which is multiplied all the same): one of the
// tensor, one of each row, or one of each block of rows and columns. Rows that such checkpoints were made for are also
// quantized on the way in ("activations"); here they stay f32, which no scale of the file is needed for.
// Source: transformers, quantizers/quantizer_finegrained_fp8.py; compressed-tensors, quantization/quant_args.py.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "io/safetensors.h"

namespace livequant {

// What quantization_config says of the weights.
struct Fp8Scheme {
  enum class Scales { kTensor, kRow, kBlock };
  Scales scales = Scales::kTensor;
  int64_t block_rows = 0, block_cols = 0;  // kBlock
  bool static_activations = false;         // each matrix may have an input_scale, which is not used
  std::vector<std::string> ignored;        // modules that keep their dtype
  std::string Text() const;                // "scales per row", "scales per 128x128 block"
};

// quantization_config of config.json's text: nothing if absent or null. quant_method "fp8" and "compressed-tensors"
// (format "float-quantized") are read, strictly: kUnsupported names a field or value that is not known here.
Result<std::optional<Fp8Scheme>> ParseFp8Scheme(std::string_view config_json);

// One matrix and its scales; points into both tensors.
struct Fp8Matrix {
  const TensorInfo* codes = nullptr;
  const TensorInfo* scales = nullptr;
  int64_t block_rows = 0, block_cols = 0;  // what one scale covers

  // Rows [first, first + count) as bf16 bits. Returns how many values the rounding changed. REQUIRES the rows to exist.
  int64_t Decode(int64_t first, int64_t count, std::byte* out) const;
};

// The matrices of F8_E4M3 among `tensors`, by name, with their scales; names of scales are put into `used`.
// kInvalidArgument: a scale that is missing, left over, misshapen, or beyond what bf16 can hold, with the count that
// was expected and the count that is there; F8_E4M3 tensors without `scheme`, or none with it.
Result<std::map<std::string, Fp8Matrix>> PairFp8Scales(const std::map<std::string, TensorInfo>& tensors,
                                                       const std::optional<Fp8Scheme>& scheme,
                                                       std::vector<std::string>* used);

}  // namespace livequant
