// kernels/page_codec.cc: see docs/formats/page.md for where the bytes are and quant/ for what they mean.
#include "kernels/page_codec.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>

#include "kernels/round_rows.h"
#include "numeric/float_formats.h"
#include "numeric/packed_bits.h"
#include "quant/affine_group.h"
#include "quant/fp8_scaled.h"
#include "quant/qserve_head.h"
#include "quant/symmetric_rows.h"

namespace livequant {
namespace {

// One convention: which functions of quant/ make and read its codes. `fields` are codes as they lie in the stream.
struct Symmetric {
  using Spec = SymmetricSpec;
  using Params = SymmetricParams;
  static Spec MakeSpec(const TensorCoding& c) {
    return {.bits = c.bits, .qparam = c.qparam, .refuse_small_scale = c.small_scale == SmallScale::kRefuse};
  }
  static FitFault Fit(const Spec& spec, const Group& x, Params* p) { return FitSymmetric(spec, x, p); }
  static uint32_t Field(const Spec& spec, float x, const Params& p) {
    return static_cast<uint32_t>(SymmetricCode(spec, x, p));
  }
  static float Value(uint32_t field, int bits, const Params& p) { return SymmetricValue(SignExtend(field, bits), p); }
  static void Store(const Params& p, DType t, std::byte* scales, std::byte*, int64_t i) {
    StoreAs(t, p.scale, scales, i);
  }
  static Params Load(DType t, const std::byte* scales, const std::byte*, int64_t i) { return {LoadAs(t, scales, i)}; }
};

struct Minimum {
  using Spec = AffineSpec;
  using Params = AffineParams;
  static Spec MakeSpec(const TensorCoding& c) {
    return {.bits = c.bits, .qparam = c.qparam, .refuse_small_scale = c.small_scale == SmallScale::kRefuse};
  }
  static FitFault Fit(const Spec& spec, const Group& x, Params* p) { return FitAffine(spec, x, p); }
  static uint32_t Field(const Spec& spec, float x, const Params& p) {
    return static_cast<uint32_t>(AffineCode(spec, x, p));
  }
  static float Value(uint32_t field, int, const Params& p) { return AffineValue(static_cast<int>(field), p); }
  static void Store(const Params& p, DType t, std::byte* scales, std::byte* zeros, int64_t i) {
    StoreAs(t, p.scale, scales, i);
    StoreAs(t, p.min, zeros, i);
  }
  static Params Load(DType t, const std::byte* scales, const std::byte* zeros, int64_t i) {
    return {LoadAs(t, scales, i), LoadAs(t, zeros, i)};
  }
};

struct FloatOffset {
  using Spec = QserveSpec;
  using Params = QserveParams;
  static Spec MakeSpec(const TensorCoding& c) {
    return {.bits = c.bits,
            .qparam = c.qparam,
            .refuse_small_scale = c.small_scale == SmallScale::kRefuse,
            .wrap = c.overflow == Overflow::kWrap};
  }
  static FitFault Fit(const Spec& spec, const Group& x, Params* p) { return FitQserve(spec, x, p); }
  static uint32_t Field(const Spec& spec, float x, const Params& p) {
    return static_cast<uint32_t>(QserveCode(spec, x, p));
  }
  static float Value(uint32_t field, int, const Params& p) { return QserveValue(static_cast<int>(field), p); }
  static void Store(const Params& p, DType t, std::byte* scales, std::byte* zeros, int64_t i) {
    StoreAs(t, p.scale, scales, i);
    StoreAs(t, p.zero, zeros, i);
  }
  static Params Load(DType t, const std::byte* scales, const std::byte* zeros, int64_t i) {
    return {LoadAs(t, scales, i), LoadAs(t, zeros, i)};
  }
};

std::string Range(const char* what, int64_t first, int64_t end) {
  std::string text = std::string(what) + " " + std::to_string(first);
  return end == first + 1 ? text : text + ".." + std::to_string(end - 1);
}

// Walks the groups of `rows` rows whose first one is in slot `slot`: fn(first_row, row_count, first_channel,
// channel_count, qparam index), rows relative to `slot`. fn returns false to stop.
template <class Fn>
void ForEachGroup(const BlockFormat& f, int slot, int64_t rows, Fn&& fn) {
  if (f.coding.axis == ScaleAxis::kRow) {
    const int groups = f.block.groups_per_row, group = f.coding.group;
    for (int64_t r = 0; r < rows; ++r) {
      for (int g = 0; g < groups; ++g) {
        if (!fn(r, int64_t{1}, g * group, group, (slot + r) * groups + g)) return;
      }
    }
    return;
  }
  for (int64_t r = 0; r < rows;) {
    const int64_t g = (slot + r) / f.coding.group;
    const int64_t end = std::min<int64_t>(rows, (g + 1) * f.coding.group - slot);
    for (int c = 0; c < f.head_dim; ++c) {
      if (!fn(r, end - r, c, 1, g * f.head_dim + c)) return;
    }
    r = end;
  }
}

template <class Convention>
Status EncodeGroups(const BlockFormat& f, MatrixView<const float> rows, int slot, std::byte* block) {
  const typename Convention::Spec spec = Convention::MakeSpec(f.coding);
  const int bits = f.coding.bits;
  std::byte* const codes = block + slot * f.block.row_bytes;
  std::byte* const scales = block + f.block.scales_offset;
  std::byte* const zeros = block + f.block.zeros_offset;
  std::memset(codes, 0, static_cast<size_t>(rows.rows * f.block.row_bytes));
  Status status;
  ForEachGroup(f, slot, rows.rows, [&](int64_t r0, int64_t row_count, int c0, int channel_count, int64_t index) {
    const bool along_row = f.coding.axis == ScaleAxis::kRow;
    const Group x{rows.row(r0) + c0, along_row ? channel_count : row_count, along_row ? 1 : rows.stride};
    typename Convention::Params params;
    if (const FitFault fault = Convention::Fit(spec, x, &params); fault != FitFault::kNone) {
      status = FaultStatus(fault, x, f.coding.qparam,
                           Range("row", r0, r0 + row_count) + ", " + Range("channel", c0, c0 + channel_count));
      return false;
    }
    Convention::Store(params, f.coding.qparam, scales, zeros, index);
    for (int64_t r = r0; r < r0 + row_count; ++r) {
      for (int c = c0; c < c0 + channel_count; ++c) {
        PutCode(codes + r * f.block.row_bytes, c, bits, Convention::Field(spec, rows(r, c), params));
      }
    }
    return true;
  });
  return status;
}

template <class Convention>
void DecodeGroups(const BlockFormat& f, const std::byte* block, int slot, MatrixView<float> out) {
  const std::byte* const codes = block + slot * f.block.row_bytes;
  ForEachGroup(f, slot, out.rows, [&](int64_t r0, int64_t row_count, int c0, int channel_count, int64_t index) {
    const typename Convention::Params params =
        Convention::Load(f.coding.qparam, block + f.block.scales_offset, block + f.block.zeros_offset, index);
    for (int64_t r = r0; r < r0 + row_count; ++r) {
      for (int c = c0; c < c0 + channel_count; ++c) {
        out(r, c) = Convention::Value(GetCode(codes + r * f.block.row_bytes, c, f.coding.bits), f.coding.bits, params);
      }
    }
    return true;
  });
}

Status BadValue(Code code, int64_t row, int channel, float value, const std::string& why) {
  char text[64];
  std::snprintf(text, sizeof text, ": value %.9g ", static_cast<double>(value));
  return Status(code, Range("row", row, row + 1) + ", " + Range("channel", channel, channel + 1) + text + why);
}

// One row of values that carry their own exponent. `x` is finite and, but for fp8, rounds to something finite.
void EncodeValueRow(const TensorCoding& c, const float* x, int64_t count, std::byte* codes) {
  if (c.kind == CodeKind::kScaledFp) {
    const Fp8Spec spec{.dtype = c.dtype, .scale = c.static_scale};
    for (int64_t i = 0; i < count; ++i) codes[i] = std::byte{Fp8Code(spec, x[i])};
    return;
  }
  switch (c.dtype) {
    case DType::kF32:
      std::memcpy(codes, x, static_cast<size_t>(count) * sizeof(float));
      return;
    case DType::kF16:
    case DType::kBF16:
      NarrowValues(c.dtype, x, count, codes);
      return;
    case DType::kFp8E4M3:
    case DType::kFp8E5M2:
      for (int64_t i = 0; i < count; ++i) StoreAs(c.dtype, static_cast<double>(x[i]), codes, i);
      return;
  }
}

Status EncodeValues(const BlockFormat& f, MatrixView<const float> rows, int slot, std::byte* block) {
  const DType t = f.coding.dtype;
  if (f.coding.kind == CodeKind::kScaledFp) {
    LQ_RETURN_IF_ERROR(CheckFp8Scale({.dtype = t, .scale = f.coding.static_scale}));
  }
  // The least that rounds to Inf: half an ulp beyond the largest. fp8 saturates by definition, f32 has nothing to
  // round.
  const double limit = t == DType::kF16 ? 65520.0 : t == DType::kBF16 ? 0x1.FFp127 : INFINITY;
  for (int64_t r = 0; r < rows.rows; ++r) {
    const float* const x = rows.row(r);
    float lo, hi;
    if (!FiniteRange({x, f.head_dim, 1}, &lo, &hi) || lo <= -limit || hi >= limit) {
      for (int c = 0; c < f.head_dim; ++c) {
        if (!std::isfinite(x[c])) return BadValue(Code::kNonFinite, r, c, x[c], "is not finite");
        if (std::fabs(static_cast<double>(x[c])) >= limit) {
          char text[64];
          std::snprintf(text, sizeof text, "is beyond %.9g, the largest %s", MaxFinite(t), DTypeName(t));
          return BadValue(Code::kNonFinite, r, c, x[c], text);
        }
      }
    }
    EncodeValueRow(f.coding, x, f.head_dim, block + (slot + r) * f.block.row_bytes);
  }
  return {};
}

void DecodeValues(const BlockFormat& f, const std::byte* block, int slot, MatrixView<float> out) {
  const bool scaled = f.coding.kind == CodeKind::kScaledFp;
  const Fp8Spec spec{.dtype = f.coding.dtype, .scale = f.coding.static_scale};
  for (int64_t r = 0; r < out.rows; ++r) {
    const std::byte* const codes = block + (slot + r) * f.block.row_bytes;
    for (int c = 0; c < f.head_dim; ++c) {
      out(r, c) = scaled ? Fp8Value(spec, std::to_integer<uint8_t>(codes[c])) : LoadAs(f.coding.dtype, codes, c);
    }
  }
}

// A coding that the functions below can read; Validate() of the schema lets no other pass.
bool IsKnown(const BlockFormat& f) {
  const TensorCoding& c = f.coding;
  if (c.kind == CodeKind::kNative) return c.bits == 8 * DTypeBytes(c.dtype);
  if (c.kind == CodeKind::kScaledFp) return c.bits == 8 && DTypeBytes(c.dtype) == 1;
  return c.has_qparams() && c.zero != ZeroConvention::kNone && c.bits >= 2 && c.bits <= 8 && c.group >= 1 &&
         (f.head_dim * c.bits) % 8 == 0 && (c.axis == ScaleAxis::kChannel || f.head_dim % c.group == 0) &&
         (c.qparam == DType::kF16 || c.qparam == DType::kF32);
}

}  // namespace

BlockFormat CodedFormat(const LayerSchema& layer, TensorIndex tensor) {
  return {
      .coding = tensor == kK ? layer.k : layer.v, .block = CodedHeadBlock(layer, tensor), .head_dim = layer.head_dim};
}

BlockFormat ExactFormat(const LayerSchema& layer, TensorIndex tensor) {
  TensorCoding exact;
  exact.kind = CodeKind::kNative;
  exact.dtype = layer.exact_dtype;
  exact.bits = 8 * DTypeBytes(layer.exact_dtype);
  return {.coding = exact, .block = ExactHeadBlock(layer, tensor), .head_dim = layer.head_dim};
}

Status EncodeRows(const BlockFormat& format, MatrixView<const float> rows, int slot, std::byte* block) {
  LQ_CHECK(IsKnown(format) && rows.cols == format.head_dim);
  if (slot < 0 || slot + rows.rows > format.block.rows) {
    return Status(Code::kInvalidArgument, Range("slot", slot, slot + rows.rows) + " of a block with " +
                                              std::to_string(format.block.rows) + " rows");
  }
  if (rows.rows == 0) return {};
  if (format.coding.kind != CodeKind::kInteger) return EncodeValues(format, rows, slot, block);
  if (format.coding.axis == ScaleAxis::kChannel) {
    const int group = format.coding.group;
    const int64_t end = slot + rows.rows;
    // Several groups at once begin or end at an edge by themselves; a piece strictly inside one group does not.
    if (slot % group != 0 && end % group != 0 && slot / group == (end - 1) / group) {
      return Status(Code::kInvalidArgument, Range("slot", slot, end) + " neither begins nor ends a group of " +
                                                std::to_string(group) + " rows, whose qparams are written once");
    }
  }
  switch (format.coding.zero) {
    case ZeroConvention::kSymmetric:
      return EncodeGroups<Symmetric>(format, rows, slot, block);
    case ZeroConvention::kMinimum:
      return EncodeGroups<Minimum>(format, rows, slot, block);
    case ZeroConvention::kFloatOffset:
      return EncodeGroups<FloatOffset>(format, rows, slot, block);
    case ZeroConvention::kNone:
      break;
  }
  LQ_CHECK(false);
}

void DecodeRowsReference(const BlockFormat& format, const std::byte* block, int slot, MatrixView<float> out) {
  LQ_CHECK(IsKnown(format) && out.cols == format.head_dim && slot >= 0 && slot + out.rows <= format.block.rows);
  if (format.coding.kind != CodeKind::kInteger) return DecodeValues(format, block, slot, out);
  switch (format.coding.zero) {
    case ZeroConvention::kSymmetric:
      return DecodeGroups<Symmetric>(format, block, slot, out);
    case ZeroConvention::kMinimum:
      return DecodeGroups<Minimum>(format, block, slot, out);
    case ZeroConvention::kFloatOffset:
      return DecodeGroups<FloatOffset>(format, block, slot, out);
    case ZeroConvention::kNone:
      break;
  }
  LQ_CHECK(false);
}

}  // namespace livequant
