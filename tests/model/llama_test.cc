// The forward pass against a naive double Llama, against the embedded model's reference numbers, and against itself:
// batches, threads, drafts and failed steps change no bit.
#include "model/llama.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "model/logits.h"
#include "model/model_bench.h"
#include "model/tiny_llama.h"
#include "support/property.h"
#include "support/values.h"

namespace livequant {
namespace {

using ::testing::HasSubstr;

const char* kModelDir = LIVEQUANT_SOURCE_DIR "/models/books-7m";

std::shared_ptr<const Llama> MustLoad(const std::filesystem::path& directory) {
  auto model = Llama::Load(directory.string());
  EXPECT_TRUE(model.ok()) << model.status().ToString();
  return *model;
}

TEST(Llama, MatchesANaiveDoubleLlamaForEveryShapeAndWeightType) {
  struct Shape {
    int heads, kv_heads, head_dim;
    bool tied;
    const char* dtype;
  };
  const Shape shapes[] = {{4, 4, 32, true, "F32"},  {4, 2, 64, false, "F16"}, {6, 2, 80, true, "BF16"},
                          {8, 1, 96, false, "F32"}, {5, 5, 128, true, "F16"}, {2, 1, 128, false, "BF16"},
                          {9, 3, 32, false, "F16"}};
  uint64_t seed = 1;
  for (const Shape& s : shapes) {
    SCOPED_TRACE(std::to_string(s.heads) + "/" + std::to_string(s.kv_heads) + " heads of " +
                 std::to_string(s.head_dim) + " " + s.dtype);
    Rng rng(seed++);
    TinyLlama tiny{.heads = s.heads,
                   .kv_heads = s.kv_heads,
                   .head_dim = s.head_dim,
                   .hidden = rng.Range(17, 70),
                   .intermediate = rng.Range(9, 90),
                   .vocab = rng.Range(20, 120),
                   .tied = s.tied};
    tiny.Fill(rng, s.dtype);
    const TempDir dir;
    tiny.Write(dir.path());
    const auto model = MustLoad(dir.path());
    int64_t parameters = 0;
    for (const auto& [name, t] : tiny.tensors) parameters += static_cast<int64_t>(t.values.size());
    EXPECT_EQ(model->parameters(), parameters);
    ModelBench bench(model, tiny.F32Schema(), 1, 300, 300);
    ThreadPool pool(1);
    const std::vector<int32_t> ids = RandomTokens(rng, 70, tiny.vocab);
    const std::vector<float> got = bench.Step(bench.Open(), ids, pool);
    const std::vector<double> want = tiny.Logits(ids);
    double worst = 0, largest = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      worst = std::max(worst, std::fabs(got[i] - want[i]));
      largest = std::max(largest, std::fabs(want[i]));
    }
    EXPECT_LE(worst, 2e-5 * largest);  // about 100 f32 roundings of one value in a row, two layers deep
    EXPECT_GT(largest, 1);
  }
}

TEST(Llama, WeightTypesMayDifferInsideOneProjection) {
  Rng rng(3);
  TinyLlama tiny;
  tiny.Fill(rng, "BF16");
  const std::vector<int32_t> ids = RandomTokens(rng, 20, tiny.vocab);
  std::vector<float> logits[2];
  for (int i = 0; i < 2; ++i) {
    if (i == 1) tiny.tensors["model.layers.0.self_attn.k_proj.weight"].dtype = "F32";  // the same values, stored wider
    const TempDir dir;
    tiny.Write(dir.path());
    ModelBench bench(MustLoad(dir.path()), tiny.F32Schema(), 1, 64, 64);
    ThreadPool pool(1);
    logits[i] = bench.Step(bench.Open(), ids, pool);
  }
  EXPECT_TRUE(SameBits(logits[0], logits[1]));
}

struct Golden {
  nlohmann::json j;
  std::vector<int32_t> prompt;
  Golden() {
    std::ifstream file(std::string(kModelDir) + "/eval/reference.json");
    j = nlohmann::json::parse(file)["golden_fp32"];
    prompt = j["prompt_ids"].get<std::vector<int32_t>>();
  }
};

TEST(Llama, EmbeddedModelMatchesItsReferenceLogits) {
  const Golden golden;
  const auto model = MustLoad(kModelDir);
  EXPECT_EQ(model->parameters(), 6951168);
  EXPECT_EQ(model->weight_bytes(), 2 * 6951168);  // tied: the table is read once, as head
  EXPECT_EQ(model->digest().size(), 64u);
  const LlamaConfig& c = model->config();
  ModelBench bench(model, NativeSchema(c, DType::kF32), 1, 128, 64);
  ThreadPool pool(2);
  std::vector<float> logits(static_cast<size_t>(c.vocab_size)),
      residuals(static_cast<size_t>(c.num_hidden_layers * c.hidden_size));
  const SequenceTokens part{.seq = bench.Open(), .tokens = golden.prompt};
  auto step =
      model->Forward({&part, 1}, *bench.cache, *bench.workspace, MatrixView<float>(logits.data(), 1, c.vocab_size),
                     pool, MatrixView<float>(residuals.data(), c.num_hidden_layers, c.hidden_size));
  ASSERT_TRUE(step.ok()) << step.status().ToString();

  const auto l2 = [](std::span<const float> x) {
    double sum = 0;
    for (const float v : x) sum += static_cast<double>(v) * v;
    return std::sqrt(sum);
  };
  double mean = 0;
  for (const float v : logits) mean += v / static_cast<double>(c.vocab_size);
  EXPECT_NEAR(mean, golden.j["logits_mean"].get<double>(), 2e-3);
  EXPECT_NEAR(l2(logits), golden.j["logits_l2"].get<double>(), 2e-3);
  for (size_t i = 0; i < 16; ++i) EXPECT_NEAR(logits[i], golden.j["logits_first16"][i].get<double>(), 2e-3) << i;
  std::vector<int32_t> order(logits.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  });
  double worst = 0;
  for (size_t i = 0; i < 10; ++i) {
    EXPECT_EQ(order[i], golden.j["top10_ids"][i].get<int32_t>());
    worst =
        std::max(worst, std::fabs(logits[static_cast<size_t>(order[i])] - golden.j["top10_logits"][i].get<double>()));
  }
  EXPECT_LE(worst, 2e-3);
  RecordProperty("worst_top10_difference", std::to_string(worst));
  for (int l = 0; l < c.num_hidden_layers; ++l) {
    const auto row = std::span<const float>(residuals).subspan(static_cast<size_t>(l * c.hidden_size),
                                                               static_cast<size_t>(c.hidden_size));
    EXPECT_NEAR(l2(row), golden.j["residual_l2_after_layer_last_position"][static_cast<size_t>(l)].get<double>(), 2e-3)
        << "layer " << l;
  }
}

