// One request at a time; and the promise below it: under a contract, no cut of the prompt changes a bit, for any
// preset.
#include "runtime/session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "model/tiny_llama.h"
#include "runtime/model_bundle.h"
#include "runtime/runtime_support.h"
#include "support/property.h"
#include "support/values.h"

namespace livequant {
namespace {

using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

const char* kModelDir = LIVEQUANT_SOURCE_DIR "/models/books-7m";
constexpr int kR = 128;  // rows of a KIVI K closure

std::shared_ptr<const Llama> LoadTiny(TinyLlama& tiny, uint64_t seed) {
  Rng rng(seed);
  tiny.Fill(rng, "BF16");
  return LoadFrom(tiny);
}

// Logits of every row of `prompt`, cut as `chunk` says, then of every row of `more`, one at a time.
struct Replay {
  std::vector<float> logits;
  OwnerStats stats;
};
Replay RunCut(const Llama& model, const CacheSchema& schema, const std::vector<int32_t>& prompt,
              const std::vector<int32_t>& more, int64_t chunk, ThreadPool& pool) {
  const int64_t n = static_cast<int64_t>(prompt.size()), total = n + static_cast<int64_t>(more.size()),
                vocab = model.config().vocab_size;
  Replay out;
  out.logits.resize(static_cast<size_t>(total * vocab));
  const int step_rows = static_cast<int>(PrefillStepRows(schema.read_step, chunk, n));
  auto cache = KvCache::Open(
      schema, {.max_len = total, .max_step_rows = step_rows, .max_q_heads = model.config().num_attention_heads});
  EXPECT_TRUE(cache.ok()) << cache.status().ToString();
  const auto seq = (*cache)->owner().Open();
  const auto workspace = model.NewWorkspace(step_rows, step_rows);
  for (int64_t at = 0; at < total;) {
    const int64_t end = at < n ? NextCut(schema.read_step, chunk, n, at) : at + 1;
    const std::span<const int32_t> ids =
        at < n ? std::span(prompt).subspan(static_cast<size_t>(at), static_cast<size_t>(end - at))
               : std::span(more).subspan(static_cast<size_t>(at - n), 1);
    const SequenceTokens part{.seq = seq->seq, .tokens = ids, .all_logits = true};
    const Status s = model.Step({&part, 1}, **cache, *workspace,
                                MatrixView<float>(out.logits.data() + at * vocab, end - at, vocab), pool);
    EXPECT_TRUE(s.ok()) << s.ToString();
    if (!s.ok()) return out;
    at = end;
  }
  out.stats = (*cache)->owner().stats();
  return out;
}

TEST(Cuts, FollowTheContract) {
  EXPECT_EQ(PrefillStepRows(kStepwise, 512, 2000), 512);
  EXPECT_EQ(PrefillStepRows(kStepwise, 512, 100), 100);
  EXPECT_EQ(PrefillStepRows(kPromptReadStep, 512, 2000), 2000);
  EXPECT_EQ(PrefillStepRows(512, 512, 2000), 512);
  EXPECT_EQ(PrefillStepRows(512, 100, 2000), 512);  // a chunk is never cut
  EXPECT_EQ(PrefillStepRows(200, 512, 2000), 400);  // and steps end where chunks do
  EXPECT_EQ(PrefillStepRows(4096, 512, 2000), 2000);
  EXPECT_EQ(NextCut(kStepwise, 512, 1100, 1024), 1100);
  EXPECT_EQ(NextCut(200, 512, 1100, 400), 800);
}

// Issue "First light", item 7: chunks of 1, 7, 128, 512 and one shot, for every preset, past three K closures.
TEST(Cuts, ChangeNoBitUnderStepwiseForAnyPreset) {
  TinyLlama tiny{.heads = 4, .kv_heads = 2, .head_dim = 64};
  const auto model = LoadTiny(tiny, 1);
  Rng rng(2);
  const std::vector<int32_t> prompt = RandomTokens(rng, 4 * kR + 45, tiny.vocab),
                             more = RandomTokens(rng, 40, tiny.vocab);
  ThreadPool one(1), two(2);
  for (const std::string& name : PresetsToTry()) {
    SCOPED_TRACE(name);
    const CacheSchema schema = SchemaOf(*model, name);
    const Replay whole = RunCut(*model, schema, prompt, more, 1 << 20, one);
    for (const int64_t chunk : {1, 7, 128, 512}) {
      const Replay cut = RunCut(*model, schema, prompt, more, chunk, two);  // threads change no bit either
      EXPECT_TRUE(SameBits(whole.logits, cut.logits)) << "chunk " << chunk;
      if (schema.layers[0].k_closure.step == kR) {
        EXPECT_GE(cut.stats.closed_rows[kK], 3 * kR);
      }
    }
  }
}

TEST(Cuts, ChangeNoBitOfTheEmbeddedModel) {
  auto model = Llama::Load(kModelDir);
  ASSERT_TRUE(model.ok()) << model.status().ToString();
  Rng rng(3);
  const std::vector<int32_t> prompt = RandomTokens(rng, 3 * kR + 20, 4096), more = RandomTokens(rng, 3, 4096);
  ThreadPool two(2);
  for (const char* name : {"f16", "kivi2", "qserve4"}) {
    const CacheSchema schema = SchemaOf(**model, name);
    const Replay whole = RunCut(**model, schema, prompt, more, 512, two);
    EXPECT_TRUE(SameBits(whole.logits, RunCut(**model, schema, prompt, more, 53, two).logits)) << name;
  }
}

// Under chunk:C steps may hold several chunks; whichever they hold, prompt rows read the same.
TEST(Cuts, AtMultiplesOfTheChunkChangeNoBitUnderChunkContracts) {
  TinyLlama tiny{.head_dim = 64};
  const auto model = LoadTiny(tiny, 4);
  Rng rng(5);
  const std::vector<int32_t> prompt = RandomTokens(rng, 4 * kR + 45, tiny.vocab), none;
  ThreadPool pool(1);
  for (const char* name : {"kivi2", "int4", "qserve8", "kivi2_sync"}) {
    for (const int c : {64, 128, 200}) {
      const CacheSchema schema = SchemaOf(*model, name, c);
      const Replay whole = RunCut(*model, schema, prompt, none, 1 << 20, pool);
      for (const int64_t chunk : {1, 512})
        EXPECT_TRUE(SameBits(whole.logits, RunCut(*model, schema, prompt, none, chunk, pool).logits))
            << name << " " << c;
    }
    // And the contract matters: it is not stepwise in disguise.
    EXPECT_FALSE(SameBits(RunCut(*model, SchemaOf(*model, name, 128), prompt, none, 128, pool).logits,
                          RunCut(*model, SchemaOf(*model, name), prompt, none, 128, pool).logits));
  }
}

TEST(Cuts, UnderPromptEveryFormatReadsExactRows) {
  TinyLlama tiny{.head_dim = 64};
  const auto model = LoadTiny(tiny, 6);
  Rng rng(7);
  const std::vector<int32_t> prompt = RandomTokens(rng, 300, tiny.vocab), none;
  ThreadPool pool(1);
  for (const char* name : {"kivi2", "int2", "qserve4"}) {
    const CacheSchema schema = SchemaOf(*model, name, kPromptReadStep);
    const CacheSchema native = SchemaOf(*model, DTypeName(schema.layers[0].exact_dtype));
    EXPECT_TRUE(SameBits(RunCut(*model, native, prompt, none, 512, pool).logits,
                         RunCut(*model, schema, prompt, none, 64, pool).logits))
        << name;
  }
}

class SessionTest : public ::testing::Test {
 protected:
  SessionTest() : model_(LoadTiny(tiny_, 8)), pool_(1) {}
  std::unique_ptr<Session> Open(const SessionOptions& options = {}, const char* preset = "f16") {
    auto session = Session::Open(model_, SchemaOf(*model_, preset), options, pool_);
    EXPECT_TRUE(session.ok()) << session.status().ToString();
    return *std::move(session);
  }
  TinyLlama tiny_{.max_positions = 256};
  std::shared_ptr<const Llama> model_;
  ThreadPool pool_;
  const std::vector<int32_t> prompt_ = {0, 5, 9, 33};
};

TEST_F(SessionTest, GivesWhatStepByStepGreedyGives) {
  const auto session = Open();
  auto out = session->Generate(prompt_, {.max_new_tokens = 20, .ignore_eos = true});
  ASSERT_TRUE(out.ok()) << out.status().ToString();
  ASSERT_EQ(out->token_ids.size(), 20u);
  EXPECT_EQ(out->finish, FinishReason::kLength);
  EXPECT_EQ(out->prompt_tokens, 4);
  EXPECT_EQ(out->prefill_steps, 1);
  EXPECT_EQ(out->decode_steps, 19);
  EXPECT_EQ(out->cache_rows, 23);
  EXPECT_GT(out->cache_used_bytes, 0);
  EXPECT_EQ(out->fallback_calls, 0);
  EXPECT_EQ(session->cache().owner().used_bytes(), 0);  // released
  const Replay replay = RunCut(*model_, SchemaOf(*model_, "f16"), prompt_, out->token_ids, 512, pool_);
  for (size_t i = 0; i < 20; ++i) {
    const float* row = replay.logits.data() + (3 + i) * static_cast<size_t>(tiny_.vocab);
    EXPECT_EQ(out->token_ids[i], std::max_element(row, row + tiny_.vocab) - row);
  }
  // The same session again, in other cuts: the same tokens.
  auto again = Open({.prefill_chunk = 1})->Generate(prompt_, {.max_new_tokens = 20, .ignore_eos = true});
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->token_ids, out->token_ids);
  EXPECT_EQ(again->prefill_steps, 4);
}

TEST_F(SessionTest, StopsAtEosAndLeavesItOut) {
  const auto free = Open()->Generate(prompt_, {.max_new_tokens = 20, .ignore_eos = true});
  ASSERT_TRUE(free.ok());
  const int32_t eos = free->token_ids[6];
  const auto first = std::find(free->token_ids.begin(), free->token_ids.end(), eos);
  tiny_.eos = "[" + std::to_string(eos) + ",60]";
  const auto stopping = LoadTiny(tiny_, 8);
  auto session = Session::Open(stopping, SchemaOf(*stopping, "f16"), {}, pool_);
  ASSERT_TRUE(session.ok());
  std::vector<int32_t> streamed;
  const auto out =
      (*session)->Generate(prompt_, {.max_new_tokens = 20, .on_token = [&](int32_t id) { streamed.push_back(id); }});
  ASSERT_TRUE(out.ok());
  EXPECT_EQ(out->finish, FinishReason::kEos);
  EXPECT_EQ(out->token_ids, std::vector<int32_t>(free->token_ids.begin(), first));
  EXPECT_EQ(streamed, out->token_ids);
}

TEST_F(SessionTest, CancelsBetweenSteps) {
  std::atomic<bool> cancel = false;
  GenerateParams params{.max_new_tokens = 100, .ignore_eos = true, .cancel = &cancel};
  int seen = 0;
  params.on_token = [&](int32_t) { cancel = ++seen == 5; };
  const auto session = Open({.prefill_chunk = 2});
  auto out = session->Generate(prompt_, params);
  ASSERT_TRUE(out.ok());
  EXPECT_EQ(out->finish, FinishReason::kCancelled);
  EXPECT_EQ(out->token_ids.size(), 5u);
  EXPECT_EQ(session->cache().owner().used_bytes(), 0);
  cancel = false;
  params.on_token = nullptr;
  params.on_prefill = [&](int64_t done, int64_t total) {
    EXPECT_EQ(total, 4);
    cancel = done == 2;
  };
  out = session->Generate(prompt_, params);
  ASSERT_TRUE(out.ok());
  EXPECT_EQ(out->finish, FinishReason::kCancelled);
  EXPECT_EQ(out->prompt_tokens, 2);
  EXPECT_TRUE(out->token_ids.empty());
}

TEST_F(SessionTest, SamplingIsSeeded) {
  const auto session = Open();
  const auto run = [&](uint64_t seed) {
    auto out = session->Generate(prompt_, {.max_new_tokens = 30,
                                           .sampling = {.temperature = 1.5, .top_k = 20, .top_p = 0.9, .seed = seed},
                                           .ignore_eos = true});
    EXPECT_TRUE(out.ok());
    return out->token_ids;
  };
  const auto first = run(1);
  EXPECT_EQ(first, run(1));
  EXPECT_NE(first, run(2));
}

TEST_F(SessionTest, BadRequestsNameValueAndLimitAndChangeNothing) {
  const auto session = Open({.max_len = 40});
  const auto refused = [&](std::vector<int32_t> prompt, const GenerateParams& params, Code code) {
    const auto out = session->Generate(prompt, params);
    EXPECT_EQ(out.status().code(), code) << out.status().ToString();
    EXPECT_EQ(session->cache().owner().used_bytes(), 0);
    return out.status().message();
  };
  EXPECT_THAT(refused({}, {}, Code::kInvalidArgument), HasSubstr("empty"));
  std::string message = refused(std::vector<int32_t>(35, 1), {.max_new_tokens = 6}, Code::kOutOfRange);
  EXPECT_THAT(message, HasSubstr("35"));
  EXPECT_THAT(message, HasSubstr("6"));
  EXPECT_THAT(message, HasSubstr("40"));
  message = refused(std::vector<int32_t>(41, 1), {.max_new_tokens = 0}, Code::kOutOfRange);
  EXPECT_THAT(message, HasSubstr("41"));
  EXPECT_THAT(refused(prompt_, {.max_new_tokens = -3}, Code::kInvalidArgument), HasSubstr("-3"));
  EXPECT_THAT(refused(prompt_, {.max_new_tokens = INT64_MAX}, Code::kOutOfRange), HasSubstr("40"));
  EXPECT_THAT(refused({0, 61}, {.max_new_tokens = 1}, Code::kOutOfRange), HasSubstr("61"));
  EXPECT_THAT(refused({0, -1}, {.max_new_tokens = 1}, Code::kOutOfRange), HasSubstr("-1"));
  EXPECT_THAT(refused(prompt_, {.max_new_tokens = 1, .sampling = {.top_p = 2}}, Code::kOutOfRange), HasSubstr("top-p"));
  EXPECT_TRUE(session->Generate(std::vector<int32_t>(35, 1), {.max_new_tokens = 5, .ignore_eos = true}).ok());
  EXPECT_TRUE(session->Generate(std::vector<int32_t>(40, 1), {.max_new_tokens = 0}).ok());
}

TEST_F(SessionTest, OpenRefusesWhatDoesNotFit) {
  const auto refused = [&](const CacheSchema& schema, const SessionOptions& options, Code code) {
    const auto session = Session::Open(model_, schema, options, pool_);
    EXPECT_EQ(session.status().code(), code) << session.status().ToString();
    return session.status().message();
  };
  const CacheSchema good = SchemaOf(*model_, "f16");
  std::string message = refused(good, {.max_len = 257}, Code::kOutOfRange);
  EXPECT_THAT(message, HasSubstr("257"));
  EXPECT_THAT(message, HasSubstr("256"));
  message = refused(good, {.memory_bytes = 1000}, Code::kOutOfRange);  // never a smaller context
  EXPECT_THAT(message, HasSubstr("1000"));
  EXPECT_THAT(refused(good, {.max_len = -1}, Code::kInvalidArgument), HasSubstr("-1"));
  EXPECT_THAT(refused(good, {.prefill_chunk = 0}, Code::kInvalidArgument), HasSubstr("0"));
  CacheSchema other = good;
  other.layers.pop_back();
  EXPECT_THAT(refused(other, {}, Code::kInvalidArgument), HasSubstr("layers is 1"));
  other = good;
  other.layers[1].head_dim = 64;
  EXPECT_THAT(refused(other, {}, Code::kInvalidArgument), HasSubstr("layer 1 head_dim is 64"));
  other = good;
  other.rope.theta = 5;
  EXPECT_THAT(refused(other, {}, Code::kInvalidArgument), HasSubstr("rope.theta"));
}

TEST_F(SessionTest, ABudgetThatFitsExactlyIsEnough) {
  const int64_t bytes = Open({.max_len = 100})->pool_bytes();
  EXPECT_EQ(Open({.max_len = 100, .memory_bytes = bytes})->pool_bytes(), bytes);
  const auto less = Session::Open(model_, SchemaOf(*model_, "f16"), {.max_len = 100, .memory_bytes = bytes - 1}, pool_);
  EXPECT_EQ(less.status().code(), Code::kOutOfRange);
}

TEST(Session, EmbeddedModelWritesItsReferenceTokensWithAnF32Cache) {
  auto bundle = ModelBundle::Load(kModelDir);
  ASSERT_TRUE(bundle.ok()) << bundle.status().ToString();
  std::ifstream file(std::string(kModelDir) + "/eval/reference.json");
  const auto golden = nlohmann::json::parse(file)["golden_fp32"];
  ThreadPool pool(2);
  auto schema = bundle->Schema("f32");
  ASSERT_TRUE(schema.ok());
  auto session = Session::Open(bundle->model, *schema, {.max_len = 128}, pool);
  ASSERT_TRUE(session.ok()) << session.status().ToString();
  const auto out = (*session)->Generate(golden["prompt_ids"].get<std::vector<int32_t>>(), {.max_new_tokens = 64});
  ASSERT_TRUE(out.ok()) << out.status().ToString();
  EXPECT_EQ(out->token_ids, golden["greedy_ids"].get<std::vector<int32_t>>());
  EXPECT_EQ(*bundle->tokenizer->Decode(out->token_ids), golden["greedy_text"].get<std::string>());
}

TEST(ModelBundle, FillsIdentityIntoEverySchema) {
  auto bundle = ModelBundle::Load(kModelDir);
  ASSERT_TRUE(bundle.ok()) << bundle.status().ToString();
  EXPECT_EQ(bundle->identity.model, bundle->model->digest());
  EXPECT_EQ(bundle->identity.tokenizer, bundle->tokenizer->digest());
  const auto kivi = bundle->Schema("kivi2", {0}, 512);
  ASSERT_TRUE(kivi.ok()) << kivi.status().ToString();
  EXPECT_EQ(kivi->identity, bundle->identity);
  EXPECT_EQ(kivi->read_step, 512);
  EXPECT_EQ(kivi->layers.size(), 8u);
  EXPECT_NE(kivi->layers[0], kivi->layers[1]);  // layer 0 is skipped: it stays native
  CacheSchema other = *kivi;
  other.identity.model = std::string(64, '0');
  const Status refused = Compatible(*kivi, other);
  EXPECT_FALSE(refused.ok());
  EXPECT_THAT(refused.message(), HasSubstr("identity.model"));
  EXPECT_FALSE(bundle->Schema("kivi3").ok());
}

TEST(ModelBundle, NeedsATokenizerOnlyWhereItIsAskedFor) {
  TinyLlama tiny;
  Rng rng(1);
  tiny.Fill(rng, "F32");
  const TempDir dir;
  tiny.Write(dir.path());
  const auto without = ModelBundle::Load(dir.path().string(), ModelBundle::WithTokenizer::kNo);
  ASSERT_TRUE(without.ok()) << without.status().ToString();
  EXPECT_FALSE(without->tokenizer.has_value());
  EXPECT_THAT(ModelBundle::Load(dir.path().string()).status().message(), HasSubstr("tokenizer.json"));
  std::filesystem::copy(std::string(kModelDir) + "/tokenizer.json", dir.path() / "tokenizer.json");
  const auto too_many = ModelBundle::Load(dir.path().string());  // 4096 tokens for a vocabulary of 61
  EXPECT_EQ(too_many.status().code(), Code::kOutOfRange);
  EXPECT_THAT(too_many.status().message(), HasSubstr("4095"));
  EXPECT_THAT(too_many.status().message(), HasSubstr("61"));
}

}  // namespace
}  // namespace livequant
