// kv/round_rows.cc: see kv/round_rows.h.
#include "kv/round_rows.h"

#include <cmath>

#include "base/check.h"
#include "kernels/round_rows.h"
#include "numeric/float_formats.h"

namespace livequant {
namespace {

// The definition, which finds and names what the vector kernel refused.
bool Name(DType dtype, MatrixView<float> rows, RowFault* fault) {
  for (int64_t r = 0; r < rows.rows; ++r)
    for (int64_t c = 0; c < rows.cols; ++c)
      if (!std::isfinite(static_cast<float>(RoundTo(dtype, rows(r, c))))) {
        *fault = {r, c, rows(r, c)};
        return true;
      }
  return false;
}

}  // namespace

bool RoundRows(DType dtype, MatrixView<float> rows, RowFault* fault) {
  if (RoundRowsTo(dtype, rows)) [[likely]]
    return true;
  LQ_CHECK(Name(dtype, rows, fault));  // the refused row is as it came
  return false;
}

}  // namespace livequant
