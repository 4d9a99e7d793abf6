// kernels/cpu/partial-inl.h: the first `count` lanes of a vector of f32, memory beyond them neither read nor written.
//
// Highway's own masked loads and stores touch whole aligned vectors on targets without masked instructions; there the
// lanes go through a buffer.
#if defined(LIVEQUANT_KERNELS_CPU_PARTIAL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LIVEQUANT_KERNELS_CPU_PARTIAL_INL_H_
#undef LIVEQUANT_KERNELS_CPU_PARTIAL_INL_H_
#else
#define LIVEQUANT_KERNELS_CPU_PARTIAL_INL_H_
#endif

#include <cstddef>
#include <cstring>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace livequant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Lanes from `count` on are zero. REQUIRES count <= Lanes(df).
template <class DF, class VF = hn::Vec<DF>>
HWY_INLINE VF LoadFirst(DF df, const float* p, size_t count) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
  return hn::MaskedLoad(hn::FirstN(df, count), df, p);
#else
  HWY_ALIGN float buffer[hn::MaxLanes(DF())] = {};
  std::memcpy(buffer, p, count * sizeof(float));
  return hn::Load(df, buffer);
#endif
}

// REQUIRES count <= Lanes(df).
template <class DF, class VF = hn::Vec<DF>>
HWY_INLINE void StoreFirst(VF v, DF df, float* p, size_t count) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
  hn::BlendedStore(v, hn::FirstN(df, count), df, p);
#else
  HWY_ALIGN float buffer[hn::MaxLanes(DF())];
  hn::Store(v, df, buffer);
  std::memcpy(p, buffer, count * sizeof(float));
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace livequant
HWY_AFTER_NAMESPACE();

#endif  // include guard
