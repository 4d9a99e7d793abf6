// A kept sequence: the next request prefills what is new, and answers as a fresh run does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "model/tiny_llama.h"
#include "runtime/model_bundle.h"
#include "runtime/runtime_support.h"
#include "runtime/session.h"
#include "support/property.h"

namespace livequant {
namespace {

using ::testing::HasSubstr;

class ContinueTest : public ::testing::Test {
 protected:
  ContinueTest() : pool_(1) {
    Rng rng(1);
    tiny_.Fill(rng, "BF16");
    model_ = LoadFrom(tiny_);
  }
  std::unique_ptr<Session> Open(const std::string& preset, int read_step = kStepwise) {
    auto session = Session::Open(model_, SchemaOf(*model_, preset, read_step), {.prefill_chunk = 90}, pool_);
    EXPECT_TRUE(session.ok()) << session.status().ToString();
    return *std::move(session);
  }
  std::vector<int32_t> Tokens(Rng& rng, int64_t count) const { return RandomTokens(rng, count, tiny_.vocab, 3); }

  TinyLlama tiny_{.head_dim = 64, .max_positions = 1024};
  std::shared_ptr<const Llama> model_;
  ThreadPool pool_;
};

TEST_F(ContinueTest, TheNextTurnPrefillsWhatIsNewAndEqualsAFreshRunForEveryPreset) {
  Rng rng(2);
  const GenerateParams params{.max_new_tokens = 20, .ignore_eos = true};
  for (const std::string& name : PresetsToTry()) {
    SCOPED_TRACE(name);
    const auto session = Open(name), fresh = Open(name);
    std::vector<int32_t> history;
    for (int turn = 0; turn < 4; ++turn) {
      const int64_t kept = static_cast<int64_t>(session->kept_tokens().size());
      const std::vector<int32_t> more = Tokens(rng, rng.Range(1, 120));
      history.insert(history.end(), more.begin(), more.end());
      const auto out = session->Continue(history, params), want = fresh->Generate(history, params);
      ASSERT_TRUE(out.ok()) << out.status().ToString();
      ASSERT_TRUE(want.ok()) << want.status().ToString();
      EXPECT_EQ(out->token_ids, want->token_ids);
      EXPECT_EQ(out->reused_rows, kept);
      EXPECT_EQ(kept, turn == 0 ? 0 : static_cast<int64_t>(history.size() - more.size()) - 1);
      EXPECT_EQ(out->prompt_tokens, static_cast<int64_t>(history.size()));
      EXPECT_EQ(session->cache().owner().stats().truncates, 0);
      history.insert(history.end(), out->token_ids.begin(), out->token_ids.end());
    }
  }
}

// Histories that leave the kept one at any row: cut there where that equals a fresh run, else prefilled anew.
TEST_F(ContinueTest, ARewrittenHistoryEqualsAFreshRun) {
  const std::vector<std::string> presets = {"f16", "int4", "kivi2", "kivi2_sync", "qserve4"};
  int64_t truncates = 0, kept_rows = 0;
  ForAll(20, [&](Rng& rng) {
    const std::string& name = presets[static_cast<size_t>(rng.Range(0, 4))];
    SCOPED_TRACE(name);
    const auto session = Open(name), fresh = Open(name);
    std::vector<int32_t> history = Tokens(rng, rng.Range(1, 300));
    for (int turn = 0; turn < 3; ++turn) {
      const GenerateParams params{.max_new_tokens = rng.Range(0, 15), .ignore_eos = true};
      const std::vector<int32_t> before(session->kept_tokens().begin(), session->kept_tokens().end());
      const auto out = session->Continue(history, params), want = fresh->Generate(history, params);
      ASSERT_TRUE(out.ok()) << out.status().ToString();
      EXPECT_EQ(out->token_ids, want->token_ids);
      EXPECT_EQ(out->cache_rows, want->cache_rows);
      const auto common =
          std::mismatch(before.begin(), before.end(), history.begin(), history.end()).first - before.begin();
      EXPECT_LE(out->reused_rows, common);
      if (name == "f16" || name == "int4") {
        EXPECT_EQ(out->reused_rows, std::min<int64_t>(common, static_cast<int64_t>(history.size()) - 1));
      }
      kept_rows += out->reused_rows;
      history.insert(history.end(), out->token_ids.begin(), out->token_ids.end());
      history.resize(static_cast<size_t>(rng.Range(1, static_cast<int64_t>(history.size()))));
      const std::vector<int32_t> more = Tokens(rng, rng.Range(0, 60));
      history.insert(history.end(), more.begin(), more.end());
    }
    truncates += session->cache().owner().stats().truncates;
    EXPECT_TRUE(session->cache().owner().CheckInvariants().ok());
  });
  EXPECT_GT(truncates, 0);
  EXPECT_GT(kept_rows, 0);
}

// Sliding windows: turns that go on, and histories cut behind rows that have left the window since.
TEST(ContinueInAWindow, EveryTurnEqualsAFreshRunForEveryPreset) {
  Rng seed(5);
  ThreadPool pool(1);
  TinyLlama tiny{.layers = 1, .head_dim = 64, .max_positions = 1024};
  tiny.Fill(seed, "BF16");
  const auto everywhere = LoadWindowed(tiny, 200);
  const auto some = Llama::Load(LIVEQUANT_SOURCE_DIR "/tests/model/golden/qwen2_layers");
  ASSERT_TRUE(some.ok()) << some.status().ToString();
  const auto expect = [&](Rng& rng, const std::shared_ptr<const Llama>& model, const std::string& name,
                          int64_t longest) {
    SCOPED_TRACE(name);
    const int64_t vocab = model->config().vocab_size;
    auto session = Session::Open(model, SchemaOf(*model, name), {.prefill_chunk = 90}, pool);
    auto fresh = Session::Open(model, SchemaOf(*model, name), {.prefill_chunk = 90}, pool);
    ASSERT_TRUE(session.ok() && fresh.ok()) << session.status().ToString();
    std::vector<int32_t> history = RandomTokens(rng, rng.Range(longest / 2, longest), vocab, 3);
    for (int turn = 0; turn < 4; ++turn) {
      const GenerateParams params{.max_new_tokens = rng.Range(1, 15), .ignore_eos = true};
      const int64_t kept = static_cast<int64_t>((*session)->kept_tokens().size());
      const auto out = (*session)->Continue(history, params), want = (*fresh)->Generate(history, params);
      ASSERT_TRUE(out.ok()) << out.status().ToString();
      ASSERT_TRUE(want.ok()) << want.status().ToString();
      EXPECT_EQ(out->token_ids, want->token_ids);
      EXPECT_EQ(out->cache_rows, want->cache_rows);
      if (turn == 1) {
        EXPECT_EQ(out->reused_rows, kept);  // went on
      }
      history.insert(history.end(), out->token_ids.begin(), out->token_ids.end());
      if (turn > 0) history.resize(static_cast<size_t>(rng.Range(1, static_cast<int64_t>(history.size()))));
      const std::vector<int32_t> more = RandomTokens(rng, rng.Range(1, longest / 4), vocab, 3);
      history.insert(history.end(), more.begin(), more.end());
    }
    EXPECT_TRUE((*session)->cache().owner().CheckInvariants().ok());
  };
  ForAll(3, [&](Rng& rng) {
    for (const std::string& name : PresetNames()) expect(rng, everywhere, name, 500);
    for (const char* name : {"f32", "fp8_e4m3", "int4", "qserve4"}) expect(rng, *some, name, 100);
  });
}

TEST_F(ContinueTest, ARefusedOrCancelledTurnLeavesASequenceThatGoesOn) {
  const auto session = Open("kivi2"), fresh = Open("kivi2");
  Rng rng(3);
  std::vector<int32_t> history = Tokens(rng, 200);
  std::atomic<bool> cancel = false;
  GenerateParams params{.max_new_tokens = 100, .ignore_eos = true, .cancel = &cancel};
  int seen = 0;
  params.on_token = [&](int32_t) { cancel = ++seen == 5; };
  const auto cut = session->Continue(history, params);
  ASSERT_TRUE(cut.ok());
  EXPECT_EQ(cut->finish, FinishReason::kCancelled);
  EXPECT_EQ(cut->token_ids.size(), 5u);
  history.insert(history.end(), cut->token_ids.begin(), cut->token_ids.end());
  const auto refused = session->Continue(std::vector<int32_t>(1000, 3), {.max_new_tokens = 25});
  EXPECT_EQ(refused.status().code(), Code::kOutOfRange);
  EXPECT_THAT(refused.status().message(), HasSubstr("1000 prompt tokens and 25"));
  EXPECT_EQ(session->kept_tokens().size(), 204u);
  const GenerateParams next{.max_new_tokens = 12, .ignore_eos = true};
  const auto out = session->Continue(history, next);
  ASSERT_TRUE(out.ok());
  EXPECT_EQ(out->reused_rows, 204);
  EXPECT_EQ(out->token_ids, fresh->Generate(history, next)->token_ids);
  // A plain request ends what was kept.
  ASSERT_TRUE(session->Generate(history, next).ok());
  EXPECT_TRUE(session->kept_tokens().empty());
  EXPECT_EQ(session->cache().owner().used_bytes(), 0);
}

TEST_F(ContinueTest, OtherContractsAreRefusedByName) {
  const auto out = Open("kivi2", 128)->Continue(std::vector<int32_t>{3, 4}, {});
  EXPECT_EQ(out.status().code(), Code::kUnsupported);
  EXPECT_THAT(out.status().message(), HasSubstr("chunk:128"));
}

}  // namespace
}  // namespace livequant
