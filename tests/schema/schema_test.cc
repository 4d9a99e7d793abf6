// tests/schema/schema_test.cc: each fault has its message, each field is compared, contracts and classes.
#include "schema/schema.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <set>

#include "schema/examples.h"

namespace livequant {
namespace {

using ::testing::HasSubstr;

CacheSchema OneOfEach() { return SchemaOf({NativeLayer(), KiviLayer(), QServeLayer(), SymmetricLayer(), Fp8Layer()}); }
constexpr int kNativeAt = 0, kKiviAt = 1, kQServeAt = 2, kSymmetricAt = 3, kFp8At = 4;

TEST(Validate, AcceptsOneOfEachKind) {
  const Status status = Validate(OneOfEach());
  EXPECT_TRUE(status.ok()) << status.ToString();
}

constexpr double inf_d = std::numeric_limits<double>::infinity();
RopeConfig Linear() { return {.type = "linear", .factor = 4}; }
RopeConfig Llama3() {
  return {.type = "llama3", .factor = 8, .original_max_positions = 64, .low_freq_factor = 1, .high_freq_factor = 4};
}
RopeConfig Yarn() {
  return {.type = "yarn",
          .factor = 4,
          .original_max_positions = 64,
          .beta_fast = 32,
          .beta_slow = 1,
          .truncate = false,
          .attention_factor = 1.2};
}

struct Fault {
  const char* what;
  std::function<void(CacheSchema&)> plant;
  Code code;
  std::vector<std::string> says;  // thing, value, limit
};

std::vector<Fault> Faults() {
  const auto layer = [](int i, auto change) {
    return [=](CacheSchema& s) { change(s.layers[static_cast<size_t>(i)]); };
  };
  using L = LayerSchema;
  const Code bad = Code::kInvalidArgument, no = Code::kUnsupported;
  const float inf = std::numeric_limits<float>::infinity(), tiny = std::numeric_limits<float>::denorm_min();
  return {
      {"no layers", [](CacheSchema& s) { s.layers.clear(); }, bad, {"layers 0", "1..4096"}},
      {"too many layers",
       [](CacheSchema& s) { s.layers.resize(4097, NativeLayer()); },
       bad,
       {"layers 4097", "1..4096"}},
      {"no heads", layer(0, [](L& l) { l.num_kv_heads = 0; }), bad, {"layer 0 num_kv_heads 0", "1..4096"}},
      {"heads", layer(3, [](L& l) { l.num_kv_heads = 4097; }), bad, {"layer 3 num_kv_heads 4097", "1..4096"}},
      {"no head size", layer(0, [](L& l) { l.head_dim = -1; }), bad, {"layer 0 head_dim -1", "1..8192"}},
      {"too many values",
       layer(0, [](L& l) { l.num_kv_heads = 4096, l.head_dim = 8192; }),
       bad,
       {"33554944", "16777216"}},
      {"window", layer(0, [](L& l) { l.window = -1; }), bad, {"layer 0 window -1", "0..1073741824"}},
      {"pinned", layer(0, [](L& l) { l.pinned_rows = -5; }), bad, {"layer 0 pinned_rows -5", "0..1048576"}},
      {"coded pages", layer(0, [](L& l) { l.coded_page_rows = 0; }), bad, {"layer 0 coded_page_rows 0", "1..4096"}},
      {"coded pages", layer(0, [](L& l) { l.coded_page_rows = 96; }), bad, {"coded_page_rows 96", "power of two"}},
      {"exact pages", layer(0, [](L& l) { l.exact_page_rows = 8192; }), bad, {"exact_page_rows 8192", "1..4096"}},
      {"exact pages", layer(0, [](L& l) { l.exact_page_rows = 33; }), bad, {"exact_page_rows 33", "power of two"}},
      {"packing", layer(0, [](L& l) { l.packing_version = 2; }), no, {"layer 0 packing_version 2", "version 1"}},
      {"stage", layer(0, [](L& l) { l.k_stage = static_cast<RopeStage>(9); }), bad, {"k_stage 9", "post or pre"}},
      {"exact dtype",
       layer(0, [](L& l) { l.exact_dtype = DType::kFp8E4M3; }),
       bad,
       {"exact_dtype fp8_e4m3", "f32, f16 or bf16"}},
      {"exact dtype", layer(0, [](L& l) { l.exact_dtype = static_cast<DType>(77); }), bad, {"exact_dtype 77"}},
      {"lag", layer(0, [](L& l) { l.k_closure.lag = -2; }), bad, {"layer 0 k_closure.lag -2", "-1..65536"}},
      {"lag", layer(0, [](L& l) { l.v_closure.lag = 65537; }), bad, {"layer 0 v_closure.lag 65537", "-1..65536"}},
      {"step", layer(0, [](L& l) { l.v_closure.step = 0; }), bad, {"layer 0 v_closure.step 0", "1..65536"}},
      {"own step", layer(0, [](L& l) { l.k_closure = {-1, 32}; }), bad, {"k_closure.step 32", "lag -1"}},
      {"window",
       layer(kKiviAt, [](L& l) { l.window = 128; }),
       bad,
       {"layer 1 v_closure.lag 128", "129", "window of 128"}},
      // Native.
      {"native fp8",
       layer(0, [](L& l) { l.k.dtype = DType::kFp8E5M2; }),
       bad,
       {"layer 0 k.dtype fp8_e5m2", "scaled_fp"}},
      {"native bits", layer(0, [](L& l) { l.k.bits = 8; }), bad, {"layer 0 k.bits 8", "16", "f16"}},
      {"native axis", layer(0, [](L& l) { l.k.axis = ScaleAxis::kRow; }), bad, {"layer 0 k.axis row", "none"}},
      {"native group", layer(0, [](L& l) { l.v.group = 32; }), bad, {"layer 0 v.group 32", "must be 0"}},
      {"native zero",
       layer(0, [](L& l) { l.v.zero = ZeroConvention::kMinimum; }),
       bad,
       {"layer 0 v.zero minimum", "none"}},
      {"native qparam", layer(0, [](L& l) { l.v.qparam = DType::kF32; }), bad, {"layer 0 v.qparam f32", "f16"}},
      {"native small",
       layer(0, [](L& l) { l.v.small_scale = SmallScale::kRefuse; }),
       bad,
       {"v.small_scale refuse", "floor"}},
      {"native overflow", layer(0, [](L& l) { l.v.overflow = Overflow::kWrap; }), bad, {"v.overflow wrap", "clamp"}},
      {"native scale", layer(0, [](L& l) { l.v.static_scale = 2; }), bad, {"v.static_scale 2", "must be 1", "tensor"}},
      {"kind", layer(0, [](L& l) { l.v.kind = static_cast<CodeKind>(5); }), bad, {"layer 0 v.kind 5"}},
      {"dtype", layer(0, [](L& l) { l.v.dtype = static_cast<DType>(5); }), bad, {"layer 0 v.dtype 5"}},
      {"axis", layer(0, [](L& l) { l.v.axis = static_cast<ScaleAxis>(5); }), bad, {"layer 0 v.axis 5"}},
      {"zero", layer(0, [](L& l) { l.v.zero = static_cast<ZeroConvention>(5); }), bad, {"layer 0 v.zero 5"}},
      {"qparam", layer(0, [](L& l) { l.v.qparam = static_cast<DType>(5); }), bad, {"layer 0 v.qparam 5"}},
      {"small",
       layer(0, [](L& l) { l.v.small_scale = static_cast<SmallScale>(5); }),
       bad,
       {"v.small_scale 5", "floor or refuse"}},
      {"overflow",
       layer(0, [](L& l) { l.v.overflow = static_cast<Overflow>(5); }),
       bad,
       {"v.overflow 5", "clamp or wrap"}},
      // Scaled fp8.
      {"fp8 dtype",
       layer(kFp8At, [](L& l) { l.k.dtype = DType::kBF16; }),
       bad,
       {"layer 4 k.dtype bf16", "fp8_e4m3 or fp8_e5m2"}},
      {"fp8 axis", layer(kFp8At, [](L& l) { l.k.axis = ScaleAxis::kRow; }), bad, {"layer 4 k.axis row", "tensor"}},
      {"fp8 bits", layer(kFp8At, [](L& l) { l.k.bits = 16; }), bad, {"layer 4 k.bits 16", "must be 8"}},
      {"fp8 scale",
       layer(kFp8At, [](L& l) { l.v.static_scale = 0; }),
       bad,
       {"layer 4 v.static_scale 0", "smallest normal"}},
      {"fp8 scale", layer(kFp8At, [](L& l) { l.v.static_scale = -1; }), bad, {"v.static_scale -1"}},
      {"fp8 scale", layer(kFp8At, [inf](L& l) { l.v.static_scale = inf; }), bad, {"v.static_scale inf"}},
      {"fp8 scale", layer(kFp8At, [](L& l) { l.v.static_scale = std::nanf(""); }), bad, {"v.static_scale nan"}},
      {"fp8 scale", layer(kFp8At, [tiny](L& l) { l.v.static_scale = tiny; }), bad, {"v.static_scale 1.4", "2^-126"}},
      // Integer codes.
      {"bits", layer(kSymmetricAt, [](L& l) { l.k.bits = 5; }), no, {"layer 3 k.bits 5", "2, 3, 4 or 8"}},
      {"dtype",
       layer(kSymmetricAt, [](L& l) { l.k.dtype = DType::kF32; }),
       bad,
       {"layer 3 k.dtype f32", "must be f16"}},
      {"axis",
       layer(kSymmetricAt, [](L& l) { l.k.axis = ScaleAxis::kTensor; }),
       bad,
       {"k.axis tensor", "row or channel"}},
      {"zero", layer(kSymmetricAt, [](L& l) { l.k.zero = ZeroConvention::kNone; }), bad, {"k.zero none", "symmetric"}},
      {"qparam", layer(kSymmetricAt, [](L& l) { l.k.qparam = DType::kBF16; }), no, {"k.qparam bf16", "f16 or f32"}},
      {"group", layer(kSymmetricAt, [](L& l) { l.k.group = 48; }), bad, {"layer 3 k.group 48", "head_dim 64"}},
      {"group", layer(kSymmetricAt, [](L& l) { l.k.group = 0; }), bad, {"layer 3 k.group 0", "1..8192"}},
      {"scale", layer(kSymmetricAt, [](L& l) { l.k.static_scale = 0.5f; }), bad, {"k.static_scale 0.5", "must be 1"}},
      {"wrap",
       layer(kSymmetricAt, [](L& l) { l.k.overflow = Overflow::kWrap; }),
       bad,
       {"k.overflow wrap", "float_offset"}},
      {"wrap bits",
       layer(kQServeAt, [](L& l) { l.k.bits = 8, l.k.overflow = Overflow::kWrap; }),
       no,
       {"wrap", "4 bits", "8 bits"}},
      {"wrap group",
       layer(kQServeAt, [](L& l) { l.k.group = 32, l.k.overflow = Overflow::kWrap; }),
       no,
       {"wrap", "group 32"}},
      {"wrap qparam",
       layer(kQServeAt, [](L& l) { l.k.qparam = DType::kF32, l.k.overflow = Overflow::kWrap; }),
       no,
       {"f32"}},
      {"channel zero",
       layer(kKiviAt, [](L& l) { l.k.zero = ZeroConvention::kFloatOffset; }),
       no,
       {"k.zero float_offset", "minimum"}},
      {"channel zero",
       layer(kKiviAt, [](L& l) { l.k.zero = ZeroConvention::kSymmetric; }),
       no,
       {"k.zero symmetric", "minimum"}},
      {"channel step", layer(kKiviAt, [](L& l) { l.k_closure.step = 48; }), bad, {"layer 1 k.group 32", "step 48"}},
      {"channel page", layer(kKiviAt, [](L& l) { l.coded_page_rows = 16; }), bad, {"k.group 32", "coded_page_rows 16"}},
      {"row bytes",
       layer(kSymmetricAt, [](L& l) { l.head_dim = 3, l.k.group = l.v.group = 3, l.k.bits = 2; }),
       bad,
       {"layer 3 k.bits 2", "head_dim 3", "whole number of bytes"}},
      // The whole.
      {"rope type", [](CacheSchema& s) { s.rope.type = "alibi"; }, no, {"rope.type \"alibi\"", "default, linear"}},
      {"rope type", [](CacheSchema& s) { s.rope.type = "dynamic"; }, no, {"rope.type dynamic", "stored already"}},
      {"unused factor", [](CacheSchema& s) { s.rope.factor = 2; }, bad, {"rope.factor 2", "must be 1", "default"}},
      {"unused original",
       [](CacheSchema& s) { s.rope = Linear(), s.rope.original_max_positions = 5; },
       bad,
       {"rope.original_max_positions 5", "must be 0", "linear"}},
      {"unused low", [](CacheSchema& s) { s.rope = Yarn(), s.rope.low_freq_factor = 1; }, bad, {"low_freq_factor 1"}},
      {"unused high", [](CacheSchema& s) { s.rope = Yarn(), s.rope.high_freq_factor = 1; }, bad, {"high_freq_factor"}},
      {"unused fast", [](CacheSchema& s) { s.rope = Llama3(), s.rope.beta_fast = 1; }, bad, {"rope.beta_fast 1"}},
      {"unused slow", [](CacheSchema& s) { s.rope = Llama3(), s.rope.beta_slow = 1; }, bad, {"rope.beta_slow 1"}},
      {"unused truncate",
       [](CacheSchema& s) { s.rope = Llama3(), s.rope.truncate = false; },
       bad,
       {"rope.truncate false", "must be true"}},
      {"unused attention",
       [](CacheSchema& s) { s.rope = Llama3(), s.rope.attention_factor = 2; },
       bad,
       {"rope.attention_factor 2", "must be 1"}},
      {"factor", [](CacheSchema& s) { s.rope = Linear(), s.rope.factor = 0.5; }, bad, {"rope.factor 0.5", "1.."}},
      {"factor", [](CacheSchema& s) { s.rope = Linear(), s.rope.factor = std::nan(""); }, bad, {"rope.factor nan"}},
      {"original",
       [](CacheSchema& s) { s.rope = Yarn(), s.rope.original_max_positions = 0; },
       bad,
       {"original_max_positions 0", "1.."}},
      {"low", [](CacheSchema& s) { s.rope = Llama3(), s.rope.low_freq_factor = 0; }, bad, {"low_freq_factor 0"}},
      {"high",
       [](CacheSchema& s) { s.rope = Llama3(), s.rope.high_freq_factor = 1; },
       bad,
       {"high_freq_factor 1", "above low_freq_factor 1"}},
      {"betas",
       [](CacheSchema& s) { s.rope = Yarn(), s.rope.beta_fast = 0.5; },
       bad,
       {"beta_fast 0.5", "at least beta_slow 1"}},
      {"beta", [](CacheSchema& s) { s.rope = Yarn(), s.rope.beta_slow = -1; }, bad, {"beta_slow -1"}},
      {"attention",
       [](CacheSchema& s) { s.rope = Yarn(), s.rope.attention_factor = inf_d; },
       bad,
       {"attention_factor inf"}},
      {"yarn theta", [](CacheSchema& s) { s.rope = Yarn(), s.rope.theta = 1; }, bad, {"rope.theta 1", "yarn"}},
      {"theta", [](CacheSchema& s) { s.rope.theta = 0; }, bad, {"rope.theta 0", "above 0"}},
      {"theta", [](CacheSchema& s) { s.rope.theta = std::nan(""); }, bad, {"rope.theta nan", "finite"}},
      {"pairing", [](CacheSchema& s) { s.rope.pairing = static_cast<RopePairing>(3); }, bad, {"rope.pairing 3"}},
      {"odd dims", [](CacheSchema& s) { s.rope.dims = 31; }, bad, {"rope.dims 31", "even"}},
      {"dims", [](CacheSchema& s) { s.rope.dims = 66; }, bad, {"rope.dims 66", "layer 0", "head_dim 64"}},
      {"read step", [](CacheSchema& s) { s.read_step = 0; }, bad, {"read_step 0", "1..1073741824"}},
      {"source", [](CacheSchema& s) { s.provenance.scale_source = "guess"; }, bad, {"scale_source guess", "dataset"}},
      {"source",
       [](CacheSchema& s) { s.provenance.scale_source = "none", s.layers[kFp8At].v.static_scale = 0.5f; },
       bad,
       {"layer 4 v.static_scale 0.5", "scale_source is none"}},
  };
}

TEST(Validate, NamesLayerFieldValueAndLimitOfEachFault) {
  for (const Fault& fault : Faults()) {
    SCOPED_TRACE(fault.what);
    CacheSchema schema = OneOfEach();
    fault.plant(schema);
    const Status status = Validate(schema);
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.code(), fault.code) << status.message();
    for (const std::string& part : fault.says) EXPECT_THAT(status.message(), HasSubstr(part));
  }
}

TEST(Validate, AcceptsTheEdgesOfItsLimits) {
  CacheSchema schema = OneOfEach();
  schema.layers[kFp8At].k.static_scale = std::numeric_limits<float>::min();
  schema.layers[kNativeAt].k_closure = {65536, 65536};
  schema.layers[kNativeAt].coded_page_rows = 4096;
  schema.layers[kKiviAt].window = 129;
  schema.layers[kKiviAt].pinned_rows = 4;
  schema.layers[kQServeAt].k.overflow = Overflow::kWrap;
  schema.layers[kSymmetricAt].k.bits = 3;
  schema.layers[kSymmetricAt].v.qparam = DType::kF32;
  schema.layers[kSymmetricAt].k_stage = RopeStage::kPre;
  schema.rope.dims = 64;
  schema.read_step = kPromptReadStep;
  schema.provenance.scale_source = "dataset";
  const Status status = Validate(schema);
  EXPECT_TRUE(status.ok()) << status.ToString();
}

TEST(Validate, AcceptsEveryRopeType) {
  for (const RopeConfig& rope : {RopeConfig{}, Linear(), Llama3(), Yarn()}) {
    CacheSchema schema = OneOfEach();
    schema.rope = rope;
    const Status status = Validate(schema);
    EXPECT_TRUE(status.ok()) << status.ToString();
    EXPECT_EQ(Digest(schema) == Digest(OneOfEach()), rope.type == "default");
  }
}

// One change for each compared field.
std::vector<std::pair<std::string, std::function<void(CacheSchema&)>>> Flips() {
  std::vector<std::pair<std::string, std::function<void(CacheSchema&)>>> flips = {
      {"identity.model", [](CacheSchema& s) { s.identity.model = "sha256:0"; }},
      {"identity.adapter", [](CacheSchema& s) { s.identity.adapter = "lora"; }},
      {"identity.tokenizer", [](CacheSchema& s) { s.identity.tokenizer = "t"; }},
      {"identity.calibration", [](CacheSchema& s) { s.identity.calibration = "c"; }},
      {"rope.type", [](CacheSchema& s) { s.rope.type = "linear"; }},
      {"rope.theta", [](CacheSchema& s) { s.rope.theta = std::nextafter(s.rope.theta, 1e9); }},
      {"rope.dims", [](CacheSchema& s) { s.rope.dims = 32; }},
      {"rope.pairing", [](CacheSchema& s) { s.rope.pairing = RopePairing::kInterleaved; }},
      {"rope.factor", [](CacheSchema& s) { s.rope.factor = std::nextafter(1.0, 2.0); }},
      {"rope.original_max_positions", [](CacheSchema& s) { s.rope.original_max_positions = 1; }},
      {"rope.low_freq_factor", [](CacheSchema& s) { s.rope.low_freq_factor = 1; }},
      {"rope.high_freq_factor", [](CacheSchema& s) { s.rope.high_freq_factor = 1; }},
      {"rope.beta_fast", [](CacheSchema& s) { s.rope.beta_fast = 1; }},
      {"rope.beta_slow", [](CacheSchema& s) { s.rope.beta_slow = 1; }},
      {"rope.truncate", [](CacheSchema& s) { s.rope.truncate = false; }},
      {"rope.attention_factor", [](CacheSchema& s) { s.rope.attention_factor = std::nextafter(1.0, 2.0); }},
      {"read_step", [](CacheSchema& s) { s.read_step = 512; }},
      {"layers", [](CacheSchema& s) { s.layers.push_back(NativeLayer()); }},
  };
  using L = LayerSchema;
  const auto layer = [&](const std::string& name, std::function<void(L&)> change) {
    flips.emplace_back("layers[0]." + name, [change](CacheSchema& s) { change(s.layers[0]); });
  };
  layer("num_kv_heads", [](L& l) { l.num_kv_heads = 3; });
  layer("head_dim", [](L& l) { l.head_dim = 128; });
  layer("window", [](L& l) { l.window = 4096; });
  for (const bool key : {true, false}) {
    const auto coding = [&](const std::string& name, std::function<void(TensorCoding&)> change) {
      layer((key ? "k." : "v.") + name, [=](L& l) { change(key ? l.k : l.v); });
    };
    coding("kind", [](TensorCoding& t) { t.kind = CodeKind::kScaledFp; });
    coding("dtype", [](TensorCoding& t) { t.dtype = DType::kBF16; });
    coding("bits", [](TensorCoding& t) { t.bits = 4; });
    coding("axis", [](TensorCoding& t) { t.axis = ScaleAxis::kTensor; });
    coding("group", [](TensorCoding& t) { t.group = 16; });
    coding("zero", [](TensorCoding& t) { t.zero = ZeroConvention::kSymmetric; });
    coding("qparam", [](TensorCoding& t) { t.qparam = DType::kF32; });
    coding("small_scale", [](TensorCoding& t) { t.small_scale = SmallScale::kRefuse; });
    coding("overflow", [](TensorCoding& t) { t.overflow = Overflow::kWrap; });
    coding("static_scale", [](TensorCoding& t) { t.static_scale = std::nextafter(1.0f, 2.0f); });
  }
  layer("k_closure.lag", [](L& l) { l.k_closure.lag = 1; });
  layer("k_closure.step", [](L& l) { l.k_closure.step = 64; });
  layer("v_closure.lag", [](L& l) { l.v_closure.lag = 1; });
  layer("v_closure.step", [](L& l) { l.v_closure.step = 2; });
  layer("k_stage", [](L& l) { l.k_stage = RopeStage::kPre; });
  layer("exact_dtype", [](L& l) { l.exact_dtype = DType::kBF16; });
  layer("pinned_rows", [](L& l) { l.pinned_rows = 1; });
  layer("coded_page_rows", [](L& l) { l.coded_page_rows = 256; });
  layer("exact_page_rows", [](L& l) { l.exact_page_rows = 64; });
  layer("packing_version", [](L& l) { l.packing_version = 2; });
  return flips;
}

TEST(Compatible, RefusesEachFieldFlippedAloneAndNamesBothValues) {  // P15
  const CacheSchema base = SchemaOf({KiviLayer()});
  const std::vector<SchemaField> fields = SchemaFields(base);
  std::set<std::string> flipped, digests = {Digest(base)};
  for (const auto& [name, flip] : Flips()) {
    SCOPED_TRACE(name);
    CacheSchema other = base;
    flip(other);
    flipped.insert(name);
    EXPECT_TRUE(digests.insert(Digest(other)).second) << "digest did not change";
    const Status status = Compatible(base, other), back = Compatible(other, base);
    ASSERT_FALSE(status.ok());
    ASSERT_FALSE(back.ok());
    const auto value = [&](const std::vector<SchemaField>& list) {
      for (const SchemaField& f : list)
        if (f.name == name) return f.value.empty() ? std::string("\"\"") : f.value;
      return std::string("absent");
    };
    EXPECT_EQ(status.message(), name + ": " + value(fields) + " here, " + value(SchemaFields(other)) + " there");
    EXPECT_EQ(back.message(), name + ": " + value(SchemaFields(other)) + " here, " + value(fields) + " there");
  }
  std::set<std::string> all;
  for (const SchemaField& f : fields) EXPECT_TRUE(all.insert(f.name).second) << f.name;
  EXPECT_EQ(flipped, all) << "every compared field is flipped, and nothing else";
}

TEST(Compatible, IgnoresProvenance) {
  const CacheSchema base = SchemaOf({KiviLayer()});
  CacheSchema other = base;
  other.provenance = {.preset = "x", .scale_source = "none", .created_by = "y"};
  EXPECT_TRUE(Compatible(base, other).ok());
  EXPECT_EQ(Digest(base), Digest(other));
}

TEST(Compatible, NamesTheFirstOfSeveralDifferences) {
  const CacheSchema base = SchemaOf({KiviLayer(), KiviLayer()});
  CacheSchema other = base;
  other.layers[1].v.bits = 4;
  other.layers[1].exact_page_rows = 64;
  EXPECT_EQ(Compatible(base, other).message(), "layers[1].v.bits: 2 here, 4 there");
  other.identity.model = "m";
  EXPECT_EQ(Compatible(base, other).message(), "identity.model: \"\" here, m there");
}

TEST(Digest, IsSha256InHexAndKeepsFieldsApart) {
  CacheSchema a = SchemaOf({KiviLayer()}), b = a;
  EXPECT_THAT(Digest(a), ::testing::MatchesRegex("[0-9a-f]{64}"));
  EXPECT_EQ(Digest(a), Digest(b));
  // The same characters, cut in another place.
  a.identity = {.model = "ab", .adapter = "c", .tokenizer = "", .calibration = ""};
  b.identity = {.model = "a", .adapter = "bc", .tokenizer = "", .calibration = ""};
  EXPECT_NE(Digest(a), Digest(b));
}

TEST(Contract, NamesRoundTrip) {
  for (const int c : {kStepwise, 2, 128, 512, kPromptReadStep - 1, kPromptReadStep}) {
    const Result<int> back = ParseContract(ContractName(c));
    ASSERT_TRUE(back.ok()) << ContractName(c);
    EXPECT_EQ(*back, c);
  }
  EXPECT_EQ(ContractName(1), "stepwise");
  EXPECT_EQ(ContractName(512), "chunk:512");
  EXPECT_EQ(ContractName(kPromptReadStep), "prompt");
  for (const char* wrong :
       {"", "Stepwise", "chunk", "chunk:", "chunk:0", "chunk:1", "chunk:-5", "chunk:+5", "chunk:5 ", "chunk: 5",
        "chunk:05", "chunk:1073741824", "chunk:99999999999999999999", "chunk:1e3", "prompt "}) {
    const Result<int> r = ParseContract(wrong);
    ASSERT_FALSE(r.ok()) << wrong;
    EXPECT_EQ(r.status().code(), Code::kInvalidArgument);
    EXPECT_THAT(r.status().message(), HasSubstr("\"" + std::string(wrong) + "\""));
  }
}

TEST(Contract, WhatEachQueryReadsCoded) {  // cache_core.md 2
  const Closure k{0, 128}, v{128, 1}, own{-1, 1};
  EXPECT_EQ(CodedRowsRead(k, kStepwise, 127), 0);
  EXPECT_EQ(CodedRowsRead(k, kStepwise, 128), 128);
  EXPECT_EQ(CodedRowsRead(v, kStepwise, 300), 172) << "row j is read coded iff j < q - 128";
  EXPECT_EQ(CodedRowsRead(own, kStepwise, 0), 1);
  EXPECT_EQ(CodedRowsRead(v, 512, 1000), 384) << "what 512 rows hold";
  EXPECT_EQ(CodedRowsRead(own, 512, 1000), 512);
  EXPECT_EQ(CodedRowsRead(k, kPromptReadStep, 100000), 0) << "a prompt row reads everything exact";
}

TEST(LayerClasses, ShareTablesWhereShapesOfTimeAreEqual) {
  LayerSchema other_bits = KiviLayer(), window = KiviLayer(), pinned = KiviLayer(), pages = KiviLayer(),
              small = KiviLayer();
  other_bits.k.bits = 4;
  window.window = 1024;
  pinned.pinned_rows = 4;
  pages.coded_page_rows = 256;
  small.exact_page_rows = 64;
  const auto classes =
      LayerClasses(SchemaOf({KiviLayer(), window, other_bits, pinned, pages, window, NativeLayer(), small}));
  ASSERT_EQ(classes.size(), 6u);
  EXPECT_EQ(classes[0].layers, (std::vector<int>{0, 2})) << "codings may differ";
  EXPECT_EQ(classes[1].layers, (std::vector<int>{1, 5}));
  EXPECT_EQ(classes[1].window, 1024);
  EXPECT_EQ(classes[2].pinned_rows, 4);
  EXPECT_EQ(classes[3].coded_page_rows, 256);
  EXPECT_EQ(classes[4].layers, std::vector<int>{6});
  EXPECT_EQ(classes[4].closure[0], (Closure{-1, 1}));
  EXPECT_EQ(classes[5].exact_page_rows, 64);
  EXPECT_EQ(classes[0].closure[1], (Closure{128, 1}));
}

}  // namespace
}  // namespace livequant
