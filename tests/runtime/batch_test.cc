// Requests side by side give what each gives alone, bit for bit; and a bad one takes nobody down.
#include "runtime/batch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "model/tiny_llama.h"
#include "runtime/model_bundle.h"
#include "runtime/runtime_support.h"
#include "support/property.h"

namespace livequant {
namespace {

using ::testing::HasSubstr;

// Greedy and seeded requests with prompts of different lengths.
std::vector<BatchRequest> RandomRequests(Rng& rng, int count, int64_t longest, int64_t most_new, int64_t vocab) {
  std::vector<BatchRequest> out;
  for (int i = 0; i < count; ++i) {
    BatchRequest& r = out.emplace_back();
    r.prompt = RandomTokens(rng, rng.Range(1, longest), vocab, 3);
    r.max_new_tokens = rng.Range(0, most_new);
    r.ignore_eos = rng.Range(0, 1) == 0;
    if (i % 2 == 1)
      r.sampling = {.temperature = 1.2, .top_k = rng.Range(0, 30), .top_p = 0.95, .seed = static_cast<uint64_t>(i)};
  }
  return out;
}

Generation Alone(const std::shared_ptr<const Llama>& model, const CacheSchema& schema, const BatchRequest& r,
                 ThreadPool& pool) {
  auto session =
      Session::Open(model, schema, {.max_len = static_cast<int64_t>(r.prompt.size()) + r.max_new_tokens}, pool);
  EXPECT_TRUE(session.ok()) << session.status().ToString();
  auto out = (*session)->Generate(
      r.prompt, {.max_new_tokens = r.max_new_tokens, .sampling = r.sampling, .ignore_eos = r.ignore_eos});
  EXPECT_TRUE(out.ok()) << out.status().ToString();
  return *out;
}

void ExpectAsAlone(const std::shared_ptr<const Llama>& model, const CacheSchema& schema,
                   const std::vector<BatchRequest>& requests, const BatchRun& run, ThreadPool& pool) {
  ASSERT_EQ(run.results.size(), requests.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "request " << i);
    ASSERT_TRUE(run.results[i].status.ok()) << run.results[i].status.ToString();
    const Generation &got = run.results[i].generation, want = Alone(model, schema, requests[i], pool);
    EXPECT_EQ(got.token_ids, want.token_ids);
    EXPECT_EQ(got.finish, want.finish);
    EXPECT_EQ(got.prompt_tokens, want.prompt_tokens);
    EXPECT_EQ(got.decode_steps, want.decode_steps);
    EXPECT_EQ(got.cache_rows, want.cache_rows);
  }
}

// Issue "Width": a batch of 8 equals 8 single runs for every preset, on the model that comes along.
TEST(Batch, OfEightEqualsEightSingleRunsForEveryPreset) {
  auto model = Llama::Load(LIVEQUANT_SOURCE_DIR "/models/books-7m");
  ASSERT_TRUE(model.ok()) << model.status().ToString();
  Rng rng(1);
  ThreadPool pool(2);
  std::vector<BatchRequest> requests = RandomRequests(rng, 8, 150, 12, 4096);
  requests[3].prompt = RandomTokens(rng, 180, 4096, 3);  // past the first closure of every preset
  requests[3].max_new_tokens = 16;
  for (const std::string& name : PresetsToTry()) {
    SCOPED_TRACE(name);
    const CacheSchema schema = SchemaOf(**model, name);
    const auto run = RunBatch(*model, schema, requests, {.max_num_seqs = 8, .prefill_chunk = 100}, pool);
    ASSERT_TRUE(run.ok()) << run.status().ToString();
    EXPECT_EQ(run->most_at_once, 8);
    EXPECT_GT(run->mixed_steps, 0);
    EXPECT_EQ(run->fallback_calls, 0);
    ExpectAsAlone(*model, schema, requests, *run, pool);
  }
}

// Queries that see a window of rows: of every layer under every preset, and of some layers under those that fit so
// short a one. Prompts and answers go far beyond it, so that rows leave while others join.
TEST(Batch, OfEightInSlidingWindowsEqualsEightSingleRuns) {
  Rng rng(7);
  ThreadPool pool(2);
  TinyLlama tiny{.layers = 1, .head_dim = 64, .max_positions = 1024};
  tiny.Fill(rng, "BF16");
  const auto everywhere = LoadWindowed(tiny, 200);
  const auto some = Llama::Load(LIVEQUANT_SOURCE_DIR "/tests/model/golden/qwen2_layers");
  ASSERT_TRUE(some.ok()) << some.status().ToString();
  const auto expect = [&](const std::shared_ptr<const Llama>& model, const std::string& name, int64_t longest) {
    SCOPED_TRACE(name);
    std::vector<BatchRequest> requests = RandomRequests(rng, 8, longest, 20, model->config().vocab_size);
    requests[0].prompt = RandomTokens(rng, longest, model->config().vocab_size, 3);
    const CacheSchema schema = SchemaOf(*model, name);
    const auto run = RunBatch(model, schema, requests, {.max_num_seqs = 8, .prefill_chunk = 100}, pool);
    ASSERT_TRUE(run.ok()) << run.status().ToString();
    EXPECT_EQ(run->most_at_once, 8);
    ExpectAsAlone(model, schema, requests, *run, pool);
  };
  for (const std::string& name : PresetNames()) expect(everywhere, name, 600);
  for (const char* name : {"f32", "fp8_e4m3", "int4", "qserve4"}) expect(*some, name, 200);
}

// More requests than sequences, any budget that holds the longest, any chunk: nothing runs out, nothing changes.
TEST(Batch, RandomRequestsUnderRandomBudgetsEqualSingleRuns) {
  TinyLlama tiny{.head_dim = 64};
  Rng fill(2);
  tiny.Fill(fill, "BF16");
  const auto model = LoadFrom(tiny);
  const std::vector<std::string> presets = {"f16", "int4", "kivi2", "qserve4"};
  int waited = 0;
  ForAll(12, [&](Rng& rng) {
    ThreadPool pool(static_cast<int>(rng.Range(1, 2)));
    const std::string& name = presets[static_cast<size_t>(rng.Range(0, 3))];
    SCOPED_TRACE(name);
    const CacheSchema schema = SchemaOf(*model, name);
    const auto requests = RandomRequests(rng, static_cast<int>(rng.Range(1, 10)), 300, 40, tiny.vocab);
    BatchOptions options{.max_num_seqs = static_cast<int>(rng.Range(1, 6)), .prefill_chunk = rng.Range(1, 200)};
    const auto free = RunBatch(model, schema, requests, options, pool);
    ASSERT_TRUE(free.ok()) << free.status().ToString();
    ExpectAsAlone(model, schema, requests, *free, pool);
    options.memory_bytes = rng.Range(free->pool_bytes / 4, free->pool_bytes);
    const auto tight = RunBatch(model, schema, requests, options, pool);
    if (!tight.ok()) {  // not even one fits
      EXPECT_EQ(tight.status().code(), Code::kOutOfRange) << tight.status().ToString();
      EXPECT_THAT(tight.status().message(), HasSubstr(std::to_string(options.memory_bytes)));
      return;
    }
    EXPECT_LE(tight->pool_bytes, options.memory_bytes);
    waited += tight->most_at_once < free->most_at_once;
    ExpectAsAlone(model, schema, requests, *tight, pool);
  });
  EXPECT_GT(waited, 0);
}

// Prompts are cut as the contract says, whoever else runs.
TEST(Batch, KeepsChunkAndPromptContracts) {
  TinyLlama tiny{.head_dim = 64};
  Rng rng(3);
  tiny.Fill(rng, "BF16");
  const auto model = LoadFrom(tiny);
  ThreadPool pool(1);
  const auto requests = RandomRequests(rng, 6, 400, 20, tiny.vocab);
  for (const int read_step : {64, 200, kPromptReadStep}) {
    SCOPED_TRACE(ContractName(read_step));
    const CacheSchema schema = SchemaOf(*model, "kivi2", read_step);
    const auto run = RunBatch(model, schema, requests, {.max_num_seqs = 3, .prefill_chunk = 130}, pool);
    ASSERT_TRUE(run.ok()) << run.status().ToString();
    ExpectAsAlone(model, schema, requests, *run, pool);
  }
}

class BatchTest : public ::testing::Test {
 protected:
  BatchTest() : pool_(1) {
    Rng rng(4);
    tiny_.Fill(rng, "F32");
  }
  TinyLlama tiny_{.max_positions = 256};
  ThreadPool pool_;
};

TEST_F(BatchTest, ARequestThatMakesNaNsEndsAloneAndTheOthersAreAsAlone) {
  auto& embedding = tiny_.tensors.at("model.embed_tokens.weight");
  for (int64_t c = 0; c < tiny_.hidden; ++c)
    embedding.values[static_cast<size_t>(50 * tiny_.hidden + c)] = std::numeric_limits<float>::quiet_NaN();
  tiny_.tied = false;
  tiny_.tensors["lm_head.weight"] = {.shape = {tiny_.vocab, tiny_.hidden},
                                     .values = std::vector<float>(static_cast<size_t>(tiny_.vocab * tiny_.hidden))};
  for (size_t i = 0; i < static_cast<size_t>(49 * tiny_.hidden); ++i)  // id 50 never wins
    tiny_.tensors["lm_head.weight"].values[i] = static_cast<float>((i * 7919 % 101)) / 101 - 0.5f;
  const auto model = LoadFrom(tiny_);
  const CacheSchema schema = SchemaOf(*model, "f16");
  Rng rng(5);
  std::vector<BatchRequest> requests;
  for (int i = 0; i < 5; ++i)
    requests.push_back({.prompt = RandomTokens(rng, 20, 49, 3), .max_new_tokens = 10, .ignore_eos = true});
  std::vector<BatchRequest> good = requests;
  good.erase(good.begin() + 2);
  requests[2].prompt[7] = 50;
  std::vector<size_t> finished;
  const auto run =
      RunBatch(model, schema, requests,
               {.prefill_chunk = 6, .on_finish = [&](size_t i, const BatchResult&) { finished.push_back(i); }}, pool_);
  ASSERT_TRUE(run.ok()) << run.status().ToString();
  EXPECT_EQ(finished.size(), 5u);
  EXPECT_EQ(finished.front(), 2u);
  EXPECT_EQ(run->results[2].status.code(), Code::kNonFinite);
  EXPECT_TRUE(run->results[2].generation.token_ids.empty());
  BatchRun others = *run;
  others.results.erase(others.results.begin() + 2);
  ExpectAsAlone(model, schema, good, others, pool_);
}

TEST_F(BatchTest, OneBadRequestIsRefusedBeforeAnythingRuns) {
  const auto model = LoadFrom(tiny_);
  const CacheSchema schema = SchemaOf(*model, "f16");
  const auto refused = [&](const BatchRequest& bad, const BatchOptions& options, Code code) {
    const std::vector<BatchRequest> requests = {{.prompt = {3, 4}, .max_new_tokens = 2}, bad};
    BatchOptions watched = options;
    watched.on_finish = [](size_t, const BatchResult&) { ADD_FAILURE() << "a request ran"; };
    const auto run = RunBatch(model, schema, requests, watched, pool_);
    EXPECT_EQ(run.status().code(), code) << run.status().ToString();
    return run.status().message();
  };
  EXPECT_THAT(refused({}, {}, Code::kInvalidArgument), HasSubstr("request 1: the prompt is empty"));
  std::string message = refused({.prompt = {3, 4, 5}, .max_new_tokens = 40}, {.context = 42}, Code::kOutOfRange);
  EXPECT_THAT(message, HasSubstr("3 prompt tokens and 40"));
  EXPECT_THAT(message, HasSubstr("42"));
  EXPECT_THAT(refused({.prompt = {61}}, {}, Code::kOutOfRange), HasSubstr("61"));
  EXPECT_THAT(refused({.prompt = {3}, .sampling = {.top_p = 2}}, {}, Code::kOutOfRange), HasSubstr("top-p"));
  EXPECT_THAT(refused({.prompt = {3}}, {.max_num_seqs = 0}, Code::kInvalidArgument), HasSubstr("max_num_seqs"));
  EXPECT_THAT(refused({.prompt = {3}}, {.prefill_chunk = 0}, Code::kInvalidArgument), HasSubstr("prefill_chunk"));
  EXPECT_THAT(refused({.prompt = {3}}, {.context = 257}, Code::kOutOfRange), HasSubstr("257"));
  EXPECT_THAT(refused({.prompt = {3}}, {.memory_bytes = 100}, Code::kOutOfRange), HasSubstr("100"));
}

TEST_F(BatchTest, CancelEndsEveryRequestWithWhatItHas) {
  const auto model = LoadFrom(tiny_);
  std::atomic<bool> cancel = false;
  std::vector<BatchRequest> requests = {{.prompt = {3, 4}, .max_new_tokens = 3, .ignore_eos = true},
                                        {.prompt = {5, 6}, .max_new_tokens = 200, .ignore_eos = true},
                                        {.prompt = {7}, .max_new_tokens = 9, .ignore_eos = true},
                                        {.prompt = {8}, .max_new_tokens = 9, .ignore_eos = true}};
  int finished = 0;
  const auto run = RunBatch(model, SchemaOf(*model, "f16"), requests,
                            {.max_num_seqs = 2,
                             .cancel = &cancel,
                             .on_finish =
                                 [&](size_t, const BatchResult&) {
                                   ++finished;
                                   cancel = true;
                                 }},
                            pool_);
  ASSERT_TRUE(run.ok()) << run.status().ToString();
  EXPECT_EQ(finished, 4);
  EXPECT_EQ(run->results[0].generation.finish, FinishReason::kLength);
  for (size_t i = 1; i < 4; ++i) EXPECT_EQ(run->results[i].generation.finish, FinishReason::kCancelled);
  EXPECT_EQ(run->results[1].generation.token_ids.size(), 3u);
  EXPECT_TRUE(run->results[3].generation.token_ids.empty());
}

}  // namespace
}  // namespace livequant
