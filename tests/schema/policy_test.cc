// tests/schema/policy_test.cc: the policy grammar, its refusals, round trips, and why a running maximum is refused.
#include "schema/policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "schema/examples.h"
#include "support/property.h"

namespace livequant {
namespace {

using ::testing::HasSubstr;

const CacheShape kShape{.num_layers = 8, .num_kv_heads = 2, .head_dim = 64, .rope = {}};

Result<LayerSchema> Lookup(std::string_view name) {
  if (name == "f16") return NativeLayer();
  if (name == "kivi2") return KiviLayer();
  if (name == "qserve4") return QServeLayer();
  if (name == "fp8") return Fp8Layer();
  return Status(Code::kNotFound, "preset \"" + std::string(name) + "\" does not exist");
}

Result<Policy> Read(const std::string& json) { return ReadPolicy(json, kShape, Lookup); }

TEST(LayerList, RoundTripsAndRefuses) {
  const std::vector<int> some = {0, 1, 2, 3, 7};
  EXPECT_EQ(LayerListText(some), "0-3,7");
  EXPECT_EQ(*ParseLayerList("0-3,7", 8), some);
  EXPECT_EQ(*ParseLayerList("5", 8), std::vector<int>{5});
  ForAll(200, [](Rng& rng) {
    std::vector<int> layers;
    for (int i = 0; i < 40; ++i)
      if (rng.Chance(0.6)) layers.push_back(i);
    if (layers.empty()) layers.push_back(0);
    const Result<std::vector<int>> back = ParseLayerList(LayerListText(layers), 40);
    ASSERT_TRUE(back.ok()) << back.status().ToString();
    EXPECT_EQ(*back, layers);
  });
  for (const char* wrong : {"", " 1", "1,", ",1", "1-", "-1", "3-1", "1,1", "2,1", "0-3,3", "8", "0-8", "1;2", "1,2x",
                            "99999999999", "1--2"}) {
    const Result<std::vector<int>> r = ParseLayerList(wrong, 8);
    ASSERT_FALSE(r.ok()) << wrong;
    EXPECT_EQ(r.status().code(), Code::kInvalidArgument);
    EXPECT_THAT(r.status().message(), HasSubstr("\"" + std::string(wrong) + "\""));
  }
  EXPECT_THAT(ParseLayerList("0-8", 8).status().message(), HasSubstr("layers 0..7"));
}

TEST(Policy, OverridesSomeLayersAndSomeFields) {
  const Result<Policy> p = Read(R"({
    "version": 1, "base": "kivi2", "contract": "chunk:512", "pinned_rows": 4,
    "layers": [
      {"layers": "0-1,7", "base": "f16"},
      {"layers": "3", "v": {"bits": 4}, "k": "qserve4", "small_scale_note": 0}
    ]})");
  EXPECT_FALSE(p.ok());
  EXPECT_THAT(p.status().message(), HasSubstr("layers[1].small_scale_note: unknown field"));
  const Result<Policy> q = Read(R"({
    "version": 1, "base": "kivi2", "contract": "chunk:512", "pinned_rows": 4, "skip": "qserve4",
    "layers": [
      {"layers": "0-1,7", "base": "f16"},
      {"layers": "3", "v": {"bits": 4}, "k": "qserve4"}
    ]})");
  ASSERT_TRUE(q.ok()) << q.status().ToString();
  const std::vector<LayerSchema>& layers = q->schema.layers;
  EXPECT_EQ(q->skip, "qserve4");
  EXPECT_EQ(q->schema.read_step, 512);
  ASSERT_EQ(layers.size(), 8u);
  for (const size_t i : {0, 1, 7}) EXPECT_EQ(layers[i], NativeLayer()) << i;
  LayerSchema kivi = KiviLayer();
  kivi.pinned_rows = 4;
  for (const size_t i : {2, 4, 5, 6}) EXPECT_EQ(layers[i], kivi) << i;
  kivi.k = QServeLayer().k;  // a preset's name brings coding and closure of that tensor
  kivi.k_closure = {0, 1};
  kivi.v.bits = 4;
  EXPECT_EQ(layers[3], kivi);
}

