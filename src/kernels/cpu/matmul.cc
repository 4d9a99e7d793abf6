// kernels/cpu/matmul.cc: see kernels/matmul.h for the contract and the packed layout.
//
// How it runs. A unit is two vectors of outputs of one panel: lanes j.. and 16 + j.. (one unit is a whole panel on
// AVX-512). A register tile is kRows x kUnits units with at least 8 chains in flight: many rows take one unit, one row
// takes four panels. A task is a block of rows times a group of panels. Inside it k runs in blocks of kKBlock, between
// which the accumulators rest in y: storing and reloading an f32 changes nothing. So a block of W stays in L2 for all
// rows of the task, and the x rows of one tile are copied to the stack with an odd number of cache lines between them
// (rows of a power-of-two stride would share a few cache sets).
#include "kernels/matmul.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <string>

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/matmul.cc"
#include "hwy/foreach_target.h"
// After foreach_target.
#include "hwy/highway.h"

#ifndef LIVEQUANT_KERNELS_CPU_MATMUL_ONCE_
#define LIVEQUANT_KERNELS_CPU_MATMUL_ONCE_
namespace livequant::matmul {

constexpr int kPanel = PackedMatrix::kPanel;
constexpr int kHalf = kPanel / 2;
constexpr int64_t kKBlock = 512;
constexpr int64_t kScratchStride = kKBlock + 16;

struct Problem {
  const float* x;
  const std::byte* panels;
  float* y;
  int64_t x_stride, y_stride, n, k, panel_bytes;
  DType dtype;
};

// Rows [row, row + rows) times panels [panel, panel + panels).
struct Block {
  int64_t row, rows, panel, panels;
};

}  // namespace livequant::matmul
#endif

HWY_BEFORE_NAMESPACE();
namespace livequant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using matmul::Block;
using matmul::kHalf;
using matmul::kKBlock;
using matmul::kPanel;
using matmul::kScratchStride;
using matmul::Problem;

using DF = hn::CappedTag<float, kHalf>;
using VF = hn::Vec<DF>;
inline constexpr int kLanes = static_cast<int>(hn::MaxLanes(DF()));
inline constexpr int kUnitsPerPanel = kHalf / kLanes;

#if HWY_TARGET == HWY_AVX3 || HWY_ARCH_ARM_A64
inline constexpr int kMaxRows = 12;  // 24 accumulators of 32 registers
#elif HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
inline constexpr int kMaxRows = 2;  // there to be correct: few instantiations
#else
inline constexpr int kMaxRows = 6;  // 12 of 16
#endif

// How many panels one row tile takes at once.
constexpr int PanelsAtOnce(int rows) { return rows <= 2 ? 4 : rows <= kMaxRows / 2 ? 2 : 1; }
// Units that fit the registers, at most those of the panels at once.
constexpr int UnitsAtOnce(int rows) {
  int units = kMaxRows / rows;
  const int wanted = rows == 1 ? 8 : rows == 2 ? 4 : units;
  units = units < wanted ? units : wanted;
  return units < 1 ? 1 : units;
}

// The f32 values of outputs `lane`.. and 16 + `lane`.. of one k of a panel.
template <DType kType>
struct Widen;

template <>
struct Widen<DType::kF32> {
  static constexpr int64_t kBytesPerK = kPanel * 4;
  static HWY_INLINE void Load(const std::byte* at_k, int lane, VF& lo, VF& hi) {
    const DF df;
    const float* p = reinterpret_cast<const float*>(at_k) + lane;
    lo = hn::Load(df, p);
    hi = hn::Load(df, p + kHalf);
  }
};

template <>
struct Widen<DType::kBF16> {
  static constexpr int64_t kBytesPerK = kPanel * 2;
  static HWY_INLINE void Load(const std::byte* at_k, int lane, VF& lo, VF& hi) {
    const DF df;
    const hn::RebindToUnsigned<DF> du;
    const auto pair = hn::Load(du, reinterpret_cast<const uint32_t*>(at_k) + lane);
    lo = hn::BitCast(df, hn::ShiftLeft<16>(pair));
    hi = hn::BitCast(df, hn::And(pair, hn::Set(du, 0xFFFF0000u)));
  }
};

template <>
struct Widen<DType::kF16> {
  static constexpr int64_t kBytesPerK = kPanel * 2;
  static HWY_INLINE void Load(const std::byte* at_k, int lane, VF& lo, VF& hi) {
    const DF df;
    const hn::Rebind<hwy::float16_t, DF> dh;
    const auto* p = reinterpret_cast<const hwy::float16_t*>(at_k) + lane;
    lo = hn::PromoteTo(df, hn::Load(dh, p));
    hi = hn::PromoteTo(df, hn::Load(dh, p + kHalf));
  }
};

