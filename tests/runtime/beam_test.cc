// Beam search: what transformers finds, beams that are bit for bit the sequences that were never branched, and a pool
// that is large enough whatever is taken twice.
#include "runtime/beam.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "io/file.h"
#include "model/tiny_llama.h"
#include "runtime/model_bundle.h"
#include "runtime/runtime_support.h"
#include "support/property.h"

namespace livequant {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

const std::filesystem::path kTests = LIVEQUANT_SOURCE_DIR "/tests";

TEST(BeamGoldens, HypothesesAndScoresAreThoseOfTransformers) {
  auto text = ReadFile((kTests / "runtime/golden/beams.json").string());
  ASSERT_TRUE(text.ok()) << text.status().ToString();
  const json golden = json::parse(*text);
  ThreadPool pool(1);
  int ended = 0;
  for (const json& c : golden["cases"]) {
    const std::string name = c["model"];
    SCOPED_TRACE(name + " beams " + std::to_string(c["num_beams"].get<int>()));
    const auto model = Llama::Load((kTests / "model/golden" / name).string());
    ASSERT_TRUE(model.ok()) << model.status().ToString();
    auto schema = PresetSchema("f32", (*model)->config().shape());
    ASSERT_TRUE(schema.ok());
    const BeamOptions options{.num_beams = c["num_beams"],
                              .max_new_tokens = c["max_new_tokens"],
                              .length_penalty = c["length_penalty"],
                              .stop_ids = c["eos"].get<std::vector<int32_t>>()};
    auto search = BeamSearch::Open(*model, *schema, c["prompt"].get<std::vector<int32_t>>(), options, pool);
    ASSERT_TRUE(search.ok()) << search.status().ToString();
    for (;;) {
      const auto more = (*search)->Step();
      ASSERT_TRUE(more.ok()) << more.status().ToString();
      if (!*more) break;
    }
    const std::vector<BeamHypothesis> found = (*search)->Hypotheses();
    ASSERT_EQ(found.size(), c["hypotheses"].size());
    for (size_t i = 0; i < found.size(); ++i) {
      auto tokens = c["hypotheses"][i]["tokens"].get<std::vector<int32_t>>();
      const bool stopped = std::count(options.stop_ids.begin(), options.stop_ids.end(), tokens.back()) > 0;
      EXPECT_EQ(found[i].finish, stopped ? FinishReason::kEos : FinishReason::kLength);
      if (stopped) tokens.pop_back(), ++ended;
      EXPECT_EQ(found[i].token_ids, tokens) << "hypothesis " << i;
      const double score = c["hypotheses"][i]["score"];
      EXPECT_NEAR(found[i].score, score, 1e-5 * std::abs(score) + 1e-5);
    }
    EXPECT_EQ((*search)->Step().ok() && *(*search)->Step(), false) << "it stays ended";
  }
  EXPECT_GT(ended, 20);
}

class BeamTest : public ::testing::Test {
 protected:
  BeamTest() : pool_(2) {
    Rng rng(5);
    tiny_.Fill(rng, "BF16");
    model_ = LoadFrom(tiny_);
  }
  TinyLlama tiny_{.head_dim = 64, .vocab = 101, .max_positions = 1024};
  std::shared_ptr<const Llama> model_;
  ThreadPool pool_;
};

// A sequence that was never branched, with what it says next.
struct Straight {
  std::vector<std::byte> state;
  std::vector<float> logits;
};
Straight RunStraight(const Llama& model, const CacheSchema& schema, std::span<const int32_t> prompt,
                     std::span<const int32_t> generated, ThreadPool& pool) {
  auto cache = KvCache::Open(schema, {.max_sequences = 1,
                                      .max_len = static_cast<int64_t>(prompt.size() + generated.size()),
                                      .max_q_heads = model.config().num_attention_heads,
                                      .threads = 1});
  LQ_CHECK(cache.ok());
  const SeqId seq = (*cache)->owner().Open()->seq;
  const auto workspace = model.NewWorkspace(static_cast<int>(prompt.size()), 1);
  Straight out;
  out.logits.resize(static_cast<size_t>(model.config().vocab_size));
  const auto step = [&](std::span<const int32_t> tokens) {
    const SequenceTokens part{.seq = seq, .tokens = tokens};
    LQ_CHECK(model
                 .Step({&part, 1}, **cache, *workspace,
                       MatrixView<float>(out.logits.data(), 1, static_cast<int64_t>(out.logits.size())), pool)
                 .ok());
  };
  step(prompt);
  for (size_t i = 0; i < generated.size(); ++i) step(generated.subspan(i, 1));
  out.state = (*cache)->StateBytes(seq);
  return out;
}

TEST_F(BeamTest, EveryBeamIsTheSequenceThatWasNeverBranchedForEveryPreset) {
  Rng rng(6);
  int64_t reorders = 0, duplicated = 0;
  for (const std::string& name : PresetNames()) {
    SCOPED_TRACE(name);
    const CacheSchema schema = SchemaOf(*model_, name);
    // Closures, page starts and shared tails lie in reach of the beams.
    const std::vector<int32_t> prompt = RandomTokens(rng, 120 + rng.Range(0, 7), tiny_.vocab, 3);
    auto search =
        BeamSearch::Open(model_, schema, prompt, {.num_beams = 4, .max_new_tokens = 24, .prefill_chunk = 50}, pool_);
    ASSERT_TRUE(search.ok()) << search.status().ToString();
    int64_t steps = 0;
    for (;; ++steps) {
      const auto more = (*search)->Step();
      ASSERT_TRUE(more.ok()) << more.status().ToString();
      if (!*more) break;
      if (steps % 6 != 5 && steps != 0) continue;
      for (const BeamSearch::Beam& beam : (*search)->beams()) {
        const Straight want = RunStraight(*model_, schema, prompt, beam.token_ids, pool_);
        ASSERT_EQ((*search)->cache().StateBytes(beam.seq), want.state);
        ASSERT_EQ(std::vector<float>(beam.logits.begin(), beam.logits.end()), want.logits);
      }
    }
    EXPECT_EQ(steps, 23);
    const BeamSearch::Stats& stats = (*search)->stats();
    reorders += stats.reorders;
    duplicated += stats.duplicated;
    EXPECT_EQ(stats.duplicated, stats.dropped);
    EXPECT_TRUE((*search)->cache().owner().CheckInvariants().ok());
  }
  EXPECT_GT(reorders, 50);
  EXPECT_GT(duplicated, 50);
}

// No step runs out of pages, whatever the lengths and whoever is taken twice; and the pool is far from a copy for each.
TEST_F(BeamTest, ThePoolHoldsAnySearch) {
  const std::vector<std::string>& names = PresetNames();
  ForAll(25, [&](Rng& rng) {
    const std::string& name = names[static_cast<size_t>(rng.Range(0, static_cast<int64_t>(names.size()) - 1))];
    SCOPED_TRACE(name);
    const std::vector<int32_t> prompt = RandomTokens(rng, rng.Range(1, 500), tiny_.vocab, 3);
    const BeamOptions options{.num_beams = static_cast<int>(rng.Range(1, 12)),
                              .max_new_tokens = rng.Range(0, 140) * (rng.Chance(0.3) ? 1 : 0) + rng.Range(0, 10),
                              .length_penalty = rng.Uniform(-1, 2),
                              .stop_ids = RandomTokens(rng, rng.Range(0, 3), tiny_.vocab),
                              .prefill_chunk = rng.Range(1, 300)};
    auto search = BeamSearch::Open(model_, SchemaOf(*model_, name), prompt, options, pool_);
    ASSERT_TRUE(search.ok()) << search.status().ToString();
    for (;;) {
      const auto more = (*search)->Step();
      ASSERT_TRUE(more.ok()) << more.status().ToString();
      if (!*more) break;
    }
    const std::vector<BeamHypothesis> found = (*search)->Hypotheses();
    ASSERT_FALSE(found.empty());
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_LE(static_cast<int64_t>(found[i].token_ids.size()), options.max_new_tokens);
      if (i > 0) {
        EXPECT_LE(found[i].score, found[i - 1].score);
      }
    }
    EXPECT_LE((*search)->stats().most_used_bytes, (*search)->stats().pool_bytes);
  });
  auto shared = BeamSearch::Open(model_, SchemaOf(*model_, "int8"), RandomTokens(*std::make_unique<Rng>(1), 900, 101),
                                 {.num_beams = 8, .max_new_tokens = 8}, pool_);
  ASSERT_TRUE(shared.ok());
  while (*(*shared)->Step()) {
  }
  EXPECT_LT((*shared)->stats().most_used_bytes, 4 * Ledger(SchemaOf(*model_, "int8"), 907).total());
}

