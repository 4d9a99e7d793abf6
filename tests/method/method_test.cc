// tests/method/method_test.cc: the preset table as it stands for ever, skipped layers, policies by name and by file.
#include "method/method.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

namespace livequant {
namespace {

using ::testing::HasSubstr;

CacheShape Shape(int layers, int heads, int dim) {
  CacheShape shape;
  shape.num_layers = layers;
  shape.num_kv_heads = heads;
  shape.head_dim = dim;
  return shape;
}

std::string TextOf(const std::filesystem::path& path) {
  std::ifstream in(path);
  EXPECT_TRUE(in.good()) << path;
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

// The table of presets, one row each, as it will stand for ever: kind dtype|bits axis group zero, closures, exact
// dtype.
struct Row {
  CodeKind kind;
  DType dtype;
  int bits;
  ScaleAxis k_axis;
  int k_group, v_group;
  ZeroConvention zero;
  Closure k, v;
  DType exact;
};

const std::map<std::string, Row>& Table() {
  using enum CodeKind;
  using enum ScaleAxis;
  constexpr auto kNo = ZeroConvention::kNone, kSym = ZeroConvention::kSymmetric;
  constexpr auto kMin = ZeroConvention::kMinimum, kOff = ZeroConvention::kFloatOffset;
  constexpr auto kF16 = DType::kF16, kF32 = DType::kF32, kBF16 = DType::kBF16;
  constexpr Closure own{-1, 1}, next{0, 1}, k128{0, 128}, v128{128, 1}, sync{97, 32};
  constexpr auto kNoAxis = ScaleAxis::kNone;
  static const std::map<std::string, Row> table = {
      {"f32", {kNative, kF32, 32, kNoAxis, 0, 0, kNo, own, own, kF32}},
      {"f16", {kNative, kF16, 16, kNoAxis, 0, 0, kNo, own, own, kF16}},
      {"bf16", {kNative, kBF16, 16, kNoAxis, 0, 0, kNo, own, own, kBF16}},
      {"fp8_e4m3", {kScaledFp, DType::kFp8E4M3, 8, kTensor, 0, 0, kNo, own, own, kF32}},
      {"fp8_e5m2", {kScaledFp, DType::kFp8E5M2, 8, kTensor, 0, 0, kNo, own, own, kF32}},
      {"int8", {kInteger, kF16, 8, kRow, 64, 64, kSym, own, own, kF32}},
      {"int4", {kInteger, kF16, 4, kRow, 64, 64, kSym, own, own, kF32}},
      {"int2", {kInteger, kF16, 2, kRow, 64, 64, kSym, own, own, kF32}},
      {"kivi4", {kInteger, kF16, 4, kChannel, 32, 32, kMin, k128, v128, kF16}},
      {"kivi2", {kInteger, kF16, 2, kChannel, 32, 32, kMin, k128, v128, kF16}},
      {"kivi2_sync", {kInteger, kF16, 2, kChannel, 32, 32, kMin, sync, sync, kF16}},
      {"qserve8", {kInteger, kF16, 8, kRow, 64, 64, kOff, next, next, kF16}},
      {"qserve4", {kInteger, kF16, 4, kRow, 64, 64, kOff, next, next, kF16}},
  };
  return table;
}

TEST(Presets, MeanWhatTheTableSays) {
  ASSERT_EQ(PresetNames().size(), Table().size());
  for (const std::string& name : PresetNames()) {
    SCOPED_TRACE(name);
    ASSERT_TRUE(Table().contains(name));
    const Row& row = Table().at(name);
    const Result<CacheSchema> schema = PresetSchema(name, Shape(3, 2, 64));
    ASSERT_TRUE(schema.ok()) << schema.status().ToString();
    EXPECT_TRUE(Validate(*schema).ok());
    EXPECT_EQ(schema->read_step, kStepwise);
    EXPECT_EQ(schema->provenance.preset, name);
    EXPECT_EQ(schema->provenance.scale_source, "none");
    ASSERT_EQ(schema->layers.size(), 3u);
    for (const LayerSchema& l : schema->layers) {
      EXPECT_EQ(l, schema->layers[0]);
      EXPECT_EQ(l.num_kv_heads, 2);
      EXPECT_EQ(l.head_dim, 64);
      EXPECT_EQ(l.k_closure, row.k);
      EXPECT_EQ(l.v_closure, row.v);
      EXPECT_EQ(l.exact_dtype, row.exact);
      EXPECT_EQ(l.k.axis, row.k_axis);
      EXPECT_EQ(l.v.axis, row.k_axis == ScaleAxis::kChannel ? ScaleAxis::kRow : row.k_axis);
      EXPECT_EQ(l.k.group, row.k_group);
      EXPECT_EQ(l.v.group, row.v_group);
      for (const TensorCoding& t : {l.k, l.v}) {
        EXPECT_EQ(t.kind, row.kind);
        EXPECT_EQ(t.dtype, row.dtype);
        EXPECT_EQ(t.bits, row.bits);
        EXPECT_EQ(t.zero, row.zero);
        EXPECT_EQ(t.qparam, DType::kF16);
        EXPECT_EQ(t.small_scale, SmallScale::kFloor);
        EXPECT_EQ(t.overflow, Overflow::kClamp);
        EXPECT_EQ(t.static_scale, 1.0f);
      }
      EXPECT_EQ(l.k_stage, RopeStage::kPost);
      EXPECT_EQ(l.pinned_rows, 0);
      EXPECT_EQ(l.window, 0);
      EXPECT_EQ(l.coded_page_rows, 128);
      EXPECT_EQ(l.exact_page_rows, 32);
      EXPECT_EQ(l.packing_version, 1);
    }
    EXPECT_FALSE(PresetSummary(name).empty());
    EXPECT_EQ(PresetSummary(name).find("does not exist"), std::string::npos);
  }
}

TEST(Presets, UnknownNamesListTheKnown) {
  const Result<LayerSchema> layer = PresetLayer("kivi3", 2, 64);
  ASSERT_FALSE(layer.ok());
  EXPECT_EQ(layer.status().code(), Code::kNotFound);
  EXPECT_THAT(layer.status().message(), HasSubstr("kivi3"));
  for (const std::string& name : PresetNames()) EXPECT_THAT(layer.status().message(), HasSubstr(name));
  EXPECT_EQ(PresetSchema("", Shape(1, 1, 64)).status().code(), Code::kNotFound);
}

TEST(Presets, HeadSize80IsServedOrRefusedByName) {
  // A 32-wide block along a head of 80 once ended a process; here it is an error with both numbers and a way out.
  for (const std::string& name : PresetNames()) {
    SCOPED_TRACE(name);
    const Result<LayerSchema> layer = PresetLayer(name, 4, 80);
    if (!name.starts_with("kivi")) {
      ASSERT_TRUE(layer.ok()) << layer.status().ToString();
      continue;
    }
    ASSERT_FALSE(layer.ok());
    EXPECT_EQ(layer.status().code(), Code::kUnsupported);
    for (const char* part : {"preset kivi", "v.group 32", "head_dim 80", "policy"})
      EXPECT_THAT(layer.status().message(), HasSubstr(part));
  }
  const Result<CacheSchema> policy = ParsePolicy(
      R"({"version": 1, "k": {"kind": "integer", "bits": 4, "axis": "channel", "group": 32, "zero": "minimum"},
          "v": {"kind": "integer", "bits": 4, "axis": "row", "group": 16, "zero": "minimum"},
          "k_closure": {"lag": 0, "step": 128}, "v_closure": {"lag": 128, "step": 1}})",
      Shape(2, 4, 80));
  EXPECT_TRUE(policy.ok()) << policy.status().ToString();
}

TEST(Presets, EveryEvenHeadSizeIsServedOrRefusedWithBothNumbers) {
  for (int d = 2; d <= 256; d += 2)
    for (const std::string& name : PresetNames()) {
      SCOPED_TRACE(name + " head_dim " + std::to_string(d));
      const Result<LayerSchema> layer = PresetLayer(name, 1, d);
      const bool kivi = name.starts_with("kivi");
      EXPECT_EQ(layer.ok(), kivi ? d % 32 == 0 : name != "int2" || d % 4 == 0);
      if (layer.ok()) continue;
      EXPECT_EQ(layer.status().code(), Code::kUnsupported);
      EXPECT_THAT(layer.status().message(), HasSubstr("head_dim " + std::to_string(d)));
      EXPECT_THAT(layer.status().message(), HasSubstr(name == "kivi4" || (kivi && d % 4 == 0) ? "group 32" : "bits 2"));
    }
}

TEST(Presets, ShapesBeyondTheLimitsAreNamed) {
  EXPECT_THAT(PresetLayer("f16", 0, 64).status().message(), HasSubstr("num_kv_heads 0"));
  EXPECT_THAT(PresetLayer("f16", 1, 0).status().message(), HasSubstr("head_dim 0"));
  EXPECT_THAT(PresetLayer("int2", 1, 3).status().message(), HasSubstr("head_dim 3"));
  EXPECT_THAT(PresetSchema("f16", Shape(0, 1, 64)).status().message(), HasSubstr("num_layers 0"));
  EXPECT_THAT(PresetSchema("f16", Shape(-1, 1, 64)).status().message(), HasSubstr("num_layers -1"));
  CacheShape yarn = Shape(1, 1, 64);
  yarn.rope.type = "yarn";
  EXPECT_EQ(PresetSchema("f16", yarn).status().code(), Code::kUnsupported);
}

TEST(Presets, TakeTheModelsWindowsOrSayWhyNot) {
  CacheShape shape = Shape(3, 2, 64);
  shape.windows = {0, 128, 16};
  for (const std::string& name : PresetNames()) {
    SCOPED_TRACE(name);
    const Result<CacheSchema> schema = PresetSchema(name, shape);
    if (!name.starts_with("kivi")) {  // whose closures are longer than 16 rows
      ASSERT_TRUE(schema.ok()) << schema.status().ToString();
      for (size_t i = 0; i < 3; ++i) EXPECT_EQ(schema->layers[i].window, shape.windows[i]);
      continue;
    }
    ASSERT_FALSE(schema.ok());
    EXPECT_EQ(schema.status().code(), Code::kUnsupported);
    for (const char* part : {"preset kivi", "layer ", "lag + step", "window of", "leave the window"})
      EXPECT_THAT(schema.status().message(), HasSubstr(part));
    // Where those layers are skipped nothing stands in the way.
    const Result<CacheSchema> skipped = SchemaFor(name, shape, {1, 2});
    ASSERT_TRUE(skipped.ok()) << skipped.status().ToString();
    EXPECT_EQ(skipped->layers[2].window, 16);
    EXPECT_EQ(skipped->layers[2].k.dtype, DType::kF16);
    EXPECT_FALSE(SchemaFor(name, shape, {1}).ok());
  }
}

TEST(SchemaFor, SkippedLayersTakeTheF16Preset) {
  const Result<CacheSchema> schema = SchemaFor("kivi2", Shape(4, 2, 64), {3, 0});
  ASSERT_TRUE(schema.ok()) << schema.status().ToString();
  for (const size_t i : {0, 3}) EXPECT_EQ(schema->layers[i], *PresetLayer("f16", 2, 64));
  for (const size_t i : {1, 2}) EXPECT_EQ(schema->layers[i], *PresetLayer("kivi2", 2, 64));
  EXPECT_EQ(schema->provenance.preset, "kivi2, layers 0,3 as f16");
  EXPECT_EQ(LayerClasses(*schema).size(), 2u);
  EXPECT_THAT(SchemaFor("kivi2", Shape(4, 2, 64), {4}).status().message(),
              HasSubstr("layer 4: the model has layers 0..3"));
  EXPECT_THAT(SchemaFor("kivi2", Shape(4, 2, 64), {-1}).status().message(), HasSubstr("layer -1"));
  EXPECT_THAT(SchemaFor("kivi2", Shape(4, 2, 64), {1, 2, 1}).status().message(), HasSubstr("layer 1 is named twice"));
}

TEST(SchemaFor, ReadsAPolicyFile) {
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("livequant_policy_" + std::to_string(getpid()) + ".json");
  std::ofstream(path)
      << R"({"version": 1, "base": "int8", "window": 300, "skip": "bf16", "layers": [{"layers": "1", "base": "qserve4"}]})";
  const Result<CacheSchema> schema = SchemaFor(path.string(), Shape(3, 2, 64), {2});
  ASSERT_TRUE(schema.ok()) << schema.status().ToString();
  EXPECT_EQ(schema->layers[0].k.bits, 8);
  EXPECT_EQ(schema->layers[1].k.zero, ZeroConvention::kFloatOffset);
  EXPECT_EQ(schema->layers[2].k.dtype, DType::kBF16) << "the policy's skip";
  EXPECT_EQ(schema->layers[2].window, 300) << "what a query sees is not the format's to change";
  EXPECT_EQ(schema->provenance.preset, path.string() + ", layers 2 as bf16");

  std::ofstream(path) << R"({"version": 1, "base": "int9"})";
  EXPECT_THAT(SchemaFor(path.string(), Shape(3, 2, 64), {}).status().message(), HasSubstr("int9"));
  std::filesystem::remove(path);
  const Status gone = SchemaFor(path.string(), Shape(3, 2, 64), {}).status();
  EXPECT_EQ(gone.code(), Code::kNotFound);
  EXPECT_THAT(gone.message(), HasSubstr(path.string()));
  EXPECT_THAT(gone.message(), HasSubstr("kivi2_sync"));
}

TEST(Policy, EveryPresetRoundTrips) {
  for (const std::string& name : PresetNames())
    for (const std::vector<int>& skip : {std::vector<int>{}, std::vector<int>{0, 2}}) {
      SCOPED_TRACE(name);
      const CacheShape shape = Shape(5, 2, 96);
      const Result<CacheSchema> schema = SchemaFor(name, shape, skip);
      ASSERT_TRUE(schema.ok()) << schema.status().ToString();
      const Result<CacheSchema> back = ParsePolicy(PolicyJson(*schema), shape);
      ASSERT_TRUE(back.ok()) << back.status().ToString();
      const Status same = Compatible(*schema, *back);
      EXPECT_TRUE(same.ok()) << same.ToString();
      EXPECT_EQ(Digest(*schema), Digest(*back));
    }
}

TEST(Policy, RunningMaximumIsRefused) {
  const Status s =
      ParsePolicy(R"({"version": 1, "base": "int8", "k": {"scale_lifetime": "running_max"}})", Shape(1, 1, 64))
          .status();
  EXPECT_EQ(s.code(), Code::kUnsupported);
  EXPECT_THAT(s.message(), HasSubstr("rewrites history"));
}

// Every fenced JSON block of the normative page is a policy that works for a model of 32 layers and head size 128.
TEST(Policy, ExamplesOfThePageParse) {
  const std::string page = TextOf(std::filesystem::path(LIVEQUANT_SOURCE_DIR) / "docs/formats/policy.md");
  int examples = 0;
  for (size_t at = 0; (at = page.find("```json\n", at)) != page.npos;) {
    at += 8;
    const size_t end = page.find("```", at);
    ASSERT_NE(end, page.npos);
    const Result<CacheSchema> schema = ParsePolicy(page.substr(at, end - at), Shape(32, 8, 128));
    EXPECT_TRUE(schema.ok()) << schema.status().ToString() << "\n" << page.substr(at, end - at);
    at = end;
    ++examples;
  }
  EXPECT_GE(examples, 3);
}

}  // namespace
}  // namespace livequant
