// kernels/matmul.h: y = x W^T with one packed layout and one order of summation for every M.
//
// Contract: y[m][n] is one chain of fused multiply-adds over k = 0, 1, ... in f32, acc = fma(x[m][k], W[n][k], acc)
// from 0, so a row's bits depend on that row and on W alone: not on M, neighbours, threads or vector width (arithmetic
// id f32_fma_chain). A CPU without a fused multiply-add (x86 below AVX2) rounds product and sum: id f32_mul_add_chain,
// whose bits also depend on nothing else, but differ from the first. Packed layout: panels of kPanel outputs, panel p
// holds W[p*kPanel + j][k] at [k][j]; the last panel is padded with zeros. In a bf16 panel the 32 values of one k are
// stored as 16 pairs {j, j + 16}: a pair is a 32-bit word that widens to two f32 by a shift and a mask, at any vector
// width. The packed bytes live in memory only; no file holds them. Weights keep the dtype of the file (f32, f16, bf16)
// and are widened exactly in registers.
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
  // Outputs of a panel: two AVX-512 vectors, one cache line of bf16 per k.
  static constexpr int kPanel = 32;

  // Packs `weights`, row-major [n][k] of `dtype` (kF32, kF16 or kBF16; else kUnsupported), any alignment.
  // kInvalidArgument: n or k < 1. kOutOfRange: the packed bytes do not fit in an int64.
  static Result<PackedMatrix> Pack(DType dtype, const void* weights, int64_t n, int64_t k);
  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  DType dtype() const { return dtype_; }
  // Packed bytes, the padding of the last panel included: what one M = 1 product reads.
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

// x [m][k], y [m][n], f32, any row strides. REQUIRES x.cols == w.k(), y.cols == w.n(), x.rows == y.rows, and y overlaps
// neither x nor w. Allocates nothing. NaN and inf spread as the chain says.
void MatMul(MatrixView<const float> x, const PackedMatrix& w, MatrixView<float> y, ThreadPool& pool);
// The same by a team, every thread of which calls it; x may be a copy of each thread's own. Ends in a barrier.
void MatMul(MatrixView<const float> x, const PackedMatrix& w, MatrixView<float> y, Team& team);

// Columns [first, first + count) of such a product, by the calling thread alone. REQUIRES first and the end to be
// multiples of kPanel, or the end w.n().
void MatMulColumns(MatrixView<const float> x, const PackedMatrix& w, int64_t first, int64_t count, MatrixView<float> y);

// Arithmetic id of MatMul on this machine: "f32_fma_chain" or "f32_mul_add_chain".
const char* MatMulArithmetic();
// Instruction set that the kernels of this folder run on, as Highway names it: "AVX3", "AVX2", "SSE4", "NEON", ...
const char* KernelIsa();

}  // namespace livequant