TEST_F(BeamTest, OneBeamIsGreedy) {
  Rng rng(8);
  const std::vector<int32_t> prompt = RandomTokens(rng, 40, tiny_.vocab, 3);
  auto search =
      BeamSearch::Open(model_, SchemaOf(*model_, "kivi2"), prompt, {.num_beams = 1, .max_new_tokens = 30}, pool_);
  ASSERT_TRUE(search.ok());
  while (*(*search)->Step()) {
  }
  auto session = Session::Open(model_, SchemaOf(*model_, "kivi2"), {}, pool_);
  ASSERT_TRUE(session.ok());
  const auto greedy = (*session)->Generate(prompt, {.max_new_tokens = 30, .ignore_eos = true});
  ASSERT_TRUE(greedy.ok());
  EXPECT_EQ((*search)->Hypotheses()[0].token_ids, greedy->token_ids);
}

TEST_F(BeamTest, ASearchThatIsLeftEarlyGivesItsBeams) {
  Rng rng(9);
  const std::vector<int32_t> prompt = RandomTokens(rng, 40, tiny_.vocab, 3);
  auto search =
      BeamSearch::Open(model_, SchemaOf(*model_, "int8"), prompt, {.num_beams = 3, .max_new_tokens = 30}, pool_);
  ASSERT_TRUE(search.ok());
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(*(*search)->Step());
  const std::vector<BeamHypothesis> found = (*search)->Hypotheses();
  ASSERT_EQ(found.size(), 3u);
  for (const BeamHypothesis& h : found) {
    EXPECT_EQ(h.finish, FinishReason::kCancelled);
    EXPECT_EQ(h.token_ids.size(), 5u);
  }
}