// kRows rows of x times kUnits units starting at unit `unit` of the panel at w (later panels follow at panel_bytes). c
// points to output 0 of that panel.
template <DType kType, int kRows, int kUnits>
HWY_NOINLINE void Tile(const float* HWY_RESTRICT x, int64_t x_stride, const std::byte* HWY_RESTRICT w,
                       int64_t panel_bytes, int unit, float* HWY_RESTRICT c, int64_t c_stride, int64_t k,
                       bool accumulate) {
  const DF df;
  VF lo[kRows][kUnits], hi[kRows][kUnits];
  const std::byte* from[kUnits];
  int lane[kUnits];
  int64_t to[kUnits];
#pragma GCC unroll 16
  for (int u = 0; u < kUnits; ++u) {
    const int panel = (unit + u) / kUnitsPerPanel;
    lane[u] = (unit + u) % kUnitsPerPanel * kLanes;
    from[u] = w + panel * panel_bytes;
    to[u] = panel * kPanel + lane[u];
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
    for (int u = 0; u < kUnits; ++u) {
      lo[m][u] = accumulate ? hn::LoadU(df, c + m * c_stride + to[u]) : hn::Zero(df);
      hi[m][u] = accumulate ? hn::LoadU(df, c + m * c_stride + to[u] + kHalf) : hn::Zero(df);
    }
  }
  for (int64_t i = 0; i < k; ++i) {
    VF wl[kUnits], wh[kUnits];
#pragma GCC unroll 16
    for (int u = 0; u < kUnits; ++u) {
      Widen<kType>::Load(from[u] + i * Widen<kType>::kBytesPerK, lane[u], wl[u], wh[u]);
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const VF a = hn::Set(df, x[m * x_stride + i]);
#pragma GCC unroll 16
      for (int u = 0; u < kUnits; ++u) {
        lo[m][u] = hn::MulAdd(a, wl[u], lo[m][u]);
        hi[m][u] = hn::MulAdd(a, wh[u], hi[m][u]);
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
    for (int u = 0; u < kUnits; ++u) {
      hn::StoreU(lo[m][u], df, c + m * c_stride + to[u]);
      hn::StoreU(hi[m][u], df, c + m * c_stride + to[u] + kHalf);
    }
  }
}

// All units of kPanels whole panels.
template <DType kType, int kRows, int kPanels>
HWY_INLINE void Panels(const float* x, int64_t x_stride, const std::byte* w, int64_t panel_bytes, float* c,
                       int64_t c_stride, int64_t k, bool accumulate) {
  constexpr int kAll = kPanels * kUnitsPerPanel;
  constexpr int kUnits = UnitsAtOnce(kRows) < kAll ? UnitsAtOnce(kRows) : kAll;
  int unit = 0;
  for (; unit + kUnits <= kAll; unit += kUnits) {
    Tile<kType, kRows, kUnits>(x, x_stride, w, panel_bytes, unit, c, c_stride, k, accumulate);
  }
  if constexpr (kAll % kUnits != 0) {
    Tile<kType, kRows, kAll % kUnits>(x, x_stride, w, panel_bytes, unit, c, c_stride, k, accumulate);
  }
}

// One tile of kRows rows (chosen from `rows` <= kRows) times panels [0, panels), `columns` outputs of which exist.
template <DType kType, int kRows>
HWY_INLINE void RowTile(int rows, const float* x, int64_t x_stride, const std::byte* w, int64_t panel_bytes,
                        int64_t panels, int64_t columns, float* y, int64_t y_stride, int64_t k, bool accumulate) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      return RowTile<kType, kRows - 1>(rows, x, x_stride, w, panel_bytes, panels, columns, y, y_stride, k, accumulate);
    }
  }
  constexpr int kPanels = PanelsAtOnce(kRows);
  const int64_t whole = columns / kPanel;
  int64_t p = 0;
  for (; p + kPanels <= whole; p += kPanels) {
    Panels<kType, kRows, kPanels>(x, x_stride, w + p * panel_bytes, panel_bytes, y + p * kPanel, y_stride, k,
                                  accumulate);
  }
  if constexpr (kPanels == 4) {
    if (p + 2 <= whole) {
      Panels<kType, kRows, 2>(x, x_stride, w + p * panel_bytes, panel_bytes, y + p * kPanel, y_stride, k, accumulate);
      p += 2;
    }
  }
  for (; p < whole; ++p) {
    Panels<kType, kRows, 1>(x, x_stride, w + p * panel_bytes, panel_bytes, y + p * kPanel, y_stride, k, accumulate);
  }
  if (p < panels) {  // the last panel of W, in part padding: its outputs pass through a buffer
    HWY_ALIGN float c[kRows * kPanel];
    const size_t valid_bytes = static_cast<size_t>(columns - p * kPanel) * sizeof(float);
    if (accumulate) {
      std::memset(c, 0, sizeof(c));
      for (int m = 0; m < kRows; ++m) std::memcpy(c + m * kPanel, y + m * y_stride + p * kPanel, valid_bytes);
    }
    Panels<kType, kRows, 1>(x, x_stride, w + p * panel_bytes, panel_bytes, c, kPanel, k, accumulate);
    for (int m = 0; m < kRows; ++m) std::memcpy(y + m * y_stride + p * kPanel, c + m * kPanel, valid_bytes);
  }
}

