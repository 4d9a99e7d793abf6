// Attention through pages against plain attention in double over rows whose form the contract chooses.
#include <gtest/gtest.h>

#include "kv/kv_support.h"

namespace livequant {
namespace {

class AttendTest : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Cases, AttendTest, ::testing::ValuesIn(CaseNames()), CaseTestName);

void ExpectContract(const CacheSchema& schema, std::initializer_list<int> steps, int q_group = 2) {
  Harness h(schema, {.sequences = 1, .q_group = q_group});
  Shadow shadow(schema);
  const SeqId seq = h.Open();
  for (const int rows : steps) {
    const Shadow before = shadow;
    const std::vector<Id> ids = Ids(1, shadow.len(), shadow.len() + rows);
    shadow.Append(ids);
    ExpectAttention(h, h.AppendAll(seq, ids, rows), before, shadow);
    if (::testing::Test::HasFailure()) return;
  }
  ExpectThreeClosures(h);
  EXPECT_EQ(h.cache().fallback_calls(), 0);
}

TEST_P(AttendTest, Stepwise) { ExpectContract(CaseSchema(GetParam(), 1, 1, 32), {1, 2, 40, 100, 1, 250, 1, 30}); }

TEST_P(AttendTest, Chunks) {
  CacheSchema schema = CaseSchema(GetParam(), 1, 1, 32);
  schema.read_step = 64;
  ExpectContract(schema, {128, 64, 130, 1, 90, 1});
}

TEST_P(AttendTest, Prompt) {
  CacheSchema schema = CaseSchema(GetParam(), 1, 1, 32);
  schema.read_step = kPromptReadStep;
  ExpectContract(schema, {400, 1, 5, 1});
}

TEST(Attend, ChunkOf512) {
  for (const char* name : {"kivi2", "kivi2_sync", "qserve4", "mixed"}) {
    SCOPED_TRACE(name);
    CacheSchema schema = CaseSchema(name, name == std::string("mixed") ? 4 : 1, 1, 32);
    schema.read_step = 512;
    ExpectContract(schema, {512, 60, 1});
  }
}

TEST(Attend, ModelShape) {
  for (const char* name : {"kivi2", "int8"}) {
    SCOPED_TRACE(name);
    ExpectContract(CaseSchema(name, 1, 2, 64), {390, 1});
  }
}

TEST(Attend, AnyRatioOfQueryHeads) {
  for (const int q_group : {1, 3, 5, 8}) {
    SCOPED_TRACE(q_group);
    ExpectContract(CaseSchema("kivi4", 1, 2, 32), {385, 1}, q_group);
  }
}

// Two head sizes and four codings in one schema: every value is unique and is read back through its own view.
TEST(Attend, LayersOfUnequalShapeKeepApart) {
  CacheSchema schema;
  for (const auto& [name, heads, dim] :
       {std::tuple{"kivi2", 2, 32}, std::tuple{"int8", 1, 64}, std::tuple{"fp8_e4m3_scaled", 3, 96},
        std::tuple{"qserve4", 1, 32}, std::tuple{"kivi4", 1, 128}})
    schema.layers.push_back(CaseSchema(name, 1, heads, dim).layers[0]);
  schema.provenance.scale_source = "dataset";
  ASSERT_TRUE(Validate(schema).ok()) << Validate(schema).ToString();
  Harness h(schema);
  const SeqId a = h.Open(), b = h.Open();
  Shadow sa(schema), sb(schema);
  for (const int rows : {150, 1, 240, 1}) {
    const Shadow before_a = sa, before_b = sb;
    const StepInput inputs[] = {{a, Ids(1, sa.len(), sa.len() + rows)}, {b, Ids(2, sb.len(), sb.len() + 1)}};
    sa.Append(inputs[0].ids);
    sb.Append(inputs[1].ids);
    const auto outputs = h.Append(inputs);
    ExpectAttention(h, outputs[0], before_a, sa);
    ExpectAttention(h, outputs[1], before_b, sb);
    ExpectRows(h, a, sa);
    ExpectRows(h, b, sb);
    if (HasFailure()) return;
  }
  ExpectThreeClosures(h);
}

// A static scale of 4 must do to the answer what rounding does and no more.
TEST(Attend, ScaleOfFourIsAppliedEverywhere) {
  std::vector<std::vector<RowOutput>> outputs;
  for (const float scale : {0.0f, 1.0f, 4.0f}) {
    CacheSchema schema = CaseSchema(scale == 0 ? "f32" : "fp8_e4m3", 1, 2, 32);
    if (scale != 0) {
      schema.layers[0].k.static_scale = schema.layers[0].v.static_scale = scale;
      schema.provenance.scale_source = "dataset";
    }
    Harness h(schema);
    const SeqId seq = h.Open();
    outputs.push_back(h.AppendAll(seq, Ids(1, 0, 300), 150));
    for (RowOutput& row : h.AppendAll(seq, Ids(1, 300, 310), 1)) outputs.back().push_back(std::move(row));
  }
  double size = 0, error[3] = {0, 0, 0};
  for (size_t r = 0; r < outputs[0].size(); ++r)
    for (size_t c = 0; c < outputs[0][r].size(); ++c) {
      size += outputs[0][r][c] * outputs[0][r][c];
      for (int i : {1, 2}) {
        const double e = outputs[i][r][c] - outputs[0][r][c];
        error[i] += e * e;
      }
    }
  EXPECT_GT(size, 0);
  for (int i : {1, 2}) {
    EXPECT_GT(error[i], 0);
    EXPECT_LT(error[i], size * 0.01) << "scale " << (i == 1 ? 1 : 4);
  }
}

TEST(Attend, AFallbackIsRefusedOrCounted) {
  CacheSchema schema = CaseSchema("kivi2", 1, 1, 32);
  schema.layers[0].k.group = 2;
  const bool read_by_kernel = ChooseKernel(schema.layers[0], Phase::kDecode, false).ok();
  KvOptions options{.max_len = 500, .max_q_heads = 2};
  auto strict = KvCache::Open(schema, options);
  EXPECT_EQ(strict.ok(), read_by_kernel);
  if (!strict.ok()) {
    EXPECT_EQ(strict.status().code(), Code::kUnsupported);
    EXPECT_NE(strict.status().message().find("layer 0"), std::string::npos) << strict.status().ToString();
  }
  Harness h(schema, {.allow_fallback = true});
  Shadow before(schema), after(schema);
  const SeqId seq = h.Open();
  after.Append(Ids(1, 0, 400));
  ExpectAttention(h, h.AppendAll(seq, Ids(1, 0, 400), 400), before, after);
  EXPECT_EQ(h.cache().fallback_calls(), read_by_kernel ? 0 : 1);
  EXPECT_EQ(h.cache().kernel(0, Phase::kPrefill).fallback, !read_by_kernel);
}

TEST(Attend, ScratchDoesNotGrowWithTheHistory) {
  Harness h(CaseSchema("kivi2", 2, 1, 32), {.sequences = 2, .max_len = 4096, .threads = 1});
  const int64_t before = h.cache().workspace_bytes();
  EXPECT_GT(before, 0);
  const SeqId seq = h.Open();
  h.AppendAll(seq, Ids(1, 0, 1), 1);
  EXPECT_EQ(h.cache().workspace_bytes(), before);
  h.AppendAll(seq, Ids(1, 1, 4000), 512);
  h.AppendAll(seq, Ids(1, 4000, 4010), 1);
  EXPECT_EQ(h.cache().workspace_bytes(), before);
}

}  // namespace
}  // namespace livequant
