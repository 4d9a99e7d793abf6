// Every model of tests/model/golden against what transformers computed with it (tools/make_model_goldens.py says how),
// for a cache of exact rows and one of f16 rows; and what must change no bit, on models with biases, norms and windows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/rng.h"
#include "model/llama.h"
#include "model/logits.h"
#include "model/model_bench.h"
#include "support/values.h"

namespace livequant {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;

const std::filesystem::path kGoldens = LIVEQUANT_SOURCE_DIR "/tests/model/golden";

std::vector<std::string> GoldenNames() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(kGoldens))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

json ReadGolden(const std::string& name, const char* file = "golden.json") {
  std::ifstream in(kGoldens / name / file);
  return json::parse(in);
}

std::shared_ptr<const Llama> LoadGolden(const std::string& name) {
  auto model = Llama::Load((kGoldens / name).string());
  EXPECT_TRUE(model.ok()) << name << ": " << model.status().ToString();
  return model.ok() ? *model : nullptr;
}

TEST(Goldens, LogitsAndGreedyTokensAreThoseOfTransformers) {
  const std::vector<std::string> names = GoldenNames();
  ASSERT_EQ(names.size(), 22u);
  double worst = 0;
  ThreadPool pool(1);
  for (const std::string& name : names) {
    const json golden = ReadGolden(name);
    const auto model = LoadGolden(name);
    ASSERT_NE(model, nullptr);
    const auto prompt = golden["prompt"].get<std::vector<int32_t>>(),
               greedy = golden["greedy"].get<std::vector<int32_t>>();
    const auto positions = golden["positions"].get<std::vector<int64_t>>();
    ASSERT_GE(golden["margin"].get<double>(), 1e-2);
    for (const DType dtype : {DType::kF32, DType::kF16}) {
      SCOPED_TRACE(name + " " + DTypeName(dtype));
      const int64_t n = static_cast<int64_t>(prompt.size()), total = n + static_cast<int64_t>(greedy.size());
      ModelBench bench(model, NativeSchema(model->config(), dtype), 1, total, static_cast<int>(n));
      const SeqId seq = bench.Open();
      std::vector<float> logits = bench.Step(seq, prompt, pool);
      for (size_t i = 0; i < positions.size(); ++i) {
        const auto want = golden["logits"][DTypeName(dtype)][i].get<std::vector<double>>();
        ASSERT_EQ(static_cast<int64_t>(want.size()), bench.vocab());
        for (size_t id = 0; id < want.size(); ++id) {
          const double error = std::fabs(logits[static_cast<size_t>(positions[i] * bench.vocab()) + id] - want[id]);
          worst = std::max(worst, error);
          ASSERT_LE(error, 1e-3) << "position " << positions[i] << ", token " << id;
        }
      }
      std::vector<int32_t> got;
      std::span<const float> last = std::span<const float>(logits).last(static_cast<size_t>(bench.vocab()));
      while (true) {
        got.push_back(MostProbable(last));
        if (got.size() == greedy.size()) break;
        logits = bench.Step(seq, std::span(got).last(1), pool);
        last = logits;
      }
      EXPECT_EQ(got, greedy);
      EXPECT_EQ(bench.cache->fallback_calls(), 0);
    }
  }
  std::printf("largest difference of a logit: %.2e\n", worst);
}

