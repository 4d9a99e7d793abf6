// kv/round_rows.h: the one rounding of a row to exact_dtype. Internal to kv/.
#pragma once

#include <cstdint>

#include "base/span2d.h"
#include "numeric/dtype.h"

namespace livequant {

// The first value that cannot be cached.
struct RowFault {
  int64_t row = 0, channel = 0;
  float value = 0;  // as it came
};

// Rounds each value to the nearest value of `dtype` (ties to even), in place. False and `fault` at the first value, in
// row order, that is NaN or Inf, or that `dtype` cannot hold (it would round to infinity): there is no clamp. Rows
// after a fault are unspecified. dtype: kF32, kF16, kBF16.
bool RoundRows(DType dtype, MatrixView<float> rows, RowFault* fault);

}  // namespace livequant
