// kernels/cpu/decode_rows.cc: coded rows of one head block -> f32, the vector side of kernels/page_codec.h.
//
// Invariants: bit for bit what DecodeRowsReference gives, on every ISA (the payload of a NaN excepted): each value is
// one product, one fused product-sum, or one difference and one product. Only bytes of the rows asked for are read:
// loads are as wide as the values that they bring, and what does not fill a vector goes one by one through quant/.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/targets.h"
#include "kernels/page_codec.h"
#include "numeric/float_formats.h"
#include "numeric/packed_bits.h"
#include "quant/affine_group.h"
#include "quant/fp8_scaled.h"
#include "quant/qserve_head.h"
#include "quant/symmetric_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/decode_rows.cc"
#include "hwy/foreach_target.h"  // compiles the part between BEFORE and AFTER once per ISA
#include "hwy/highway.h"

// Every kernel: name, what doctor prints, the template that implements it.
#define LQ_DECODE_ROWS(X)                                                           \
  X(DecodeF32, "decode_rows.f32", DecodeF32Rows)                                    \
  X(DecodeF16, "decode_rows.f16", DecodeValueRows<F16Values>)                       \
  X(DecodeBf16, "decode_rows.bf16", DecodeValueRows<Bf16Values>)                    \
  X(DecodeE4M3, "decode_rows.fp8_e4m3", DecodeValueRows<E4M3Values>)                \
  X(DecodeE5M2, "decode_rows.fp8_e5m2", DecodeValueRows<E5M2Values>)                \
  X(DecodeInt2Row, "decode_rows.int2.row", (DecodeRowGroups<2, Symmetric>))         \
  X(DecodeInt4Row, "decode_rows.int4.row", (DecodeRowGroups<4, Symmetric>))         \
  X(DecodeInt8Row, "decode_rows.int8.row", (DecodeRowGroups<8, Symmetric>))         \
  X(DecodeMin2Row, "decode_rows.min2.row", (DecodeRowGroups<2, Minimum>))           \
  X(DecodeMin4Row, "decode_rows.min4.row", (DecodeRowGroups<4, Minimum>))           \
  X(DecodeMin8Row, "decode_rows.min8.row", (DecodeRowGroups<8, Minimum>))           \
  X(DecodeMin2Channel, "decode_rows.min2.channel", DecodeChannelGroups<2>)          \
  X(DecodeMin4Channel, "decode_rows.min4.channel", DecodeChannelGroups<4>)          \
  X(DecodeMin8Channel, "decode_rows.min8.channel", DecodeChannelGroups<8>)          \
  X(DecodeOffset4Row, "decode_rows.offset4.row", (DecodeRowGroups<4, FloatOffset>)) \
  X(DecodeOffset8Row, "decode_rows.offset8.row", (DecodeRowGroups<8, FloatOffset>))