template <DType kType>
void RunBlock(const Problem& q, const Block& b) {
  HWY_ALIGN float scratch[kMaxRows * kScratchStride];
  const int64_t columns = std::min(b.panels * kPanel, q.n - b.panel * kPanel);
  const int64_t tiles = (b.rows + kMaxRows - 1) / kMaxRows;
  for (int64_t k0 = 0; k0 < q.k; k0 += kKBlock) {
    const int64_t k = std::min(kKBlock, q.k - k0);
    const std::byte* w = q.panels + b.panel * q.panel_bytes + k0 * Widen<kType>::kBytesPerK;
    for (int64_t t = 0; t < tiles; ++t) {
      // Even shares: 13 rows are 7 + 6, not 12 + 1.
      const int64_t row = b.row + b.rows * t / tiles, rows = b.row + b.rows * (t + 1) / tiles - row;
      const float* x = q.x + row * q.x_stride + k0;
      // One row too: another thread has just written it, and line by line, as the products come to it, each line would
      // be waited for; a copy asks for all at once.
      for (int64_t m = 0; m < rows; ++m)
        std::memcpy(scratch + m * kScratchStride, x + m * q.x_stride, static_cast<size_t>(k) * sizeof(float));
      RowTile<kType, kMaxRows>(static_cast<int>(rows), scratch, kScratchStride, w, q.panel_bytes, b.panels, columns,
                               q.y + row * q.y_stride + b.panel * kPanel, q.y_stride, k, k0 != 0);
    }
  }
}

void MatMulBlock(const Problem& q, const Block& b) {
  switch (q.dtype) {
    case DType::kF32:
      return RunBlock<DType::kF32>(q, b);
    case DType::kF16:
      return RunBlock<DType::kF16>(q, b);
    default:
      return RunBlock<DType::kBF16>(q, b);
  }
}

// Whether MulAdd rounds once.
bool FusedMulAdd() { return HWY_NATIVE_FMA != 0; }
const char* IsaName() { return hwy::TargetName(HWY_TARGET); }

}  // namespace HWY_NAMESPACE
}  // namespace livequant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace livequant {
namespace {

HWY_EXPORT(MatMulBlock);
HWY_EXPORT(FusedMulAdd);
HWY_EXPORT(IsaName);

constexpr size_t kAlignment = 64;

// [n][k] values of T -> panels [k][kPanel]; `slot` maps an output of a panel to its place among the 32.
template <class T, class Slot>
void PackPanels(const std::byte* from, int64_t n, int64_t k, std::byte* to, Slot slot) {
  for (int64_t row = 0; row < n; ++row) {
    const int64_t panel = row / PackedMatrix::kPanel, j = slot(static_cast<int>(row % PackedMatrix::kPanel));
    std::byte* out = to + (panel * k * PackedMatrix::kPanel + j) * static_cast<int64_t>(sizeof(T));
    const std::byte* in = from + row * k * static_cast<int64_t>(sizeof(T));
    for (int64_t i = 0; i < k; ++i) {
      std::memcpy(out + i * PackedMatrix::kPanel * static_cast<int64_t>(sizeof(T)),
                  in + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    }
  }
}

matmul::Problem ProblemOf(MatrixView<const float> x, const PackedMatrix& w, MatrixView<float> y) {
  LQ_CHECK(x.cols == w.k() && y.cols == w.n() && x.rows == y.rows);
  const int64_t panel_bytes = PackedMatrix::kPanel * w.k() * DTypeBytes(w.dtype());
  return {x.data, w.panels(), y.data, x.stride, y.stride, w.n(), w.k(), panel_bytes, w.dtype()};
}

}  // namespace

void PackedMatrix::Free::operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t(kAlignment)); }

