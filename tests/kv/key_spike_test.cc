// Key spikes: the definition against sorting, and what a cache finds of planted ones.
#include "kv/key_spike.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kv/kv_cache.h"
#include "method/method.h"
#include "support/property.h"

namespace livequant {
namespace {

TEST(FindKeySpike, IsTheDefinition) {
  int spikes = 0;
  ForAll(2000, [&](Rng& rng) {
    std::vector<float> row(static_cast<size_t>(rng.Pick({1, 2, 3, 16, 63, 64, 100, 128})));
    const double spread = rng.Pick({1.0, 3.0, 5.0});  // decades
    for (float& x : row) {
      x = static_cast<float>(std::pow(10.0, rng.Uniform(-spread, 0)) * (rng.Chance(0.5) ? 1 : -1));
      if (rng.Chance(0.05)) x = 0;
    }
    std::vector<float> sorted = row;
    for (float& x : sorted) x = std::fabs(x);
    const float largest = *std::max_element(sorted.begin(), sorted.end());
    const auto channel = std::find(sorted.begin(), sorted.end(), largest) - sorted.begin();
    std::sort(sorted.begin(), sorted.end());
    const float median = sorted[sorted.size() / 2], ratio = largest / median;
    const bool spiked = largest > 0 && ratio > 30;
    spikes += spiked;
    const auto found = FindKeySpike(row, 0);
    ASSERT_EQ(found.has_value(), spiked) << largest << " over " << median;
    if (!spiked) return;
    EXPECT_EQ(found->largest, largest);
    EXPECT_EQ(found->median, median);
    EXPECT_EQ(found->channel, channel);
    EXPECT_TRUE(FindKeySpike(row, ratio).has_value()) << "as bad as another";
    EXPECT_FALSE(FindKeySpike(row, std::nextafter(ratio, INFINITY)).has_value() && std::isfinite(ratio));
  });
  EXPECT_GT(spikes, 200);
  EXPECT_LT(spikes, 1800);
}

TEST(FindKeySpike, EdgesOfTheRatio) {
  EXPECT_FALSE(FindKeySpike(std::vector<float>{1, 1, 30}, 0)) << "30 times is not over 30 times";
  EXPECT_TRUE(FindKeySpike(std::vector<float>{-1, 1, std::nextafter(30.0f, 31.0f)}, 0));
  EXPECT_FALSE(FindKeySpike(std::vector<float>(64, 0.0f), 0));
  EXPECT_TRUE(FindKeySpike(std::vector<float>{0, 0, 1e-45f}, 0)) << "a median of 0";
}

constexpr int kLayers = 3, kHeads = 2, kDim = 64, kSpikeRows = 40;

// K of every row and layer: magnitudes in [1, 2], then what `plant` changes; V the same with spikes everywhere.
std::optional<KeySpike> SpikeOf(const CacheSchema& schema, int chunk, int threads,
                                const std::vector<KeySpike>& plants) {
  auto cache = KvCache::Open(schema, {.max_len = kSpikeRows, .max_step_rows = kSpikeRows, .max_q_heads = kHeads});
  EXPECT_TRUE(cache.ok()) << cache.status().ToString();
  const SeqId seq = (*cache)->owner().Open()->seq;
  ThreadPool pool(threads);
  for (int64_t at = 0; at < kSpikeRows; at += chunk) {
    const int n = static_cast<int>(std::min<int64_t>(chunk, kSpikeRows - at));
    const AppendRequest request{.seq = seq, .rows = n};
    auto step = (*cache)->Begin({&request, 1});
    EXPECT_TRUE(step.ok()) << step.status().ToString();
    for (int layer = 0; layer < kLayers; ++layer) {
      Rng rng(static_cast<uint64_t>(layer * 1000 + at));
      std::vector<float> k(static_cast<size_t>(n * kHeads * kDim)), v = k;
      for (float& x : k) x = static_cast<float>(rng.Uniform(1, 2));
      for (size_t i = 0; i < v.size(); ++i) v[i] = i % kDim == 5 ? 500.0f : 0.5f;
      for (const KeySpike& p : plants)
        if (p.layer == layer && p.position >= at && p.position < at + n)
          k[static_cast<size_t>(((p.position - at) * kHeads + p.head) * kDim + p.channel)] = p.largest;
      EXPECT_TRUE(step->Prepare(layer, k.data(), v.data(), pool).ok());
    }
    EXPECT_TRUE(step->Publish().ok());
  }
  const auto spike = (*cache)->TakeKeySpike();
  EXPECT_FALSE((*cache)->TakeKeySpike().has_value()) << "taken once";
  return spike;
}

TEST(KeySpikes, ThePlantedOneIsFoundWhateverTheCutsAndThreads) {
  const CacheShape shape{.num_layers = kLayers, .num_kv_heads = kHeads, .head_dim = kDim, .rope = {}};
  const std::vector<KeySpike> plants = {
      {.layer = 0, .head = 0, .position = 3, .channel = 9, .largest = 90},
      {.layer = 2, .head = 1, .position = 17, .channel = 40, .largest = -400},
      {.layer = 1, .head = 0, .position = 30, .channel = 1, .largest = 200},
  };
  for (const std::string& name : PresetNames()) {
    SCOPED_TRACE(name);
    auto schema = PresetSchema(name, shape);
    ASSERT_TRUE(schema.ok());
    const bool per_token = schema->layers[0].k.axis == ScaleAxis::kRow;
    EXPECT_EQ(per_token, name.starts_with("int") || name.starts_with("qserve"));
    EXPECT_FALSE(SpikeOf(*schema, 7, 2, {}).has_value()) << "nothing planted";
    for (const auto& [chunk, threads] : {std::pair(1, 1), {7, 2}, {kSpikeRows, 2}}) {
      const auto spike = SpikeOf(*schema, chunk, threads, plants);
      ASSERT_EQ(spike.has_value(), per_token);
      if (!per_token) continue;
      EXPECT_EQ(spike->layer, 2);
      EXPECT_EQ(spike->head, 1);
      EXPECT_EQ(spike->position, 17);
      EXPECT_EQ(spike->channel, 40);
      EXPECT_EQ(spike->largest, 400);
      EXPECT_GE(spike->median, 1);
      EXPECT_LE(spike->median, 2);
    }
    // Layers that keep keys otherwise, and rows that are never coded, have no spikes to speak of.
    if (!per_token) continue;
    schema->layers[2] = *PresetLayer("f16", kHeads, kDim);
    EXPECT_EQ(SpikeOf(*schema, 7, 1, plants)->layer, 1);
    schema->layers[1].pinned_rows = 31;
    EXPECT_EQ(SpikeOf(*schema, 7, 1, plants)->layer, 0);
  }
}

}  // namespace
}  // namespace livequant
