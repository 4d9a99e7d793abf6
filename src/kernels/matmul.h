// kernels/matmul.h: y = x W^T with one packed layout and one order of summation for every M.
//
// Contract: y[m][n] is one chain of fused multiply-adds over k = 0, 1, ... in f32, so a row's bits depend on that row and on
// W alone: not on M, neighbours, threads or vector width (arithmetic id f32_fma_chain).
// Packed layout: panels of kPanel outputs, panel p holds W[p*kPanel + j][k] at [k][j]; the last panel is padded with zeros.
// Weights keep the dtype of the file (f32, f16, bf16) and are widened exactly in registers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/span2d.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "numeric/dtype.h"

namespace livequant {

class PackedMatrix {
 public:
  // Packs `weights`, row-major [n][k] of `dtype` (kF32, kF16 or kBF16; else kUnsupported).
  static Result<PackedMatrix> Pack(DType dtype, const void* weights, int64_t n, int64_t k);
  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  DType dtype() const { return dtype_; }
  int64_t bytes() const { return bytes_; }
  const std::byte* panels() const { return data_.get(); }

 private:
  int64_t n_ = 0, k_ = 0, bytes_ = 0;
  DType dtype_ = DType::kF32;
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, Free> data_;
};

// x [m][k], y [m][n], f32. REQUIRES x.cols == w.k(), y.cols == w.n(), x.rows == y.rows. Allocates nothing.
void MatMul(MatrixView<const float> x, const PackedMatrix& w, MatrixView<float> y, ThreadPool& pool);

}  // namespace livequant