TEST(Policy, FullCodingsNeedNoBase) {
  const Result<Policy> p = Read(R"({"version": 1, "exact_dtype": "bf16",
    "k": {"kind": "scaled_fp", "dtype": "fp8_e5m2", "axis": "tensor", "static_scale": 0.0125, "scale_lifetime": "static"},
    "v": {"kind": "integer", "bits": 8, "axis": "row", "group": 16, "zero": "symmetric", "qparam": "f32", "small_scale": "refuse"},
    "scale_source": "dataset", "calibration": "sha256:12",
    "k_closure": {"lag": 0, "step": 1}, "k_stage": "pre", "window": 512, "coded_page_rows": 256, "exact_page_rows": 64})");
  ASSERT_TRUE(p.ok()) << p.status().ToString();
  const LayerSchema& l = p->schema.layers[5];
  EXPECT_EQ(l.k.dtype, DType::kFp8E5M2);
  EXPECT_EQ(l.k.bits, 8);
  EXPECT_EQ(l.k.static_scale, 0.0125f);
  EXPECT_EQ(l.v.group, 16);
  EXPECT_EQ(l.v.qparam, DType::kF32);
  EXPECT_EQ(l.v.small_scale, SmallScale::kRefuse);
  EXPECT_EQ(l.exact_dtype, DType::kBF16);
  EXPECT_EQ(l.k_closure, (Closure{0, 1}));
  EXPECT_EQ(l.k_stage, RopeStage::kPre);
  EXPECT_EQ(l.window, 512);
  EXPECT_EQ(l.coded_page_rows, 256);
  EXPECT_EQ(l.exact_page_rows, 64);
  EXPECT_EQ(p->schema.identity.calibration, "sha256:12");
  EXPECT_EQ(p->schema.provenance.scale_source, "dataset");
}

// What a query sees is the model's; a policy may narrow it.
TEST(Policy, WindowsAreTheModelsUnlessTheyAreNarrowed) {
  const CacheShape shape{.num_layers = 4, .num_kv_heads = 2, .head_dim = 64, .rope = {}, .windows = {0, 300, 300, 200}};
  const auto windows = [&](const char* json) {
    const Result<Policy> p = ReadPolicy(json, shape, Lookup);
    EXPECT_TRUE(p.ok()) << p.status().ToString();
    std::vector<int> out;
    if (p.ok())
      for (const LayerSchema& l : p->schema.layers) out.push_back(l.window);
    return out;
  };
  EXPECT_EQ(windows(R"({"version": 1, "base": "f16"})"), (std::vector{0, 300, 300, 200}));
  EXPECT_EQ(windows(R"({"version": 1, "base": "f16", "window": 150})"), (std::vector{150, 150, 150, 150}));
  EXPECT_EQ(
      windows(
          R"({"version": 1, "base": "f16", "layers": [{"layers": "2", "window": 20}, {"layers": "3", "base": "f16"}]})"),
      (std::vector{0, 300, 20, 200}));
  const std::pair<const char*, const char*> wide[] = {
      {R"({"version": 1, "base": "f16", "window": 250})", "layer 3 window: 250: the model's queries see 200 rows"},
      {R"({"version": 1, "base": "f16", "window": 0})", "layer 1 window: 0: the model's queries see 300 rows"}};
  for (const auto& [json, says] : wide) {
    const Result<Policy> p = ReadPolicy(json, shape, Lookup);
    ASSERT_FALSE(p.ok());
    EXPECT_THAT(p.status().message(), HasSubstr(says));
  }
  const Result<Policy> negative = ReadPolicy(R"({"version": 1, "base": "f16", "window": -1})", shape, Lookup);
  ASSERT_FALSE(negative.ok());
  EXPECT_THAT(negative.status().message(), HasSubstr("window: -1"));
}

