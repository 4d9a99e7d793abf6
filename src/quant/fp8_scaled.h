// quant/fp8_scaled.h: a value divided by a static scale, stored as fp8; no qparams in the cache.
//
//   code = fp8(x / scale), to nearest even, saturating    x' = fp8 value * scale, one f32 product
//
// Bytes   one code a value. The scale is part of the schema. Normative text and a worked example:
// docs/formats/fp8_scaled.md Scale   finite, a normal f32, and largest fp8 * scale must be finite; CheckFp8Scale. It
// moves the window (full precision from
//         2^-6 scale for e4m3, saturation at 448 scale) and does not change the relative precision.
// Error   |x| <= max * scale: |x - x'| <= max(2^-m |x|, h scale) + 2^-24 |x'| + f32's smallest subnormal; m 4, h 2^-10
// for
//         e4m3; m 3, h 2^-17 for e5m2. Beyond it x' = +-max * scale: saturation is part of the format.
// Fails   x must be finite: the caller refuses NaN and Inf.
// Source  methods.md 9.1.
#pragma once

#include <cstdint>

#include "numeric/float_formats.h"
#include "quant/group.h"

namespace livequant {

struct Fp8Spec {
  DType dtype = DType::kFp8E4M3;  // kFp8E4M3 or kFp8E5M2
  float scale = 1;
};

// kInvalidArgument: dtype is no fp8 format. kOutOfRange: the scale breaks the rule above.
Status CheckFp8Scale(const Fp8Spec& spec);

// The quotient is made in double and rounded once to fp8.
inline uint8_t Fp8Code(const Fp8Spec& spec, float x) {
  return static_cast<uint8_t>(EncodeAs(spec.dtype, static_cast<double>(x) / static_cast<double>(spec.scale)));
}
inline float Fp8Value(const Fp8Spec& spec, uint8_t code) { return DecodeAs(spec.dtype, code) * spec.scale; }

}  // namespace livequant