TEST_F(BeamTest, BadOptionsAreRefusedByName) {
  const std::vector<int32_t> prompt = {5, 6, 7};
  const auto refused = [&](const BeamOptions& options) {
    return BeamSearch::Open(model_, SchemaOf(*model_, "int8"), prompt, options, pool_).status();
  };
  EXPECT_THAT(refused({.num_beams = 0}).message(), HasSubstr("num_beams is 0; must be 1 to 256"));
  EXPECT_THAT(refused({.length_penalty = 101}).message(), HasSubstr("length_penalty is 101"));
  EXPECT_THAT(refused({.length_penalty = std::nan("")}).message(), HasSubstr("length_penalty is nan"));
  EXPECT_THAT(refused({.prefill_chunk = 0}).message(), HasSubstr("prefill_chunk is 0"));
  EXPECT_EQ(refused({.max_new_tokens = 5000}).code(), Code::kOutOfRange);
  EXPECT_THAT(refused({.num_beams = 60}).message(), HasSubstr("keep 120 continuations a step; the vocabulary has 101"));
  const Status budget = refused({.memory_bytes = 1000});
  EXPECT_EQ(budget.code(), Code::kOutOfRange);
  EXPECT_THAT(budget.message(), HasSubstr("memory_bytes is 1000"));
}

}  // namespace
}  // namespace livequant