HWY_BEFORE_NAMESPACE();
namespace livequant::HWY_NAMESPACE {
#if HWY_TARGET != HWY_SCALAR  // one lane: the reference is that already
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DI32 = hn::RebindToSigned<DF>;
using DU32 = hn::RebindToUnsigned<DF>;
using DU16 = hn::Rebind<uint16_t, DF>;
using DU8 = hn::Rebind<uint8_t, DF>;
using VF = hn::Vec<DF>;

// f16 bits -> f32, subnormals, Inf and NaN included.
HWY_INLINE VF FromF16(hn::Vec<DU16> bits) {
  const DF df;
#if HWY_TARGET <= HWY_AVX2 && HWY_ARCH_X86
  return hn::PromoteTo(df, hn::BitCast(hn::Rebind<hwy::float16_t, DF>(), bits));
#else
  const DI32 di;
  const auto wide = hn::PromoteTo(di, bits);
  const auto mag = hn::And(wide, hn::Set(di, 0x7FFF));
  const auto sign = hn::ShiftLeft<16>(hn::And(wide, hn::Set(di, 0x8000)));
  const auto rebias = hn::Set(di, 112 << 23);
  const auto normal = hn::Add(hn::ShiftLeft<13>(mag), rebias);
  const auto special = hn::Add(normal, rebias);  // exponent 31 -> 255
  // 1.man * 2^-14 - 2^-14 is man * 2^-24, exactly, without a subnormal operand.
  const auto subnormal =
      hn::BitCast(di, hn::Sub(hn::BitCast(df, hn::Add(normal, hn::Set(di, 1 << 23))), hn::Set(df, 0x1p-14f)));
  auto result = hn::IfThenElse(hn::Gt(mag, hn::Set(di, 0x7BFF)), special, normal);
  result = hn::IfThenElse(hn::Gt(hn::Set(di, 0x400), mag), subnormal, result);
  return hn::BitCast(df, hn::Or(result, sign));
#endif
}

// a * b + c, rounded once.
HWY_INLINE VF FusedMulAdd(VF a, VF b, VF c) {
#if HWY_TARGET <= HWY_AVX2 && HWY_ARCH_X86
  return hn::MulAdd(a, b, c);
#else
  const DF df;
  HWY_ALIGN float x[hn::MaxLanes(DF())], y[hn::MaxLanes(DF())], z[hn::MaxLanes(DF())];
  hn::Store(a, df, x);
  hn::Store(b, df, y);
  hn::Store(c, df, z);
  for (size_t i = 0; i < hn::Lanes(df); ++i) z[i] = std::fma(x[i], y[i], z[i]);
  return hn::Load(df, z);
#endif
}

// The code bits of Lanes(DF) codes from byte p on, each code in its own 32-bit lane at bit `shift[lane]` of the word.
template <int kBits>
HWY_INLINE hn::Vec<DU32> SpreadCodes(const uint8_t* p) {
  const DU32 du;
  constexpr size_t kBytes = hn::MaxLanes(DU32()) * kBits / 8;
  if constexpr (kBytes == 8) {
    const hn::Half<DU32> half;
    uint32_t w[2];
    std::memcpy(w, p, 8);
    return hn::Combine(du, hn::Set(half, w[1]), hn::Set(half, w[0]));
  } else {
    static_assert(kBytes <= 4);
    uint32_t w = 0;
    std::memcpy(&w, p, kBytes);
    return hn::Set(du, w);
  }
}
template <int kBits>
HWY_INLINE hn::Vec<DU32> CodeShifts() {
  const DU32 du;
  return hn::And(hn::Mul(hn::Iota(du, 0), hn::Set(du, kBits)), hn::Set(du, 31));
}

// Codes as f32: unsigned, or two's complement.
template <int kBits>
HWY_INLINE VF UnsignedCodes(const uint8_t* p) {
  const DF df;
  const DI32 di;
  if constexpr (kBits == 8) {
    return hn::ConvertTo(df, hn::PromoteTo(di, hn::LoadU(DU8(), p)));
  } else {
    const DU32 du;
    const auto codes = hn::And(hn::Shr(SpreadCodes<kBits>(p), CodeShifts<kBits>()), hn::Set(du, (1u << kBits) - 1));
    return hn::ConvertTo(df, hn::BitCast(di, codes));
  }
}
template <int kBits>
HWY_INLINE VF SignedCodes(const uint8_t* p) {
  const DF df;
  const DI32 di;
  if constexpr (kBits == 8) {
    const hn::Rebind<int8_t, DF> d8;
    return hn::ConvertTo(df, hn::PromoteTo(di, hn::LoadU(d8, reinterpret_cast<const int8_t*>(p))));
  } else {
    const DU32 du;
    const auto to_top = hn::Sub(hn::Set(du, 32 - kBits), CodeShifts<kBits>());
    return hn::ConvertTo(df, hn::ShiftRight<32 - kBits>(hn::BitCast(di, hn::Shl(SpreadCodes<kBits>(p), to_top))));
  }
}

// How one convention turns codes into values; `zero` is the minimum or the offset.
struct Symmetric {
  static constexpr bool kHasZero = false;
  template <int kBits>
  static HWY_INLINE VF Values(const uint8_t* p, VF scale, VF) {
    return hn::Mul(SignedCodes<kBits>(p), scale);
  }
  static float Value(uint32_t field, int bits, float scale, float) {
    return SymmetricValue(SignExtend(field, bits), {scale});
  }
};
struct Minimum {
  static constexpr bool kHasZero = true;
  template <int kBits>
  static HWY_INLINE VF Values(const uint8_t* p, VF scale, VF min) {
    return FusedMulAdd(UnsignedCodes<kBits>(p), scale, min);
  }
  static float Value(uint32_t field, int, float scale, float min) {
    return AffineValue(static_cast<int>(field), {scale, min});
  }
};
struct FloatOffset {
  static constexpr bool kHasZero = true;
  template <int kBits>
  static HWY_INLINE VF Values(const uint8_t* p, VF scale, VF zero) {
    return hn::Mul(hn::Sub(UnsignedCodes<kBits>(p), zero), scale);
  }
  static float Value(uint32_t field, int, float scale, float zero) {
    return QserveValue(static_cast<int>(field), {scale, zero});
  }
};

// `count` stored qparams from index `first` on, as f32.
HWY_INLINE void LoadQparams(DType dtype, const std::byte* plane, int64_t first, int64_t count,
                            float* HWY_RESTRICT out) {
  const std::byte* const in = plane + first * DTypeBytes(dtype);
  if (dtype == DType::kF32) {
    std::memcpy(out, in, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  const DF df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(FromF16(hn::LoadU(DU16(), reinterpret_cast<const uint16_t*>(in) + i)), df, out + i);
  }
  for (; i < count; ++i) out[i] = LoadAs(dtype, in, i);
}

// Qparams along a row: `group` channels of a row share them. Any group, any head_dim.
template <int kBits, class Convention>
HWY_INLINE void DecodeRowGroups(const BlockFormat& f, const std::byte* block, int slot, MatrixView<float> out) {
  constexpr int64_t kChunk = 512;  // qparams converted at once: 4 KiB of stack
  HWY_ALIGN float scales[kChunk], zeros[kChunk] = {};
  const DF df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  const int64_t groups = f.block.groups_per_row, group = f.coding.group, row_bytes = f.block.row_bytes;
  const int64_t first = slot * groups, total = out.rows * groups;
  const std::byte* codes = block + slot * row_bytes;
  float* values = out.data;
  int64_t g = 0, row = 0;
  for (int64_t done = 0; done < total; done += kChunk) {
    const int64_t count = std::min(kChunk, total - done);
    LoadQparams(f.coding.qparam, block + f.block.scales_offset, first + done, count, scales);
    if constexpr (Convention::kHasZero) {
      LoadQparams(f.coding.qparam, block + f.block.zeros_offset, first + done, count, zeros);
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t begin = g * group, end = begin + group;
      int64_t j = begin;
      if (begin * kBits % 8 == 0) {
        const auto* const p = reinterpret_cast<const uint8_t*>(codes);
        const VF scale = hn::Set(df, scales[i]), zero = hn::Set(df, zeros[i]);
        for (; j + lanes <= end; j += lanes) {
          hn::StoreU(Convention::template Values<kBits>(p + j * kBits / 8, scale, zero), df, values + j);
        }
      }
      for (; j < end; ++j) values[j] = Convention::Value(GetCode(codes, j, kBits), kBits, scales[i], zeros[i]);
      if (++g == groups) {
        g = 0;
        ++row;
        codes += row_bytes;
        values = out.data + row * out.stride;
      }
    }
  }
}

// Qparams along a channel: `group` rows of a channel share a scale and a minimum.
template <int kBits>
HWY_INLINE void DecodeChannelGroups(const BlockFormat& f, const std::byte* block, int slot, MatrixView<float> out) {
  constexpr int64_t kChunk =
      256;  // channels whose qparams are held as f32; a multiple of 8, so a chunk starts at a byte
  HWY_ALIGN float scales[kChunk], mins[kChunk];
  const DF df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  const int64_t group = f.coding.group, head_dim = f.head_dim;
  for (int64_t c = 0; c < head_dim; c += kChunk) {
    const int64_t channels = std::min(kChunk, head_dim - c);
    for (int64_t row = 0; row < out.rows;) {
      const int64_t g = (slot + row) / group;
      const int64_t end = std::min(out.rows, (g + 1) * group - slot);
      LoadQparams(f.coding.qparam, block + f.block.scales_offset, g * head_dim + c, channels, scales);
      LoadQparams(f.coding.qparam, block + f.block.zeros_offset, g * head_dim + c, channels, mins);
      for (; row < end; ++row) {
        const std::byte* const codes = block + (slot + row) * f.block.row_bytes + c * kBits / 8;
        const auto* const p = reinterpret_cast<const uint8_t*>(codes);
        float* const values = out.row(row) + c;
        int64_t j = 0;
        for (; j + lanes <= channels; j += lanes) {
          hn::StoreU(Minimum::Values<kBits>(p + j * kBits / 8, hn::Load(df, scales + j), hn::Load(df, mins + j)), df,
                     values + j);
        }
        for (; j < channels; ++j) values[j] = Minimum::Value(GetCode(codes, j, kBits), kBits, scales[j], mins[j]);
      }
    }
  }
}

// Values that carry their own exponent, one code each.
struct F16Values {
  static constexpr int kBytes = 2;
  static constexpr bool kScaled = false;
  static HWY_INLINE VF Values(const uint8_t* p) {
    return FromF16(hn::LoadU(DU16(), reinterpret_cast<const uint16_t*>(p)));
  }
};
struct Bf16Values {
  static constexpr int kBytes = 2;
  static constexpr bool kScaled = false;
  static HWY_INLINE VF Values(const uint8_t* p) {
    const auto bits = hn::PromoteTo(DU32(), hn::LoadU(DU16(), reinterpret_cast<const uint16_t*>(p)));
    return hn::BitCast(DF(), hn::ShiftLeft<16>(bits));
  }
};
struct E4M3Values {
  static constexpr int kBytes = 1;
  static constexpr bool kScaled = true;
  static HWY_INLINE VF Values(const uint8_t* p) {
    // The same fields as an f16 mean 2^-8 of the value, subnormals included (bias 7 against 15).
    const DU16 du16;
    const auto code = hn::PromoteTo(du16, hn::LoadU(DU8(), p));
    const auto mag = hn::And(hn::ShiftLeft<7>(code), hn::Set(du16, 0x3F80));
    const auto sign = hn::ShiftLeft<8>(hn::And(code, hn::Set(du16, 0x80)));
    const auto value = hn::IfThenElse(hn::Eq(mag, hn::Set(du16, 0x3F80)), hn::Set(du16, 0x7E00), mag);
    return hn::Mul(FromF16(hn::Or(value, sign)), hn::Set(DF(), 256.0f));
  }
};
struct E5M2Values {
  static constexpr int kBytes = 1;
  static constexpr bool kScaled = true;
  static HWY_INLINE VF Values(const uint8_t* p) {
    return FromF16(hn::ShiftLeft<8>(hn::PromoteTo(DU16(), hn::LoadU(DU8(), p))));
  }
};

template <class Format>
HWY_INLINE void DecodeValueRows(const BlockFormat& f, const std::byte* block, int slot, MatrixView<float> out) {
  const DF df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  const VF scale = hn::Set(df, f.coding.static_scale);
  for (int64_t row = 0; row < out.rows; ++row) {
    const std::byte* const codes = block + (slot + row) * f.block.row_bytes;
    const auto* const p = reinterpret_cast<const uint8_t*>(codes);
    float* const values = out.row(row);
    int64_t j = 0;
    for (; j + lanes <= f.head_dim; j += lanes) {
      VF v = Format::Values(p + j * Format::kBytes);
      if constexpr (Format::kScaled) v = hn::Mul(v, scale);
      hn::StoreU(v, df, values + j);
    }
    for (; j < f.head_dim; ++j) {
      values[j] = LoadAs(f.coding.dtype, codes, j);
      if constexpr (Format::kScaled) values[j] *= f.coding.static_scale;
    }
  }
}

HWY_INLINE void DecodeF32Rows(const BlockFormat& f, const std::byte* block, int slot, MatrixView<float> out) {
  for (int64_t row = 0; row < out.rows; ++row) {
    std::memcpy(out.row(row), block + (slot + row) * f.block.row_bytes, static_cast<size_t>(f.block.row_bytes));
  }
}

#define LQ_DEFINE(name, text, kernel)                                                        \
  void name(const BlockFormat& f, const std::byte* block, int slot, MatrixView<float> out) { \
    constexpr DecodeRowsFn kKernel = kernel;                                                 \
    kKernel(f, block, slot, out);                                                            \
  }
#else
#define LQ_DEFINE(name, text, kernel)                                                        \
  void name(const BlockFormat& f, const std::byte* block, int slot, MatrixView<float> out) { \
    DecodeRowsReference(f, block, slot, out);                                                \
  }
#endif
LQ_DECODE_ROWS(LQ_DEFINE)
#undef LQ_DEFINE

}  // namespace livequant::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace livequant {
namespace {

// One dispatch per call, which decodes up to a page of rows.
#define LQ_EXPORT(name, text, kernel)                                                             \
  HWY_EXPORT(name);                                                                               \
  void name##Cpu(const BlockFormat& f, const std::byte* block, int slot, MatrixView<float> out) { \
    HWY_DYNAMIC_DISPATCH(name)(f, block, slot, out);                                              \
  }
LQ_DECODE_ROWS(LQ_EXPORT)
#undef LQ_EXPORT

struct Kernel {
  DecodeRowsFn fn = nullptr;
  const char* name = nullptr;
};
enum Id {
#define LQ_ID(name, text, kernel) k##name,
  LQ_DECODE_ROWS(LQ_ID)
#undef LQ_ID
      kNoKernel,
};
constexpr Kernel kKernels[] = {
#define LQ_ROW(name, text, kernel) {name##Cpu, text},
    LQ_DECODE_ROWS(LQ_ROW)
#undef LQ_ROW
        {},
};

Id Choose(const TensorCoding& c) {
  const Id none = kNoKernel;
  switch (c.kind) {
    case CodeKind::kNative:
      return c.dtype == DType::kF32    ? kDecodeF32
             : c.dtype == DType::kF16  ? kDecodeF16
             : c.dtype == DType::kBF16 ? kDecodeBf16
                                       : none;
    case CodeKind::kScaledFp:
      return c.dtype == DType::kFp8E4M3 ? kDecodeE4M3 : c.dtype == DType::kFp8E5M2 ? kDecodeE5M2 : none;
    case CodeKind::kInteger:
      break;
  }
  const bool row = c.axis == ScaleAxis::kRow;
  if (!row && c.axis != ScaleAxis::kChannel) return none;
  switch (c.zero) {
    case ZeroConvention::kSymmetric:
      return !row          ? none
             : c.bits == 2 ? kDecodeInt2Row
             : c.bits == 4 ? kDecodeInt4Row
             : c.bits == 8 ? kDecodeInt8Row
                           : none;
    case ZeroConvention::kMinimum:
      switch (c.bits) {
        case 2:
          return row ? kDecodeMin2Row : kDecodeMin2Channel;
        case 4:
          return row ? kDecodeMin4Row : kDecodeMin4Channel;
        case 8:
          return row ? kDecodeMin8Row : kDecodeMin8Channel;
      }
      return none;
    case ZeroConvention::kFloatOffset:
      return !row ? none : c.bits == 4 ? kDecodeOffset4Row : c.bits == 8 ? kDecodeOffset8Row : none;
    case ZeroConvention::kNone:
      break;
  }
  return none;
}

}  // namespace

DecodeRowsFn FindDecodeRows(const TensorCoding& coding, const char** name) {
  const Kernel& kernel = kKernels[Choose(coding)];
  if (name != nullptr) *name = kernel.name;
  return kernel.fn;
}

}  // namespace livequant
#endif  // HWY_ONCE