TEST(Policy, RefusalsNameThePlace) {
  struct Case {
    const char* json;
    Code code;
    std::vector<std::string> says;
  };
  const Code bad = Code::kInvalidArgument;
  const std::vector<Case> cases = {
      {"", bad, {"policy"}},
      {"[]", bad, {"must be an object"}},
      {"{}", bad, {"version", "must be 1"}},
      {R"({"version": 2, "base": "f16"})", bad, {"version", "2", "must be 1"}},
      {R"({"version": "1", "base": "f16"})", bad, {"version", "not an integer"}},
      {R"({"version": 1.0, "base": "f16"})", bad, {"version", "not an integer"}},
      {R"({"version": 1})", bad, {"layer 0", "base"}},
      {R"({"version": 1, "layers": [{"layers": "0-6", "base": "f16"}]})", bad, {"layer 7", "base"}},
      {R"({"version": 1, "k": "f16"})", bad, {"layer 0", "k and v"}},
      {R"({"version": 1, "base": "nope"})", Code::kNotFound, {"base", "nope"}},
      {R"({"version": 1, "base": ""})", Code::kNotFound, {"base", "does not exist"}},
      {R"({"version": 1, "base": "f16", "skip": ""})", Code::kNotFound, {"skip", "does not exist"}},
      {R"({"version": 1, "base": "f16", "scale_source": ""})", bad, {"scale_source", "\"\"", "dataset"}},
      {R"({"version": 1, "base": "f16", "bass": 1})", bad, {"bass", "unknown field", "pinned_rows"}},
      {R"({"version": 1, "bass": "f16"})", bad, {"bass", "unknown field", "base"}},  // not: there is no base
      {R"({"version": 1, "base": "f16", "base": "kivi2"})", bad, {"base"}},
      {R"({"version": 1, "base": 3})", bad, {"base", "3", "not a string"}},
      {R"({"version": 1, "base": "f16", "k": {"kind": "integer", "bit": 4}})", bad, {"k.bit", "unknown field", "bits"}},
      {R"({"version": 1, "base": "f16", "k": 4})", bad, {"k", "must be an object"}},
      {R"({"version": 1, "base": "f16", "k": {"dtype": "f64"}})", bad, {"k.dtype", "f64", "bf16"}},
      {R"({"version": 1, "base": "f16", "k": {"kind": null}})", bad, {"k.kind", "null"}},
      {R"({"version": 1, "base": "kivi2", "v": {"group": 48}})", bad, {"layer 0 v.group 48", "head_dim 64"}},
      {R"({"version": 1, "base": "kivi2", "k_closure": {"lag": 0, "step": 48}})", bad, {"k.group 32", "step 48"}},
      {R"({"version": 1, "base": "kivi2", "k_closure": {"lag": 0}})", bad, {"k_closure.step", "missing"}},
      {R"({"version": 1, "base": "kivi2", "k_closure": {"lag": 0, "step": 128, "x": 1}})",
       bad,
       {"k_closure.x", "unknown"}},
      {R"({"version": 1, "base": "f16", "pinned_rows": 2147483648})", bad, {"pinned_rows", "2147483648", "32 bits"}},
      {R"({"version": 1, "base": "f16", "pinned_rows": 18446744073709551615})", bad, {"pinned_rows", "32 bits"}},
      {R"({"version": 1, "base": "f16", "pinned_rows": -1})", bad, {"pinned_rows -1", "0..1048576"}},
      {R"({"version": 1, "base": "f16", "pinned_rows": 1e308})", bad, {"pinned_rows", "not an integer"}},
      {R"({"version": 1, "base": "f16", "pinned_rows": true})", bad, {"pinned_rows", "not an integer"}},
      {R"({"version": 1, "base": "fp8", "k": {"static_scale": 1e39}})", bad, {"k.static_scale", "beyond f32"}},
      {R"({"version": 1, "base": "fp8", "k": {"static_scale": "1"}})", bad, {"k.static_scale", "not a number"}},
      {R"({"version": 1, "base": "fp8", "k": {"static_scale": 0.5}})", bad, {"layer 0 k.static_scale 0.5", "none"}},
      {R"({"version": 1, "base": "fp8", "scale_source": "dataset"})", bad, {"calibration", "missing"}},
      {R"({"version": 1, "base": "f16", "coded_page_rows": 64})", bad, {"coded_page_rows", "64", "multiple of 128"}},
      {R"({"version": 1, "base": "f16", "exact_page_rows": 16})", bad, {"exact_page_rows", "16", "multiple of 32"}},
      {R"({"version": 1, "base": "f16", "contract": "chunk:0"})", bad, {"chunk:0", "stepwise"}},
      {R"({"version": 1, "base": "f16", "layers": {}})", bad, {"layers", "must be a list"}},
      {R"({"version": 1, "base": "f16", "layers": [1]})", bad, {"layers[0]", "must be an object"}},
      {R"({"version": 1, "base": "f16", "layers": [{"base": "f16"}]})", bad, {"layers[0].layers"}},
      {R"({"version": 1, "base": "f16", "layers": [{"layers": "8"}]})", bad, {"layers[0].layers", "layer 8", "0..7"}},
      {R"({"version": 1, "base": "f16", "layers": [{"layers": "0"}, {"layers": "0-1"}]})",
       bad,
       {"layers[1].layers", "layer 0", "layers[0]"}},
      {R"({"version": 1, "base": "f16", "layers": [{"layers": "0", "contract": "prompt"}]})",
       bad,
       {"layers[0].contract", "unknown"}},
      {R"({"version": 1, "base": "f16", "skip": "nope"})", Code::kNotFound, {"skip", "nope"}},
      {R"({"version": 1, "base": "kivi2", "k": {"scale_lifetime": "static"}})",
       bad,
       {"k.scale_lifetime", "static", "group"}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.json);
    const Result<Policy> p = Read(c.json);
    ASSERT_FALSE(p.ok());
    EXPECT_EQ(p.status().code(), c.code) << p.status().message();
    for (const std::string& part : c.says) EXPECT_THAT(p.status().message(), HasSubstr(part));
  }
  EXPECT_FALSE(ReadPolicy(R"({"version": 1, "base": "f16"})",
                          {.num_layers = 0, .num_kv_heads = 2, .head_dim = 64, .rope = {}}, Lookup)
                   .ok());
}