Result<PackedMatrix> PackedMatrix::Pack(DType dtype, const void* weights, int64_t n, int64_t k) {
  if (dtype != DType::kF32 && dtype != DType::kF16 && dtype != DType::kBF16) {
    return Status(Code::kUnsupported, std::string("matrix of ") + DTypeName(dtype) + ": nearest are f32, f16, bf16");
  }
  if (n < 1 || k < 1) {
    return Status(Code::kInvalidArgument,
                  "matrix [" + std::to_string(n) + "][" + std::to_string(k) + "]: both sizes must be >= 1");
  }
  const int64_t value_bytes = DTypeBytes(dtype);
  constexpr int64_t kLimit = std::numeric_limits<int64_t>::max();
  const int64_t panels = (n - 1) / kPanel + 1;
  if (panels > kLimit / kPanel / value_bytes / k) {
    return Status(Code::kOutOfRange, "matrix [" + std::to_string(n) + "][" + std::to_string(k) + "] of " +
                                         DTypeName(dtype) + ": more than 2^63 - 1 bytes");
  }
  PackedMatrix out;
  out.n_ = n;
  out.k_ = k;
  out.dtype_ = dtype;
  out.bytes_ = panels * kPanel * k * value_bytes;
  out.data_.reset(
      static_cast<std::byte*>(::operator new[](static_cast<size_t>(out.bytes_), std::align_val_t(kAlignment))));
  if (n % kPanel != 0) {
    const int64_t panel_bytes = kPanel * k * value_bytes;
    std::memset(out.data_.get() + (panels - 1) * panel_bytes, 0, static_cast<size_t>(panel_bytes));
  }
  const auto* from = static_cast<const std::byte*>(weights);
  const auto plain = [](int j) { return j; };
  const auto paired = [](int j) { return j < kPanel / 2 ? 2 * j : 2 * (j - kPanel / 2) + 1; };
  switch (dtype) {
    case DType::kF32:
      PackPanels<float>(from, n, k, out.data_.get(), plain);
      break;
    case DType::kF16:
      PackPanels<uint16_t>(from, n, k, out.data_.get(), plain);
      break;
    default:
      PackPanels<uint16_t>(from, n, k, out.data_.get(), paired);
      break;
  }
  return out;
}

void MatMulColumns(MatrixView<const float> x, const PackedMatrix& w, int64_t first, int64_t count,
                   MatrixView<float> y) {
  constexpr int64_t kPanel = PackedMatrix::kPanel;
  const int64_t end = first + count;
  LQ_CHECK(first >= 0 && first % kPanel == 0 && end <= w.n() && (end % kPanel == 0 || end == w.n()));
  if (x.rows == 0 || count == 0) return;
  HWY_DYNAMIC_DISPATCH(MatMulBlock)
  (ProblemOf(x, w, y), {.row = 0, .rows = x.rows, .panel = first / kPanel, .panels = (count + kPanel - 1) / kPanel});
}

void MatMul(MatrixView<const float> x, const PackedMatrix& w, MatrixView<float> y, Team& team) {
  const matmul::Problem q = ProblemOf(x, w, y);
  if (x.rows == 0) return;
  const int64_t panels = (w.n() + PackedMatrix::kPanel - 1) / PackedMatrix::kPanel;

  // Tuned by bench/kernels_bench: a group of panels (256 outputs) fills a quarter of a 1 MiB L2 with one k block of
  // bf16, and 96 rows share each pass over it. Few rows are read-bound and short: each thread gets one contiguous
  // range, the same in every step.
  constexpr int64_t kRowBlock = 96;
  const int threads = team.threads();
  const int64_t row_blocks = (x.rows + kRowBlock - 1) / kRowBlock;
  int64_t group = 8;
  if (x.rows <= 4) {
    group = (panels + threads - 1) / threads;
  } else if (const int64_t share = (panels * row_blocks + threads - 1) / threads; share < group) {
    group = (share + 3) / 4 * 4;
  }
  const int64_t groups = (panels + group - 1) / group;
  const auto kernel = HWY_DYNAMIC_DISPATCH(MatMulBlock);
  team.For(groups * row_blocks, [&](int64_t index, int) {
    const int64_t g = index / row_blocks, r = index % row_blocks;
    const int64_t row = x.rows * r / row_blocks;
    kernel(q, {.row = row,
               .rows = x.rows * (r + 1) / row_blocks - row,
               .panel = g * group,
               .panels = std::min(group, panels - g * group)});
  });
}

void MatMul(MatrixView<const float> x, const PackedMatrix& w, MatrixView<float> y, ThreadPool& pool) {
  // Below about 128 KiB of W for one row, waking a thread costs more than it gives.
  if (w.bytes() * x.rows < (int64_t{128} << 10)) {
    Team alone;
    return MatMul(x, w, y, alone);
  }
  pool.Together([&](Team& team) { MatMul(x, w, y, team); });
}

const char* MatMulArithmetic() { return HWY_DYNAMIC_DISPATCH(FusedMulAdd)() ? "f32_fma_chain" : "f32_mul_add_chain"; }
const char* KernelIsa() { return HWY_DYNAMIC_DISPATCH(IsaName)(); }

}  // namespace livequant
#endif  // HWY_ONCE