// What each golden is there to test is really in it.
TEST(Goldens, ConfigsSayWhatTheyAreThereFor) {
  const auto config = [](const std::string& name) {
    std::ifstream in(kGoldens / name / "config.json");
    const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    auto c = ParseLlamaConfig(text);
    EXPECT_TRUE(c.ok()) << c.status().ToString();
    return *c;
  };
  LlamaConfig c = config("llama_bias");
  EXPECT_TRUE(c.qkv_bias && c.o_bias && c.mlp_bias && !c.qk_norm && !c.tie_word_embeddings);
  c = config("mistral_window");
  EXPECT_EQ(c.architecture, "MistralForCausalLM");
  EXPECT_THAT(c.windows, ElementsAre(16, 16));
  EXPECT_TRUE(config("mistral_full").windows.empty());
  c = config("qwen2_full");
  EXPECT_TRUE(c.qkv_bias && !c.o_bias && !c.mlp_bias && c.windows.empty());
  EXPECT_THAT(config("qwen2_layers").windows, ElementsAre(0, 16, 16));
  c = config("qwen3");
  EXPECT_TRUE(c.qk_norm && !c.qkv_bias);
  EXPECT_EQ(c.head_dim, 64);
  EXPECT_EQ(c.hidden_size, 64);
  EXPECT_EQ(config("llama_rope_linear").rope.type, "linear");
  c = config("llama_rope_llama3");
  RopeConfig classic = config("llama_rope_llama3_classic").rope;
  EXPECT_EQ(c.rope.type, "llama3");
  classic.dims = c.rope.dims;
  EXPECT_EQ(c.rope, classic) << "both spellings say the same";
  c = config("llama_rope_yarn");
  EXPECT_NEAR(c.rope.attention_factor, 0.1 * std::log(4.0) + 1, 1e-12);
  EXPECT_EQ(config("llama_rope_yarn_attention").rope.attention_factor, 1.3);
  c = config("llama_rope_yarn_mscale");
  EXPECT_NEAR(c.rope.attention_factor, (0.1 * std::log(4.0) + 1) / (0.05 * std::log(4.0) + 1), 1e-12);
  EXPECT_FALSE(c.rope.truncate);
}

// Past the window too, where the cache has dropped what nobody sees. Steps of 1, 3 and 4 rows are those that every
// thread of a team does for itself, by KV head where the threads divide them.
TEST(Goldens, CutsOfAPromptAndThreadsChangeNoBit) {
  const auto pools = [] {
    std::vector<std::unique_ptr<ThreadPool>> made;
    for (int threads = 1; threads <= 3; ++threads) made.push_back(std::make_unique<ThreadPool>(threads));
    return made;
  }();
  for (const char* name :
       {"mistral_window", "qwen2_layers", "llama_bias", "qwen3", "qwen3_yarn", "llama_gqa7", "llama_d100"}) {
    SCOPED_TRACE(name);
    const auto model = LoadGolden(name);
    ASSERT_NE(model, nullptr);
    const int64_t most = std::min<int64_t>(model->config().max_position_embeddings, 250);
    Rng rng(7);
    const std::vector<int32_t> ids = RandomTokens(rng, most, model->config().vocab_size);
    std::vector<float> whole;
    for (const auto& [chunk, threads] : std::vector<std::pair<int64_t, size_t>>{
             {most, 1}, {1, 1}, {1, 2}, {1, 3}, {3, 2}, {4, 3}, {7, 1}, {7, 2}, {33, 3}}) {
      ThreadPool& pool = *pools[threads - 1];
      ModelBench bench(model, NativeSchema(model->config(), DType::kF16), 1, most, static_cast<int>(chunk));
      const SeqId seq = bench.Open();
      std::vector<float> all;
      for (int64_t at = 0; at < most; at += chunk) {
        const int64_t n = std::min(chunk, most - at);
        const std::vector<float> part =
            bench.Step(seq, std::span(ids).subspan(static_cast<size_t>(at), static_cast<size_t>(n)), pool);
        all.insert(all.end(), part.begin(), part.end());
      }
      if (whole.empty()) whole = all;
      EXPECT_TRUE(SameBits(all, whole)) << "chunks of " << chunk << ", threads " << threads;
    }
  }
}

