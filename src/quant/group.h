// quant/group.h: what the quantizers of one group of values have in common.
//
// A quantizer is three functions: Fit (values -> stored qparams), Code (one value and the *stored* qparams -> code) and
// Value (code and stored qparams -> f32). Code cannot see the values that Fit saw, so codes always come from the
// qparams as a reader will find them (methods.md 0.1), except in modes named compat.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "base/status.h"
#include "numeric/dtype.h"

namespace livequant {

// `count` values, `stride` apart: channels of a row (1) or rows of a channel (the row pitch). Owns nothing.
struct Group {
  const float* data = nullptr;
  int64_t count = 0, stride = 1;
  float operator[](int64_t i) const { return data[i * stride]; }
};

// Why a group has no qparams. Small and free of allocation: Fit runs once per group of every row.
enum class FitFault : uint8_t {
  kNone,
  kNonFinite,    // NaN or Inf among the values
  kBeyondRange,  // scale, minimum or offset would be infinite in its stored dtype
  kSmallScale,   // the stored scale would be below the smallest normal and the policy refuses that
};

// The Status of a fault: kNonFinite for the first two, kOutOfRange for a refused small scale. Names the value and the
// limit. `where` places the group ("row 3, channels 32..63"); `qparam` is the dtype that was too narrow. REQUIRES not
// kNone.
Status FaultStatus(FitFault fault, const Group& values, DType qparam, const std::string& where);

// Smallest and largest value. False: NaN or Inf among them, `lo` and `hi` unspecified. REQUIRES count >= 1.
inline bool FiniteRange(const Group& x, float* lo, float* hi) {
  float mn = x[0], mx = x[0], probe = 0;
  for (int64_t i = 0; i < x.count; ++i) {
    const float v = x[i];
    mn = v < mn ? v : mn;
    mx = v > mx ? v : mx;
    probe += v * 0.0f;  // 0, or NaN for good once a NaN or Inf was seen
  }
  *lo = mn;
  *hi = mx;
  return probe == 0;
}

}  // namespace livequant
