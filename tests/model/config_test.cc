// config.json: what is read, and that everything else is refused by name, value and limit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "model/llama.h"
#include "support/property.h"

namespace livequant {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

json Embedded() {
  std::ifstream file(LIVEQUANT_SOURCE_DIR "/models/books-7m/config.json");
  return json::parse(file);
}

TEST(LlamaConfig, ReadsTheEmbeddedModel) {
  const auto c = ParseLlamaConfig(Embedded().dump());
  ASSERT_TRUE(c.ok()) << c.status().ToString();
  EXPECT_EQ(c->vocab_size, 4096);
  EXPECT_EQ(c->hidden_size, 256);
  EXPECT_EQ(c->intermediate_size, 704);
  EXPECT_EQ(c->max_position_embeddings, 8192);
  EXPECT_EQ(c->num_hidden_layers, 8);
  EXPECT_EQ(c->num_attention_heads, 4);
  EXPECT_EQ(c->num_key_value_heads, 2);
  EXPECT_EQ(c->head_dim, 64);
  EXPECT_EQ(c->rms_norm_eps, 1e-5f);
  EXPECT_TRUE(c->tie_word_embeddings);
  EXPECT_THAT(c->eos_token_ids, ElementsAre(1));
  EXPECT_EQ(c->bos_token_id, 0);
  EXPECT_EQ(c->rope.theta, 100000.0);
  EXPECT_EQ(c->rope.dims, 64);
  EXPECT_EQ(c->rope.type, "default");
}

TEST(LlamaConfig, AbsentFieldsHaveTheDocumentedDefaults) {
  json j = Embedded();
  for (const char* name :
       {"num_key_value_heads", "head_dim", "hidden_act", "rope_theta", "rope_parameters", "rope_scaling",
        "tie_word_embeddings", "attention_bias", "mlp_bias", "eos_token_id", "bos_token_id", "model_type"})
    j.erase(name);
  const auto c = ParseLlamaConfig(j.dump());
  ASSERT_TRUE(c.ok()) << c.status().ToString();
  EXPECT_EQ(c->num_key_value_heads, 4);
  EXPECT_EQ(c->head_dim, 64);
  EXPECT_EQ(c->rope.theta, 10000.0);
  EXPECT_FALSE(c->tie_word_embeddings);
  EXPECT_TRUE(c->eos_token_ids.empty());
  EXPECT_EQ(c->bos_token_id, -1);
}

TEST(LlamaConfig, RopeThetaIsReadFromEitherPlace) {
  json j = Embedded();
  j["eos_token_id"] = {1, 7};
  j.erase("rope_theta");
  j["rope_parameters"]["rope_theta"] = 5000.0;
  auto c = ParseLlamaConfig(j.dump());
  ASSERT_TRUE(c.ok()) << c.status().ToString();
  EXPECT_EQ(c->rope.theta, 5000.0);
  EXPECT_THAT(c->eos_token_ids, ElementsAre(1, 7));
  j.erase("rope_parameters");
  j["rope_theta"] = 7000;
  c = ParseLlamaConfig(j.dump());
  ASSERT_TRUE(c.ok()) << c.status().ToString();
  EXPECT_EQ(c->rope.theta, 7000.0);
}

struct BadField {
  const char* field;
  json value;  // null: erased
  Code code;
  const char* says;  // besides the field's name
};

TEST(LlamaConfig, RefusesEveryBadFieldByNameValueAndLimit) {
  const std::vector<BadField> cases = {
      {"architectures", {"GemmaForCausalLM"}, Code::kUnsupported, "known: LlamaForCausalLM, MistralForCausalLM"},
      {"architectures", json::array(), Code::kInvalidArgument, "[]"},
      {"architectures", "LlamaForCausalLM", Code::kInvalidArgument, "list"},
      {"architectures", nullptr, Code::kInvalidArgument, "missing"},
      {"model_type", "mistral", Code::kUnsupported, "mistral"},
      {"hidden_act", "gelu", Code::kUnsupported, "gelu"},
      {"attention_bias", 1, Code::kInvalidArgument, "true or false"},
      {"mlp_bias", "no", Code::kInvalidArgument, "true or false"},
      {"use_sliding_window", true, Code::kUnsupported, "true"},
      {"layer_types", json::array({"full_attention"}), Code::kInvalidArgument, "8 names"},
      {"partial_rotary_factor", 0.5, Code::kUnsupported, "1.0"},
      {"is_encoder_decoder", true, Code::kUnsupported, "false"},
      {"final_logit_softcapping", 30.0, Code::kUnsupported, "may change the result"},
      {"auto_map", json{{"AutoModel", "theirs.py"}}, Code::kUnsupported, "theirs.py"},
      {"tie_word_embeddings", "yes", Code::kInvalidArgument, "yes"},
      {"sliding_window", 4096, Code::kUnsupported, "4096"},
      {"vocab_size", 0, Code::kOutOfRange, "0"},
      {"vocab_size", -5, Code::kOutOfRange, "-5"},
      {"vocab_size", 4096.5, Code::kInvalidArgument, "4096.5"},
      {"vocab_size", "4096", Code::kInvalidArgument, "integer"},
      {"vocab_size", nullptr, Code::kInvalidArgument, "missing"},
      {"vocab_size", 18446744073709551615u, Code::kOutOfRange, "18446744073709551615"},
      {"hidden_size", int64_t{1} << 40, Code::kOutOfRange, "1099511627776"},
      {"hidden_size", nullptr, Code::kInvalidArgument, "missing"},
      {"intermediate_size", -1, Code::kOutOfRange, "-1"},
      {"max_position_embeddings", 0, Code::kOutOfRange, "0"},
      {"max_position_embeddings", int64_t{1} << 31, Code::kOutOfRange, "2147483648"},
      {"num_hidden_layers", 1000000, Code::kOutOfRange, "1000000"},
      {"num_attention_heads", 0, Code::kOutOfRange, "0"},
      {"num_key_value_heads", 3, Code::kInvalidArgument, "3"},
      {"num_key_value_heads", 8, Code::kInvalidArgument, "divide"},
      {"head_dim", 63, Code::kInvalidArgument, "even"},
      {"head_dim", 0, Code::kOutOfRange, "0"},
      {"head_dim", 4096, Code::kOutOfRange, "1024"},
      {"rms_norm_eps", 0.0, Code::kOutOfRange, "above 0"},
      {"rms_norm_eps", -1e-5, Code::kOutOfRange, "-1e-05"},
      {"rms_norm_eps", 1e-300, Code::kOutOfRange, "1e-300"},
      {"rms_norm_eps", nullptr, Code::kInvalidArgument, "missing"},
      {"rope_theta", 0, Code::kOutOfRange, "above 0"},
      {"rope_theta", 5000, Code::kInvalidArgument, "5000"},  // rope_parameters says 100000
      {"rope_scaling", json{{"rope_type", "linear"}, {"factor", 2.0}}, Code::kInvalidArgument, "something else"},
      {"rope_scaling", json{{"rope_type", "default"}, {"factor", 8.0}}, Code::kUnsupported, "factor"},
      {"rope_scaling", "yarn", Code::kInvalidArgument, "yarn"},
      {"rope_parameters", json{{"partial_rotary_factor", 0.5}}, Code::kUnsupported, "0.5"},
      {"eos_token_id", 4096, Code::kOutOfRange, "4096"},
      {"eos_token_id", json{1, -2}, Code::kOutOfRange, "-2"},
      {"eos_token_id", "</s>", Code::kInvalidArgument, "</s>"},
      {"bos_token_id", -1, Code::kOutOfRange, "-1"},
  };
  for (const BadField& bad : cases) {
    json j = Embedded();
    if (bad.value.is_null())
      j.erase(bad.field);
    else
      j[bad.field] = bad.value;
    const auto c = ParseLlamaConfig(j.dump());
    SCOPED_TRACE(std::string(bad.field) + " = " + bad.value.dump());
    ASSERT_FALSE(c.ok());
    EXPECT_EQ(c.status().code(), bad.code) << c.status().ToString();
    EXPECT_THAT(c.status().message(), HasSubstr(bad.field));
    EXPECT_THAT(c.status().message(), HasSubstr(bad.says));
  }
}

json Rope(const json& scaling) {
  json j = Embedded();
  j.erase("rope_parameters");
  j["rope_scaling"] = scaling;
  return j;
}

TEST(LlamaConfig, ReadsRopeTypesInEverySpelling) {
  const json linear = {{"type", "linear"}, {"factor", 4}};
  auto c = ParseLlamaConfig(Rope(linear).dump());
  ASSERT_TRUE(c.ok()) << c.status().ToString();
  EXPECT_EQ(c->rope, (RopeConfig{.type = "linear", .theta = 100000.0, .dims = 64, .factor = 4}));

  const json llama3 = {{"rope_type", "llama3"},
                       {"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 2048}};
  c = ParseLlamaConfig(Rope(llama3).dump());
  ASSERT_TRUE(c.ok()) << c.status().ToString();
  const RopeConfig classic = c->rope;
  EXPECT_EQ(classic, (RopeConfig{.type = "llama3",
                                 .theta = 100000.0,
                                 .dims = 64,
                                 .factor = 8,
                                 .original_max_positions = 2048,
                                 .low_freq_factor = 1,
                                 .high_freq_factor = 4}));
  json newer = Embedded();
  newer.erase("rope_theta");
  newer["rope_parameters"] = llama3;
  newer["rope_parameters"]["rope_theta"] = 100000.0;
  newer["rope_parameters"]["type"] = "llama3";  // as some exports repeat it
  c = ParseLlamaConfig(newer.dump());
  ASSERT_TRUE(c.ok()) << c.status().ToString();
  EXPECT_EQ(c->rope, classic);
  newer["rope_theta"] = 100000.0;
  newer["rope_scaling"] = llama3;
  EXPECT_TRUE(ParseLlamaConfig(newer.dump()).ok()) << "both, and they agree";

  // Yarn: the defaults, and what they become.
  json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}};
  c = ParseLlamaConfig(Rope(yarn).dump());
  ASSERT_TRUE(c.ok()) << c.status().ToString();
  EXPECT_EQ(c->rope.original_max_positions, 8192);
  EXPECT_EQ(c->rope.beta_fast, 32);
  EXPECT_EQ(c->rope.beta_slow, 1);
  EXPECT_TRUE(c->rope.truncate);
  EXPECT_DOUBLE_EQ(c->rope.attention_factor, 1.1386294361119891);  // 0.1 ln 4 + 1
  yarn["mscale"] = 1.0;
  EXPECT_DOUBLE_EQ(ParseLlamaConfig(Rope(yarn).dump())->rope.attention_factor, 1.1386294361119891) << "needs both";
  yarn["mscale_all_dim"] = 1.0;
  EXPECT_DOUBLE_EQ(ParseLlamaConfig(Rope(yarn).dump())->rope.attention_factor, 1.0);
  yarn["attention_factor"] = 0.75;
  EXPECT_EQ(ParseLlamaConfig(Rope(yarn).dump())->rope.attention_factor, 0.75);
  yarn = {{"rope_type", "yarn"}, {"original_max_position_embeddings", 2048}};
  EXPECT_EQ(ParseLlamaConfig(Rope(yarn).dump())->rope.factor, 4.0) << "8192 / 2048";
}

TEST(LlamaConfig, RefusesBadRopeFieldsWithTheirPath) {
  struct Case {
    json scaling;
    Code code;
    std::vector<const char*> says;
  };
  const json llama3 = {{"rope_type", "llama3"},
                       {"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 2048}};
  const auto with = [&](json base, const char* key, const json& value) {
    if (value.is_null())
      base.erase(key);
    else
      base[key] = value;
    return base;
  };
  const json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}};
  const std::vector<Case> cases = {
      {{{"rope_type", "dynamic"}, {"factor", 2.0}}, Code::kUnsupported, {"rope.type dynamic", "stored already"}},
      {{{"rope_type", "longrope"}}, Code::kUnsupported, {"longrope"}},
      {{{"rope_type", "mrope"}}, Code::kUnsupported, {"mrope", "llama3"}},
      {{{"rope_type", 3}}, Code::kInvalidArgument, {"rope_scaling.rope_type", "3"}},
      {{{"rope_type", "linear"}, {"type", "yarn"}, {"factor", 2}}, Code::kInvalidArgument, {"yarn", "linear"}},
      {{{"rope_type", "linear"}}, Code::kInvalidArgument, {"rope_scaling.factor", "missing"}},
      {{{"rope_type", "linear"}, {"factor", 0.5}}, Code::kOutOfRange, {"rope_scaling.factor", "0.5", "at least 1"}},
      {{{"rope_type", "linear"}, {"factor", 2}, {"beta_fast", 3}}, Code::kUnsupported, {"beta_fast", "linear"}},
      {with(llama3, "low_freq_factor", nullptr), Code::kInvalidArgument, {"low_freq_factor", "missing"}},
      {with(llama3, "original_max_position_embeddings", nullptr), Code::kInvalidArgument, {"original_max", "missing"}},
      {with(llama3, "original_max_position_embeddings", 0), Code::kOutOfRange, {"original_max", "0"}},
      {with(llama3, "high_freq_factor", 1.0), Code::kInvalidArgument, {"high_freq_factor", "above low_freq_factor"}},
      {with(llama3, "attention_factor", 1.0), Code::kUnsupported, {"attention_factor", "llama3"}},
      {{{"rope_type", "yarn"}}, Code::kInvalidArgument, {"rope_scaling.factor", "missing"}},
      {with(yarn, "beta_slow", 40.0), Code::kInvalidArgument, {"beta_fast", "32", "40"}},
      {with(yarn, "attention_factor", 0.0), Code::kOutOfRange, {"attention_factor", "above 0"}},
      {with(yarn, "truncate", 1), Code::kInvalidArgument, {"truncate", "true or false"}},
      {with(yarn, "finetuned", true), Code::kUnsupported, {"finetuned"}},
  };
  for (const Case& bad : cases) {
    const auto c = ParseLlamaConfig(Rope(bad.scaling).dump());
    SCOPED_TRACE(bad.scaling.dump());
    ASSERT_FALSE(c.ok());
    EXPECT_EQ(c.status().code(), bad.code) << c.status().ToString();
    for (const char* part : bad.says) EXPECT_THAT(c.status().message(), HasSubstr(part));
  }
}

// The smallest config of an architecture; what it leaves out has transformers' default.
json Smallest(const char* architecture, const char* type) {
  return {
      {"architectures", {architecture}}, {"model_type", type},     {"vocab_size", 64},          {"hidden_size", 64},
      {"intermediate_size", 64},         {"num_hidden_layers", 3}, {"num_attention_heads", 32}, {"rms_norm_eps", 1e-6},
      {"max_position_embeddings", 128}};
}

TEST(LlamaConfig, MistralHasOneWindowForAllLayers) {
  json j = Smallest("MistralForCausalLM", "mistral");
  auto c = ParseLlamaConfig(j.dump());
  ASSERT_TRUE(c.ok()) << c.status().ToString();
  EXPECT_EQ(c->num_key_value_heads, 8);
  EXPECT_EQ(c->head_dim, 2);
  EXPECT_THAT(c->windows, ElementsAre(4096, 4096, 4096)) << "absent: 4096";
  EXPECT_EQ(c->shape().window(2), 4096);
  j["sliding_window"] = nullptr;
  j["num_key_value_heads"] = nullptr;
  c = ParseLlamaConfig(j.dump());
  EXPECT_TRUE(c->windows.empty()) << "null: none";
  EXPECT_EQ(c->num_key_value_heads, 32);
  j["sliding_window"] = 7;
  EXPECT_THAT(ParseLlamaConfig(j.dump())->windows, ElementsAre(7, 7, 7));
  j["layer_types"] = {"sliding_attention", "full_attention", "sliding_attention"};
  EXPECT_THAT(ParseLlamaConfig(j.dump()).status().message(), HasSubstr("layer_types[1]"));
  j.erase("layer_types");
  for (const json& bad : {json(0), json(-3), json("all")}) {
    j["sliding_window"] = bad;
    EXPECT_THAT(ParseLlamaConfig(j.dump()).status().message(), HasSubstr("sliding_window")) << bad;
  }
  j["sliding_window"] = 7;
  j["attention_bias"] = true;
  EXPECT_EQ(ParseLlamaConfig(j.dump()).status().code(), Code::kUnsupported);
}

TEST(LlamaConfig, QwenHasWindowsByLayer) {
  for (const bool three : {false, true}) {
    json j = three ? Smallest("Qwen3ForCausalLM", "qwen3") : Smallest("Qwen2ForCausalLM", "qwen2");
    auto c = ParseLlamaConfig(j.dump());
    ASSERT_TRUE(c.ok()) << c.status().ToString();
    EXPECT_EQ(c->num_key_value_heads, 32);
    EXPECT_EQ(c->head_dim, three ? 128 : 2);
    EXPECT_EQ(c->qkv_bias, !three);
    EXPECT_EQ(c->qk_norm, three);
    EXPECT_TRUE(c->windows.empty());
    j["sliding_window"] = 9;
    EXPECT_TRUE(ParseLlamaConfig(j.dump())->windows.empty()) << "not in use";
    j["use_sliding_window"] = true;
    EXPECT_TRUE(ParseLlamaConfig(j.dump())->windows.empty()) << "max_window_layers is 28";
    j["max_window_layers"] = 1;
    EXPECT_THAT(ParseLlamaConfig(j.dump())->windows, ElementsAre(0, 9, 9));
    j["layer_types"] = {"sliding_attention", "full_attention", "sliding_attention"};
    EXPECT_THAT(ParseLlamaConfig(j.dump())->windows, ElementsAre(9, 0, 9));
    j["use_sliding_window"] = false;
    EXPECT_THAT(ParseLlamaConfig(j.dump()).status().message(), HasSubstr("layer_types[0]"));
    j["layer_types"] = {"full_attention", "chunked_attention", "full_attention"};
    EXPECT_THAT(ParseLlamaConfig(j.dump()).status().message(), HasSubstr("chunked_attention"));
    j.erase("layer_types");
    j["attention_bias"] = true;
    c = ParseLlamaConfig(j.dump());
    EXPECT_EQ(c.ok(), three);
    if (three) {
      EXPECT_TRUE(c->qkv_bias && c->o_bias);
    }
  }
}

// Keys and values come from a file and go to terminals and replies.
TEST(LlamaConfig, RefusalsArePrintable) {
  std::string foreign = "\x1b[2J\x7f";
  for (int i = 0; i < 60; ++i) foreign += "\xC3\xA9";  // so that a cut may fall inside a character
  for (const auto& [field, value] :
       {std::pair<std::string, json>("hidden_act", foreign), {"rope_scaling", json{{foreign, 1}}}}) {
    json j = Embedded();
    j[field] = value;
    const auto c = ParseLlamaConfig(j.dump());
    ASSERT_FALSE(c.ok());
    EXPECT_THAT(c.status().message(), HasSubstr(field));
    for (const char byte : c.status().message()) EXPECT_TRUE(byte >= 0x20 && byte < 0x7F) << c.status().message();
  }
}

TEST(LlamaConfig, HeadSizeMustFollowFromHiddenSizeWhereItIsAbsent) {
  json j = Embedded();
  j.erase("head_dim");
  j["num_attention_heads"] = 6;
  const auto c = ParseLlamaConfig(j.dump());
  ASSERT_FALSE(c.ok());
  EXPECT_THAT(c.status().message(), HasSubstr("256"));
  EXPECT_THAT(c.status().message(), HasSubstr("6"));
}

TEST(LlamaConfig, AnyBytesGiveAValueOrAnError) {
  json qwen = Smallest("Qwen3ForCausalLM", "qwen3");
  qwen.update({{"use_sliding_window", true},
               {"max_window_layers", 1},
               {"rope_parameters", {{"rope_type", "yarn"}, {"factor", 4.0}, {"rope_theta", 1e6}}}});
  const std::string good[] = {Embedded().dump(), qwen.dump()};
  int refused = 0;
  ForAll(600, [&](Rng& rng) {
    std::string text = good[rng.Range(0, 1)];
    for (int64_t edits = rng.Range(1, 4); edits > 0; --edits) {
      const size_t at = static_cast<size_t>(rng.Range(0, static_cast<int64_t>(text.size()) - 1));
      if (rng.Chance(0.5))
        text[at] = static_cast<char>(rng.Range(0, 255));
      else
        text.erase(at, static_cast<size_t>(rng.Range(1, 5)));
    }
    const auto c = ParseLlamaConfig(text);
    if (!c.ok()) {
      ++refused;
      EXPECT_FALSE(c.status().message().empty());
    } else {
      EXPECT_EQ(c->num_attention_heads % c->num_key_value_heads, 0);
      EXPECT_EQ(c->head_dim % 2, 0);
      EXPECT_GT(c->rms_norm_eps, 0);
      EXPECT_TRUE(ValidateRope(c->rope).ok());
    }
  });
  EXPECT_GT(refused, 200);
}

}  // namespace
}  // namespace livequant