TEST(Llama, EmbeddedModelWritesItsReferenceTokens) {
  const Golden golden;
  ModelBench bench(MustLoad(kModelDir), NativeSchema(MustLoad(kModelDir)->config(), DType::kF32), 1, 128, 64);
  ThreadPool pool(2);
  const SeqId seq = bench.Open();
  std::vector<float> logits = bench.Step(seq, golden.prompt, pool);
  std::vector<int32_t> got;
  while (got.size() < 64) {
    got.push_back(MostProbable(std::span<const float>(logits).last(static_cast<size_t>(bench.vocab()))));
    logits = bench.Step(seq, {&got.back(), 1}, pool);
  }
  EXPECT_EQ(got, golden.j["greedy_ids"].get<std::vector<int32_t>>());
}

// Rows of any length together are rows one at a time, bit for bit; so are any number of threads.
TEST(Llama, ABatchOfUnequalSequencesIsItsSequences) {
  ForAll(12, [](Rng& rng) {
    TinyLlama tiny{.heads = 6,
                   .kv_heads = static_cast<int>(rng.Pick({1, 2, 3, 6})),
                   .head_dim = static_cast<int>(rng.Pick({32, 64, 80}))};
    tiny.Fill(rng, "BF16");
    const TempDir dir;
    tiny.Write(dir.path());
    const auto model = MustLoad(dir.path());
    const int sequences = static_cast<int>(rng.Range(2, 5));
    ModelBench alone(model, tiny.F32Schema(), sequences, 400, 400),
        together(model, tiny.F32Schema(), sequences, 400, 400);
    ThreadPool one(1), three(3);
    std::vector<SeqId> seq_alone, seq_together;
    for (int s = 0; s < sequences; ++s) {
      seq_alone.push_back(alone.Open());
      seq_together.push_back(together.Open());
    }
    for (int step = 0; step < 4; ++step) {
      std::vector<std::vector<int32_t>> ids;
      std::vector<SequenceTokens> batch;
      std::vector<float> want;
      int64_t logit_rows = 0;
      for (int s = 0; s < sequences; ++s)  // prefill of one beside decode of another
        ids.push_back(RandomTokens(rng, rng.Chance(0.5) ? 1 : rng.Range(2, 60), tiny.vocab));
      for (int s = 0; s < sequences; ++s) {
        const bool all = rng.Chance(0.5);
        batch.push_back(
            {.seq = seq_together[static_cast<size_t>(s)], .tokens = ids[static_cast<size_t>(s)], .all_logits = all});
        const std::vector<float> rows = alone.Step(seq_alone[static_cast<size_t>(s)], ids[static_cast<size_t>(s)], one);
        const size_t keep = (all ? ids[static_cast<size_t>(s)].size() : 1) * static_cast<size_t>(tiny.vocab);
        want.insert(want.end(), rows.end() - static_cast<std::ptrdiff_t>(keep), rows.end());
        logit_rows += all ? static_cast<int64_t>(ids[static_cast<size_t>(s)].size()) : 1;
      }
      std::vector<float> got(want.size());
      const Status s = model->Step(batch, *together.cache, *together.workspace,
                                   MatrixView<float>(got.data(), logit_rows, tiny.vocab), three);
      ASSERT_TRUE(s.ok()) << s.ToString();
      ASSERT_TRUE(SameBits(got, want)) << "step " << step;
    }
  });
}