// Keys, values and names come from a file and go to terminals and replies.
TEST(Policy, RefusalsArePrintableAndShort) {
  const std::string foreign = "\\u001b[2J\xC3\xA9" + std::string(5000, 'x');
  for (const std::string& field : std::vector<std::string>{
           "\"" + foreign + "\": 1", "\"base\": \"" + foreign + "\"", "\"k\": \"" + foreign + "\"",
           "\"skip\": \"" + foreign + "\"", "\"window\": \"" + foreign + "\"", "\"contract\": \"" + foreign + "\"",
           "\"scale_source\": \"" + foreign + "\"", "\"k_stage\": \"" + foreign + "\"",
           "\"k\": {\"scale_lifetime\": \"" + foreign + "\"}", "\"layers\": [{\"layers\": \"" + foreign + "\"}]"}) {
    const bool is_base = field.starts_with("\"base");
    const Result<Policy> p =
        Read("{\"version\": 1, " + (is_base ? "" : std::string("\"base\": \"f16\", ")) + field + "}");
    ASSERT_FALSE(p.ok()) << field;
    const std::string& message = p.status().message();
    EXPECT_LT(message.size(), 600u);
    for (const char c : message) EXPECT_TRUE(c >= 0x20 && c < 0x7F) << message;
  }
}

TEST(RunningMaximum, IsRefusedWithTheReason) {
  for (const char* tensor : {"k", "v"}) {
    const Result<Policy> p =
        Read(R"({"version": 1, "base": "fp8", ")" + std::string(tensor) + R"(": {"scale_lifetime": "running_max"}})");
    ASSERT_FALSE(p.ok());
    EXPECT_EQ(p.status().code(), Code::kUnsupported);
    EXPECT_THAT(p.status().message(), HasSubstr(std::string(tensor) + ".scale_lifetime running_max"));
    EXPECT_THAT(p.status().message(), HasSubstr("rewrites history"));
  }
}

