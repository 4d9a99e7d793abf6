// kernels/cpu/tile_gemm-inl.h: C (+)= A B and dot products for small row-major f32 tiles, as attention over one tile of
// rows needs them.
//
// Contract  TileGemm: each C[m][n] is one chain of fused multiply-adds over k = 0, 1, ..., starting from C[m][n] or
// from 0: its bits
//           depend on row m of A, column n of B and that start alone, not on M, N or the vector width. (Targets without
//           a fused multiply-add round twice a step.)
//           TileDots: each C[m][n] is 16 chains, chain i over k = i, i + 16, ... from a product that rounds, folded as
//           a tree (i with i + 8, then i + 4, i + 2, i + 1). A vector of 16 lanes along k makes the same bits, so a dot
//           product may run along rows of B as they are stored or across them, whichever is cheaper.
// Layout    lanes are columns. Up to kTileAccumulators vector accumulators live in registers: few rows take many
// columns at
//           once, many rows few, so that at least 8 chains are in flight wherever the shape has them.
#if defined(LIVEQUANT_KERNELS_CPU_TILE_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LIVEQUANT_KERNELS_CPU_TILE_GEMM_INL_H_
#undef LIVEQUANT_KERNELS_CPU_TILE_GEMM_INL_H_
#else
#define LIVEQUANT_KERNELS_CPU_TILE_GEMM_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "hwy/highway.h"
#include "kernels/cpu/partial-inl.h"

HWY_BEFORE_NAMESPACE();
namespace livequant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Registers: 32 vectors on AVX-512 and Arm, 16 elsewhere. Accumulators leave room for kVectors of B and a broadcast.
#if HWY_TARGET == HWY_AVX3 || HWY_ARCH_ARM_A64
inline constexpr int kTileAccumulators = 24;
#else
inline constexpr int kTileAccumulators = 12;
#endif

// kRows x (kVectors vectors of columns), whole k. kTail: only the first `tail` lanes of the last vector exist.
template <int kRows, int kVectors, bool kTail>
HWY_NOINLINE void TileGemmKernel(const float* HWY_RESTRICT a, int64_t lda, const float* HWY_RESTRICT b, int64_t ldb,
                                 float* HWY_RESTRICT c, int64_t ldc, int64_t k, bool accumulate, size_t tail) {
  using DF = hn::CappedTag<float, 16>;
  using VF = hn::Vec<DF>;
  const DF df;
  constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(DF()));
  VF acc[kRows][kVectors];
#pragma GCC unroll 32
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 32
    for (int v = 0; v < kVectors; ++v) {
      if (!accumulate) {
        acc[m][v] = hn::Zero(df);
      } else if (kTail && v == kVectors - 1) {
        acc[m][v] = LoadFirst(df, c + m * ldc + v * kLanes, tail);
      } else {
        acc[m][v] = hn::LoadU(df, c + m * ldc + v * kLanes);
      }
    }
  }
  for (int64_t i = 0; i < k; ++i, b += ldb) {
    VF w[kVectors];
#pragma GCC unroll 32
    for (int v = 0; v < kVectors; ++v) {
      w[v] = kTail && v == kVectors - 1 ? LoadFirst(df, b + v * kLanes, tail) : hn::LoadU(df, b + v * kLanes);
    }
#pragma GCC unroll 32
    for (int m = 0; m < kRows; ++m) {
      const VF x = hn::Set(df, a[m * lda + i]);
#pragma GCC unroll 32
      for (int v = 0; v < kVectors; ++v) acc[m][v] = hn::MulAdd(x, w[v], acc[m][v]);
    }
  }
#pragma GCC unroll 32
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 32
    for (int v = 0; v < kVectors; ++v) {
      if (kTail && v == kVectors - 1) {
        StoreFirst(acc[m][v], df, c + m * ldc + v * kLanes, tail);
      } else {
        hn::StoreU(acc[m][v], df, c + m * ldc + v * kLanes);
      }
    }
  }
}

// Column j of B. Without rows (k == 0) B may be null, of which no column has an address.
HWY_INLINE const float* ColumnOf(const float* b, int64_t j, int64_t k) { return k > 0 ? b + j : b; }

// Rows [0, rows) with rows <= kRows, all columns in steps of kVectors vectors, then single vectors, then a masked tail.
template <int kRows, int kVectors>
HWY_INLINE void TileGemmRows(int rows, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                             int64_t n, int64_t k, bool accumulate) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      return TileGemmRows<kRows - 1, kVectors>(rows, a, lda, b, ldb, c, ldc, n, k, accumulate);
    }
  }
  constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(hn::CappedTag<float, 16>()));
  int64_t j = 0;
  for (; j + kVectors * kLanes <= n; j += kVectors * kLanes) {
    TileGemmKernel<kRows, kVectors, false>(a, lda, ColumnOf(b, j, k), ldb, c + j, ldc, k, accumulate, 0);
  }
  for (; j + kLanes <= n; j += kLanes) {
    TileGemmKernel<kRows, 1, false>(a, lda, ColumnOf(b, j, k), ldb, c + j, ldc, k, accumulate, 0);
  }
  if (j < n) {
    TileGemmKernel<kRows, 1, true>(a, lda, ColumnOf(b, j, k), ldb, c + j, ldc, k, accumulate,
                                   static_cast<size_t>(n - j));
  }
}

