// The page codec: bytes where schema/layout.h says they are, codes that quant/ makes, and every vector kernel bit for
// bit the reference, on every instruction set that this machine has.
#include "kernels/page_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "kernels/for_each_isa.h"
#include "numeric/float_formats.h"
#include "numeric/packed_bits.h"
#include "quant/affine_group.h"
#include "quant/fp8_scaled.h"
#include "quant/qserve_head.h"
#include "quant/symmetric_rows.h"
#include "support/property.h"

#if defined(__SANITIZE_ADDRESS__)
#define LQ_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define LQ_ASAN 1
#endif
#endif
#if defined(LQ_ASAN)
#include <sanitizer/asan_interface.h>
#endif

namespace {
thread_local int64_t allocations = 0;  // of this thread, through operator new
}
// Kept out of line, or the compiler sees malloc meet delete and delete meet new.
[[gnu::noinline]] void* operator new(size_t bytes) {
  ++allocations;
  if (void* p = std::malloc(bytes)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace livequant {
namespace {

using ::testing::HasSubstr;

TensorCoding Native(DType t) { return {.dtype = t, .bits = 8 * DTypeBytes(t)}; }
TensorCoding Fp8(DType t, float scale) {
  return {.kind = CodeKind::kScaledFp, .dtype = t, .bits = 8, .axis = ScaleAxis::kTensor, .static_scale = scale};
}
TensorCoding Integer(int bits, ScaleAxis axis, int group, ZeroConvention zero, DType qparam = DType::kF16) {
  return {.kind = CodeKind::kInteger, .bits = bits, .axis = axis, .group = group, .zero = zero, .qparam = qparam};
}

BlockFormat Format(const TensorCoding& coding, int head_dim, int rows = 64) {
  LayerSchema layer;
  layer.coded_page_rows = rows;
  layer.num_kv_heads = 1;
  layer.head_dim = head_dim;
  layer.k = coding;
  return CodedFormat(layer, kK);
}

std::string Name(const TensorCoding& c) {
  const char* zero[] = {"none", "symmetric", "minimum", "offset"};
  return std::string("kind ") + std::to_string(static_cast<int>(c.kind)) + " " + DTypeName(c.dtype) + " bits " +
         std::to_string(c.bits) + (c.axis == ScaleAxis::kChannel ? " channel" : " row") + " group " +
         std::to_string(c.group) + " " + zero[static_cast<int>(c.zero)] + " qparam " + DTypeName(c.qparam);
}

// Every coding that a block of `head_dim` channels can have, 3 bits and odd groups included.
std::vector<TensorCoding> AllCodings(int head_dim) {
  std::vector<TensorCoding> all = {Native(DType::kF32),         Native(DType::kF16),         Native(DType::kBF16),
                                   Fp8(DType::kFp8E4M3, 1.0f),  Fp8(DType::kFp8E5M2, 1.0f),  Fp8(DType::kFp8E4M3, 0.3f),
                                   Fp8(DType::kFp8E5M2, 0.07f), Fp8(DType::kFp8E4M3, 2e-38f)};
  for (ZeroConvention zero : {ZeroConvention::kSymmetric, ZeroConvention::kMinimum, ZeroConvention::kFloatOffset}) {
    for (int bits : {2, 3, 4, 8}) {
      if (head_dim * bits % 8 != 0) continue;
      for (DType qparam : {DType::kF16, DType::kF32}) {
        for (int group : {1, 2, 5, 8, 16, 20, 32, 64, head_dim}) {
          if (head_dim % group == 0) all.push_back(Integer(bits, ScaleAxis::kRow, group, zero, qparam));
        }
        for (int group : {1, 32, 64}) all.push_back(Integer(bits, ScaleAxis::kChannel, group, zero, qparam));
      }
    }
  }
  return all;
}

// Rows that every coding can take: spread over a few binades, exact in f16.
std::vector<float> TameRows(Rng& rng, int64_t rows, int head_dim) {
  std::vector<float> x = NormalWithOutliers(rng, rows, head_dim);
  for (float& v : x) v = static_cast<float>(RoundToF16(v));
  return x;
}

// A block filled by EncodeRows over all its slots.
std::vector<std::byte> EncodedBlock(const BlockFormat& f, Rng& rng) {
  std::vector<std::byte> block(static_cast<size_t>(f.block.bytes), std::byte{0xFF});
  const std::vector<float> x = TameRows(rng, f.block.rows, f.head_dim);
  const Status s = EncodeRows(f, {x.data(), f.block.rows, f.head_dim}, 0, block.data());
  EXPECT_TRUE(s.ok()) << s.ToString();
  return block;
}

bool SameValue(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}

// Hides all bytes of a block but those of rows [slot, slot + rows) from AddressSanitizer's eyes until destroyed.
class OnlyRowsReadable {
 public:
  OnlyRowsReadable(const BlockFormat& f, const std::vector<std::byte>& block, int slot, int64_t rows) : block_(block) {
#if defined(LQ_ASAN)
    __asan_poison_memory_region(block.data(), block.size());
    Show(slot * f.block.row_bytes, rows * f.block.row_bytes);
    if (!f.coding.has_qparams()) return;
    int64_t first = int64_t{slot} * f.block.groups_per_row, count = rows * f.block.groups_per_row;
    if (f.coding.axis == ScaleAxis::kChannel) {
      first = int64_t{slot / f.coding.group} * f.head_dim;
      count = ((slot + rows - 1) / f.coding.group + 1) * f.head_dim - first;
    }
    const int64_t size = DTypeBytes(f.coding.qparam);
    Show(f.block.scales_offset + first * size, count * size);
    if (f.coding.qparams_per_group() == 2) Show(f.block.zeros_offset + first * size, count * size);
#else
    (void)f, (void)slot, (void)rows;
#endif
  }
  ~OnlyRowsReadable() {
#if defined(LQ_ASAN)
    __asan_unpoison_memory_region(block_.data(), block_.size());
#endif
  }

 private:
#if defined(LQ_ASAN)
  void Show(int64_t offset, int64_t bytes) {
    __asan_unpoison_memory_region(block_.data() + offset, static_cast<size_t>(bytes));
  }
#endif
  const std::vector<std::byte>& block_;
};

void ExpectKernelMatches(const BlockFormat& f, const std::vector<std::byte>& block, int slot, int64_t rows) {
  const DecodeRowsFn kernel = FindDecodeRows(f.coding, nullptr);
  ASSERT_NE(kernel, nullptr) << Name(f.coding);
  const int64_t stride = f.head_dim + 3;
  std::vector<float> want(static_cast<size_t>(rows * stride), -7.0f), got = want;
  DecodeRowsReference(f, block.data(), slot, {want.data(), rows, f.head_dim, stride});
  {
    const OnlyRowsReadable only(f, block, slot, rows);
    kernel(f, block.data(), slot, {got.data(), rows, f.head_dim, stride});
  }
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_TRUE(SameValue(got[i], want[i]))
        << Name(f.coding) << " head_dim " << f.head_dim << " slot " << slot << " rows " << rows << " row "
        << i / static_cast<size_t>(stride) << " channel " << i % static_cast<size_t>(stride) << ": " << got[i]
        << " for " << want[i];
  }
}

constexpr int kHeadDims[] = {32, 64, 80, 96, 112, 128, 192, 256};

TEST(PageCodec, EveryIsaDecodesTheReferenceBits) {
  for (int head_dim : kHeadDims) {
    Rng rng(static_cast<uint64_t>(head_dim));
    for (const TensorCoding& coding : AllCodings(head_dim)) {
      if (FindDecodeRows(coding, nullptr) == nullptr) continue;
      const BlockFormat f = Format(coding, head_dim);
      const std::vector<std::byte> block = EncodedBlock(f, rng);
      const int slot = static_cast<int>(rng.Range(0, f.block.rows - 1));
      const int64_t rows = rng.Range(0, std::min(9, f.block.rows - slot));
      ForEachIsa([&](const char* isa) {
        SCOPED_TRACE(isa);
        ExpectKernelMatches(f, block, 0, f.block.rows);
        ExpectKernelMatches(f, block, slot, rows);
      });
      if (HasFailure()) return;
    }
  }
}

// Head sizes that fill no vector, and more qparams or channels than a kernel converts at once.
TEST(PageCodec, EveryIsaDecodesAnyHeadSize) {
  for (int head_dim : {4, 8, 12, 20, 36, 40, 56, 72, 100, 260, 576, 1024}) {
    Rng rng(static_cast<uint64_t>(head_dim));
    for (const TensorCoding& coding : AllCodings(head_dim)) {
      if (FindDecodeRows(coding, nullptr) == nullptr) continue;
      const BlockFormat f =
          Format(coding, head_dim, std::max(8, coding.axis == ScaleAxis::kChannel ? coding.group : 0));
      const std::vector<std::byte> block = EncodedBlock(f, rng);
      const int slot = static_cast<int>(rng.Range(0, f.block.rows - 1));
      const int64_t rows = rng.Range(1, std::min(4, f.block.rows - slot));
      ForEachIsa([&](const char* isa) {
        SCOPED_TRACE(isa);
        ExpectKernelMatches(f, block, slot, rows);
      });
      if (HasFailure()) return;
    }
  }
}

TEST(PageCodec, EveryIsaDecodesAtEverySlot) {
  ForEachIsa([](const char* isa) {
    SCOPED_TRACE(isa);
    Rng rng(5);
    for (const TensorCoding& coding : {Native(DType::kF16), Native(DType::kF32), Fp8(DType::kFp8E4M3, 0.5f),
                                       Integer(8, ScaleAxis::kRow, 80, ZeroConvention::kSymmetric),
                                       Integer(2, ScaleAxis::kRow, 20, ZeroConvention::kSymmetric),
                                       Integer(2, ScaleAxis::kRow, 16, ZeroConvention::kMinimum),
                                       Integer(4, ScaleAxis::kChannel, 32, ZeroConvention::kMinimum),
                                       Integer(2, ScaleAxis::kChannel, 32, ZeroConvention::kMinimum),
                                       Integer(4, ScaleAxis::kRow, 80, ZeroConvention::kFloatOffset)}) {
      const BlockFormat f = Format(coding, 80, 128);
      const std::vector<std::byte> block = EncodedBlock(f, rng);
      for (int slot = 0; slot < f.block.rows; ++slot) {
        for (int rows : {1, f.block.rows - slot}) ExpectKernelMatches(f, block, slot, rows);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  });
}

// Any bytes decode without harm, and to the reference's values: all f16 and fp8 codes, subnormal, infinite and NaN
// qparams.
TEST(PageCodec, EveryIsaDecodesArbitraryBytesAsTheReferenceDoes) {
  ForEachIsa([](const char* isa) {
    SCOPED_TRACE(isa);
    for (int head_dim : {64, 80, 20}) {
      for (const TensorCoding& coding : AllCodings(head_dim)) {
        if (FindDecodeRows(coding, nullptr) == nullptr) continue;
        const BlockFormat f = Format(coding, head_dim);
        Rng rng(17);
        std::vector<std::byte> block(static_cast<size_t>(f.block.bytes));
        for (std::byte& b : block) b = static_cast<std::byte>(rng.Range(0, 255));
        ExpectKernelMatches(f, block, 0, f.block.rows);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
    for (DType t : {DType::kF16, DType::kBF16, DType::kFp8E4M3, DType::kFp8E5M2}) {
      const BlockFormat f = Format(DTypeBytes(t) == 1 ? Fp8(t, 0.37f) : Native(t), 512);
      std::vector<std::byte> block(static_cast<size_t>(f.block.bytes));
      for (size_t i = 0; i < block.size(); ++i) {
        block[i] = static_cast<std::byte>(DTypeBytes(t) == 1 ? i : (i / 2) >> (i % 2 * 8));
      }
      ExpectKernelMatches(f, block, 0, f.block.rows);
    }
  });
}

// What a reader of unwritten slots sees must not look like data.
TEST(PageCodec, PoisonDecodesToNan) {
  for (int head_dim : {64, 80}) {
    for (const TensorCoding& coding : AllCodings(head_dim)) {
      const BlockFormat f = Format(coding, head_dim);
      const std::vector<std::byte> block(static_cast<size_t>(f.block.bytes), std::byte{0xFF});
      std::vector<float> out(static_cast<size_t>(f.block.rows * head_dim));
      const MatrixView<float> view(out.data(), f.block.rows, head_dim);
      DecodeRowsReference(f, block.data(), 0, view);
      for (float v : out) ASSERT_TRUE(std::isnan(v)) << Name(coding);
      if (FindDecodeRows(coding, nullptr) == nullptr) continue;
      ForEachIsa([&](const char* isa) {
        SCOPED_TRACE(isa);
        std::fill(out.begin(), out.end(), 0.0f);
        FindDecodeRows(coding, nullptr)(f, block.data(), 0, view);
        for (float v : out) ASSERT_TRUE(std::isnan(v)) << Name(coding);
      });
    }
  }
}

// The layout of schema/layout.h by hand, element by element, against the walk of the reference.
TEST(PageCodec, ReferenceReadsCodesAndQparamsWhereTheLayoutPutsThem) {
  Rng rng(3);
  for (const TensorCoding& c : AllCodings(40)) {
    const BlockFormat f = Format(c, 40);
    const std::vector<std::byte> block = EncodedBlock(f, rng);
    std::vector<float> out(static_cast<size_t>(f.block.rows * 40));
    DecodeRowsReference(f, block.data(), 0, {out.data(), f.block.rows, 40});
    for (int64_t r = 0; r < f.block.rows; ++r) {
      for (int64_t ch = 0; ch < 40; ++ch) {
        const std::byte* row = block.data() + r * f.block.row_bytes;
        float want;
        if (c.kind == CodeKind::kNative) {
          want = LoadAs(c.dtype, row, ch);
        } else if (c.kind == CodeKind::kScaledFp) {
          want = LoadAs(c.dtype, row, ch) * c.static_scale;
        } else {
          const int64_t index = c.axis == ScaleAxis::kRow ? r * (40 / c.group) + ch / c.group : (r / c.group) * 40 + ch;
          const float scale = LoadAs(c.qparam, block.data() + f.block.scales_offset, index);
          const int code = static_cast<int>(GetCode(row, ch, c.bits));
          if (c.zero == ZeroConvention::kSymmetric) {
            want = static_cast<float>(SignExtend(static_cast<uint32_t>(code), c.bits)) * scale;
          } else {
            const float zero = LoadAs(c.qparam, block.data() + f.block.zeros_offset, index);
            want = c.zero == ZeroConvention::kMinimum ? std::fma(static_cast<float>(code), scale, zero)
                                                      : (static_cast<float>(code) - zero) * scale;
          }
        }
        ASSERT_TRUE(SameValue(out[static_cast<size_t>(r * 40 + ch)], want)) << Name(c) << " row " << r << " ch " << ch;
      }
    }
  }
}

// P21: a row's bytes depend on that row alone; P9's one-by-one part for codes along a row.
TEST(PageCodec, RowsEncodeAloneAsInABatch) {
  ForAll(40, [](Rng& rng) {
    const int head_dim = rng.Pick({32, 64, 80});
    for (const TensorCoding& coding : AllCodings(head_dim)) {
      if (coding.axis == ScaleAxis::kChannel) continue;
      if (rng.Chance(0.8)) continue;
      const BlockFormat f = Format(coding, head_dim);
      const std::vector<float> x = TameRows(rng, 12, head_dim);
      std::vector<std::byte> batch(static_cast<size_t>(f.block.bytes), std::byte{0xFF}), single = batch;
      ASSERT_TRUE(EncodeRows(f, {x.data(), 12, head_dim}, 7, batch.data()).ok());
      for (int r = 11; r >= 0; --r) {
        ASSERT_TRUE(EncodeRows(f, {x.data() + r * head_dim, 1, head_dim}, 7 + r, single.data()).ok());
      }
      EXPECT_EQ(batch, single) << Name(coding);
      for (int64_t i = 0; i < 7 * f.block.row_bytes; ++i) ASSERT_EQ(batch[static_cast<size_t>(i)], std::byte{0xFF});
    }
  });
}

// Groups along tokens: several at once, one at a time, and short ones at either end give qparams over their own rows
// only.
TEST(PageCodec, ChannelGroupsCloseTogetherOrOneByOne) {
  ForAll(60, [](Rng& rng) {
    const int head_dim = rng.Pick({16, 64, 80}), group = rng.Pick({8, 32}), bits = rng.Pick({2, 3, 4, 8});
    const BlockFormat f = Format(Integer(bits, ScaleAxis::kChannel, group, ZeroConvention::kMinimum), head_dim, 128);
    const int from = static_cast<int>(rng.Range(0, 2 * group)), to = static_cast<int>(rng.Range(from + group, 128));
    const std::vector<float> x = TameRows(rng, to - from, head_dim);
    std::vector<std::byte> whole(static_cast<size_t>(f.block.bytes), std::byte{0xFF}), pieces = whole;
    ASSERT_TRUE(EncodeRows(f, {x.data(), to - from, head_dim}, from, whole.data()).ok());
    for (int a = from; a < to;) {
      const int b = std::min(to, (a / group + 1) * group);
      ASSERT_TRUE(EncodeRows(f, {x.data() + (a - from) * head_dim, b - a, head_dim}, a, pieces.data()).ok());
      // The group's qparams and codes by hand, from its own rows.
      for (int c = 0; c < head_dim; ++c) {
        const AffineSpec spec{.bits = bits};
        AffineParams p;
        ASSERT_EQ(FitAffine(spec, {x.data() + (a - from) * head_dim + c, b - a, head_dim}, &p), FitFault::kNone);
        const int64_t index = int64_t{a / group} * head_dim + c;
        ASSERT_EQ(LoadAs(DType::kF16, pieces.data() + f.block.scales_offset, index), p.scale);
        ASSERT_EQ(LoadAs(DType::kF16, pieces.data() + f.block.zeros_offset, index), p.min);
        for (int r = a; r < b; ++r) {
          ASSERT_EQ(static_cast<int>(GetCode(pieces.data() + r * f.block.row_bytes, c, bits)),
                    AffineCode(spec, x[static_cast<size_t>((r - from) * head_dim + c)], p));
        }
      }
      a = b;
    }
    EXPECT_EQ(whole, pieces);
  });
}

// The K tile of methods.md 4.10: 4 tokens x 2 channels, 2 bits, one group along tokens.
TEST(PageCodec, KiviKeyTileVector) {
  BlockFormat f;
  f.coding = Integer(2, ScaleAxis::kChannel, 4, ZeroConvention::kMinimum);
  f.head_dim = 4;  // 2 channels of the vector, twice: a row of codes is one byte
  f.block = {.rows = 4, .row_bytes = 1, .scales_offset = 64, .zeros_offset = 128, .bytes = 192, .groups_per_page = 1};
  const float x[4][4] = {{8, .1f, 8, .1f}, {7.5f, -.2f, 7.5f, -.2f}, {-8, .15f, -8, .15f}, {6, .05f, 6, .05f}};
  std::byte block[192] = {};
  ASSERT_TRUE(EncodeRows(f, {x[0], 4, 4}, 0, block).ok());
  // Row r: codes [c0, c1, c0, c1] with c0 [3,3,0,3], c1 [3,0,3,2], little end first.
  const int want[] = {0xFF, 0x33, 0xCC, 0xBB};
  for (int r = 0; r < 4; ++r) EXPECT_EQ(std::to_integer<int>(block[r]), want[r]) << r;
  const uint16_t scales[] = {0x4555, 0x2F78}, mins[] = {0xC800, 0xB266};
  for (int c = 0; c < 2; ++c) {
    EXPECT_EQ(F16FromFloat(LoadAs(DType::kF16, block + 64, c)), scales[c]);
    EXPECT_EQ(F16FromFloat(LoadAs(DType::kF16, block + 128, c)), mins[c]);
  }
  float out[4][4];
  DecodeRowsReference(f, block, 0, {out[0], 4, 4});
  const float decoded[4][2] = {{7.99609375f, .150146484375f},
                               {7.99609375f, -.199951171875f},
                               {-8, .150146484375f},
                               {7.99609375f, .033447265625f}};
  for (int r = 0; r < 4; ++r) {
    for (int c = 0; c < 4; ++c) EXPECT_EQ(out[r][c], decoded[r][c % 2]);
  }
}

// The worked examples of docs/formats: one row of 4 channels; scales at byte 64, minima and offsets at 128.
TEST(PageCodec, WorkedExamplesOfTheFormatPages) {
  struct Example {
    TensorCoding coding;
    float x[4];
    std::vector<int> codes;
    int scale, zero;  // f16 bits
    std::vector<float> decoded;
  };
  using enum ZeroConvention;
  const Example examples[] = {
      {Integer(4, ScaleAxis::kRow, 4, kSymmetric),
       {0.5f, -1, 0.25f, 0.75f},
       {0x94, 0x52},
       0x3092,
       -1,
       {0.5712890625f, -0.999755859375f, 0.28564453125f, 0.714111328125f}},
      {Integer(2, ScaleAxis::kRow, 4, kMinimum), {-1, .2f, .9f, 2}, {0xE4}, 0x3C00, 0xBC00, {-1, 0, 1, 2}},
      {Integer(4, ScaleAxis::kRow, 4, kMinimum),
       {-1, .2f, .9f, 2},
       {0x60, 0xFA},
       0x3266,
       0xBC00,
       {-1, 0.19970703125f, 0.99951171875f, 1.999267578125f}},
      {Integer(4, ScaleAxis::kRow, 4, kFloatOffset),
       {1, 2, 1.5f, 1.25f},
       {0xF0, 0x48},
       0x2C44,
       0xCB80,
       {.999755859375f, 1.99951171875f, 1.532958984375f, 1.266357421875f}},
      {Fp8(DType::kFp8E4M3, .0125f), {5.6f, -1, .003f, .5f}, {0x7E, 0xEA, 0x27, 0x62}, -1, -1, {}},
  };
  for (const Example& e : examples) {
    const BlockFormat f = Format(e.coding, 4, 8);
    std::vector<std::byte> block(static_cast<size_t>(f.block.bytes), std::byte{0xFF});
    ASSERT_TRUE(EncodeRows(f, {e.x, 1, 4}, 0, block.data()).ok());
    for (size_t i = 0; i < e.codes.size(); ++i) {
      EXPECT_EQ(std::to_integer<int>(block[i]), e.codes[i]) << Name(e.coding) << " byte " << i;
    }
    const auto bits = [&block](size_t at) {
      return std::to_integer<int>(block[at]) | std::to_integer<int>(block[at + 1]) << 8;
    };
    if (e.scale >= 0) {
      EXPECT_EQ(bits(64), e.scale) << Name(e.coding);
    }
    if (e.zero >= 0) {
      EXPECT_EQ(bits(128), e.zero) << Name(e.coding);
    }
    std::vector<float> out(4);
    DecodeRowsReference(f, block.data(), 0, {out.data(), 1, 4});
    if (!e.decoded.empty()) {
      EXPECT_EQ(out, e.decoded) << Name(e.coding);
    }
  }
}

TEST(PageCodec, RefusalsNamePlaceValueAndLimit) {
  const int d = 32;
  Rng rng(1);
  for (const TensorCoding& coding : AllCodings(d)) {
    const BlockFormat f = Format(coding, d);
    std::vector<std::byte> block(static_cast<size_t>(f.block.bytes));
    for (float bad : {NAN, INFINITY, -INFINITY}) {
      std::vector<float> x = TameRows(rng, 32, d);
      x[5 * d + 17] = bad;
      const int rows = coding.axis == ScaleAxis::kChannel ? 64 : 32;
      x.resize(static_cast<size_t>(rows * d), 0.25f);
      const Status s = EncodeRows(f, {x.data(), rows, d}, 0, block.data());
      ASSERT_EQ(s.code(), Code::kNonFinite) << Name(coding);
      EXPECT_THAT(s.message(), HasSubstr("row")) << Name(coding);
      EXPECT_THAT(s.message(), HasSubstr(std::isnan(bad) ? "nan" : "inf")) << Name(coding);
    }
  }
  std::vector<float> x(d, 1.0f);
  std::vector<std::byte> block(1 << 16);
  x[3] = 65520;  // rounds to Inf; 65519 rounds to 65504
  Status s = EncodeRows(Format(Native(DType::kF16), d), {x.data(), 1, d}, 4, block.data());
  EXPECT_EQ(s.code(), Code::kNonFinite);
  EXPECT_THAT(s.message(), HasSubstr("row 0, channel 3: value 65520"));
  EXPECT_THAT(s.message(), HasSubstr("65504"));
  x[3] = -65519;
  EXPECT_TRUE(EncodeRows(Format(Native(DType::kF16), d), {x.data(), 1, d}, 4, block.data()).ok());
  x[3] = std::numeric_limits<float>::max();
  EXPECT_EQ(EncodeRows(Format(Native(DType::kBF16), d), {x.data(), 1, d}, 4, block.data()).code(), Code::kNonFinite);
  EXPECT_TRUE(EncodeRows(Format(Native(DType::kF32), d), {x.data(), 1, d}, 4, block.data()).ok());
  // fp8 saturates: that is the format, not an error.
  const BlockFormat fp8 = Format(Fp8(DType::kFp8E4M3, 2.0f), d);
  ASSERT_TRUE(EncodeRows(fp8, {x.data(), 1, d}, 4, block.data()).ok());
  std::vector<float> out(d);
  DecodeRowsReference(fp8, block.data(), 4, {out.data(), 1, d});
  EXPECT_EQ(out[3], 896.0f);

  TensorCoding refuse = Integer(8, ScaleAxis::kRow, 16, ZeroConvention::kSymmetric);
  refuse.small_scale = SmallScale::kRefuse;
  std::vector<float> tiny(2 * d, 0.0077f);
  std::fill(tiny.begin(), tiny.begin() + d + 16, 1.0f);
  s = EncodeRows(Format(refuse, d), {tiny.data(), 2, d}, 0, block.data());
  EXPECT_EQ(s.code(), Code::kOutOfRange);
  EXPECT_THAT(s.message(), HasSubstr("row 1, channel 16..31"));
  EXPECT_THAT(s.message(), HasSubstr("6.10351562e-05"));
  refuse.small_scale = SmallScale::kFloor;
  EXPECT_TRUE(EncodeRows(Format(refuse, d), {tiny.data(), 2, d}, 0, block.data()).ok());
}

TEST(PageCodec, MalformedCallsAreRefused) {
  const int d = 32;
  const std::vector<float> x(64 * d, 1.0f);
  const BlockFormat f = Format(Integer(2, ScaleAxis::kChannel, 32, ZeroConvention::kMinimum), d, 128);
  std::vector<std::byte> block(static_cast<size_t>(f.block.bytes));
  const auto encode = [&](int slot, int rows) { return EncodeRows(f, {x.data(), rows, d}, slot, block.data()).code(); };
  EXPECT_EQ(encode(10, 5), Code::kInvalidArgument);  // neither begins nor ends a group
  EXPECT_EQ(encode(10, 22), Code::kOk);              // ends one
  EXPECT_EQ(encode(32, 5), Code::kOk);               // begins one
  EXPECT_EQ(encode(10, 30), Code::kOk);              // ends one and begins the next
  EXPECT_EQ(encode(127, 2), Code::kInvalidArgument);
  EXPECT_EQ(encode(-1, 1), Code::kInvalidArgument);
  EXPECT_EQ(encode(128, 0), Code::kOk);
}

TEST(PageCodec, EncodingAndDecodingAllocateNothing) {
  Rng rng(2);
  for (const TensorCoding& coding : AllCodings(64)) {
    const BlockFormat f = Format(coding, 64);
    const std::vector<float> x = TameRows(rng, 64, 64);
    std::vector<std::byte> block(static_cast<size_t>(f.block.bytes));
    std::vector<float> out(64 * 64);
    const int64_t before = allocations;
    const Status s = EncodeRows(f, {x.data(), 64, 64}, 0, block.data());
    DecodeRowsReference(f, block.data(), 0, {out.data(), 64, 64});
    if (const DecodeRowsFn kernel = FindDecodeRows(coding, nullptr)) kernel(f, block.data(), 0, {out.data(), 64, 64});
    EXPECT_EQ(allocations, before) << Name(coding);
    EXPECT_TRUE(s.ok());
  }
}

TEST(PageCodec, KernelsExistForThePresetsAndSayTheirNames) {
  const auto name = [](const TensorCoding& c) {
    const char* text = "unset";
    const DecodeRowsFn fn = FindDecodeRows(c, &text);
    EXPECT_EQ(fn == nullptr, text == nullptr);
    return std::string(text == nullptr ? "" : text);
  };
  using enum ZeroConvention;
  EXPECT_EQ(name(Native(DType::kF16)), "decode_rows.f16");
  EXPECT_EQ(name(Fp8(DType::kFp8E4M3, 1)), "decode_rows.fp8_e4m3");
  EXPECT_EQ(name(Integer(2, ScaleAxis::kRow, 64, kSymmetric)), "decode_rows.int2.row");
  EXPECT_EQ(name(Integer(4, ScaleAxis::kRow, 32, kMinimum)), "decode_rows.min4.row");
  EXPECT_EQ(name(Integer(2, ScaleAxis::kChannel, 32, kMinimum)), "decode_rows.min2.channel");
  EXPECT_EQ(name(Integer(8, ScaleAxis::kRow, 64, kFloatOffset)), "decode_rows.offset8.row");
  for (const TensorCoding& none :
       {Integer(3, ScaleAxis::kRow, 64, kSymmetric), Integer(3, ScaleAxis::kChannel, 32, kMinimum),
        Integer(4, ScaleAxis::kChannel, 32, kSymmetric), Integer(2, ScaleAxis::kRow, 64, kFloatOffset),
        Native(DType::kFp8E4M3)}) {
    EXPECT_EQ(name(none), "") << Name(none);
  }
}

TEST(PageCodec, FormatsFollowTheSchema) {
  LayerSchema layer;
  layer.num_kv_heads = 2;
  layer.head_dim = 64;
  layer.k = Integer(4, ScaleAxis::kChannel, 32, ZeroConvention::kMinimum);
  layer.v = Integer(2, ScaleAxis::kRow, 32, ZeroConvention::kMinimum);
  layer.exact_dtype = DType::kBF16;
  EXPECT_EQ(CodedFormat(layer, kK).coding, layer.k);
  EXPECT_EQ(CodedFormat(layer, kV).coding, layer.v);
  EXPECT_EQ(CodedFormat(layer, kV).block.row_bytes, 16);
  const BlockFormat exact = ExactFormat(layer, kV);
  EXPECT_EQ(exact.coding.kind, CodeKind::kNative);
  EXPECT_EQ(exact.coding.dtype, DType::kBF16);
  EXPECT_EQ(exact.block.row_bytes, 128);
  EXPECT_EQ(exact.block.rows, 32);
}

}  // namespace
}  // namespace livequant