// Why: one scale per channel, s(t) = max |x| so far / 127. Codes of row 0 were made under s(0); row 1 brings a larger
// maximum.
TEST(RunningMaximum, ALargerMaximumRewritesOldRows) {
  const auto scale = [](double maximum) { return maximum / 127; };
  const double first = 0.5;
  const double before = scale(1.0), after = scale(8.0);  // maxima seen up to row 0 and up to row 1
  const double code = std::nearbyint(first / before);
  EXPECT_EQ(code, 64);
  EXPECT_LE(std::abs(code * before - first), before / 2) << "sound under its own scale";
  EXPECT_NEAR(code * after, 4.03, 0.01) << "the same code under the later scale: eight times the value that was stored";
  EXPECT_GT(std::abs(code * after - first), 7 * first);
  // A scale that closes with its group never moves, whatever comes later: that is the form which the schema offers
  // instead.
  ForAll(100, [&](Rng& rng) {
    double maximum = 0, worst_frozen = 0, worst_running = 0;
    std::vector<std::pair<double, double>> rows;  // value, scale when coded
    for (int i = 0; i < 50; ++i) {
      const double x = rng.Normal() * (1 + i);  // a range that grows
      maximum = std::max(maximum, std::abs(x));
      rows.emplace_back(x, scale(maximum));
    }
    for (const auto& [x, s] : rows) {
      const double c = std::nearbyint(x / s);
      worst_frozen = std::max(worst_frozen, std::abs(c * s - x) / s);
      worst_running = std::max(worst_running, std::abs(c * scale(maximum) - x) / s);
    }
    EXPECT_LE(worst_frozen, 0.5 + 1e-9);
    EXPECT_GT(worst_running, 10);
  });
}

TEST(Policy, WrittenFilesReadBackEqual) {
  ForAll(200, [](Rng& rng) {
    CacheSchema schema;
    const LayerSchema kinds[] = {NativeLayer(), KiviLayer(), QServeLayer(), SymmetricLayer(), Fp8Layer()};
    for (int i = 0; i < kShape.num_layers; ++i) {
      LayerSchema layer = kinds[rng.Range(0, 4)];
      if (rng.Chance(0.2)) layer.pinned_rows = static_cast<int>(rng.Range(0, 9));
      if (rng.Chance(0.2)) layer.k_stage = RopeStage::kPre;
      if (rng.Chance(0.2)) layer.exact_dtype = rng.Pick({DType::kF32, DType::kBF16});
      if (rng.Chance(0.2)) layer.window = 777;
      if (layer.v.axis == ScaleAxis::kTensor) layer.v.static_scale = static_cast<float>(rng.Uniform(1e-6, 3));
      if (layer.v.zero == ZeroConvention::kFloatOffset && rng.Chance(0.5)) layer.v.overflow = Overflow::kWrap;
      schema.layers.push_back(layer);
    }
    schema.read_step = rng.Pick({kStepwise, 512, kPromptReadStep});
    schema.provenance.scale_source = "dataset";
    schema.identity.calibration = "sha256:1";
    ASSERT_TRUE(Validate(schema).ok());
    const Result<Policy> back = Read(WritePolicy(schema));
    ASSERT_TRUE(back.ok()) << back.status().ToString() << WritePolicy(schema);
    const Status same = Compatible(schema, back->schema);
    EXPECT_TRUE(same.ok()) << same.ToString();
    EXPECT_EQ(WritePolicy(back->schema), WritePolicy(schema));
  });
}

TEST(Policy, AnyBytesGiveAValueOrAnError) {
  const std::string good = WritePolicy(SchemaOf(std::vector<LayerSchema>(8, KiviLayer())));
  int refused = 0;
  ForAll(2000, [&](Rng& rng) {
    std::string text = good;
    for (int64_t n = rng.Range(1, 4); n > 0; --n)
      text[static_cast<size_t>(rng.Range(0, static_cast<int64_t>(text.size()) - 1))] =
          static_cast<char>(rng.Range(0, 255));
    if (rng.Chance(0.3)) text.resize(static_cast<size_t>(rng.Range(0, static_cast<int64_t>(text.size()))));
    const Result<Policy> p = Read(text);
    refused += !p.ok();
    if (p.ok()) {
      EXPECT_TRUE(Validate(p->schema).ok());
    }
  });
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace livequant
