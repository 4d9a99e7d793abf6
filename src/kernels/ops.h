// kernels/ops.h: row operations of a Llama block, f32. Every function treats rows one by one: a row's bits depend on
// that row alone, and sums run over 16 fixed partial sums (partial j takes elements j, j + 16, ...) folded as a tree of
// 8, 4, 2, 1, so they are the same on every ISA. SiluMulRows and LogSumExp use kernels/cpu/exp-inl.h, whose last bits
// are the same on every ISA that has a fused multiply-add.
//
// All shapes are [rows][cols] with any row stride. Outputs may be the very same view as an input; they overlap in no
// other way. NaN and inf follow from the formulas. Broken shapes are broken invariants (LQ_CHECK).
#pragma once

#include <cstdint>
#include <span>

#include "base/span2d.h"
#include "kernels/rope_table.h"

namespace livequant {

// y = x / sqrt(mean(x^2) + eps) * gamma, row by row. gamma [cols]. REQUIRES eps > 0. Source: methods.md 1.4.
// Error: relative <= (cols / 16 + 10) 2^-24 an element.
void RmsNormRows(MatrixView<const float> x, const float* gamma, float eps, MatrixView<float> y);
// y = silu(gate) * up, silu(g) = g / (1 + e^-g). Error: relative <= 6 * 2^-24 where |gate| <= 87.
void SiluMulRows(MatrixView<const float> gate, MatrixView<const float> up, MatrixView<float> y);
// y += x. x may have stride 0: one row that is added to every row of y.
void AddRows(MatrixView<const float> x, MatrixView<float> y);

// Rotates each of `heads` heads of `head_dim` channels of each row in place; row r is at positions[r]. A pair (a, b)
// becomes (a cos - b sin, b cos + a sin); pair i is channels (i, i + dims/2) when half-split, (2i, 2i + 1) when
// interleaved; channels from dims on stay. REQUIRES 0 <= positions[r] < table.max_len(), heads * head_dim <= x.cols.
// Source: methods.md 5.12.
void RopeRows(MatrixView<float> x, int heads, int head_dim, std::span<const int32_t> positions, const RopeTable& table);

// log(sum(exp(x))) of one row, f32 terms summed in double. Nothing or all -inf: -inf; an inf: inf; a NaN: NaN.
// Error: absolute <= 2^-22.
double LogSumExp(std::span<const float> x);

}  // namespace livequant