// Steps of few rows, which every thread of a team does for itself where it can, and of more: KV heads and hidden units
// (a last turn of 8 of them) that the threads divide, or not.
TEST(Llama, AnyNumberOfThreadsGivesTheSameBits) {
  ForAll(6, [](Rng& rng) {
    TinyLlama tiny{.heads = 12,
                   .kv_heads = static_cast<int>(rng.Pick({1, 2, 3, 4, 6, 12})),
                   .head_dim = static_cast<int>(rng.Pick({32, 64, 80})),
                   .intermediate = rng.Pick({40, 96, 200})};
    tiny.Fill(rng, rng.Chance(0.5) ? "BF16" : "F32");
    const TempDir dir;
    tiny.Write(dir.path());
    const auto model = MustLoad(dir.path());
    const std::vector<int32_t> ids = RandomTokens(rng, 320, tiny.vocab);
    std::vector<int64_t> cuts;
    for (int64_t at = 0; at < 320;)
      at += cuts.emplace_back(std::min<int64_t>(320 - at, rng.Chance(0.7) ? rng.Range(1, 5) : rng.Range(6, 40)));
    std::vector<float> want;
    for (int threads = 1; threads <= 4; ++threads) {
      ThreadPool pool(threads);
      ModelBench bench(model, tiny.F32Schema(), 1, 320, 40);
      const SeqId seq = bench.Open();
      std::vector<float> all;
      int64_t at = 0;
      for (const int64_t n : cuts) {
        const std::vector<float> rows =
            bench.Step(seq, std::span(ids).subspan(static_cast<size_t>(at), static_cast<size_t>(n)), pool);
        all.insert(all.end(), rows.begin(), rows.end());
        at += n;
      }
      if (threads == 1) want = all;
      ASSERT_TRUE(SameBits(all, want)) << threads << " threads";
    }
  });
}

TEST(Llama, DraftRowsHaveTheLogitsOfSingleSteps) {
  Rng rng(5);
  TinyLlama tiny;
  tiny.Fill(rng, "F32");
  const TempDir dir;
  tiny.Write(dir.path());
  const auto model = MustLoad(dir.path());
  ModelBench bench(model, tiny.F32Schema(), 2, 200, 64);
  ThreadPool pool(1);
  const std::vector<int32_t> prompt = RandomTokens(rng, 37, tiny.vocab), draft = RandomTokens(rng, 6, tiny.vocab);
  const SeqId plain = bench.Open(), drafted = bench.Open();
  bench.Step(plain, prompt, pool);
  bench.Step(drafted, prompt, pool);
  std::vector<float> want, got(draft.size() * static_cast<size_t>(tiny.vocab));
  for (const int32_t& id : draft) {
    const std::vector<float> row = bench.Step(plain, {&id, 1}, pool);
    want.insert(want.end(), row.begin(), row.end());
  }
  {
    const SequenceTokens part{.seq = drafted, .tokens = draft, .all_logits = true, .mode = Mode::kPrefix};
    auto step =
        model->Forward({&part, 1}, *bench.cache, *bench.workspace, MatrixView<float>(got.data(), 6, tiny.vocab), pool);
    ASSERT_TRUE(step.ok()) << step.status().ToString();
    ASSERT_EQ(step->rows(), 6);
    EXPECT_TRUE(SameBits(got, want));
    const int accepted = 4;
    ASSERT_TRUE(step->Publish({&accepted, 1}).ok());
  }
  ASSERT_EQ(bench.cache->owner().length(drafted), 41);
  const std::vector<float> next = bench.Step(drafted, {&draft[4], 1}, pool);
  EXPECT_TRUE(SameBits(next, std::span<const float>(want).subspan(4 * static_cast<size_t>(tiny.vocab),
                                                                  static_cast<size_t>(tiny.vocab))));
}

