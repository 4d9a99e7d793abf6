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
      {"architectures", {"MistralForCausalLM"}, Code::kUnsupported, "MistralForCausalLM"},
      {"architectures", json::array(), Code::kInvalidArgument, "[]"},
      {"architectures", "LlamaForCausalLM", Code::kInvalidArgument, "list"},
      {"architectures", nullptr, Code::kInvalidArgument, "missing"},
      {"model_type", "mistral", Code::kUnsupported, "mistral"},
      {"hidden_act", "gelu", Code::kUnsupported, "gelu"},
      {"attention_bias", true, Code::kUnsupported, "bias"},
      {"attention_bias", 1, Code::kInvalidArgument, "true or false"},
      {"mlp_bias", true, Code::kUnsupported, "bias"},
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
      {"rope_scaling", json{{"rope_type", "llama3"}, {"factor", 8.0}}, Code::kUnsupported, ""},
      {"rope_scaling", json{{"type", "linear"}}, Code::kUnsupported, "linear"},
      {"rope_scaling", json{{"rope_type", "default"}, {"factor", 8.0}}, Code::kUnsupported, "factor"},
      {"rope_scaling", "yarn", Code::kInvalidArgument, "yarn"},
      {"rope_parameters", json{{"rope_type", "yarn"}}, Code::kUnsupported, "yarn"},
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
  const std::string good = Embedded().dump();
  int refused = 0;
  ForAll(400, [&](Rng& rng) {
    std::string text = good;
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
    }
  });
  EXPECT_GT(refused, 200);
}

}  // namespace
}  // namespace livequant
