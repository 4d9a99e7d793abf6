// Speculative decoding: whatever is guessed, tokens and cache are those of plain decoding, bit for bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "model/tiny_llama.h"
#include "runtime/drafter.h"
#include "runtime/model_bundle.h"
#include "runtime/runtime_support.h"
#include "runtime/session.h"
#include "support/effort.h"
#include "support/property.h"

namespace livequant {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr SeqId kFirstSequence = 1;  // of a session: its owner has one slot
constexpr int kMost = 16;

// Knows what the answer will be and is right as often as it is told to be.
class Cheat : public Drafter {
 public:
  Cheat(std::vector<int32_t> all, int64_t vocab, double right, uint64_t seed)
      : all_(std::move(all)), vocab_(vocab), right_(right), rng_(seed) {}
  Result<std::span<const int32_t>> Draft(std::span<const int32_t> tokens, int most) override {
    guess_.clear();
    const int count = static_cast<int>(rng_.Range(0, most));
    for (size_t at = tokens.size(); static_cast<int>(guess_.size()) < count; ++at) {
      const bool right = at < all_.size() && rng_.Chance(right_);
      // Now and then no token of the model at all.
      guess_.push_back(right ? all_[at] : static_cast<int32_t>(rng_.Range(-2, vocab_ + 1)));
    }
    return std::span<const int32_t>(guess_);
  }

 private:
  std::vector<int32_t> all_, guess_;
  int64_t vocab_;
  double right_;
  Rng rng_;
};

class SpeculateTest : public ::testing::Test {
 protected:
  SpeculateTest() : pool_(1) {
    Rng rng(1);
    tiny_.Fill(rng, "BF16");
    model_ = LoadFrom(tiny_);
    small_.Fill(rng, "BF16");
    draft_ = LoadFrom(small_);
  }
  std::unique_ptr<Session> Open(const std::string& preset, int drafts = kMost, int read_step = kStepwise) {
    auto session = Session::Open(model_, SchemaOf(*model_, preset, read_step),
                                 {.prefill_chunk = 90, .max_draft_tokens = drafts}, pool_);
    EXPECT_TRUE(session.ok()) << session.status().ToString();
    return *std::move(session);
  }
  // Both runs keep their sequence; it must be the same one.
  void ExpectSame(const std::string& preset, const std::vector<int32_t>& prompt, GenerateParams params,
                  Drafter& drafter, int64_t* accepted) {
    const auto plain = Open(preset, 0), session = Open(preset);
    const auto want = plain->Continue(prompt, params);
    ASSERT_TRUE(want.ok()) << want.status().ToString();
    params.drafter = &drafter;
    const auto got = session->Continue(prompt, params);
    ASSERT_TRUE(got.ok()) << got.status().ToString();
    EXPECT_EQ(got->token_ids, want->token_ids);
    EXPECT_EQ(got->finish, want->finish);
    EXPECT_EQ(got->cache_rows, want->cache_rows);
    EXPECT_EQ(got->pending_tokens, want->pending_tokens);
    EXPECT_EQ(got->decode_steps + got->accepted_tokens, want->decode_steps);
    EXPECT_EQ(session->cache().StateBytes(kFirstSequence), plain->cache().StateBytes(kFirstSequence));
    EXPECT_TRUE(session->cache().owner().CheckInvariants().ok());
    EXPECT_EQ(session->cache().owner().stats().truncates, 0);
    int64_t steps = 0, sum = 0;
    for (size_t j = 0; j < got->accepted_steps.size(); ++j) {
      steps += got->accepted_steps[j];
      sum += static_cast<int64_t>(j) * got->accepted_steps[j];
    }
    EXPECT_EQ(steps, got->decode_steps);
    EXPECT_EQ(sum, got->accepted_tokens);
    *accepted += got->accepted_tokens;
  }