TEST(Goldens, ABatchOfUnequalSequencesIsEachSequenceAlone) {
  ThreadPool pool(1);
  for (const char* name : {"mistral_window", "qwen2_layers", "llama_bias", "qwen3", "llama_gqa7", "llama_d100"}) {
    SCOPED_TRACE(name);
    const auto model = LoadGolden(name);
    ASSERT_NE(model, nullptr);
    Rng rng(11);
    const int64_t lengths[] = {57, 3, 140};
    std::vector<std::vector<int32_t>> ids;
    for (const int64_t n : lengths) ids.push_back(RandomTokens(rng, n + 2, model->config().vocab_size));
    ModelBench together(model, NativeSchema(model->config(), DType::kF32), 3, 150, 200);
    std::vector<SequenceTokens> batch;
    for (size_t i = 0; i < 3; ++i)
      batch.push_back({.seq = together.Open(),
                       .tokens = std::span(ids[i]).first(static_cast<size_t>(lengths[i])),
                       .all_logits = true});
    std::vector<std::vector<float>> steps = {together.Step(batch, pool)};
    for (int more = 0; more < 2; ++more) {
      for (size_t i = 0; i < 3; ++i)
        batch[i].tokens = std::span(ids[i]).subspan(static_cast<size_t>(lengths[i] + more), 1);
      steps.push_back(together.Step(batch, pool));
    }
    int64_t row = 0;
    for (size_t i = 0; i < 3; ++i) {
      ModelBench alone(model, NativeSchema(model->config(), DType::kF32), 1, 150, 200);
      const SeqId seq = alone.Open();
      const auto rows_of = [&](int step, int64_t first, int64_t count) {
        return std::span<const float>(steps[static_cast<size_t>(step)])
            .subspan(static_cast<size_t>(first * alone.vocab()), static_cast<size_t>(count * alone.vocab()));
      };
      EXPECT_TRUE(SameBits(alone.Step(seq, std::span(ids[i]).first(static_cast<size_t>(lengths[i])), pool),
                           rows_of(0, row, lengths[i])));
      for (int more = 0; more < 2; ++more)
        EXPECT_TRUE(
            SameBits(alone.Step(seq, std::span(ids[i]).subspan(static_cast<size_t>(lengths[i] + more), 1), pool),
                     rows_of(more + 1, static_cast<int64_t>(i), 1)));
      row += lengths[i];
    }
  }
}

// A window of 16 rows never needs more than two pages of 128 at rest, however long the sequence.
TEST(Goldens, AWindowKeepsThePagesBounded) {
  const auto model = LoadGolden("mistral_window");
  ASSERT_NE(model, nullptr);
  Rng rng(13);
  const std::vector<int32_t> ids = RandomTokens(rng, 250, model->config().vocab_size);
  int64_t used[2] = {0, 0};
  for (const bool windowed : {false, true}) {
    CacheSchema schema = NativeSchema(model->config(), DType::kF32);
    for (LayerSchema& layer : schema.layers) layer.coded_page_rows = 16;
    if (!windowed)
      for (LayerSchema& layer : schema.layers) layer.window = 0;
    auto cache = KvCache::Open(schema, {.max_len = 250, .max_step_rows = 8, .max_q_heads = 2});
    ASSERT_TRUE(cache.ok()) << cache.status().ToString();
    const SeqId seq = (*cache)->owner().Open()->seq;
    const auto workspace = model->NewWorkspace(8, 1);
    std::vector<float> logits(static_cast<size_t>(model->config().vocab_size));
    ThreadPool pool(1);
    int64_t most = 0;
    for (size_t at = 0; at < ids.size(); at += 8) {
      const SequenceTokens part{.seq = seq, .tokens = std::span(ids).subspan(at, std::min<size_t>(8, ids.size() - at))};
      ASSERT_TRUE(model
                      ->Step({&part, 1}, **cache, *workspace,
                             MatrixView<float>(logits.data(), 1, model->config().vocab_size), pool)
                      .ok());
      most = std::max(most, (*cache)->owner().used_bytes());
    }
    EXPECT_EQ((*cache)->owner().stats().window_drops > 0, windowed);
    used[windowed] = most;
    EXPECT_TRUE((*cache)->owner().CheckInvariants().ok());
  }
  EXPECT_LE(used[1] * 5, used[0]) << "3 pages of 16 rows against 16";
}

}  // namespace
}  // namespace livequant
