// kernels/cpu/ops.cc: see kernels/ops.h.
//
// Rows are cut into blocks of 16 columns, 16 / Lanes vectors each, so that column j meets partial sum j % 16 on every
// ISA. Sums of squares and rotations use a product and a sum, each rounded: equal on every ISA. Exp uses fused
// multiply-adds.
#include "kernels/ops.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/ops.cc"
#include "hwy/foreach_target.h"
// After foreach_target.
#include "hwy/highway.h"
#include "kernels/cpu/exp-inl.h"
#include "kernels/cpu/partial-inl.h"

HWY_BEFORE_NAMESPACE();
namespace livequant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int kPartials = 16;
using DF = hn::CappedTag<float, kPartials>;
using VF = hn::Vec<DF>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(DF()));
constexpr int kVectors = kPartials / kLanes;

// partial[j] += partial[j + width] for width 8, 4, 2, 1.
template <class T>
HWY_INLINE T Fold(T* partial) {
  for (int width = kPartials / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) partial[j] += partial[j + width];
  }
  return partial[0];
}

float SumOfSquares(const float* x, int64_t n) {
  const DF df;
  VF acc[kVectors];
  for (int v = 0; v < kVectors; ++v) acc[v] = hn::Zero(df);
  int64_t i = 0;
  for (; i + kPartials <= n; i += kPartials) {
    for (int v = 0; v < kVectors; ++v) {
      const VF a = hn::LoadU(df, x + i + v * kLanes);
      acc[v] = hn::Add(acc[v], hn::Mul(a, a));
    }
  }
  HWY_ALIGN float partial[kPartials];
  for (int v = 0; v < kVectors; ++v) hn::Store(acc[v], df, partial + v * kLanes);
  for (int j = 0; i < n; ++i, ++j) partial[j] += x[i] * x[i];
  return Fold(partial);
}

void RmsNorm(MatrixView<const float> x, const float* gamma, float eps, MatrixView<float> y) {
  const DF df;
  for (int64_t r = 0; r < x.rows; ++r) {
    const float* in = x.row(r);
    float* out = y.row(r);
    const float mean = SumOfSquares(in, x.cols) / static_cast<float>(x.cols);
    const float scale = 1.0f / std::sqrt(mean + eps);
    const VF s = hn::Set(df, scale);
    int64_t i = 0;
    for (; i + kLanes <= x.cols; i += kLanes) {
      hn::StoreU(hn::Mul(hn::Mul(hn::LoadU(df, in + i), s), hn::LoadU(df, gamma + i)), df, out + i);
    }
    for (; i < x.cols; ++i) out[i] = in[i] * scale * gamma[i];
  }
}

// g / (1 + e^-g) * u
HWY_INLINE VF SiluMulVector(VF g, VF u) {
  const DF df;
  return hn::Mul(hn::Div(g, hn::Add(hn::Set(df, 1.0f), Exp(df, hn::Neg(g)))), u);
}

void SiluMul(MatrixView<const float> gate, MatrixView<const float> up, MatrixView<float> y) {
  const DF df;
  for (int64_t r = 0; r < y.rows; ++r) {
    const float *g = gate.row(r), *u = up.row(r);
    float* out = y.row(r);
    int64_t i = 0;
    for (; i + kLanes <= y.cols; i += kLanes) {
      hn::StoreU(SiluMulVector(hn::LoadU(df, g + i), hn::LoadU(df, u + i)), df, out + i);
    }
    if (i < y.cols) {
      const auto left = static_cast<size_t>(y.cols - i);
      StoreFirst(SiluMulVector(LoadFirst(df, g + i, left), LoadFirst(df, u + i, left)), df, out + i, left);
    }
  }
}

void Add(MatrixView<const float> x, MatrixView<float> y) {
  const DF df;
  for (int64_t r = 0; r < y.rows; ++r) {
    const float* in = x.row(r);
    float* out = y.row(r);
    int64_t i = 0;
    for (; i + kLanes <= y.cols; i += kLanes) {
      hn::StoreU(hn::Add(hn::LoadU(df, out + i), hn::LoadU(df, in + i)), df, out + i);
    }
    for (; i < y.cols; ++i) out[i] += in[i];
  }
}

// (a, b) -> (a cos - b sin, b cos + a sin) for `pairs` pairs. Half-split: a = x[i], b = x[pairs + i]. Interleaved:
// x[2i], x[2i+1].
void RotateHalfSplit(float* x, const float* cos, const float* sin, int pairs) {
  const DF df;
  float* a = x;
  float* b = x + pairs;
  int i = 0;
  for (; i + kLanes <= pairs; i += kLanes) {
    const VF va = hn::LoadU(df, a + i), vb = hn::LoadU(df, b + i);
    const VF c = hn::LoadU(df, cos + i), s = hn::LoadU(df, sin + i);
    hn::StoreU(hn::Sub(hn::Mul(va, c), hn::Mul(vb, s)), df, a + i);
    hn::StoreU(hn::Add(hn::Mul(vb, c), hn::Mul(va, s)), df, b + i);
  }
  for (; i < pairs; ++i) {
    const float va = a[i], vb = b[i];
    a[i] = va * cos[i] - vb * sin[i];
    b[i] = vb * cos[i] + va * sin[i];
  }
}

