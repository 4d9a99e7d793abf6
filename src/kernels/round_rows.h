// kernels/round_rows.h: rows of f32 rounded in place to the values of a narrower native type.
//
// The definition is RoundTo of numeric/float_formats.h, value by value; bits are the same on every ISA. As there, what
// rounds to zero becomes +0 in f16 and keeps its sign in bf16; f32 values stay as they are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/span2d.h"
#include "numeric/dtype.h"

namespace livequant {

// Rounds each value to the nearest value of `dtype` (ties to even). False at the first row with a value that is NaN or
// Inf, or that would round to Inf: that row and those after it are as they came, those before it are rounded.
// dtype: kF32, kF16, kBF16.
bool RoundRowsTo(DType dtype, MatrixView<float> rows);

// The bits of `count` values, each rounded to the nearest (ties to even; F16FromFloat and Bf16FromFloat of
// numeric/float_formats.h: a zero keeps its sign), at `out`, aligned to two bytes. dtype: kF16, kBF16. REQUIRES every
// value to round to a finite one.
void NarrowValues(DType dtype, const float* values, int64_t count, std::byte* out);

}  // namespace livequant
