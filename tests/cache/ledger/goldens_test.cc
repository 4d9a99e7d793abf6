// tests/cache/ledger/goldens_test.cc: published byte counts: the article's ledger and methods.md 10.2 to 10.5. Formats
// without a runtime here are segments by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "cache/ledger/forms.h"
#include "cache/ledger/ledger.h"

namespace livequant {
namespace {

constexpr double kMiB = 1024.0 * 1024, kGiB = 1024 * kMiB;
double MiB(int64_t bytes) { return static_cast<double>(bytes) / kMiB; }

// One tensor of the article's shape: 32 layers, 8 KV heads, head size 128; every row coded at once.
LedgerSegment Tensor(double code_bits) {
  LedgerSegment s;
  s.layers = 32;
  s.heads = 8;
  s.values = 128;
  s.code_bits = code_bits;
  return s;
}
LedgerSegment PerRow(double code_bits, double qparam_bytes) {
  LedgerSegment s = Tensor(code_bits);
  s.row_qparam_bytes = qparam_bytes;
  return s;
}
LedgerBytes Both(const LedgerSegment& s, int64_t tokens) { return Ledger(std::vector{s, s}, tokens); }

TEST(ArticleLedger, PayloadOfTheGqaExample) {
  EXPECT_EQ(MiB(Both(Tensor(16), 4096).codes), 512);
  EXPECT_EQ(MiB(Both(Tensor(8), 4096).codes), 256);
  EXPECT_EQ(MiB(Both(Tensor(4), 4096).codes), 128);
  EXPECT_EQ(MiB(Both(Tensor(2), 4096).codes), 64);
  EXPECT_EQ(MiB(Both(Tensor(16), 4096).total()), 512);
}

TEST(ArticleLedger, SynchronizedTailIs109MiB) {
  const CacheSchema schema = Forms("kivi2_sync", 32, 8, 128);
  const LedgerBytes b = Ledger(schema, 4096);
  EXPECT_EQ(MiB(b.codes), 62);
  EXPECT_EQ(MiB(b.qparams), 31);
  EXPECT_EQ(MiB(b.residual), 16);
  EXPECT_EQ(b.sparse + b.exact_prefix + b.pages, 0);
  EXPECT_EQ(MiB(b.total()), 109);
  const std::vector<LedgerSegment> segments = SegmentsOf(schema);
  ASSERT_EQ(segments.size(), 2u);
  EXPECT_EQ(segments[0].name, "layers 0-31 k");
  EXPECT_EQ(segments[1].name, "layers 0-31 v");
  for (const LedgerSegment& s : segments) {
    const LedgerBytes one = Ledger(std::vector{s}, 4096);
    EXPECT_EQ(MiB(one.codes), 31) << s.name;
    EXPECT_EQ(MiB(one.qparams), 15.5) << s.name;
    EXPECT_EQ(MiB(one.residual), 8) << s.name;
  }
}

struct KiviCase {
  int64_t tokens;
  double k_codes, k_qparams, k_tail, v_codes, v_qparams, v_tail, total;
};
// methods.md 10.2, each to the digits given there.
constexpr KiviCase kKivi[] = {
    {4000, 31, 15.5, 2, 30.25, 15.125, 8, 101.875},
    {4096, 32, 16, 0, 31, 15.5, 8, 102.5},
    {4223, 32, 16, 7.9375, 31.9921875, 15.99609375, 8, 111.92578125},
    {4224, 33, 16.5, 0, 32, 16, 8, 105.5},
    {131072, 1024, 512, 0, 1023, 511.5, 8, 3078.5},
};

TEST(ArticleLedger, PinnedKiviScheduleIsASawTooth) {
  const CacheSchema schema = Forms("kivi2", 32, 8, 128);
  const std::vector<LedgerSegment> s = SegmentsOf(schema);
  for (const KiviCase& c : kKivi) {
    SCOPED_TRACE(c.tokens);
    const LedgerBytes k = Ledger(std::vector{s[0]}, c.tokens), v = Ledger(std::vector{s[1]}, c.tokens);
    EXPECT_EQ(MiB(k.codes), c.k_codes);
    EXPECT_EQ(MiB(k.qparams), c.k_qparams);
    EXPECT_EQ(MiB(k.residual), c.k_tail);
    EXPECT_EQ(MiB(v.codes), c.v_codes);
    EXPECT_EQ(MiB(v.qparams), c.v_qparams);
    EXPECT_EQ(MiB(v.residual), c.v_tail);
    EXPECT_EQ(MiB(Ledger(schema, c.tokens).total()), c.total);
  }
  EXPECT_NEAR(MiB(Ledger(schema, 4223).total()), 111.926, 5e-4);
  // Effective bits at 128 k: 3.006 of 16.
  EXPECT_NEAR(16 * static_cast<double>(Ledger(schema, 131072).total()) / (16384 * kMiB), 3.006, 5e-4);
  EXPECT_LT(Ledger(schema, 4224).total(), Ledger(schema, 4223).total()) << "bytes are not monotone in T";
}

TEST(ArticleLedger, SlackOfTheCacheCoreExample) {
  // 102.5 MiB without slack at 4096; 103 = 101.875 + 1.125 at 4000 (cache_core.md 4).
  const CacheSchema schema = Forms("kivi2", 32, 8, 128);
  EXPECT_EQ(Ledger(schema, 4096).slack, 0);
  EXPECT_EQ(MiB(Ledger(schema, 4000).slack), 1.125);
  EXPECT_EQ(MiB(LayoutPlane(schema, LayerClasses(schema)[0], kK, kCoded).page_bytes), 1.5);
  EXPECT_EQ(MiB(LayoutPlane(schema, LayerClasses(schema)[0], kV, kCoded).page_bytes), 1.5);
  EXPECT_EQ(MiB(LayoutPlane(schema, LayerClasses(schema)[0], kV, kExact).page_bytes), 2);
}

TEST(MethodLedger, QparamsOfOneTensorPerAxis) {  // 10.2, last line
  EXPECT_EQ(MiB(Ledger(std::vector{PerRow(0, 128 / 32 * 4)}, 4096).total()), 16);
  EXPECT_EQ(MiB(Ledger(std::vector{PerRow(0, 4)}, 4096).total()), 4);
  for (const int group : {32, 128}) {
    LedgerSegment k = Tensor(0);
    k.group_rows = group;
    k.group_qparam_bytes = 128 * 4;
    EXPECT_EQ(MiB(Ledger(std::vector{k}, 4096).qparams), group == 32 ? 16 : 4);
  }
}

TEST(MethodLedger, MetadataPerAxis) {  // 11.6, bytes a scalar at four bytes of affine qparams
  const auto per_scalar = [](const LedgerSegment& s) {
    return static_cast<double>(Ledger(std::vector{s}, 4096).qparams) / (32 * 8 * 128 * 4096.0);
  };
  EXPECT_EQ(per_scalar(Tensor(8)), 0);
  EXPECT_EQ(per_scalar(PerRow(8, 4)), 1.0 / 32);
  EXPECT_EQ(per_scalar(PerRow(4, 16)), 1.0 / 8);
  LedgerSegment channel = Tensor(4);
  channel.group_qparam_bytes = 128 * 4;
  channel.group_rows = 32;
  EXPECT_EQ(per_scalar(channel), 1.0 / 8);
  channel.group_rows = 128;
  EXPECT_EQ(per_scalar(channel), 1.0 / 32);
  EXPECT_EQ(per_scalar(PerRow(4, 8)), 1.0 / 16);  // NVFP4
}

TEST(MethodLedger, FormatsOfThePresets) {  // 10.3
  const auto total = [](const char* name) { return MiB(Ledger(Forms(name, 32, 8, 128), 4096).total()); };
  EXPECT_EQ(total("f16"), 512);
  EXPECT_EQ(total("bf16"), 512);
  EXPECT_EQ(total("f32"), 1024);
  EXPECT_EQ(total("fp8_e4m3"), 256);
  EXPECT_EQ(total("fp8_e5m2"), 256);
  EXPECT_EQ(Ledger(Forms("fp8_e4m3", 32, 8, 128), 4096).artifact, 256);  // two f32 scales a layer
  EXPECT_EQ(total("qserve8"), 264);
  EXPECT_EQ(total("qserve4"), 136);
  EXPECT_EQ(total("int8"), 260);  // one f16 scale a row, half of per-token-head's f32
  EXPECT_EQ(total("int4"), 132);
  EXPECT_EQ(total("int2"), 68);
  EXPECT_EQ(total("kivi4"), 102.5 + 63);  // two bits more for 4096 rows of K and 3968 of V
  for (const std::string& name : FormNames()) EXPECT_EQ(Ledger(Forms(name, 32, 8, 128), 4096).pages, 0) << name;
}

TEST(MethodLedger, QServePageIs34816Bytes) {
  // 64 rows in the released layout; ours hold 128 of the same bytes.
  CacheSchema schema = Forms("qserve4", 1, 8, 128);
  schema.layers[0].coded_page_rows = 64;
  ASSERT_TRUE(Validate(schema).ok());
  EXPECT_EQ(LayoutPlane(schema, LayerClasses(schema)[0], kK, kCoded).page_bytes, 34816);
  EXPECT_EQ(Ledger(schema, 4096).slack, 0);
}

TEST(MethodLedger, FormatsWithoutARuntime) {  // 10.3
  const auto both = [](const LedgerSegment& s) { return MiB(Both(s, 4096).total()); };
  EXPECT_EQ(both(PerRow(8, 4)), 264);             // int8 or fp8 per token and head, f32 scale
  EXPECT_EQ(both(PerRow(4, 4)), 136);             // int4 per token and head, zero point inside the scale
  EXPECT_EQ(both(PerRow(4, 128 / 16)), 144);      // NVFP4: an e4m3 scale for 16
  EXPECT_EQ(both(PerRow(8, 128 / 32 * 2)), 272);  // q8_0
  EXPECT_EQ(both(PerRow(4, 128 / 32 * 2)), 144);  // q4_0
  LedgerSegment per_head = Tensor(8);
  per_head.static_bytes = 8 * 4;
  EXPECT_EQ(Both(per_head, 4096).total(), 256 * 1024 * 1024);
  EXPECT_EQ(Both(per_head, 4096).artifact, 2048);
}

TEST(MethodLedger, TurboQuantSlots) {
  // K codes and a norm, V codes, scale and minimum: 196, 134, 118, 102 bytes a token and head.
  const auto slot = [](double k_bits, double k_norm, double v_bits) {
    return MiB(Ledger(std::vector{PerRow(k_bits, k_norm), PerRow(v_bits, 4)}, 4096).total());
  };
  EXPECT_EQ(slot(8, 0, 4), 196);  // fp8 keys carry no norm
  EXPECT_EQ(slot(4, 2, 4), 134);
  EXPECT_EQ(slot(3, 2, 4), 118);
  EXPECT_EQ(slot(3, 2, 3), 102);
}

TEST(MethodLedger, KVarNTiles) {
  // Tiles of 128 rows, 108 (k4v2) or 140 (k4v4) bytes a token and head; 128 sink rows and the open tile are f16. Of a
  // tile's bytes beyond its codes 12 a row are qparams: 1536 a tile and head over both tensors, counted here half to
  // each.
  const auto kvarn = [](double v_bits) {
    std::vector<LedgerSegment> tensors;
    for (const double bits : {4.0, v_bits}) {
      LedgerSegment s = Tensor(bits);
      s.group_rows = 128;
      s.group_qparam_bytes = 768;
      s.closure = {0, 128};
      tensors.push_back(s);
    }
    return tensors;
  };
  EXPECT_EQ(MiB(Ledger(kvarn(2), 4096).total()), 108);
  EXPECT_EQ(MiB(Ledger(kvarn(4), 4096).total()), 140);
  std::vector<LedgerSegment> with_sinks = kvarn(2);
  for (LedgerSegment& s : with_sinks) s.pinned = 128;
  const LedgerBytes b = Ledger(with_sinks, 4096 + 128 + 50);
  EXPECT_EQ(MiB(b.codes + b.qparams), 108);
  EXPECT_EQ(MiB(b.exact_prefix), 16);
  EXPECT_EQ(b.residual, 2 * 32 * 8 * 128 * 2 * 50);
}

TEST(MethodLedger, KVQuantBothLayouts) {
  // 1024 columns a row; 1 % sparse is capped at 6 a side: 12 slots. Released: f32 values, int32 indices, a table of
  // 2^bits f32 for each V row, and, as an artifact, for each K channel. Compact: f16 values, u16 indices, an f16 range
  // pair for each V row and each K channel.
  const auto kvquant = [](double bits, double table_bytes, double slot_bytes) {
    std::vector<LedgerSegment> tensors(2, Tensor(bits));
    for (LedgerSegment& s : tensors) {
      s.heads = 1;
      s.values = 1024;
      s.row_sparse_bytes = 12 * slot_bytes;
    }
    tensors[0].static_bytes = 1024 * static_cast<int64_t>(table_bytes);
    tensors[1].row_qparam_bytes = table_bytes;
    const LedgerBytes b = Ledger(tensors, 4096);
    EXPECT_EQ(MiB(b.codes), 32 * bits);
    EXPECT_EQ(MiB(b.sparse), 3 * slot_bytes);
    return MiB(b.total() + b.artifact);
  };
  EXPECT_EQ(kvquant(4, 16 * 4, 8), 162);
  EXPECT_EQ(kvquant(3, 8 * 4, 8), 125);
  EXPECT_EQ(kvquant(2, 4 * 4, 8), 90.5);
  EXPECT_EQ(kvquant(4, 4, 4), 140.625);
  EXPECT_EQ(kvquant(3, 4, 4), 108.625);
  EXPECT_EQ(kvquant(2, 4, 4), 76.625);
}

TEST(MethodLedger, DecodeReads) {  // 10.4: T0 4096, 256 generated tokens, GiB
  struct Case {
    double bits, exclusive, inclusive;
  };
  for (const Case& c :
       {Case{16, 131.984, 132.016}, Case{8, 65.992, 66.008}, Case{4, 32.996, 33.004}, Case{2, 16.498, 16.502}}) {
    const std::vector<LedgerSegment> s(2, Tensor(c.bits));
    EXPECT_NEAR(static_cast<double>(CumulativeReadBytes(s, 4096, 256, false)) / kGiB, c.exclusive, 5e-4);
    EXPECT_NEAR(static_cast<double>(CumulativeReadBytes(s, 4096, 256, true)) / kGiB, c.inclusive, 5e-4);
    // 2 L H d b/8 (N T0 + N (N-1)/2), and N rows more.
    const int64_t row = 2 * 32 * 8 * 128 * static_cast<int64_t>(c.bits) / 8;
    EXPECT_EQ(CumulativeReadBytes(s, 4096, 256, false), row * (256 * 4096 + 256 * 255 / 2));
    EXPECT_EQ(CumulativeReadBytes(s, 4096, 256, true), row * (256 * 4096 + 256 * 255 / 2 + 256));
  }
  EXPECT_EQ(CumulativeReadBytes(std::vector{Tensor(16)}, 4096, 0, true), 0);
}

TEST(MethodLedger, DecodeReadsOfSplitFrontiers) {
  const CacheSchema schema = Forms("kivi2", 32, 8, 128);
  const auto segments = SegmentsOf(schema);
  // The step to 4096 rows reads what 4095 rows hold, and its own row exact: K is closed only after it.
  const int64_t own_row = 2 * 32 * 8 * 128 * 2;
  EXPECT_EQ(DecodeReadBytes(segments, 4096), Ledger(schema, 4095).total() + own_row);
  EXPECT_EQ(CumulativeReadBytes(segments, 4095, 1, true), DecodeReadBytes(segments, 4096));
  EXPECT_EQ(CumulativeReadBytes(segments, 4095, 1, false), Ledger(schema, 4095).total());
  // qserve's own row is exact in its step; int8's is coded.
  const CacheSchema qserve = Forms("qserve4", 32, 8, 128), int8 = Forms("int8", 32, 8, 128);
  EXPECT_EQ(DecodeReadBytes(SegmentsOf(qserve), 100), Ledger(qserve, 99).total() + own_row);
  EXPECT_EQ(DecodeReadBytes(SegmentsOf(int8), 100), Ledger(int8, 100).total());
  EXPECT_EQ(DecodeReadBytes(segments, 0), 0);
}

TEST(MethodLedger, MixedLayersAndSlidingWindows) {  // 10.5
  const auto gpt_oss = [](double full_bits, double sliding_bits, int64_t tokens) {
    std::vector<LedgerSegment> s(4);
    for (size_t i = 0; i < 4; ++i) {
      s[i].layers = 12;
      s[i].heads = 8;
      s[i].values = 64;
      s[i].code_bits = i < 2 ? full_bits : sliding_bits;
      s[i].window = i < 2 ? 0 : 128;
    }
    return MiB(Ledger(s, tokens).total());
  };
  EXPECT_EQ(gpt_oss(16, 16, 4096), 99);
  EXPECT_EQ(gpt_oss(8, 16, 4096), 51);
  EXPECT_EQ(gpt_oss(8, 8, 4096), 49.5);
  EXPECT_EQ(gpt_oss(16, 16, 131072), 3075);
  EXPECT_EQ(gpt_oss(8, 16, 131072), 1539);
  EXPECT_EQ(gpt_oss(8, 8, 131072), 1537.5);
  // The same through the schema: skipped layers, windows, two classes.
  CacheSchema schema = Forms("fp8_e4m3", 24, 8, 64);
  for (size_t i = 0; i < 24; i += 2) {
    schema.layers[i] = FormLayer("bf16", 8, 64);
    schema.layers[i].window = 128;
  }
  ASSERT_TRUE(Validate(schema).ok());
  EXPECT_EQ(MiB(Ledger(schema, 4096).total()), 51);
  EXPECT_EQ(Ledger(schema, 4096).slack, 0);
  EXPECT_EQ(SegmentsOf(schema).size(), 4u);
}

TEST(MethodLedger, MlaIsOneSegmentWithoutHeads) {
  const auto mla = [](double code_bits, double qparam_bytes, int64_t values, int64_t tokens) {
    LedgerSegment s;
    s.layers = 61;
    s.heads = 1;
    s.values = values;
    s.code_bits = code_bits;
    s.row_qparam_bytes = qparam_bytes;
    return Ledger(std::vector{s}, tokens).total();
  };
  EXPECT_EQ(MiB(mla(16, 0, 576, 4096)), 274.5);
  EXPECT_EQ(MiB(mla(16, 0, 576, 131072)), 8784);
  // 512 e4m3 latents, four f32 scales, 64 bf16 rotary values: 656 bytes.
  EXPECT_EQ(mla(8, 16 + 64 * 2, 512, 1), 61 * 656);
  EXPECT_NEAR(MiB(mla(8, 16 + 64 * 2, 512, 4096)), 156.3, 0.05);
  EXPECT_NEAR(MiB(mla(8, 16 + 64 * 2, 512, 131072)), 5002, 0.5);
}

// A model's bytes may change between releases only together with this table: +40 % for the same model once went unseen
// in an engine until machines ran out of memory (padding and grouping had changed).
TEST(FieldFailures, GoldenLedgerPerModelConfig) {
  struct Model {
    const char* name;
    int layers, heads, dim;
    int64_t f16, fp8, int4, kivi2, qserve4;  // total bytes at 4096 tokens
  };
  const Model models[] = {
      {"Llama-3.1-8B", 32, 8, 128, 536870912, 268435456, 138412032, 107479040, 142606336},
      {"Llama-3.1-70B", 80, 8, 128, 1342177280, 671088640, 346030080, 268697600, 356515840},
      {"Llama-2-7B", 32, 32, 128, 2147483648, 1073741824, 553648128, 429916160, 570425344},
      {"Qwen2.5-7B", 28, 4, 128, 234881024, 117440512, 60555264, 47022080, 62390272},
      {"Llama-3.2-1B", 16, 8, 64, 134217728, 67108864, 35651584, 26869760, 37748736},
  };
  for (const Model& m : models) {
    SCOPED_TRACE(m.name);
    const auto total = [&](const char* name) { return Ledger(Forms(name, m.layers, m.heads, m.dim), 4096).total(); };
    EXPECT_EQ(total("f16"), m.f16);
    EXPECT_EQ(total("fp8_e4m3"), m.fp8);
    EXPECT_EQ(total("int4"), m.int4);
    EXPECT_EQ(total("kivi2"), m.kivi2);
    EXPECT_EQ(total("qserve4"), m.qserve4);
  }
}

TEST(FieldFailures, BytesPerBlockAreNotBytesPerElement) {
  // 32x overestimate: an estimator took the bytes of a 32-value block for those of one value. Of q8_0 a value costs
  // 34/32 bytes.
  EXPECT_EQ(Ledger(std::vector{PerRow(8, 8)}, 1).total(), 32 * 8 * 128 / 32 * 34);
}

TEST(FieldFailures, TwoHeadSizesInOneModel) {
  // 256 and 512 with inline scales broke a page-size ratio elsewhere; here each class has pages of its own size.
  CacheSchema schema = Forms("int8", 4, 2, 256);
  schema.layers[1] = FormLayer("int8", 2, 512);
  ASSERT_TRUE(Validate(schema).ok());
  const PlaneLayout plane = LayoutPlane(schema, LayerClasses(schema)[0], kK, kCoded);
  EXPECT_EQ(plane.head_stride[0], 128 * 258);
  EXPECT_EQ(plane.head_stride[1], 128 * 514);
  EXPECT_EQ(Ledger(schema, 128).total(), 2 * plane.page_bytes);
}

}  // namespace
}  // namespace livequant
