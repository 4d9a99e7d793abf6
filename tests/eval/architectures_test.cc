// Every preset on every model of tests/model/golden: it runs, past its closures and the model's windows, the same bits
// however the prompt is cut; or it is refused at load, with both numbers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <set>

#include "base/rng.h"
#include "eval/logits.h"
#include "runtime/model_bundle.h"
#include "runtime/session.h"

namespace livequant {
namespace {

using ::testing::HasSubstr;

std::vector<ModelBundle> Goldens() {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(LIVEQUANT_SOURCE_DIR "/tests/model/golden"))
    paths.push_back(entry.path().string());
  std::sort(paths.begin(), paths.end());
  std::vector<ModelBundle> bundles;
  for (const std::string& path : paths) {
    auto bundle = ModelBundle::Load(path, ModelBundle::WithTokenizer::kNo);
    EXPECT_TRUE(bundle.ok()) << path << ": " << bundle.status().ToString();
    if (bundle.ok()) bundles.push_back(*std::move(bundle));
  }
  return bundles;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST(Architectures, EveryPresetRunsOnEveryModelOrSaysWhyNot) {
  const std::vector<ModelBundle> bundles = Goldens();
  ASSERT_EQ(bundles.size(), 22u);
  ThreadPool pool(1), two(2);
  int ran = 0, refused = 0;
  std::set<std::string> ran_windowed;
  for (const ModelBundle& bundle : bundles) {
    const LlamaConfig& c = bundle.model->config();
    const int64_t n = std::min<int64_t>(c.max_position_embeddings, 178) - 8;
    Rng rng(5);
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < n; ++i) ids.push_back(static_cast<int32_t>(rng.Range(0, c.vocab_size - 1)));
    std::vector<float> exact;
    for (const std::string& name : PresetNames()) {
      SCOPED_TRACE(bundle.path + " " + name);
      const auto schema = bundle.Schema(name);
      if (!schema.ok()) {
        ++refused;
        EXPECT_EQ(schema.status().code(), Code::kUnsupported);
        const std::string& why = schema.status().message();
        EXPECT_THAT(why, HasSubstr("preset " + name));
        if (c.head_dim % 32 != 0) {
          EXPECT_THAT(why, HasSubstr("group 32: must divide head_dim " + std::to_string(c.head_dim)));
        } else {
          ASSERT_FALSE(c.windows.empty()) << why;
          EXPECT_THAT(why, HasSubstr("the window of 16 rows"));
        }
        continue;
      }
      ++ran;
      if (!c.windows.empty()) ran_windowed.insert(name);
      LogitsRequest request{.token_ids = ids, .positions = {n / 2, n - 1}, .generate = 8};
      const auto whole = EvalLogits(*bundle.model, *schema, request, pool);
      ASSERT_TRUE(whole.ok()) << whole.status().ToString();
      request.prefill_chunk = 5;
      const auto cut = EvalLogits(*bundle.model, *schema, request, two);
      ASSERT_TRUE(cut.ok()) << cut.status().ToString();
      EXPECT_EQ(whole->generated, cut->generated);
      for (size_t i = 0; i < 2; ++i) {
        EXPECT_TRUE(SameBits(whole->positions[i].logits, cut->positions[i].logits));
        for (const float x : whole->positions[i].logits) ASSERT_TRUE(std::isfinite(x));
      }
      if (name == "f32") exact = whole->positions[1].logits;
      const bool fine = name == "bf16" || name == "int8" || name == "qserve8";
      for (size_t i = 0; fine && i < exact.size(); ++i) {
        ASSERT_NEAR(whole->positions[1].logits[i], exact[i], 0.35);
      }
    }
  }
  EXPECT_EQ(ran + refused, 22 * static_cast<int>(PresetNames().size()));
  // KIVI: five models with head sizes that 32 does not divide, and two models with windows of 16; nothing else.
  EXPECT_EQ(refused, 3 * 7);
  EXPECT_EQ(ran_windowed.size(), PresetNames().size() - 3);
}

// What the owner keeps of a windowed layer is what the ledger counts, and no more than a page beyond it.
TEST(Architectures, AWindowedModelRunsInASessionWithinItsLedger) {
  auto bundle =
      ModelBundle::Load(LIVEQUANT_SOURCE_DIR "/tests/model/golden/qwen2_layers", ModelBundle::WithTokenizer::kNo);
  ASSERT_TRUE(bundle.ok()) << bundle.status().ToString();
  ThreadPool pool(1);
  auto schema = bundle->Schema("int8");
  ASSERT_TRUE(schema.ok()) << schema.status().ToString();
  EXPECT_EQ(schema->layers[0].window, 0);
  EXPECT_EQ(schema->layers[2].window, 16);
  auto session = Session::Open(bundle->model, *schema, {.prefill_chunk = 16}, pool);
  ASSERT_TRUE(session.ok()) << session.status().ToString();
  const auto generation =
      (*session)->Generate(std::vector<int32_t>(40, 7), {.max_new_tokens = 200, .ignore_eos = true});
  ASSERT_TRUE(generation.ok()) << generation.status().ToString();
  EXPECT_EQ(generation->cache_rows, 239);
  EXPECT_GT((*session)->cache().owner().stats().window_drops, 0);

  CacheSchema wide = *schema;
  wide.layers[2].window = 0;
  const auto refused = Session::Open(bundle->model, wide, {}, pool);
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.status().message(), HasSubstr("layer 2 window is 0; the model's is 16"));
  wide.layers[2].window = 15;
  EXPECT_TRUE(Session::Open(bundle->model, wide, {}, pool).ok()) << "narrower is a choice";
  wide = *schema;
  wide.rope.type = "linear";
  EXPECT_THAT(Session::Open(bundle->model, wide, {}, pool).status().message(), HasSubstr("rope.type is linear"));
}

}  // namespace
}  // namespace livequant
