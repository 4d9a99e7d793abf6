// kernels/cpu/round_rows.cc: see kernels/round_rows.h.
//
// In f32 and integer lanes alone, one sequence of operations for all ISAs: a conversion to f16 and back would round by
// the mode of the machine, and not every ISA has one.
#include "kernels/round_rows.h"

#include <cstring>
#include <limits>

#include "base/check.h"
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/round_rows.cc"
#include "hwy/foreach_target.h"
// After foreach_target.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace livequant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The least magnitude that does not fit: half an ulp beyond the largest value.
template <DType kType>
constexpr float kLimit = kType == DType::kF16    ? 65520.0f
                         : kType == DType::kBF16 ? 0x1.FFp127f
                                                 : std::numeric_limits<float>::infinity();

// `x` with its lowest kBits bits rounded away, ties to even.
template <int kBits, class DF, class VF = hn::Vec<DF>>
HWY_INLINE VF DropBits(DF df, VF x) {
  const hn::RebindToUnsigned<DF> du;
  const auto bits = hn::BitCast(du, x);
  const auto odd = hn::And(hn::ShiftRight<kBits>(bits), hn::Set(du, 1));
  const auto up = hn::Add(hn::Add(bits, hn::Set(du, (1u << (kBits - 1)) - 1)), odd);
  return hn::BitCast(df, hn::And(up, hn::Set(du, ~((1u << kBits) - 1))));
}

template <DType kType, class DF, class VF = hn::Vec<DF>>
HWY_INLINE VF RoundValues(DF df, VF x) {
  if constexpr (kType == DType::kBF16) return DropBits<16>(df, x);
  // Below 2^-14 the ulp of f16 is 2^-24, that of an f32 in [0.5, 1): the sum rounds there. Zeros become +0.
  const VF shift = hn::Set(df, 0.75f);
  const VF subnormal = hn::Sub(hn::Add(x, shift), shift);
  return hn::IfThenElse(hn::Lt(hn::Abs(x), hn::Set(df, 0x1p-14f)), subnormal, DropBits<13>(df, x));
}

template <DType kType>
HWY_INLINE bool RoundAs(MatrixView<float> rows) {
  const hn::CappedTag<float, 16> df;
  const hn::CappedTag<float, 1> d1;
  constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(df));
  const int64_t whole = rows.cols / kLanes * kLanes;
  for (int64_t r = 0; r < rows.rows; ++r) {
    float* const row = rows.row(r);
    auto fits = hn::Lt(hn::Zero(df), hn::Set(df, 1.0f));
    for (int64_t c = 0; c < whole; c += kLanes)
      fits = hn::And(fits, hn::Lt(hn::Abs(hn::LoadU(df, row + c)), hn::Set(df, kLimit<kType>)));
    bool all = hn::AllTrue(df, fits);
    for (int64_t c = whole; c < rows.cols; ++c)
      all &= hn::AllTrue(d1, hn::Lt(hn::Abs(hn::LoadU(d1, row + c)), hn::Set(d1, kLimit<kType>)));
    if (!all) return false;
    if constexpr (kType == DType::kF32) continue;
    for (int64_t c = 0; c < whole; c += kLanes) hn::StoreU(RoundValues<kType>(df, hn::LoadU(df, row + c)), df, row + c);
    for (int64_t c = whole; c < rows.cols; ++c) hn::StoreU(RoundValues<kType>(d1, hn::LoadU(d1, row + c)), d1, row + c);
  }
  return true;
}

bool RoundRowsOf(DType dtype, MatrixView<float> rows) {
  if (dtype == DType::kF32) return RoundAs<DType::kF32>(rows);
  if (dtype == DType::kF16) return RoundAs<DType::kF16>(rows);
  LQ_CHECK(dtype == DType::kBF16);
  return RoundAs<DType::kBF16>(rows);
}

// The 16 bits of rounded values, in the low halves of 32-bit lanes.
template <DType kType, class DF, class VF = hn::Vec<DF>>
HWY_INLINE hn::Vec<hn::RebindToSigned<DF>> BitsOf(DF df, VF x) {
  const hn::RebindToSigned<DF> di;
  const hn::RebindToUnsigned<DF> du;
  const VF rounded = RoundValues<kType>(df, x);
  if constexpr (kType == DType::kBF16) return hn::BitCast(di, hn::ShiftRight<16>(hn::BitCast(du, rounded)));
  // The sign of x: a value that rounds to zero keeps it here.
  const auto sign = hn::And(hn::ShiftRight<16>(hn::BitCast(du, x)), hn::Set(du, 0x8000u));
  const VF magnitude = hn::Abs(rounded);
  const auto normal = hn::ShiftRight<13>(hn::Sub(hn::BitCast(du, magnitude), hn::Set(du, 112u << 23)));
  const auto subnormal = hn::BitCast(du, hn::ConvertTo(di, hn::Mul(magnitude, hn::Set(df, 0x1p24f))));
  const auto small = hn::RebindMask(du, hn::Lt(magnitude, hn::Set(df, 0x1p-14f)));
  return hn::BitCast(di, hn::Or(sign, hn::IfThenElse(small, subnormal, normal)));
}

template <DType kType>
HWY_INLINE void NarrowAs(const float* values, int64_t count, std::byte* out) {
  const hn::CappedTag<float, 16> df;
  const hn::Rebind<uint16_t, decltype(df)> d16;
  const hn::CappedTag<float, 1> d1;
  constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(df));
  uint16_t* const to = reinterpret_cast<uint16_t*>(out);
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes)
    hn::StoreU(hn::DemoteTo(d16, BitsOf<kType>(df, hn::LoadU(df, values + c))), d16, to + c);
  for (; c < count; ++c) {
    const auto bits = static_cast<uint16_t>(hn::GetLane(BitsOf<kType>(d1, hn::LoadU(d1, values + c))));
    std::memcpy(out + 2 * c, &bits, sizeof(bits));
  }
}

void NarrowValuesOf(DType dtype, const float* values, int64_t count, std::byte* out) {
  if (dtype == DType::kF16) return NarrowAs<DType::kF16>(values, count, out);
  LQ_CHECK(dtype == DType::kBF16);
  NarrowAs<DType::kBF16>(values, count, out);
}

}  // namespace HWY_NAMESPACE
}  // namespace livequant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace livequant {
namespace {
HWY_EXPORT(RoundRowsOf);
HWY_EXPORT(NarrowValuesOf);
}  // namespace

bool RoundRowsTo(DType dtype, MatrixView<float> rows) { return HWY_DYNAMIC_DISPATCH(RoundRowsOf)(dtype, rows); }

void NarrowValues(DType dtype, const float* values, int64_t count, std::byte* out) {
  HWY_DYNAMIC_DISPATCH(NarrowValuesOf)(dtype, values, count, out);
}

}  // namespace livequant
#endif  // HWY_ONCE
