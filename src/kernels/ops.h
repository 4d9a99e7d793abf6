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
#include <vector>

#include "base/span2d.h"
#include "schema/schema.h"

namespace livequant {

// y = x / sqrt(mean(x^2) + eps) * gamma, row by row. gamma [cols]. REQUIRES eps > 0. Source: methods.md 1.4.
// Error: relative <= (cols / 16 + 10) 2^-24 an element.
void RmsNormRows(MatrixView<const float> x, const float* gamma, float eps, MatrixView<float> y);
// y = silu(gate) * up, silu(g) = g / (1 + e^-g). Error: relative <= 6 * 2^-24 where |gate| <= 87.
void SiluMulRows(MatrixView<const float> gate, MatrixView<const float> up, MatrixView<float> y);
// y += x.
void AddRows(MatrixView<const float> x, MatrixView<float> y);

// cos and sin of every position below max_len, made in double once: angle = position * theta^(-2 i / dims).
class RopeTable {
 public:
  RopeTable() = default;
  // REQUIRES config.type "default", even 0 < dims <= head_dim (dims 0 means head_dim), max_len >= 0: the schema is
  // validated before a table is made.
  RopeTable(const RopeConfig& config, int head_dim, int64_t max_len);
  int dims() const { return dims_; }
  RopePairing pairing() const { return pairing_; }
  int64_t max_len() const { return max_len_; }
  // dims / 2 values of one position, REQUIRES 0 <= position < max_len.
  const float* cos(int64_t position) const { return cos_.data() + position * (dims_ / 2); }
  const float* sin(int64_t position) const { return sin_.data() + position * (dims_ / 2); }

 private:
  int dims_ = 0;
  RopePairing pairing_ = RopePairing::kHalfSplit;
  int64_t max_len_ = 0;
  std::vector<float> cos_, sin_;
};
// Rotates each of `heads` heads of `head_dim` channels of each row in place; row r is at positions[r]. A pair (a, b)
// becomes (a cos - b sin, b cos + a sin); pair i is channels (i, i + dims/2) when half-split, (2i, 2i + 1) when
// interleaved; channels from dims on stay. REQUIRES 0 <= positions[r] < table.max_len(), heads * head_dim <= x.cols.
// Source: methods.md 5.12.
void RopeRows(MatrixView<float> x, int heads, int head_dim, std::span<const int32_t> positions, const RopeTable& table);

// log(sum(exp(x))) of one row, f32 terms summed in double. Nothing or all -inf: -inf; an inf: inf; a NaN: NaN.
// Error: absolute <= 2^-22.
double LogSumExp(std::span<const float> x);

}  // namespace livequant
