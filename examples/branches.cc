// examples/branches.cc: the same cache through livequant.hpp: a prompt shared by two branches, a draft of which a
// prefix is kept, a row that is refused, and what all of it cost.
//
//   branches [FORMAT]     default kivi4
#include <livequant/livequant.hpp>

#include <cmath>
#include <cstdio>
#include <exception>
#include <limits>
#include <string>
#include <vector>

namespace {

constexpr int kLayers = 2, kKvHeads = 2, kQHeads = 8, kDim = 64;

// Appends `rows` rows to a sequence, all layers, and publishes the first `accepted` of them.
void Append(lq::Cache& cache, const lq::Sequence& seq, int rows, int accepted, float angle) {
  const bool draft = accepted < rows;
  lq::Step step = cache.Begin(seq, rows, draft);
  std::vector<float> k, v, q, out(static_cast<size_t>(rows * kQHeads * kDim));
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < kQHeads * kDim; ++i) {
      const float x = std::sin(angle * static_cast<float>((step.position(0) + r) * 31 + i));
      q.push_back(x);
      if (i < kKvHeads * kDim) k.push_back(x + 0.5f), v.push_back(x * x);
    }
  for (int layer = 0; layer < kLayers; ++layer) {
    step.Prepare(layer, k, v);
    step.Attend(layer, q, kQHeads, 0.125f, out);
  }
  if (draft)
    step.Publish(std::vector<int32_t>{accepted});
  else
    step.Publish();
}

void Run(const std::string& format) {
  const lq::Schema schema(format, {.num_layers = kLayers, .num_kv_heads = kKvHeads, .head_dim = kDim});
  lq::Cache cache(schema, {.max_sequences = 2, .max_len = 1024, .max_q_heads = kQHeads});
  lq::Sequence trunk = cache.Open();
  Append(cache, trunk, 300, 300, 0.11f);
  const int64_t alone = cache.used_bytes();
  lq::Sequence branch = trunk.Fork();
  std::printf("300 rows: %lld bytes; with a branch: %lld\n", static_cast<long long>(alone),
              static_cast<long long>(cache.used_bytes()));
  for (int i = 0; i < 20; ++i) Append(cache, branch, 1, 1, 0.07f);
  Append(cache, trunk, 6, 4, 0.13f);  // four of six drafted rows are kept
  const std::vector<std::byte> before = trunk.State();
  try {
    Append(cache, trunk, 1, 1, std::numeric_limits<float>::quiet_NaN());
    throw std::runtime_error("a row of NaN was taken");
  } catch (const lq::Error& e) {
    if (e.status() != LQ_NON_FINITE || trunk.State() != before) throw;
    std::printf("refused, and nothing changed: %s\n", e.what());
  }
  std::printf("trunk %lld rows, branch %lld, %lld bytes\n", static_cast<long long>(trunk.length()),
              static_cast<long long>(branch.length()), static_cast<long long>(cache.used_bytes()));
  if (trunk.length() != 304 || branch.length() != 320) throw std::runtime_error("lengths");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Run(argc > 1 ? argv[1] : "kivi4");
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
