// tests/attention/choose_test.cc: the registry: what is read by which kernel, and what a refusal says.
#include <gmock/gmock.h>

#include "attention/attention.h"
#include "attention/pager.h"

namespace livequant {
namespace {

using testing::HasSubstr;

TEST(ChooseKernel, EveryPresetCodingIsReadByTheGenericPathInEveryPhase) {
  for (const TestFormat& format : TestFormats(128))
    for (Phase phase : {Phase::kDecode, Phase::kPrefill, Phase::kVerify}) {
      const auto choice = ChooseKernel(MakeLayer(format, 8, 128), phase, false);
      ASSERT_TRUE(choice.ok()) << format.name << ": " << choice.status().ToString();
      EXPECT_EQ(choice->attention, "generic_f32");
      EXPECT_FALSE(choice->decode_k.empty());
      EXPECT_FALSE(choice->decode_v.empty());
      EXPECT_FALSE(choice->fallback);
    }
}

TEST(ChooseKernel, RefusalNamesTheCodingAndTheNearestOne) {
  const TensorCoding coding = Integer(3, ScaleAxis::kRow, 64, ZeroConvention::kSymmetric);
  ASSERT_EQ(FindDecodeRows(coding, nullptr), nullptr) << "3 bits have a vector decoder now: name another coding";
  const LayerSchema layer = MakeLayer({"", Native(DType::kF16), coding}, 2, 64);
  const auto refused = ChooseKernel(layer, Phase::kDecode, false);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kUnsupported);
  EXPECT_THAT(refused.status().message(), HasSubstr("no decode kernel reads v coded as integer 3 bits"));
  EXPECT_THAT(refused.status().message(), HasSubstr("nearest readable: integer 4 bits"));
  EXPECT_EQ(PlanLayer(layer, nullptr, false).status().code(), Code::kUnsupported);

  const auto allowed = ChooseKernel(layer, Phase::kDecode, true);
  ASSERT_TRUE(allowed.ok());
  EXPECT_EQ(allowed->attention, "reference");
  EXPECT_TRUE(allowed->fallback);
  const auto plan = PlanLayer(layer, nullptr, true);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->decode[kV][kCoded], &DecodeRowsReference);
}

TEST(ChooseKernel, PreRopeKeysNeedATable) {
  LayerSchema layer = MakeLayer(TestFormats(64)[1], 1, 64);
  layer.k_stage = RopeStage::kPre;
  EXPECT_EQ(PlanLayer(layer, nullptr, false).status().code(), Code::kInvalidArgument);
}

TEST(ChooseKernel, PhasesHaveNames) {
  EXPECT_STREQ(PhaseName(Phase::kDecode), "decode");
  EXPECT_STREQ(PhaseName(Phase::kPrefill), "prefill");
  EXPECT_STREQ(PhaseName(Phase::kVerify), "verify");
}

}  // namespace
}  // namespace livequant
