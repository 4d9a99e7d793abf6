// tests/schema/layout_test.cc: sizes and places of planes, published figures and a property.
#include "schema/layout.h"

#include <gtest/gtest.h>

#include "schema/examples.h"
#include "support/property.h"

namespace livequant {
namespace {

TEST(HeadBlock, SizesOfTheFormatsAtHeadSize128) {  // cache_core.md 4: 16.3, 8.3, 8.5, 10 and 6 KiB
  const auto bytes = [](LayerSchema layer, int bits, TensorIndex tensor) {
    layer.head_dim = 128;
    for (TensorCoding* t : {&layer.k, &layer.v}) {
      t->bits = bits;
      if (t->group == 64) t->group = 128;
    }
    EXPECT_TRUE(Validate(SchemaOf({layer})).ok());
    return CodedHeadBlock(layer, tensor).bytes;
  };
  EXPECT_EQ(bytes(SymmetricLayer(), 8, kK), 16640);
  EXPECT_EQ(bytes(SymmetricLayer(), 4, kV), 8448);
  EXPECT_EQ(bytes(QServeLayer(), 4, kK), 8704);
  EXPECT_EQ(bytes(KiviLayer(), 4, kK), 10240);
  EXPECT_EQ(bytes(KiviLayer(), 4, kV), 10240);
  EXPECT_EQ(bytes(KiviLayer(), 2, kK), 6144);
  EXPECT_EQ(bytes(KiviLayer(), 2, kV), 6144);
  EXPECT_EQ(bytes(NativeLayer(), 16, kK), 32768);
  EXPECT_EQ(bytes(Fp8Layer(), 8, kK), 16384);
}

TEST(HeadBlock, PlanesOfTheWorkedExample) {  // docs/formats/page.md
  LayerSchema layer = KiviLayer();
  layer.head_dim = 32;
  const HeadBlock k = CodedHeadBlock(layer, kK), v = CodedHeadBlock(layer, kV), x = ExactHeadBlock(layer, kK);
  EXPECT_EQ(k.row_bytes, 8);
  EXPECT_EQ(k.groups_per_page, 4);
  EXPECT_EQ(k.groups_per_row, 0);
  EXPECT_EQ(k.scales_offset, 1024);
  EXPECT_EQ(k.zeros_offset, 1280);
  EXPECT_EQ(k.bytes, 1536);
  EXPECT_EQ(v.groups_per_row, 1);
  EXPECT_EQ(v.groups_per_page, 0);
  EXPECT_EQ(v.scales_offset, 1024);
  EXPECT_EQ(v.zeros_offset, 1280);
  EXPECT_EQ(v.bytes, 1536);
  EXPECT_EQ(x.rows, 32);
  EXPECT_EQ(x.row_bytes, 64);
  EXPECT_EQ(x.bytes, 2048);
  EXPECT_EQ(x.scales_offset, x.bytes);
  EXPECT_EQ(x.zeros_offset, x.bytes);
}

TEST(HeadBlock, SymmetricCodesHaveNoZeros) {
  const HeadBlock b = CodedHeadBlock(SymmetricLayer(), kK);
  EXPECT_EQ(b.scales_offset, 128 * 64);
  EXPECT_EQ(b.zeros_offset, 128 * 64 + 256);
  EXPECT_EQ(b.bytes, b.zeros_offset);
}

// Every byte of codes, scales and zeros has a place of its own, planes start at multiples of 64, nothing is larger than
// need be.
TEST(HeadBlock, PlanesNeitherOverlapNorWaste) {
  int padded = 0;
  ForAll(500, [&](Rng& rng) {
    LayerSchema layer = NativeLayer();
    layer.head_dim = rng.Pick({4, 8, 20, 32, 80, 96, 128, 256});
    layer.coded_page_rows = rng.Pick({32, 128, 256});
    layer.exact_page_rows = rng.Pick({1, 32});
    const bool channel = rng.Chance(0.5);
    const int group = channel ? rng.Pick({8, 16, 32}) : layer.head_dim / rng.Pick({1, 2, 4});
    layer.k = IntegerCoding(rng.Pick({2, 4, 8}), channel ? ScaleAxis::kChannel : ScaleAxis::kRow, group,
                            channel || rng.Chance(0.5) ? ZeroConvention::kMinimum : ZeroConvention::kSymmetric);
    layer.k.qparam = rng.Pick({DType::kF16, DType::kF32});
    if (channel) layer.k_closure = {0, 64};
    const Status valid = Validate(SchemaOf({layer}));
    ASSERT_TRUE(valid.ok()) << valid.ToString();
    const HeadBlock b = CodedHeadBlock(layer, kK);
    const int64_t codes = b.rows * b.row_bytes;
    const int64_t qparams =
        channel ? layer.coded_page_rows / group * layer.head_dim : layer.coded_page_rows * (layer.head_dim / group);
    const int64_t plane = qparams * DTypeBytes(layer.k.qparam);
    EXPECT_EQ(b.row_bytes * 8, int64_t{layer.head_dim} * layer.k.bits);
    for (const int64_t offset : {b.scales_offset, b.zeros_offset, b.bytes}) EXPECT_EQ(offset % 64, 0);
    EXPECT_GE(b.scales_offset, codes);
    EXPECT_LT(b.scales_offset, codes + 64);
    EXPECT_GE(b.zeros_offset, b.scales_offset + plane);
    EXPECT_LT(b.zeros_offset, b.scales_offset + plane + 64);
    EXPECT_EQ(b.bytes - b.zeros_offset,
              layer.k.zero == ZeroConvention::kSymmetric ? 0 : b.zeros_offset - b.scales_offset);
    const HeadBlock x = ExactHeadBlock(layer, kV);
    EXPECT_EQ(x.row_bytes, layer.head_dim * 2);
    EXPECT_GE(x.bytes, x.rows * x.row_bytes);
    EXPECT_LT(x.bytes, x.rows * x.row_bytes + 64);
    padded += b.scales_offset != codes || b.zeros_offset != b.scales_offset + plane || x.bytes != x.rows * x.row_bytes;
  });
  EXPECT_GT(padded, 20);
}

TEST(Plane, LayersOfAClassFollowEachOther) {
  LayerSchema a = KiviLayer(), b = KiviLayer(), elsewhere = NativeLayer();
  b.k.bits = 4;
  b.num_kv_heads = 3;
  b.head_dim = 96;
  const CacheSchema schema = SchemaOf({a, elsewhere, b});
  ASSERT_TRUE(Validate(schema).ok());
  const LayerClass cls = LayerClasses(schema)[0];
  ASSERT_EQ(cls.layers, (std::vector<int>{0, 2}));
  for (const TensorIndex tensor : {kK, kV})
    for (const FormIndex form : {kCoded, kExact}) {
      const PlaneLayout plane = LayoutPlane(schema, cls, tensor, form);
      const HeadBlock of_a = form == kCoded ? CodedHeadBlock(a, tensor) : ExactHeadBlock(a, tensor);
      const HeadBlock of_b = form == kCoded ? CodedHeadBlock(b, tensor) : ExactHeadBlock(b, tensor);
      EXPECT_EQ(plane.rows, form == kCoded ? 128 : 32);
      EXPECT_EQ(plane.layer_offset, (std::vector<int64_t>{0, 2 * of_a.bytes}));
      EXPECT_EQ(plane.head_stride, (std::vector<int64_t>{of_a.bytes, of_b.bytes}));
      EXPECT_EQ(plane.page_bytes, 2 * of_a.bytes + 3 * of_b.bytes);
    }
}

}  // namespace
}  // namespace livequant
