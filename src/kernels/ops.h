// kernels/ops.h: row operations of a Llama block, f32. Every function treats rows one by one: a row's bits depend on that row
// alone, and sums run over 16 fixed partial sums folded as a tree, so they are the same on every ISA.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/span2d.h"
#include "schema/schema.h"

namespace livequant {

// y = x / sqrt(mean(x^2) + eps) * gamma, row by row. gamma [cols]. REQUIRES eps > 0.
void RmsNormRows(MatrixView<const float> x, const float* gamma, float eps, MatrixView<float> y);
// y = silu(gate) * up.
void SiluMulRows(MatrixView<const float> gate, MatrixView<const float> up, MatrixView<float> y);
// y += x.
void AddRows(MatrixView<const float> x, MatrixView<float> y);

// cos and sin of every position below max_len, made in double once: angle = position * theta^(-2 i / dims).
class RopeTable {
 public:
  RopeTable() = default;
  RopeTable(const RopeConfig& config, int head_dim, int64_t max_len);
  int dims() const { return dims_; }
  RopePairing pairing() const { return pairing_; }
  int64_t max_len() const { return max_len_; }
  const float* cos(int64_t position) const { return cos_.data() + position * (dims_ / 2); }
  const float* sin(int64_t position) const { return sin_.data() + position * (dims_ / 2); }

 private:
  int dims_ = 0;
  RopePairing pairing_ = RopePairing::kHalfSplit;
  int64_t max_len_ = 0;
  std::vector<float> cos_, sin_;
};
// Rotates each of `heads` heads of `head_dim` channels of each row in place; row r is at positions[r].
void RopeRows(MatrixView<float> x, int heads, int head_dim, std::span<const int32_t> positions, const RopeTable& table);

// log(sum(exp(x))) of one row, f32 terms summed in double.
double LogSumExp(std::span<const float> x);

}  // namespace livequant