void RotateInterleaved(float* x, const float* cos, const float* sin, int pairs) {
  const DF df;
  int i = 0;
  for (; i + kLanes <= pairs; i += kLanes) {
    VF va, vb;
    hn::LoadInterleaved2(df, x + 2 * i, va, vb);
    const VF c = hn::LoadU(df, cos + i), s = hn::LoadU(df, sin + i);
    hn::StoreInterleaved2(hn::Sub(hn::Mul(va, c), hn::Mul(vb, s)), hn::Add(hn::Mul(vb, c), hn::Mul(va, s)), df,
                          x + 2 * i);
  }
  for (; i < pairs; ++i) {
    const float va = x[2 * i], vb = x[2 * i + 1];
    x[2 * i] = va * cos[i] - vb * sin[i];
    x[2 * i + 1] = vb * cos[i] + va * sin[i];
  }
}

void Rope(MatrixView<float> x, int heads, int head_dim, std::span<const int32_t> positions, const RopeTable& table) {
  const auto rotate = table.pairing() == RopePairing::kHalfSplit ? RotateHalfSplit : RotateInterleaved;
  for (int64_t r = 0; r < x.rows; ++r) {
    const int32_t position = positions[static_cast<size_t>(r)];
    for (int h = 0; h < heads; ++h) {
      rotate(x.row(r) + int64_t{h} * head_dim, table.cos(position), table.sin(position), table.dims() / 2);
    }
  }
}

// Sum of e^(x - shift), f32 terms, 16 partial sums in double.
double SumOfExp(const float* x, int64_t n, float shift) {
  const DF df;
  const VF down = hn::Set(df, shift);
  double partial[kPartials] = {};
  HWY_ALIGN float terms[kPartials];
  int64_t i = 0;
  for (; i + kPartials <= n; i += kPartials) {
    for (int v = 0; v < kVectors; ++v) {
      hn::Store(Exp(df, hn::Sub(hn::LoadU(df, x + i + v * kLanes), down)), df, terms + v * kLanes);
    }
    for (int j = 0; j < kPartials; ++j) partial[j] += static_cast<double>(terms[j]);
  }
  for (int j = 0; i < n; ++i, ++j) {
    partial[j] += static_cast<double>(hn::GetLane(Exp(df, hn::Set(df, x[i] - shift))));
  }
  return Fold(partial);
}

}  // namespace HWY_NAMESPACE
}  // namespace livequant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace livequant {
namespace {
HWY_EXPORT(RmsNorm);
HWY_EXPORT(SiluMul);
HWY_EXPORT(Add);
HWY_EXPORT(Rope);
HWY_EXPORT(SumOfExp);

bool SameShape(MatrixView<const float> a, MatrixView<const float> b) { return a.rows == b.rows && a.cols == b.cols; }
}  // namespace

void RmsNormRows(MatrixView<const float> x, const float* gamma, float eps, MatrixView<float> y) {
  LQ_CHECK(SameShape(x, y) && eps > 0);
  HWY_DYNAMIC_DISPATCH(RmsNorm)(x, gamma, eps, y);
}

void SiluMulRows(MatrixView<const float> gate, MatrixView<const float> up, MatrixView<float> y) {
  LQ_CHECK(SameShape(gate, y) && SameShape(up, y));
  HWY_DYNAMIC_DISPATCH(SiluMul)(gate, up, y);
}

void AddRows(MatrixView<const float> x, MatrixView<float> y) {
  LQ_CHECK(SameShape(x, y));
  HWY_DYNAMIC_DISPATCH(Add)(x, y);
}

void RopeRows(MatrixView<float> x, int heads, int head_dim, std::span<const int32_t> positions,
              const RopeTable& table) {
  LQ_CHECK(static_cast<int64_t>(positions.size()) == x.rows && int64_t{heads} * head_dim <= x.cols);
  LQ_CHECK(table.dims() <= head_dim);
  for (const int32_t p : positions) LQ_CHECK(p >= 0 && p < table.max_len());
  HWY_DYNAMIC_DISPATCH(Rope)(x, heads, head_dim, positions, table);
}

double LogSumExp(std::span<const float> x) {
  float largest = -std::numeric_limits<float>::infinity();
  for (const float v : x) {
    if (std::isnan(v)) return std::numeric_limits<double>::quiet_NaN();
    largest = std::max(largest, v);
  }
  if (std::isinf(largest)) return static_cast<double>(largest);
  return static_cast<double>(largest) +
         std::log(HWY_DYNAMIC_DISPATCH(SumOfExp)(x.data(), static_cast<int64_t>(x.size()), largest));
}

}  // namespace livequant
#endif  // HWY_ONCE
