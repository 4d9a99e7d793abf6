// bench/step_bench.cc: one decode step of a real model against the time to read what it must read.
//
//   step_bench [MODEL_DIR] [context] [threads] [formats]     one JSON object on stdout
//
// A step at `context` rows must read the weights once and the cache of the sequence once. Both are read here as plain
// streaming reads of a buffer of the same size, on the same threads, in the same run, before and after the steps: the
// ratio is what counts. The cache level that the working set fits in is named, since it decides the ceiling.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cache/ledger/ledger.h"
#include "kernels/ceiling.h"
#include "runtime/model_bundle.h"
#include "runtime/session.h"

namespace {

using namespace livequant;

double Median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

int Main(int argc, char** argv) {
  const std::string dir = argc > 1 ? argv[1] : LIVEQUANT_SOURCE_DIR "/models/books-7m";
  const int64_t context = argc > 2 ? std::atoll(argv[2]) : 1024;
  const int threads = argc > 3 ? std::atoi(argv[3]) : 2;
  const std::string formats = argc > 4 ? argv[4] : "f16,int8,kivi2";
  auto bundle = ModelBundle::Load(dir);
  if (!bundle.ok()) {
    fmt::print(stderr, "error: {}\n", bundle.status().message());
    return 1;
  }
  ThreadPool pool(threads);
  const Llama& model = *bundle->model;
  const int64_t vocab = model.config().vocab_size;
  nlohmann::json out = {
      {"model", dir}, {"context", context}, {"threads", threads}, {"results", nlohmann::json::array()}};
  for (size_t at = 0; at <= formats.size();) {
    const size_t end = std::min(formats.find(',', at), formats.size());
    const std::string format = formats.substr(at, end - at);
    at = end + 1;
    auto schema = bundle->Schema(format);
    if (!schema.ok()) {
      fmt::print(stderr, "error: {}\n", schema.status().message());
      return 1;
    }
    auto cache = KvCache::Open(
        *schema, {.max_sequences = 1, .max_len = context + 256, .max_q_heads = model.config().num_attention_heads});
    if (!cache.ok()) {
      fmt::print(stderr, "error: {}\n", cache.status().message());
      return 1;
    }
    auto seq = (*cache)->owner().Open();
    auto workspace = model.NewWorkspace(512, 1);
    std::vector<float> logits(static_cast<size_t>(vocab));
    std::vector<int32_t> ids(static_cast<size_t>(context));
    for (size_t i = 0; i < ids.size(); ++i)
      ids[i] = static_cast<int32_t>(2 + i * 7919 % static_cast<size_t>(vocab - 2));
    const auto step = [&](std::span<const int32_t> tokens) {
      const SequenceTokens batch = {.seq = seq->seq, .tokens = tokens};
      const Status s = model.Step({&batch, 1}, **cache, *workspace, {logits.data(), 1, vocab}, pool);
      if (!s.ok()) {
        fmt::print(stderr, "error: {}\n", s.message());
        std::exit(1);
      }
    };
    for (int64_t done = 0; done < context - 64;) {
      const int64_t n = std::min<int64_t>(512, context - 64 - done);
      step(std::span(ids).subspan(static_cast<size_t>(done), static_cast<size_t>(n)));
      done += n;
    }
    const int64_t weights = model.weight_bytes(), read = DecodeReadBytes(SegmentsOf(*schema), context);
    std::vector<double> step_s, read_s;
    const auto read_ceiling = [&] {
      for (int i = 0; i < 8; ++i)
        read_s.push_back(static_cast<double>(weights + read) / (MeasureReadGbps(pool, weights + read, 1) * 1e9));
    };
    read_ceiling();
    for (int i = 0; i < 128; ++i) {  // from 64 rows below `context` to 64 above
      const auto t0 = std::chrono::steady_clock::now();
      step(std::span(ids).first(1));
      step_s.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - t0).count());
    }
    read_ceiling();
    const double s = Median(step_s), r = Median(read_s);
    std::sort(step_s.begin(), step_s.end());
    const double p10 = step_s[step_s.size() / 10];
    out["results"].push_back({{"format", format},
                              {"weight_bytes", weights},
                              {"cache_read_bytes", read},
                              {"step_us", s * 1e6},
                              {"step_p10_us", p10 * 1e6},
                              {"read_us", r * 1e6},
                              {"ratio", s / r},
                              {"tokens_per_s", 1 / s},
                              {"cache_level", CacheLevelOf(weights + read, threads)}});
  }
  fmt::print("{}\n", out.dump(2));
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return Main(argc, argv); }
