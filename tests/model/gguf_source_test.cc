// tests/model/gguf_source_test.cc: a GGUF file is the model that it was made from, bit for bit; block types by hand;
// each metadata key that means something is read, and each that might is refused.
#include "model/gguf_source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "io/json.h"
#include "kv/kv_cache.h"
#include "model/model_files.h"
#include "model/tiny_gguf.h"
#include "numeric/float_formats.h"
#include "support/property.h"

namespace livequant {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using B = GgufBuilder;

std::vector<float> Logits(const Llama& model, const CacheSchema& schema, const std::vector<int32_t>& ids) {
  auto cache = KvCache::Open(schema, {.max_len = 64, .max_step_rows = 64, .max_q_heads = 64});
  EXPECT_TRUE(cache.ok()) << cache.status().ToString();
  const auto seq = (*cache)->owner().Open();
  const auto rows = static_cast<int64_t>(ids.size()), vocab = model.config().vocab_size;
  const auto workspace = model.NewWorkspace(64, 64);
  std::vector<float> out(static_cast<size_t>(rows * vocab));
  ThreadPool pool(1);
  const SequenceTokens part{.seq = seq->seq, .tokens = ids, .all_logits = true};
  const Status s = model.Step({&part, 1}, **cache, *workspace, MatrixView<float>(out.data(), rows, vocab), pool);
  EXPECT_TRUE(s.ok()) << s.ToString();
  return out;
}

TEST(GgufModel, IsTheModelItWasMadeFromBitForBit) {
  ForAll(24, [](Rng& rng) {
    TinyLlama tiny{.heads = 6,
                   .kv_heads = static_cast<int>(rng.Pick({1, 2, 3, 6})),
                   .head_dim = static_cast<int>(rng.Pick({8, 32, 64, 80, 100})),
                   .hidden = rng.Range(10, 50),
                   .intermediate = rng.Range(9, 40),
                   .tied = rng.Chance(0.5),
                   .theta = rng.Chance(0.5) ? 10000.0 : 500000.0};
    tiny.Fill(rng, rng.Pick<std::string>({"F32", "F16", "BF16"}));
    const TempDir dir;
    tiny.Write(dir.path());
    const std::string path = (dir.path() / "m.gguf").string();
    WriteText(path, TinyGguf(tiny).Bytes());
    const auto a = Llama::Load(dir.path().string()), b = Llama::Load(path);
    ASSERT_TRUE(a.ok()) << a.status().ToString();
    ASSERT_TRUE(b.ok()) << b.status().ToString();
    EXPECT_EQ((*a)->parameters(), (*b)->parameters());
    EXPECT_NE((*a)->digest(), (*b)->digest());
    std::vector<int32_t> ids;
    for (int i = 0; i < 20; ++i) ids.push_back(static_cast<int32_t>(rng.Range(0, tiny.vocab - 1)));
    const std::vector<float> want = Logits(**a, tiny.F32Schema(), ids), got = Logits(**b, tiny.F32Schema(), ids);
    ASSERT_EQ(std::memcmp(want.data(), got.data(), want.size() * sizeof(float)), 0);
    // The schema's RoPE is the config's, however it was written.
    EXPECT_EQ((*a)->config().rope, (*b)->config().rope);
    EXPECT_EQ((*b)->config().eos_token_ids, std::vector<int32_t>{1});
  });
}

// A file with one tensor of each kind, parsed; the parts must outlive the source.
struct Loaded {
  std::string bytes;
  Gguf gguf;
  std::unique_ptr<GgufSource> source;
};
std::unique_ptr<Loaded> Load(const B& b) {
  auto out = std::make_unique<Loaded>();
  out->bytes = b.Bytes();
  auto gguf = Gguf::Parse(std::as_bytes(std::span(out->bytes)), "m.gguf");
  EXPECT_TRUE(gguf.ok()) << gguf.status().ToString();
  out->gguf = *std::move(gguf);
  auto source = GgufSource::Make(out->gguf, "m.gguf");
  EXPECT_TRUE(source.ok()) << source.status().ToString();
  out->source = *std::move(source);
  return out;
}
B WithHeads() {
  B b;
  b.pairs = {{"general.architecture", B::String("llama")},
             {"llama.attention.head_count", B::U32(2)},
             {"llama.attention.head_count_kv", B::U32(1)}};
  return b;
}

TEST(GgufSource, BlockTypesAreDequantizedExactly) {
  B b = WithHeads();
  std::string q8, q4;
  std::vector<float> want8, want4;
  for (const float scale : {0.375f, -2.0f, 0x1p-20f, 0.0f}) {  // two rows of two blocks; 2^-20 is subnormal in f16
    const uint16_t bits = F16FromDouble(double{scale});
    q8 += LittleEndian(bits);
    for (int i = 0; i < 32; ++i) {
      const int code = i == 0 ? -128 : i == 1 ? 127 : 7 * i - 100;
      q8 += static_cast<char>(code);
      want8.push_back(static_cast<float>(code) * scale);
    }
    q4 += LittleEndian(bits);
    for (int i = 0; i < 16; ++i) q4 += static_cast<char>(i | (15 - i) << 4);
    for (int i = 0; i < 32; ++i) want4.push_back(static_cast<float>((i < 16 ? i : 15 - (i - 16)) - 8) * scale);
  }
  b.tensors = {{.name = "token_embd.weight", .dims = {64, 2}, .type = 8, .bytes = q8},
               {.name = "output.weight", .dims = {64, 2}, .type = 2, .bytes = q4}};
  const auto m = Load(b);
  for (const auto& [name, stored, want] :
       {std::tuple("model.embed_tokens.weight", "Q8_0", &want8), std::tuple("lm_head.weight", "Q4_0", &want4)}) {
    const SourceTensor& t = m->source->tensors().at(name);
    EXPECT_EQ(t.stored, stored);
    EXPECT_EQ(t.dtype, DType::kF32);
    std::vector<float> got(64);
    for (const int64_t row : {1, 0}) {
      m->source->Read(name, row, 1, reinterpret_cast<std::byte*>(got.data()));
      for (size_t i = 0; i < 64; ++i) ASSERT_EQ(got[i], (*want)[static_cast<size_t>(row) * 64 + i]) << name << " " << i;
    }
  }
}

TEST(GgufSource, RowsAndBiasesOfInterleavedHeadsAreTurnedBack) {
  B b = WithHeads();  // two query heads of 4 rows, one key head of 4; row r holds r
  std::string q, bias, k;
  for (int r = 0; r < 8; ++r) q += LittleEndian(static_cast<float>(r)) + LittleEndian(static_cast<float>(r + 100));
  for (int r = 0; r < 8; ++r) bias += LittleEndian(static_cast<float>(r));
  for (int r = 0; r < 4; ++r) k += LittleEndian(static_cast<float>(r));
  b.tensors = {{.name = "blk.0.attn_q.weight", .dims = {2, 8}, .type = 0, .bytes = q},
               {.name = "blk.0.attn_q.bias", .dims = {8}, .type = 0, .bytes = bias},
               {.name = "blk.0.attn_k.weight", .dims = {1, 4}, .type = 0, .bytes = k},
               {.name = "blk.0.attn_v.weight", .dims = {1, 4}, .type = 0, .bytes = k}};
  const std::vector<float> order = {0, 2, 1, 3, 4, 6, 5, 7};  // file row of each row of the checkpoint
  const auto m = Load(b);
  std::vector<float> got(16);
  m->source->Read("model.layers.0.self_attn.q_proj.weight", 0, 8, reinterpret_cast<std::byte*>(got.data()));
  for (size_t r = 0; r < 8; ++r) {
    EXPECT_EQ(got[2 * r], order[r]);
    EXPECT_EQ(got[2 * r + 1], order[r] + 100);
  }
  m->source->Read("model.layers.0.self_attn.q_proj.weight", 5, 2, reinterpret_cast<std::byte*>(got.data()));
  EXPECT_EQ(got[0], 6);
  EXPECT_EQ(got[2], 5);
  m->source->Read("model.layers.0.self_attn.q_proj.bias", 0, 1, reinterpret_cast<std::byte*>(got.data()));
  for (size_t r = 0; r < 8; ++r) EXPECT_EQ(got[r], order[r]);
  m->source->Read("model.layers.0.self_attn.k_proj.weight", 0, 4, reinterpret_cast<std::byte*>(got.data()));
  for (size_t r = 0; r < 4; ++r) EXPECT_EQ(got[r], order[r]);
  m->source->Read("model.layers.0.self_attn.v_proj.weight", 0, 4, reinterpret_cast<std::byte*>(got.data()));
  for (size_t r = 0; r < 4; ++r) EXPECT_EQ(got[r], static_cast<float>(r));  // values are not rotated

  b.pairs[2].second = LittleEndian(uint32_t{5}) + LittleEndian(int32_t{1});  // a signed count
  EXPECT_EQ(Load(b)->source->tensors().size(), 4u);
  b.pairs[0].second = B::String("qwen2");  // stores rows as they are
  b.pairs[1].first = "qwen2.attention.head_count";
  b.pairs[2].first = "qwen2.attention.head_count_kv";
  const auto plain = Load(b);
  plain->source->Read("model.layers.0.self_attn.q_proj.weight", 0, 8, reinterpret_cast<std::byte*>(got.data()));
  for (size_t r = 0; r < 8; ++r) EXPECT_EQ(got[2 * r], static_cast<float>(r));
}

TEST(GgufSource, HeadsThatDoNotDivideTheRowsAreRefused) {
  B b = WithHeads();
  b.tensors = {{.name = "blk.0.attn_q.weight", .dims = {1, 6}, .type = 0, .bytes = std::string(24, '\0')}};
  const std::string bytes = b.Bytes();
  const auto gguf = Gguf::Parse(std::as_bytes(std::span(bytes)), "m.gguf");
  ASSERT_TRUE(gguf.ok());
  const auto source = GgufSource::Make(*gguf, "m.gguf");
  ASSERT_FALSE(source.ok());
  EXPECT_THAT(source.status().message(), AllOf(HasSubstr("blk.0.attn_q.weight"), HasSubstr("6 rows")));
}

nlohmann::json Config(const B& b) {
  const std::string bytes = b.Bytes();
  const auto gguf = Gguf::Parse(std::as_bytes(std::span(bytes)), "m.gguf");
  EXPECT_TRUE(gguf.ok()) << gguf.status().ToString();
  const auto text = GgufConfigJson(*gguf, "m.gguf");
  if (!text.ok()) return text.status().ToString();
  return *ParseJson(*text, "config");
}
B TinyFile() {
  Rng rng(4);
  TinyLlama tiny;
  tiny.Fill(rng, "F32");
  return TinyGguf(tiny);
}

TEST(GgufConfig, EveryKeyHasItsField) {
  B b = TinyFile();
  nlohmann::json c = Config(b);
  EXPECT_EQ(c["architectures"], nlohmann::json::array({"LlamaForCausalLM"}));
  EXPECT_EQ(c["hidden_size"], 48);
  EXPECT_EQ(c["num_hidden_layers"], 2);
  EXPECT_EQ(c["num_attention_heads"], 4);
  EXPECT_EQ(c["num_key_value_heads"], 2);
  EXPECT_EQ(c["head_dim"], 32);
  EXPECT_EQ(c["intermediate_size"], 40);
  EXPECT_EQ(c["vocab_size"], 61);
  EXPECT_EQ(c["rope_theta"], 10000.0);
  EXPECT_EQ(c["tie_word_embeddings"], true);
  EXPECT_FALSE(c.contains("rope_scaling"));
  b.Set("llama.attention.sliding_window", B::U32(128));
  EXPECT_EQ(Config(b)["model_type"], "mistral");
  EXPECT_EQ(Config(b)["sliding_window"], 128);
  b.Remove("llama.attention.sliding_window");
  b.Remove("llama.attention.head_count_kv");
  EXPECT_EQ(Config(b)["num_key_value_heads"], 4);
  b.Set("llama.attention.head_count", B::Integers({4, 4}));  // one of each layer
  EXPECT_EQ(Config(b)["num_attention_heads"], 4);
  b.Remove("llama.attention.key_length");
  EXPECT_EQ(Config(b)["head_dim"], 12);
  b.Set("llama.rope.scaling.type", B::String("linear"));
  b.Set("llama.rope.scaling.factor", B::F32(4));
  EXPECT_EQ(Config(b)["rope_scaling"], (nlohmann::json{{"rope_type", "linear"}, {"factor", 4.0}}));
  b.Set("llama.rope.scaling.type", B::String("yarn"));
  b.Set("llama.rope.scaling.original_context_length", B::U32(512));
  b.Set("llama.rope.scaling.yarn_beta_fast", B::F32(16));
  EXPECT_EQ(
      Config(b)["rope_scaling"],
      (nlohmann::json{
          {"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 512}, {"beta_fast", 16.0}}));
  b.Set("tokenizer.ggml.eot_token_id", B::U32(7));
  EXPECT_EQ(Config(b)["eos_token_id"], nlohmann::json::array({1, 7}));
}

TEST(GgufConfig, Llama3FactorsAreFoundAndOthersRefused) {
  B b = TinyFile();
  b.Set("llama.rope.freq_base", B::F32(500000));
  std::string factors;
  for (int i = 0; i < 16; ++i) {
    const double wavelength = 2 * std::numbers::pi * std::pow(500000.0, i / 16.0);
    double f = 1;
    if (wavelength > 8192)
      f = 8;
    else if (wavelength > 2048)
      f = 1 / ((1 - (8192 / wavelength - 1) / 3) / 8 + (8192 / wavelength - 1) / 3);
    factors += LittleEndian(static_cast<float>(f));
  }
  b.tensors.push_back({.name = "rope_freqs.weight", .dims = {16}, .type = 0, .bytes = factors});
  EXPECT_EQ(Config(b)["rope_scaling"], (nlohmann::json{{"rope_type", "llama3"},
                                                       {"factor", 8.0},
                                                       {"low_freq_factor", 1.0},
                                                       {"high_freq_factor", 4.0},
                                                       {"original_max_position_embeddings", 8192}}));
  b.Set("llama.rope.scaling.original_context_length", B::U32(4096));  // then index 8 would be higher
  EXPECT_THAT(Config(b).get<std::string>(), AllOf(HasSubstr("over 4096 positions"), HasSubstr("unsupported")));
  b.Set("llama.rope.scaling.original_context_length", B::U32(8192));
  EXPECT_TRUE(Config(b).is_object());
  b.tensors.back().bytes.replace(4, 4, LittleEndian(3.0f));
  EXPECT_THAT(Config(b).get<std::string>(), AllOf(HasSubstr("unsupported"), HasSubstr("holds 3 at index 1")));
  b.tensors.back().bytes.resize(32);
  b.tensors.back().dims = {8};
  EXPECT_THAT(Config(b).get<std::string>(), HasSubstr("vector of 16 F32"));
}

TEST(GgufConfig, RefusesByKeyValueAndLimit) {
  struct Case {
    const char* key;
    std::string value;  // empty: removed
    const char* says;
  };
  const Case cases[] = {
      {"general.architecture", "", "is missing"},
      {"general.architecture", B::U32(1), "no string"},
      {"general.architecture", B::String("mamba\n"), "\"mamba\\x0a\""},
      {"general.type", B::String("adapter"), "is not \"model\""},
      {"llama.logit_scale", B::F32(2), "may change results"},
      {"llama.expert_count", B::U32(8), "may change results"},
      {"adapter.type", B::String("lora"), "may change results"},
      {"llama.block_count", "", "is missing"},
      {"llama.block_count", B::F32(2), "type f32; an integer is needed"},
      {"llama.block_count", LittleEndian(uint32_t{5}) + LittleEndian(int32_t{-2}), "is -2"},
      {"llama.block_count", LittleEndian(uint32_t{10}) + LittleEndian(uint64_t{1} << 33), "is 8589934592"},
      {"llama.attention.head_count", B::U32(0), "at least 1"},
      {"llama.attention.head_count_kv", B::U32(0), "at least 1"},
      {"llama.attention.head_count_kv", B::Integers({2, 1}), "2 for layer 0 and 1 for layer 1"},
      {"llama.attention.head_count_kv", B::Integers({}), "an integer is needed"},
      {"llama.attention.value_length", B::U32(16), "only the head size, 32"},
      {"llama.rope.dimension_count", B::U32(16), "only the head size, 32"},
      {"llama.attention.layer_norm_rms_epsilon", "", "is missing"},
      {"llama.attention.layer_norm_rms_epsilon", B::U32(1), "a float is needed"},
      {"llama.rope.freq_base", B::F32(std::numeric_limits<float>::infinity()), "finite"},
      {"llama.rope.scaling.type", B::String("longrope"), "none, linear and yarn"},
      {"llama.rope.scaling.type", B::U32(1), "no string"},
      {"llama.rope.scaling.factor", B::F32(8), "without a scaling type"},
      {"llama.rope.scaling.attn_factor", B::F32(0.5f), "is 0.5; only 1 is read"},
      {"llama.vocab_size", B::U32(60), "token_embd.weight has 61 rows"},
      {"tokenizer.ggml.eos_token_id", B::F32(1), "an integer is needed"},
  };
  for (const Case& c : cases) {
    B b = TinyFile();
    if (c.value.empty())
      b.Remove(c.key);
    else
      b.Set(c.key, c.value);
    const nlohmann::json why = Config(b);
    ASSERT_TRUE(why.is_string()) << c.key << " " << c.says;
    EXPECT_THAT(why.get<std::string>(), AllOf(HasSubstr("m.gguf"), HasSubstr(c.key), HasSubstr(c.says)));
  }
  B b = TinyFile();
  for (const auto& [key, value] :
       {std::pair("llama.expert_count", B::U32(0)), std::pair("general.type", B::String("model")),
        std::pair("llama.attention.causal", B::Bool(1)), std::pair("llama.rope.scale_linear", B::F32(1)),
        std::pair("quantize.imatrix.file", B::String("x"))})
    b.Set(key, value);
  EXPECT_TRUE(Config(b).is_object()) << Config(b);
}

}  // namespace
}  // namespace livequant