class Refusals : public ::testing::Test {
 protected:
  Refusals() {
    Rng rng(9);
    tiny_.max_positions = 64;
    tiny_.Fill(rng, "F32");
  }
  Status LoadStatus() const {
    const TempDir dir;
    tiny_.Write(dir.path());
    return Llama::Load(dir.path().string()).status();
  }
  TinyLlama tiny_;
};

TEST_F(Refusals, EachMissingTensorIsNamed) {
  const auto whole = tiny_.tensors;
  for (const auto& [name, t] : whole) {
    tiny_.tensors = whole;
    tiny_.tensors.erase(name);
    const Status s = LoadStatus();
    EXPECT_EQ(s.code(), Code::kInvalidArgument);
    EXPECT_THAT(s.message(), HasSubstr(name));
    EXPECT_THAT(s.message(), HasSubstr("missing"));
  }
}

TEST_F(Refusals, LeftOverTensorsAreNamed) {
  const auto whole = tiny_.tensors;
  for (const char* name :
       {"model.layers.2.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias", "extra", "lm_head.bias"}) {
    tiny_.tensors = whole;
    tiny_.tensors[name] = {.shape = {2}, .values = {1, 2}};
    const Status s = LoadStatus();
    EXPECT_EQ(s.code(), Code::kInvalidArgument);
    EXPECT_THAT(s.message(), HasSubstr(name));
  }
}

TEST_F(Refusals, TensorsThatSayNothingNewAreIgnored) {
  tiny_.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = {.shape = {2}, .values = {1, 2}};
  EXPECT_TRUE(LoadStatus().ok());
  tiny_.tensors["lm_head.weight"] = tiny_.tensors["model.embed_tokens.weight"];
  EXPECT_TRUE(LoadStatus().ok());
  tiny_.tensors["lm_head.weight"].values[5] += 1;  // tied, and yet another matrix
  EXPECT_THAT(LoadStatus().message(), HasSubstr("lm_head.weight"));
}

TEST_F(Refusals, MisshapenTensorsAreNamedWithBothShapes) {
  TinyTensor& t = tiny_.tensors["model.layers.1.mlp.up_proj.weight"];
  t.shape = {48, 40};
  const Status s = LoadStatus();
  EXPECT_EQ(s.code(), Code::kInvalidArgument);
  EXPECT_THAT(s.message(), HasSubstr("model.layers.1.mlp.up_proj.weight"));
  EXPECT_THAT(s.message(), HasSubstr("[48, 40]"));
  EXPECT_THAT(s.message(), HasSubstr("[40, 48]"));
}

TEST_F(Refusals, OtherWeightTypesAreNamed) {
  const TempDir dir;
  tiny_.Write(dir.path());
  std::string bytes = SafetensorsBytes(tiny_.tensors);
  const size_t at = bytes.find("\"F32\"", bytes.find("model.norm.weight"));
  bytes.replace(at, 5, "\"I32\"");
  WriteText(dir.path() / "model.safetensors", bytes);
  const Status s = Llama::Load(dir.path().string()).status();
  EXPECT_EQ(s.code(), Code::kUnsupported);
  EXPECT_THAT(s.message(), HasSubstr("model.norm.weight"));
  EXPECT_THAT(s.message(), HasSubstr("I32"));
}

TEST_F(Refusals, MissingFilesAreNamed) {
  const TempDir dir;
  EXPECT_THAT(Llama::Load(dir.path().string()).status().message(), HasSubstr("config.json"));
  WriteText(dir.path() / "config.json", tiny_.ConfigJson());
  EXPECT_THAT(Llama::Load(dir.path().string()).status().message(), HasSubstr("model.safetensors"));
}

