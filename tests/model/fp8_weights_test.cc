// tests/model/fp8_weights_test.cc: F8_E4M3 with scales is the bf16 model of the same values; what config.json may say
// of it; scales are counted.
#include "model/fp8_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "model/llama.h"
#include "model/model_files.h"
#include "model/tiny_llama.h"
#include "numeric/float_formats.h"
#include "support/property.h"

namespace livequant {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* kPlain = R"({"quant_method":"fp8","activation_scheme":"dynamic","fmt":"e4m3"})";
constexpr const char* kBlock =
    R"({"quant_method":"fp8","activation_scheme":"dynamic","fmt":"e4m3","weight_block_size":[16,12]})";
constexpr const char* kChannel =
    R"({"quant_method":"compressed-tensors","format":"float-quantized","quantization_status":"compressed",)"
    R"("global_compression_ratio":1.5,"ignore":["lm_head"],"kv_cache_scheme":null,"config_groups":{"group_0":{)"
    R"("targets":["Linear"],"output_activations":null,"input_activations":{"num_bits":8,"type":"float","strategy":)"
    R"("token","dynamic":true,"symmetric":true},"weights":{"num_bits":8,"type":"float","symmetric":true,"strategy":)"
    R"("channel","dynamic":false,"observer":"minmax","group_size":null,"block_structure":null}}}})";

// A file of tensors that own their bytes.
struct Files {
  std::map<std::string, std::pair<TensorInfo, std::string>> parts;
  void Put(const std::string& name, const std::string& dtype, std::vector<int64_t> shape, std::string bytes) {
    parts[name] = {TensorInfo{dtype, std::move(shape), {}}, std::move(bytes)};
  }
  std::map<std::string, TensorInfo> Infos() const {
    std::map<std::string, TensorInfo> out;
    for (const auto& [name, p] : parts) {
      out[name] = p.first;
      out[name].bytes = std::as_bytes(std::span(p.second));
    }
    return out;
  }
};

std::string Config(const TinyLlama& tiny, const std::string& quantization) {
  std::string text = tiny.ConfigJson();
  return text.insert(text.size() - 1, ",\"quantization_config\":" + quantization);
}

struct Pair {
  TinyLlama bf16;
  Files fp8;
};
// Random codes and scales for every projection. The same matrices as bf16: a scale has 12 bits, so a product is exact
// in f32, and TinyLlama's writer rounds it to bf16 once.
Pair MakePair(Rng& rng, int64_t block_rows, int64_t block_cols, const std::string& scale_end, bool scale_vector) {
  Pair p{.bf16 = {.hidden = 40, .intermediate = 56}, .fp8 = {}};
  p.bf16.Fill(rng, "BF16");
  for (auto& [name, t] : p.bf16.tensors) {
    if (name.find("_proj") == name.npos) {
      std::string bytes;
      for (const float x : t.values) {
        const uint16_t bits = Bf16FromDouble(double{x});
        bytes.append(reinterpret_cast<const char*>(&bits), 2);
      }
      p.fp8.Put(name, "BF16", t.shape, bytes);
      continue;
    }
    const int64_t rows = t.shape[0], cols = t.shape[1], br = block_rows > 0 ? block_rows : rows,
                  bc = block_cols > 0 ? block_cols : cols;
    const int64_t scale_rows = (rows + br - 1) / br, scale_cols = (cols + bc - 1) / bc;
    std::vector<float> scales;
    std::string codes, scale_bytes;
    for (int64_t i = 0; i < scale_rows * scale_cols; ++i) {
      scales.push_back(static_cast<float>(rng.Range(1, 4095)) * 0x1p-18f);
      scale_bytes.append(reinterpret_cast<const char*>(&scales.back()), 4);
    }
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; ++c) {
        const auto code = static_cast<uint8_t>(rng.Range(0, 126) + (rng.Chance(0.5) ? 128 : 0));  // no NaN
        codes += static_cast<char>(code);
        t.values[static_cast<size_t>(r * cols + c)] = Bf16ToFloat(
            Bf16FromDouble(double{Fp8E4M3ToFloat(code) * scales[static_cast<size_t>(r / br * scale_cols + c / bc)]}));
      }
    p.fp8.Put(name, "F8_E4M3", t.shape, codes);
    std::vector<int64_t> shape = {scale_rows, scale_cols};
    if (scale_vector) shape.pop_back();
    p.fp8.Put(name + scale_end, "F32", shape, scale_bytes);
  }
  return p;
}

