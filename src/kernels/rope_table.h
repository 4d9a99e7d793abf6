// kernels/rope_table.h: the rotations of a RopeConfig, made once in double and kept as f32.
#pragma once

#include <cstdint>
#include <vector>

#include "schema/schema.h"

namespace livequant {

// The angle of each pair at position 1, [pairs] with pairs = dims / 2 (dims 0: head_dim / 2); position p turns by p
// times as much. Formulas: schema/schema.h, RopeConfig. REQUIRES ValidateRope(config).ok(), even 0 < dims <= head_dim.
std::vector<double> RopeFrequencies(const RopeConfig& config, int head_dim);

// attention_factor * cos and sin of every position below max_len.
class RopeTable {
 public:
  RopeTable() = default;
  // REQUIRES ValidateRope(config).ok(), even 0 < dims <= head_dim (dims 0 means head_dim), max_len >= 0: the schema is
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

}  // namespace livequant
