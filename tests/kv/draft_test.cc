// Drafts (P12): rows that are prepared many at a time and accepted in part leave the state that decoding one by one
// leaves.
#include <gtest/gtest.h>

#include "kv/kv_support.h"

namespace livequant {
namespace {

class DraftTest : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Cases, DraftTest, ::testing::ValuesIn(CaseNames()), CaseTestName);

constexpr int kDraft = 8, kTail = 3;

TEST_P(DraftTest, EveryAcceptedPrefixEqualsPlainDecoding) {
  const CacheSchema schema = CaseSchema(GetParam(), 2, 1, 32);
  Harness h(schema, {.sequences = 4});
  int cut = 0, sealed = 0;
  for (const int64_t len : {2, 60, 120, 123, 126, 127, 128, 130, 153, 157, 200, 382, 384, 390}) {
    SCOPED_TRACE("draft at " + std::to_string(len));
    const SeqId base = h.Open();
    h.AppendAll(base, Ids(1, 0, len), 512, false);
    // Plain decoding from here, one row a step.
    auto plain = h.owner().Fork(base);
    ASSERT_TRUE(plain.ok());
    std::vector<std::vector<std::byte>> states = {h.State(plain->seq)};
    std::vector<RowOutput> outputs;
    for (int64_t p = len; p < len + kDraft + kTail; ++p) {
      outputs.push_back(h.AppendAll(plain->seq, Ids(1, p, p + 1), 1)[0]);
      states.push_back(h.State(plain->seq));
    }
    for (int accept = 0; accept <= kDraft && !HasFailure(); ++accept) {
      SCOPED_TRACE("accept " + std::to_string(accept));
      auto fork = h.owner().Fork(base);
      ASSERT_TRUE(fork.ok());
      // Rows past the accepted ones are guesses of another stream: nothing of them may stay.
      StepInput input{fork->seq, Ids(1, len, len + accept), Mode::kPrefix};
      for (const Id id : Ids(99, len + accept, len + kDraft)) input.ids.push_back(id);
      std::vector<std::vector<RowOutput>> got;
      auto step = h.Run({&input, 1}, &got);
      ASSERT_TRUE(step.ok()) << step.status().ToString();
      const int count = step->count(0);
      ASSERT_GE(count, 1);
      if (count < kDraft) ++cut;
      const int taken = std::min(accept, count);
      ExpectSameOutputs(std::span(got[0]).first(static_cast<size_t>(taken)),
                        std::span(outputs).first(static_cast<size_t>(taken)));
      EXPECT_EQ(h.State(fork->seq), states[0]) << "a draft is private";
      const int64_t closed = h.owner().stats().closed_rows[kK];
      auto receipts = step->Publish(std::span(&taken, 1));
      ASSERT_TRUE(receipts.ok()) << receipts.status().ToString();
      EXPECT_EQ((*receipts)[0].rows, taken);
      EXPECT_EQ((*receipts)[0].first, len);
      if (taken == count && h.owner().stats().closed_rows[kK] > closed) ++sealed;
      h.ExpectSound();
      ASSERT_EQ(h.owner().length(fork->seq), len + taken);
      EXPECT_EQ(h.State(fork->seq), states[static_cast<size_t>(taken)]);
      // What follows is what would have followed.
      for (int64_t i = taken; i < taken + kTail; ++i) {
        const std::vector<RowOutput> next = h.AppendAll(fork->seq, Ids(1, len + i, len + i + 1), 1);
        ExpectSameOutputs(next, std::span(outputs).subspan(static_cast<size_t>(i), 1));
      }
      EXPECT_EQ(h.State(fork->seq), states[static_cast<size_t>(taken + kTail)]);
      ASSERT_TRUE(h.owner().Release(fork->seq).ok());
    }
    ASSERT_TRUE(h.owner().Release(plain->seq).ok());
    ASSERT_TRUE(h.owner().Release(base).ok());
    EXPECT_EQ(h.owner().used_bytes(), 0);
    if (HasFailure()) return;
  }
  for (const LayerSchema& layer : schema.layers)
    if (layer.k.axis == ScaleAxis::kChannel) {
      EXPECT_GT(sealed, 0) << "a seal must close some K group";
      // With a lag beyond the draft no group that closes can hold draft rows.
      EXPECT_TRUE(cut > 0 || layer.k_closure.lag >= kDraft - 1) << "a K closure must cut some draft";
    }
  ExpectThreeClosures(h);
}

// A batch in which one sequence drafts, one decodes and one prefills; the draft is accepted in part.
TEST(Draft, DraftsShareABatchWithDecodeAndPrefill) {
  const CacheSchema schema = CaseSchema("kivi2", 2, 1, 32);
  Harness batch(schema), alone(schema);
  SeqId in[3], out[3];
  const int64_t lengths[3] = {390, 385, 0}, rows[3] = {6, 1, 200};
  for (int i = 0; i < 3; ++i) {
    in[i] = batch.Open();
    out[i] = alone.Open();
    const std::vector<Id> ids = Ids(static_cast<uint64_t>(i), 0, lengths[i]);
    batch.AppendAll(in[i], ids, 512, false);
    alone.AppendAll(out[i], ids, 512, false);
  }
  std::vector<StepInput> inputs;
  for (int i = 0; i < 3; ++i)
    inputs.push_back(
        {in[i], Ids(static_cast<uint64_t>(i), lengths[i], lengths[i] + rows[i]), i == 0 ? Mode::kPrefix : Mode::kAll});
  std::vector<std::vector<RowOutput>> got;
  auto step = batch.Run(inputs, &got);
  ASSERT_TRUE(step.ok()) << step.status().ToString();
  EXPECT_EQ(batch.cache().kernel(0, Phase::kVerify).attention, "generic_f32");
  const int accepted[3] = {4, 1, 200};
  ASSERT_TRUE(step->Publish(accepted).ok());
  for (int i = 0; i < 3; ++i) {
    const std::vector<RowOutput> want =
        alone.AppendAll(out[i], Ids(static_cast<uint64_t>(i), lengths[i], lengths[i] + accepted[i]), i == 2 ? 200 : 1);
    ExpectSameOutputs(std::span(got[i]).first(want.size()), want);
    EXPECT_EQ(batch.State(in[i]), alone.State(out[i])) << i;
  }
  ExpectThreeClosures(batch);
}

}  // namespace
}  // namespace livequant