// C[m][n] (+)= A[m][k] B[k][n]; row strides lda, ldb, ldc in floats, any alignment, any sizes >= 0. C overlaps
// neither A nor B. accumulate: start from C, else from 0. Best with n a multiple of 64.
HWY_INLINE void TileGemm(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t m,
                         int64_t n, int64_t k, bool accumulate) {
  constexpr int kWide = kTileAccumulators / 2, kMiddle = kTileAccumulators / 4, kNarrow = kTileAccumulators / 8;
  constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(hn::CappedTag<float, 16>()));
  if (k == 0) lda = 0;  // A has no values and may be null too
  while (m > 0) {
    // Even shares, so that no tile is left with one row.
    const int64_t tiles = (m + kWide - 1) / kWide;
    const int rows = static_cast<int>((m + tiles - 1) / tiles);
    if (rows <= kNarrow && n >= 8 * kLanes) {
      TileGemmRows<kNarrow, 8>(rows, a, lda, b, ldb, c, ldc, n, k, accumulate);
    } else if (rows <= kMiddle && n >= 4 * kLanes) {
      TileGemmRows<kMiddle, 4>(rows, a, lda, b, ldb, c, ldc, n, k, accumulate);
    } else {
      TileGemmRows<kWide, 2>(rows, a, lda, b, ldb, c, ldc, n, k, accumulate);
    }
    a += rows * lda;
    c += rows * ldc;
    m -= rows;
  }
}

// Registers of TileDots: a tree of 16 chains that are made one by one holds at most 4 partial sums and a chain.
inline constexpr int kDotVectors = kTileAccumulators >= 24 ? 2 : 1;
inline constexpr int kDotRows = 2;

template <int kRows, int kVectors>
HWY_NOINLINE void TileDotsKernel(const float* HWY_RESTRICT a, int64_t lda, const float* HWY_RESTRICT b, int64_t ldb,
                                 float* HWY_RESTRICT c, int64_t ldc, int64_t k) {
  using DF = hn::CappedTag<float, 16>;
  using VF = hn::Vec<DF>;
  const DF df;
  constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(DF()));
  VF sum[5][kRows][kVectors];  // [0]: the chain; [1 + s]: sums of 2^s chains that wait for their partners
#pragma GCC unroll 16
  for (int step = 0; step < 16; ++step) {
    // Partners come one after the other: 0, 8, 4, 12, 2, ...
    const int first = (step & 1) << 3 | (step & 2) << 1 | (step & 4) >> 1 | (step & 8) >> 3;
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        sum[0][m][v] = first < k ? hn::Mul(hn::Set(df, a[m * lda + first]), hn::LoadU(df, b + first * ldb + v * kLanes))
                                 : hn::Zero(df);
    for (int64_t i = first + 16; i < k; i += 16) {
      VF w[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) w[v] = hn::LoadU(df, b + i * ldb + v * kLanes);
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m) {
        const VF x = hn::Set(df, a[m * lda + i]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[0][m][v] = hn::MulAdd(x, w[v], sum[0][m][v]);
      }
    }
    int level = 1;
#pragma GCC unroll 4
    for (; step >> (level - 1) & 1; ++level)
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[0][m][v] = hn::Add(sum[level][m][v], sum[0][m][v]);
    if (level > 4) break;
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[level][m][v] = sum[0][m][v];
  }
#pragma GCC unroll 4
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sum[0][m][v], df, c + m * ldc + v * kLanes);
}

// C[m][n] = dot of A[m][0..k) and B[0..k)[n]; strides as in TileGemm. REQUIRES n a multiple of 16.
HWY_INLINE void TileDots(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t m,
                         int64_t n, int64_t k) {
  constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(hn::CappedTag<float, 16>()));
  if (k == 0) lda = 0;
  const auto columns = [&](int64_t j, auto vectors) HWY_ATTR {
    constexpr int kVectors = decltype(vectors)::value;
    int64_t i = 0;
    for (; i + kDotRows <= m; i += kDotRows)
      TileDotsKernel<kDotRows, kVectors>(a + i * lda, lda, ColumnOf(b, j, k), ldb, c + i * ldc + j, ldc, k);
    for (; i < m; ++i) TileDotsKernel<1, kVectors>(a + i * lda, lda, ColumnOf(b, j, k), ldb, c + i * ldc + j, ldc, k);
  };
  int64_t j = 0;
  for (; j + kDotVectors * kLanes <= n; j += kDotVectors * kLanes)
    columns(j, std::integral_constant<int, kDotVectors>());
  for (; j < n; j += kLanes) columns(j, std::integral_constant<int, 1>());
}

}  // namespace HWY_NAMESPACE
}  // namespace livequant
HWY_AFTER_NAMESPACE();

#endif  // include guard
