// tests/kv/planes_test.cc: rows as dense arrays: they decode to what the cache decodes, and each byte of them is a
// page's byte, which a second encoder, page by page, gives again.
#include "kv/planes.h"

#include <gmock/gmock.h>

#include <cstring>

#include "kernels/page_codec.h"
#include "kv/kv_support.h"

namespace livequant {
namespace {

using ::testing::HasSubstr;

class PlanesTest : public ::testing::TestWithParam<std::string> {};

TEST_P(PlanesTest, AreTheCachesRowsAndThePagesBytes) {
  constexpr int kLayers = 2, kHeads = 2, kDim = 64;
  const CacheSchema schema = CaseSchema(GetParam(), kLayers, kHeads, kDim);
  for (const int64_t len : {1, 31, 200, 333}) {
    Harness h(schema);
    const SeqId seq = h.Open();
    h.AppendAll(seq, Ids(7, 0, len), 90, false);
    const auto lease = h.owner().Acquire(seq);
    ASSERT_TRUE(lease.ok());
    for (int layer = 0; layer < kLayers; ++layer)
      for (const TensorIndex tensor : {kK, kV}) {
        const LayerSchema& l = schema.layers[static_cast<size_t>(layer)];
        const auto planes = ReadPlanes(h.cache(), *lease, layer, tensor);
        if (l.window > 0) {
          ASSERT_FALSE(planes.ok());
          EXPECT_THAT(planes.status().message(), HasSubstr("window"));
          continue;
        }
        ASSERT_TRUE(planes.ok()) << planes.status().ToString();
        const PlaneShape& s = planes->shape;
        for (int head = 0; head < kHeads; ++head) {
          std::vector<float> want(static_cast<size_t>(len * kDim)), got(want.size(), -1.0f);
          h.cache().ReadRows(*lease, layer, tensor, head, want.data());
          const Status decoded =
              DecodePlanes(l, tensor, s, {planes->codes, planes->scales, planes->zeros, planes->exact}, head,
                           MatrixView<float>(got.data(), len, kDim));
          ASSERT_TRUE(decoded.ok()) << decoded.ToString();
          ASSERT_EQ(std::memcmp(want.data(), got.data(), want.size() * sizeof(float)), 0)
              << "layer " << layer << " tensor " << tensor << " head " << head << " len " << len;

          // The codes again, from the rows as they were before they were coded.
          const BlockFormat format = CodedFormat(l, tensor);
          Shadow shadow(schema);
          shadow.Append(Ids(7, 0, len));
          const int group = format.coding.axis == ScaleAxis::kChannel ? format.coding.group : 1;
          for (int64_t r = s.pinned; r < s.frontier;) {
            const int64_t page_end = r / format.block.rows * format.block.rows + format.block.rows;
            const int64_t end = std::min({s.frontier, page_end, group == 1 ? page_end : (r / group + 1) * group});
            std::vector<float> rows;
            for (int64_t i = r; i < end; ++i) {
              const std::vector<float> row = shadow.Exact(layer, tensor, head, i);
              rows.insert(rows.end(), row.begin(), row.end());
            }
            std::vector<std::byte> block(static_cast<size_t>(format.block.bytes));
            const int slot = static_cast<int>(r % format.block.rows);
            ASSERT_TRUE(
                EncodeRows(format, MatrixView<const float>(rows.data(), end - r, kDim), slot, block.data()).ok());
            ASSERT_EQ(std::memcmp(block.data() + slot * s.row_bytes,
                                  planes->codes.data() + (head * s.coded_rows() + r - s.pinned) * s.row_bytes,
                                  static_cast<size_t>((end - r) * s.row_bytes)),
                      0);
            if (s.owners > 0) {
              const int64_t each = s.each * DTypeBytes(format.coding.qparam), owners = group == 1 ? end - r : 1;
              const int64_t at = (head * s.owners + r / group - s.pinned / group) * each;
              ASSERT_EQ(std::memcmp(block.data() + format.block.scales_offset + slot / group * each,
                                    planes->scales.data() + at, static_cast<size_t>(owners * each)),
                        0);
              if (s.has_zeros) {
                ASSERT_EQ(std::memcmp(block.data() + format.block.zeros_offset + slot / group * each,
                                      planes->zeros.data() + at, static_cast<size_t>(owners * each)),
                          0);
              }
            }
            r = end;
          }
        }
      }
  }
}
INSTANTIATE_TEST_SUITE_P(Cases, PlanesTest, ::testing::ValuesIn(CaseNames()), CaseTestName);

TEST(Planes, ARefilledGroupIsRefused) {
  const CacheSchema schema = CaseSchema("kivi2", 1, 1, 32);
  Harness h(schema);
  const SeqId seq = h.Open();
  h.AppendAll(seq, Ids(1, 0, 300), 300, false);
  ASSERT_TRUE(h.owner().Truncate(seq, 70).ok());
  h.AppendAll(seq, Ids(2, 70, 330), 300, false);
  const auto lease = h.owner().Acquire(seq);
  ASSERT_TRUE(lease.ok());
  const auto planes = ReadPlanes(h.cache(), *lease, 0, kK);
  ASSERT_FALSE(planes.ok());
  EXPECT_EQ(planes.status().code(), Code::kUnsupported);
}

TEST(Planes, LengthsAreChecked) {
  const CacheSchema schema = CaseSchema("int8", 1, 1, 32);
  const PlaneShape s = ShapeOfPlanes(schema.layers[0], kK, 10);
  std::vector<std::byte> codes(320), scales(10 * 2);
  std::vector<float> out(320);
  const MatrixView<float> view(out.data(), 10, 32);
  ASSERT_EQ(s.frontier, 10);
  EXPECT_TRUE(DecodePlanes(schema.layers[0], kK, s, {codes, scales, {}, {}}, 0, view).ok());
  EXPECT_THAT(DecodePlanes(schema.layers[0], kK, s, {std::span(codes).first(319), scales, {}, {}}, 0, view).message(),
              HasSubstr("codes: 319 bytes; the schema needs 320"));
  EXPECT_THAT(DecodePlanes(schema.layers[0], kK, s, {codes, {}, {}, {}}, 0, view).message(), HasSubstr("scales: 0"));
  EXPECT_THAT(DecodePlanes(schema.layers[0], kK, s, {codes, scales, scales, {}}, 0, view).message(),
              HasSubstr("zeros"));
  EXPECT_THAT(DecodePlanes(schema.layers[0], kK, s, {codes, scales, {}, codes}, 0, view).message(), HasSubstr("exact"));
}

}  // namespace
}  // namespace livequant