TEST(Fp8Weights, AreTheBf16ModelOfTheirValues) {
  struct Case {
    const char* config;
    int64_t block_rows, block_cols;
    const char* scale_end;
    bool vector;
  };
  const Case cases[] = {{kPlain, 0, 0, "_scale", false},
                        {kPlain, 0, 0, "_scale_inv", true},
                        {kBlock, 16, 12, "_scale_inv", false},
                        {kChannel, 1, 0, "_scale", false},
                        {kChannel, 1, 0, "_scale", true}};
  uint64_t seed = 1;
  for (const Case& c : cases) {
    Rng rng(seed++);
    const Pair p = MakePair(rng, c.block_rows, c.block_cols, c.scale_end, c.vector);
    const TempDir a, b;
    p.bf16.Write(a.path());
    WriteText(b.path() / "config.json", Config(p.bf16, c.config));
    WriteText(b.path() / "model.safetensors", SafetensorsText(p.fp8.Infos(), {}));
    const auto want = ModelFiles::Open(a.path().string()), got = ModelFiles::Open(b.path().string());
    ASSERT_TRUE(want.ok()) << want.status().ToString();
    ASSERT_TRUE(got.ok()) << got.status().ToString();
    ASSERT_EQ((*want)->weights().tensors().size(), (*got)->weights().tensors().size());
    for (const auto& [name, t] : (*want)->weights().tensors()) {
      const SourceTensor& other = (*got)->weights().tensors().at(name);
      ASSERT_EQ(other.dtype, DType::kBF16);
      ASSERT_EQ(other.shape, t.shape);
      std::vector<std::byte> x(static_cast<size_t>(t.rows() * t.cols() * 2)), y(x.size());
      (*want)->weights().Read(name, 0, t.rows(), x.data());
      (*got)->weights().Read(name, 0, t.rows(), y.data());
      ASSERT_EQ(x, y) << name;
    }
    const SafetensorsSource::Fp8Report report = (*got)->safetensors()->ReportFp8();
    EXPECT_EQ(report.tensors, 14);
    EXPECT_GT(report.rounded, report.values / 2);  // 4 + 12 bits seldom fit in 8
    EXPECT_LT(report.rounded, report.values);
    EXPECT_TRUE(Llama::Load(b.path().string()).ok());
  }
}

TEST(Fp8Weights, RoundOnceToNearestEven) {
  const std::string codes = {0x38, 0x38, static_cast<char>(0xB8), 0x00, 0x7E};      // 1, 1, -1, 0, 448
  for (const auto& [scale, bits] : {std::pair(0x1.01p0f, uint16_t{0x3F80}),         // a tie: to the even significand
                                    std::pair(0x1.03p0f, uint16_t{0x3F82}),         // the other tie
                                    std::pair(0x1.010002p0f, uint16_t{0x3F81})}) {  // just above a tie
    const TensorInfo code{"F8_E4M3", {1, 5}, std::as_bytes(std::span(codes))};
    const TensorInfo s{"F32", {1}, std::as_bytes(std::span(&scale, 1))};
    uint16_t out[5];
    EXPECT_EQ((Fp8Matrix{&code, &s, 1, 5}.Decode(0, 1, reinterpret_cast<std::byte*>(out))), 4);
    EXPECT_EQ(out[0], bits);
    EXPECT_EQ(out[2], bits | 0x8000);
    EXPECT_EQ(out[3], 0);
  }
}