  TinyLlama tiny_{.head_dim = 64, .max_positions = 1024};
  TinyLlama small_{.layers = 1, .heads = 2, .kv_heads = 1, .head_dim = 32, .max_positions = 1024};
  std::shared_ptr<const Llama> model_, draft_;
  ThreadPool pool_;
};

TEST_F(SpeculateTest, GreedyAndSampledOutputsAreThePlainOnesForEveryPresetAndDrafter) {
  Rng rng(2);
  int64_t by_ngram = 0, by_model = 0, by_cheat = 0;
  for (const std::string& name : PresetNames()) {
    SCOPED_TRACE(name);
    // The answer crosses the closures at 128 and, under a lag, what they leave behind.
    const std::vector<int32_t> prompt = RandomTokens(rng, rng.Range(60, 110), tiny_.vocab, 3);
    GenerateParams params{.max_new_tokens = 90, .ignore_eos = rng.Chance(0.5)};
    NgramDrafter ngram(1, 3);
    ExpectSame(name, prompt, params, ngram, &by_ngram);
    auto model = ModelDrafter::Open(draft_, SchemaOf(*draft_, name), {.max_tokens = 6}, pool_);
    ASSERT_TRUE(model.ok()) << model.status().ToString();
    ExpectSame(name, prompt, params, **model, &by_model);
    EXPECT_TRUE((*model)->cache().owner().CheckInvariants().ok());

    params.sampling = {.temperature = 0.8, .top_k = 20, .seed = static_cast<uint64_t>(rng.Range(1, 1 << 20))};
    const auto plain = Open(name, 0)->Generate(prompt, params);
    ASSERT_TRUE(plain.ok());
    std::vector<int32_t> all = prompt;
    all.insert(all.end(), plain->token_ids.begin(), plain->token_ids.end());
    for (const double right : {0.6, 0.95}) {
      Cheat cheat(all, tiny_.vocab, right, 7);
      ExpectSame(name, prompt, params, cheat, &by_cheat);
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(by_ngram, 50);
  EXPECT_GT(by_cheat, 300);
  EXPECT_GE(by_model, 0);
}

// One forward over k rows gives the logits that k forwards give, wherever it starts and whatever k is.
TEST_F(SpeculateTest, VerifyLogitsAreOneTokenLogitsAtEveryResidueAndLength) {
  constexpr int kResidues = 128, kFirst = 250;  // of KIVI's R, and so of every G; past the first closures
  Rng rng(3);
  const std::vector<int32_t> text = RandomTokens(rng, kFirst + kResidues + kMost, tiny_.vocab, 3);
  const int64_t vocab = tiny_.vocab;
  for (const std::string& name : PresetNames()) {
    SCOPED_TRACE(name);
    const CacheSchema schema = SchemaOf(*model_, name);
    auto cache = KvCache::Open(
        schema,
        {.max_sequences = 2, .max_len = static_cast<int64_t>(text.size()), .max_q_heads = tiny_.heads, .threads = 1});
    ASSERT_TRUE(cache.ok());
    Owner& owner = (*cache)->owner();
    const auto workspace = model_->NewWorkspace(kFirst, kMost);
    std::vector<float> one(text.size() * static_cast<size_t>(vocab)), several(static_cast<size_t>(kMost * vocab));
    const SeqId seq = owner.Open()->seq;
    const auto step = [&](int64_t from, int64_t to) {
      const SequenceTokens part{
          .seq = seq, .tokens = std::span(text).subspan(static_cast<size_t>(from), static_cast<size_t>(to - from))};
      LQ_CHECK(
          model_
              ->Step({&part, 1}, **cache, *workspace, MatrixView<float>(one.data() + (to - 1) * vocab, 1, vocab), pool_)
              .ok());
    };
    // One row a step, and a fork of each state on the way: drafts are verified on the forks when all is known.
    step(0, kFirst);
    for (int64_t at = kFirst; at < static_cast<int64_t>(text.size()); ++at) step(at, at + 1);
    auto again = KvCache::Open(
        schema,
        {.max_sequences = 2, .max_len = static_cast<int64_t>(text.size()), .max_q_heads = tiny_.heads, .threads = 1});
    ASSERT_TRUE(again.ok());
    const SeqId base = (*again)->owner().Open()->seq;
    int64_t wrong = 0, rows = 0, cut = 0;
    const auto extend = [&](int64_t from, int64_t to) {
      const SequenceTokens part{
          .seq = base, .tokens = std::span(text).subspan(static_cast<size_t>(from), static_cast<size_t>(to - from))};
      LQ_CHECK(model_->Step({&part, 1}, **again, *workspace, MatrixView<float>(several.data(), 1, vocab), pool_).ok());
    };
    extend(0, kFirst);
    const bool groups = schema.layers[0].k.axis == ScaleAxis::kChannel;
    for (int64_t at = kFirst; at < kFirst + kResidues; ++at) {
      // Every k where a closure can come between; where rows stand alone each k at an eighth of the residues.
      for (int k = 1; k <= kMost; ++k) {
        if (!groups && (at + k) % Effort(8, 1, 8) != 0) continue;
        if (groups && kInstrumented && (at + k) % 8 != 0) continue;
        const SequenceTokens part{.seq = base,
                                  .tokens = std::span(text).subspan(static_cast<size_t>(at), static_cast<size_t>(k)),
                                  .all_logits = true,
                                  .mode = Mode::kPrefix};
        auto draft =
            model_->Forward({&part, 1}, **again, *workspace, MatrixView<float>(several.data(), k, vocab), pool_);
        ASSERT_TRUE(draft.ok()) << draft.status().ToString();
        cut += draft->count(0) < k;
        rows += draft->count(0);
        for (int64_t i = 0; i < draft->count(0); ++i)
          wrong += !std::equal(several.begin() + i * vocab, several.begin() + (i + 1) * vocab,
                               one.begin() + (at + i) * vocab);
      }
      extend(at, at + 1);
    }
    EXPECT_EQ(wrong, 0);
    EXPECT_GT(rows, kResidues * kMost / 8);
    if (groups && schema.layers[0].k_closure.lag == 0) {
      EXPECT_GT(cut, 0) << "a draft must stop at a closure";
    }
  }
}

TEST_F(SpeculateTest, ADraftModelThatIsTheModelIsAlwaysRight) {
  Rng rng(4);
  for (const std::string name : {"f16", "kivi2", "qserve4"}) {
    SCOPED_TRACE(name);
    auto drafter = ModelDrafter::Open(model_, SchemaOf(*model_, name), {.max_tokens = 4, .prefill_chunk = 33}, pool_);
    ASSERT_TRUE(drafter.ok()) << drafter.status().ToString();
    const auto session = Open(name, 4);
    // The second request has nothing of the first.
    for (const int64_t rows : {100, 150}) {
      const std::vector<int32_t> prompt = RandomTokens(rng, rows, tiny_.vocab, 3);
      const auto out = session->Generate(prompt, {.max_new_tokens = 61, .ignore_eos = true, .drafter = drafter->get()});
      ASSERT_TRUE(out.ok()) << out.status().ToString();
      EXPECT_EQ(out->accepted_tokens, out->drafted_tokens);
      EXPECT_EQ(out->cache_rows, rows + 60);
      EXPECT_EQ(out->pending_tokens, 1) << "the last token never had a forward";
      // 60 tokens behind the first, 5 a step; a closure may cut a draft.
      EXPECT_LE(out->decode_steps, 14);
      const Owner& owner = (*drafter)->cache().owner();
      EXPECT_TRUE(owner.CheckInvariants().ok());
      EXPECT_EQ(owner.stats().truncates, 0);
    }
  }
}

TEST(NgramDrafterTest, ContinuesWhatFollowedTheLastTime) {
  const auto draft = [](std::vector<int32_t> text, int most, int min = 1, int max = 3) {
    NgramDrafter drafter(min, max);
    const auto guess = drafter.Draft(text, most);
    EXPECT_TRUE(guess.ok());
    return std::vector<int32_t>(guess->begin(), guess->end());
  };
  EXPECT_THAT(draft({1, 2, 3, 4, 1, 2}, 3), ElementsAre(3, 4, 1));
  EXPECT_THAT(draft({1, 2, 3, 9, 1, 2, 4, 8, 1, 2}, 2), ElementsAre(4, 8)) << "the latest of equal matches";
  EXPECT_THAT(draft({7, 1, 2, 5, 9, 1, 2, 4, 7, 1, 2}, 1), ElementsAre(5)) << "the longest match";
  EXPECT_THAT(draft({1, 2, 3}, 4), IsEmpty());
  EXPECT_THAT(draft({5}, 4), IsEmpty());
  EXPECT_THAT(draft({9, 5, 8, 5}, 4, 2), IsEmpty()) << "below min";
  EXPECT_THAT(draft({4, 6, 6}, 3), ElementsAre(6, 6, 6)) << "a period goes on behind the text";
  EXPECT_THAT(draft({1, 2, 1, 2, 1}, 5), ElementsAre(2, 1, 2, 1, 2));
}

TEST_F(SpeculateTest, WhatCannotBeKeptIsRefusedByName) {
  NgramDrafter drafter(1, 2);
  const std::vector<int32_t> prompt = {5, 6, 7};
  const Status closed = Open("int8", 0)->Generate(prompt, {.drafter = &drafter}).status();
  EXPECT_EQ(closed.code(), Code::kInvalidArgument);
  EXPECT_THAT(closed.message(), HasSubstr("max_draft_tokens 0"));
  const Status contract = Open("int8", 4, 128)->Generate(prompt, {.drafter = &drafter}).status();
  EXPECT_EQ(contract.code(), Code::kUnsupported);
  EXPECT_THAT(contract.message(), HasSubstr("chunk:128"));
  AttentionRecord record;
  EXPECT_THAT(Open("int8")->Generate(prompt, {.drafter = &drafter, .record = &record}).status().message(),
              HasSubstr("not of drafts"));
  const auto far = ModelDrafter::Open(draft_, SchemaOf(*draft_, "f16"), {.context = 5000}, pool_);
  EXPECT_THAT(far.status().message(), HasSubstr("1024 rows (max_position_embeddings); the request may have 5000"));
  EXPECT_EQ(ModelDrafter::Open(draft_, SchemaOf(*model_, "f16"), {}, pool_).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(ModelDrafter::Open(draft_, SchemaOf(*draft_, "f16"), {.max_tokens = 0}, pool_).status().code(),
            Code::kInvalidArgument);
  EXPECT_THAT(Session::Open(model_, SchemaOf(*model_, "f16"), {.max_draft_tokens = -1}, pool_).status().message(),
              HasSubstr("max_draft_tokens is -1"));
}

}  // namespace
}  // namespace livequant
