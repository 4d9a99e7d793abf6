// kernels/cpu/exp-inl.h: e^x of a vector of f32.
//
// x = n ln 2 + r with n = round(x / ln 2), |r| <= 0.35; e^r as 1 + r + r^2 p(r), p of degree 5, minimax in relative
// error (its own error 5e-11; found by Lawson's iteration on |r| <= 0.3475); times 2^n in two halves, so that results
// below 2^-126 are rounded once into the subnormals and large ones become inf. Error  <= 2 ulp on [-87, 0] (a test
// sweeps it); e^-inf = 0, e^0 = 1 exactly, e^NaN = NaN, e^x = 0 for x <= -104,
//        inf for x >= 89.
// Bits   every step is one explicit operation, so all targets with fused multiply-add give the same bits (without: last
// bits
//        differ).
#if defined(LIVEQUANT_KERNELS_CPU_EXP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LIVEQUANT_KERNELS_CPU_EXP_INL_H_
#undef LIVEQUANT_KERNELS_CPU_EXP_INL_H_
#else
#define LIVEQUANT_KERNELS_CPU_EXP_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace livequant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// e^x lane by lane; `df` is any f32 tag.
template <class DF, class VF = hn::Vec<DF>>
HWY_INLINE VF Exp(DF df, VF x) {
  const hn::RebindToSigned<DF> di;
  // Comparisons are false for NaN, which therefore passes through; Min and Max would differ from ISA to ISA.
  const VF low = hn::Set(df, -104.0f), high = hn::Set(df, 89.0f);
  x = hn::IfThenElse(hn::Lt(x, low), low, x);
  x = hn::IfThenElse(hn::Gt(x, high), high, x);
  const auto n = hn::NearestInt(hn::Mul(x, hn::Set(df, 1.44269504088896341f)));
  const VF nf = hn::ConvertTo(df, n);
  // ln 2 in two parts; the first has few enough bits that n times it is exact.
  VF r = hn::NegMulAdd(nf, hn::Set(df, 0.693359375f), x);
  r = hn::NegMulAdd(nf, hn::Set(df, -2.12194440e-4f), r);
  VF p = hn::Set(df, 1.97900721e-4f);
  p = hn::MulAdd(p, r, hn::Set(df, 1.39449432e-3f));
  p = hn::MulAdd(p, r, hn::Set(df, 8.33349861e-3f));
  p = hn::MulAdd(p, r, hn::Set(df, 4.16662917e-2f));
  p = hn::MulAdd(p, r, hn::Set(df, 1.66666657e-1f));
  p = hn::MulAdd(p, r, hn::Set(df, 0.5f));
  p = hn::Add(hn::MulAdd(p, hn::Mul(r, r), r), hn::Set(df, 1.0f));
  const auto half = hn::ShiftRight<1>(n);
  const auto bias = hn::Set(di, 127);
  const VF scale_a = hn::BitCast(df, hn::ShiftLeft<23>(hn::Add(half, bias)));
  const VF scale_b = hn::BitCast(df, hn::ShiftLeft<23>(hn::Add(hn::Sub(n, half), bias)));
  return hn::Mul(hn::Mul(p, scale_a), scale_b);
}

}  // namespace HWY_NAMESPACE
}  // namespace livequant
HWY_AFTER_NAMESPACE();

#endif  // include guard
