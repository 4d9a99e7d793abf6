// kv/round_rows.cc: see kv/round_rows.h.
#include "kv/round_rows.h"

#include <cmath>

#include "numeric/float_formats.h"

namespace livequant {
namespace {

// One instantiation a format, so that the loop has no switch in it.
template <DType kType>
bool Round(MatrixView<float> rows, RowFault* fault) {
  for (int64_t r = 0; r < rows.rows; ++r) {
    float* row = rows.row(r);
    for (int64_t c = 0; c < rows.cols; ++c) {
      const float rounded = static_cast<float>(RoundTo(kType, row[c]));
      if (!std::isfinite(rounded)) [[unlikely]] {
        *fault = {r, c, row[c]};
        return false;
      }
      row[c] = rounded;
    }
  }
  return true;
}

}  // namespace

bool RoundRows(DType dtype, MatrixView<float> rows, RowFault* fault) {
  switch (dtype) {
    case DType::kF32:
      return Round<DType::kF32>(rows, fault);
    case DType::kF16:
      return Round<DType::kF16>(rows, fault);
    case DType::kBF16:
      return Round<DType::kBF16>(rows, fault);
    case DType::kFp8E4M3:
    case DType::kFp8E5M2:
      break;
  }
  LQ_CHECK(false);  // Validate allows no other exact_dtype
}

}  // namespace livequant
