// numeric/dtype.h: the number formats that a stored value can have.
#pragma once

#include <cstdint>

namespace livequant {

enum class DType : uint8_t { kF32, kF16, kBF16, kFp8E4M3, kFp8E5M2 };

// Bytes of one value.
constexpr int DTypeBytes(DType t) { return t == DType::kF32 ? 4 : (t == DType::kF16 || t == DType::kBF16) ? 2 : 1; }
// Lower-case name: "f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2".
constexpr const char* DTypeName(DType t) {
  switch (t) {
    case DType::kF32: return "f32";
    case DType::kF16: return "f16";
    case DType::kBF16: return "bf16";
    case DType::kFp8E4M3: return "fp8_e4m3";
    case DType::kFp8E5M2: return "fp8_e5m2";
  }
  return "?";
}

}  // namespace livequant