TEST(Fp8Weights, ScalesAreCounted) {
  Rng rng(9);
  const Pair whole = MakePair(rng, 0, 0, "_scale", true);
  const auto why = [](const Files& files, const char* config) {
    const auto scheme = ParseFp8Scheme(std::string("{\"quantization_config\":") + config + "}");
    EXPECT_TRUE(scheme.ok()) << scheme.status().ToString();
    std::vector<std::string> used;
    const auto infos = files.Infos();
    const auto pairs = PairFp8Scales(infos, *scheme, &used);
    return pairs.ok() ? "accepted" : pairs.status().ToString();
  };
  EXPECT_EQ(why(whole.fp8, kPlain), "accepted");
  const std::string q = "model.layers.1.self_attn.q_proj.weight";
  Files f = whole.fp8;
  f.parts.erase(q + "_scale");
  EXPECT_THAT(why(f, kPlain),
              AllOf(HasSubstr(q + "_scale is missing"), HasSubstr("14 F8_E4M3 tensors need 14 scales, 13")));
  f = whole.fp8;
  f.parts["extra.weight_scale"] = f.parts[q + "_scale"];
  EXPECT_THAT(why(f, kPlain), AllOf(HasSubstr("extra.weight_scale is left over"), HasSubstr("need 14 scales, 15")));
  f = whole.fp8;
  f.parts[q + "_scale_inv"] = f.parts[q + "_scale"];
  EXPECT_THAT(why(f, kPlain), HasSubstr("both there"));
  f = whole.fp8;
  f.parts["model.layers.1.self_attn.q_proj.input_scale"] = f.parts[q + "_scale"];
  EXPECT_THAT(why(f, kPlain), HasSubstr("input_scale is left over"));
  EXPECT_EQ(why(f, R"({"quant_method":"fp8","activation_scheme":"static"})"), "accepted");
  EXPECT_THAT(why(whole.fp8, kBlock), AllOf(HasSubstr("has shape [1]"), HasSubstr("per 16x12 block needs [")));
  EXPECT_THAT(why(whole.fp8, kChannel), HasSubstr("scales per row"));
  EXPECT_THAT(why(whole.fp8, "null"), HasSubstr("no quantization_config"));
  EXPECT_THAT(why(whole.fp8, R"({"quant_method":"fp8","ignored_layers":["model.layers.1.self_attn.q_proj"]})"),
              HasSubstr("leaves module"));
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 1e37f}) {
    f = whole.fp8;
    f.parts[q + "_scale"].second.assign(reinterpret_cast<const char*>(&bad), 4);
    EXPECT_THAT(why(f, kPlain), AllOf(HasSubstr(q + "_scale"), HasSubstr("finite"))) << bad;
  }
  f = whole.fp8;
  f.parts[q + "_scale"].first.dtype = "I32";
  EXPECT_THAT(why(f, kPlain), HasSubstr("is I32"));
  f = whole.fp8;
  std::erase_if(f.parts, [](const auto& p) { return p.second.first.dtype == "F8_E4M3"; });
  EXPECT_THAT(why(f, kPlain), HasSubstr("none of"));
  f = whole.fp8;
  f.Put("model.norm.weight", "F8_E4M3", {40}, std::string(40, '8'));
  EXPECT_THAT(why(f, kPlain), HasSubstr("only matrices"));
}

TEST(Fp8Weights, QuantizationConfigIsReadStrictly) {
  const auto why = [](const std::string& config) {
    const auto scheme = ParseFp8Scheme("{\"quantization_config\":" + config + "}");
    return scheme.ok() ? "accepted" : scheme.status().ToString();
  };
  const auto edited = [](std::string text, const std::string& from, const std::string& to) {
    const size_t at = text.find(from);
    EXPECT_NE(at, text.npos) << from;
    return text.replace(at, from.size(), to);
  };
  for (const char* good : {kPlain, kBlock, kChannel, "null"}) EXPECT_EQ(why(good), "accepted") << good;
  EXPECT_TRUE(
      (*ParseFp8Scheme("{\"quantization_config\":" + edited(kChannel, "\"dynamic\":true", "\"dynamic\":false") + "}"))
          ->static_activations);
  struct Case {
    std::string config;
    const char* says;
  };
  const Case cases[] = {
      {"7", "quantization_config is 7"},
      {R"({"bits":4})", "quant_method"},
      {R"({"quant_method":"gptq"})", "gptq"},
      {edited(kPlain, "e4m3", "e5m2"), "fmt"},
      {edited(kPlain, "dynamic", "sometimes"), "sometimes"},
      {edited(kPlain, "\"fmt\"", "\"fmtt\""), "fmtt"},
      {edited(kBlock, "[16,12]", "[16]"), "weight_block_size is [16]"},
      {edited(kBlock, "[16,12]", "[0,16]"), "from 1 to 65536"},
      {edited(kBlock, "[16,12]", "[-1,16]"), "from 1 to 65536"},
      {edited(kChannel, "float-quantized", "pack-quantized"), "pack-quantized"},
      {edited(kChannel, "\"kv_cache_scheme\":null", "\"kv_cache_scheme\":{}"), "kv_cache_scheme"},
      {edited(kChannel, "[\"Linear\"]", "[\"Linear\",\"Embedding\"]"), "targets"},
      {edited(kChannel, "\"weights\":{\"num_bits\":8", "\"weights\":{\"num_bits\":4"), "num_bits is 4"},
      {edited(kChannel, "\"weights\":{\"num_bits\":8,", "\"weights\":{"), "it must be said"},
      {edited(kChannel, "\"channel\"", "\"group\""), "strategy is \"group\""},
      {edited(kChannel, "\"group_size\":null", "\"group_size\":32"), "group_size"},
      {edited(kChannel, "\"block_structure\":null", "\"block_structure\":[1,1]"), "only the strategy"},
      {edited(kChannel, "\"input_activations\":{\"num_bits\":8", "\"input_activations\":{\"num_bits\":4"),
       "8-bit floats"},
      {edited(kChannel, "[\"lm_head\"]", "[1]"), "module names"},
      {edited(kChannel, "\"group_0\":{", "\"group_1\":{},\"group_0\":{"), "one group"},
  };
  for (const Case& c : cases) EXPECT_THAT(why(c.config), HasSubstr(c.says)) << c.config;
}

}  // namespace
}  // namespace livequant