TEST_F(Refusals, TruncatedWeightsAreRefusedAtEveryLength) {
  const TempDir dir;
  tiny_.Write(dir.path());
  const std::string bytes = SafetensorsBytes(tiny_.tensors);
  ForAll(60, [&](Rng& rng) {
    WriteText(dir.path() / "model.safetensors",
              bytes.substr(0, static_cast<size_t>(rng.Range(0, static_cast<int64_t>(bytes.size()) - 1))));
    EXPECT_FALSE(Llama::Load(dir.path().string()).ok());
  });
}

TEST_F(Refusals, ABadStepChangesNothing) {
  tiny_.tensors["model.embed_tokens.weight"].values[5 * 48 + 3] = std::numeric_limits<float>::quiet_NaN();
  const TempDir dir;
  tiny_.Write(dir.path());
  const auto model = MustLoad(dir.path());
  ModelBench bench(model, tiny_.F32Schema(), 2, 64, 32);
  ThreadPool pool(1);
  const SeqId seq = bench.Open();
  const std::vector<int32_t> good = {7, 8, 9};
  bench.Step(seq, good, pool);
  const std::vector<std::byte> before = bench.cache->StateBytes(seq);
  const int64_t used = bench.cache->owner().used_bytes();

  const auto refuse = [&](const std::vector<int32_t>& ids, Code code, const char* says) {
    std::vector<float> logits(static_cast<size_t>(tiny_.vocab));
    const SequenceTokens part{.seq = seq, .tokens = ids};
    const Status s =
        model->Step({&part, 1}, *bench.cache, *bench.workspace, MatrixView<float>(logits.data(), 1, tiny_.vocab), pool);
    EXPECT_EQ(s.code(), code) << s.ToString();
    EXPECT_THAT(s.message(), HasSubstr(says));
    EXPECT_EQ(bench.cache->owner().length(seq), 3);
    EXPECT_EQ(bench.cache->StateBytes(seq), before);
    EXPECT_EQ(bench.cache->owner().used_bytes(), used);
    const Status sound = bench.cache->owner().CheckInvariants();
    EXPECT_TRUE(sound.ok()) << sound.ToString();
  };
  refuse({7, -1}, Code::kOutOfRange, "-1");
  refuse({7, 61}, Code::kOutOfRange, "61");
  refuse({}, Code::kInvalidArgument, "no tokens");
  refuse(std::vector<int32_t>(33, 1), Code::kInvalidArgument, "32");
  refuse({7, 5, 8}, Code::kNonFinite, "");
  const std::vector<float> next = bench.Step(seq, good, pool);
  EXPECT_TRUE(std::isfinite(next[0]));
  bench.Step(seq, std::vector<int32_t>(32, 2), pool);
  EXPECT_EQ(bench.cache->owner().length(seq), 38);
  std::vector<float> logits(static_cast<size_t>(tiny_.vocab));
  const std::vector<int32_t> many(27, 1);
  const SequenceTokens part{.seq = seq, .tokens = many};
  const Status s =
      model->Step({&part, 1}, *bench.cache, *bench.workspace, MatrixView<float>(logits.data(), 1, tiny_.vocab), pool);
  EXPECT_EQ(s.code(), Code::kOutOfRange);
  EXPECT_THAT(s.message(), HasSubstr("64"));
}

TEST(Logits, ProbabilitiesSumToOneAndTheLargestWins) {
  ForAll(50, [](Rng& rng) {
    const size_t n = static_cast<size_t>(rng.Range(1, 3000));
    std::vector<float> x(n), p(n);
    const double shift = rng.Uniform(-500, 500);
    for (float& v : x) v = static_cast<float>(rng.Normal() * 5 + shift);
    double sum = 0, reference = 0;
    for (const float v : x) reference += std::exp(v - shift);
    const double z = LogPartition(x);
    EXPECT_NEAR(z, std::log(reference) + shift, 1e-6);
    Probabilities(x, z, p);
    for (const float v : p) sum += v;
    EXPECT_NEAR(sum, 1, 1e-4);  // the logits themselves carry 2^-24 |x| each
    const int32_t top = MostProbable(x);
    for (const float v : x) EXPECT_LE(v, x[static_cast<size_t>(top)]);
    x.push_back(x[static_cast<size_t>(top)]);
    EXPECT_EQ(MostProbable(x), top);  // a tie goes to the lower id
  });
}

}  // namespace
}  // namespace livequant
