// bench/attention_bench.cc: one layer of attention over pages, decode and prefill.
//
// Decode reports the K and V bytes that a step reads (codes and qparams of all KV heads) per second, and `read_x`: time
// over the pure read time of as many bytes, measured in this run. Prefill reports multiply-adds of visible rows only
// (causal; 4 flops a channel, row and query head) and `of_fma`: their rate over the FMA ceiling measured in this run.
// Pages lie in one buffer in order and stay hot between iterations: at these sizes a layer's cache is in L2 or L3.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "attention/attention.h"
#include "base/rng.h"
#include "kernels/ceiling.h"

namespace livequant {
namespace {

struct Preset {
  const char* name;
  TensorCoding k, v;
  Closure k_closure{-1, 1}, v_closure{-1, 1};
};

Preset MakePreset(int id, int dim) {
  const auto native = [](DType t) {
    return TensorCoding{.kind = CodeKind::kNative, .dtype = t, .bits = 8 * DTypeBytes(t)};
  };
  const auto integer = [](int bits, ScaleAxis axis, int group, ZeroConvention zero) {
    return TensorCoding{.kind = CodeKind::kInteger, .bits = bits, .axis = axis, .group = group, .zero = zero};
  };
  const TensorCoding fp8{.kind = CodeKind::kScaledFp, .dtype = DType::kFp8E4M3, .bits = 8, .axis = ScaleAxis::kTensor};
  switch (id) {
    case 0:
      return {"f32", native(DType::kF32), native(DType::kF32)};
    case 1:
      return {"f16", native(DType::kF16), native(DType::kF16)};
    case 2:
      return {"bf16", native(DType::kBF16), native(DType::kBF16)};
    case 3:
      return {"fp8_e4m3", fp8, fp8};
    case 4:
    case 5: {
      const TensorCoding c = integer(id == 4 ? 8 : 4, ScaleAxis::kRow, dim, ZeroConvention::kSymmetric);
      return {id == 4 ? "int8" : "int4", c, c};
    }
    case 6:
    case 7: {
      const int bits = id == 6 ? 4 : 2;
      return {id == 6 ? "kivi4" : "kivi2",
              integer(bits, ScaleAxis::kChannel, 32, ZeroConvention::kMinimum),
              integer(bits, ScaleAxis::kRow, 32, ZeroConvention::kMinimum),
              {0, 128},
              {128, 1}};
    }
    default: {
      const TensorCoding c = integer(4, ScaleAxis::kRow, dim, ZeroConvention::kFloatOffset);
      return {"qserve4", c, c, {0, 1}, {0, 1}};
    }
  }
}

// One sequence of `len` rows, of which the last `count` are the step, and all that a call needs.
struct Case {
  Case(const Preset& preset, int kv_heads, int group, int dim, int len, int count) {
    LayerSchema layer;
    layer.num_kv_heads = kv_heads, layer.head_dim = dim, layer.k = preset.k, layer.v = preset.v;
    layer.k_closure = preset.k_closure, layer.v_closure = preset.v_closure;
    if (preset.k.kind == CodeKind::kNative) layer.exact_dtype = preset.k.dtype;
    auto made = PlanLayer(layer, nullptr, false);
    LQ_CHECK(made.ok());
    plan = *made;
    Rng rng(1);
    const auto normal = [&](int64_t n) {
      std::vector<float> x(static_cast<size_t>(n));
      for (float& v : x) v = static_cast<float>(rng.Normal());
      return x;
    };
    const int first = len - count;
    seq.len = len, seq.count = count;
    view.closure[kK] = layer.k_closure, view.closure[kV] = layer.v_closure, view.read_step = kStepwise;
    for (int t : {kK, kV}) {
      seq.f[t] = static_cast<int32_t>(view.closure[t].frontier(first));
      seq.staged[t] =
          static_cast<int32_t>(std::max<int64_t>(seq.f[t], CodedRowsRead(view.closure[t], kStepwise, len - 1)));
      for (int form : {kCoded, kExact}) {
        const BlockFormat& f = plan.format[t][form];
        const int rows = f.block.rows, begin = form == kCoded ? 0 : seq.f[t] / rows * rows,
                  end = form == kCoded ? seq.staged[t] : first;
        const int pages = end > begin ? (end - begin + rows - 1) / rows : 0;
        PlaneView& p = view.plane[t][form];
        p.head_stride = f.block.bytes, p.page_stride = f.block.bytes * kv_heads, p.layer_offset = 0, p.rows = rows;
        memory[t][form].resize(static_cast<size_t>(p.page_stride * std::max(pages, 1)));
        p.base = memory[t][form].data();
        seq.root[t][form] = static_cast<uint32_t>(roots.size() / kRootStride), seq.entries[t][form] = pages;
        for (int b = 0; b < kRootStride; ++b) roots.push_back(static_cast<uint32_t>(roots.size()));
        blocks.resize(roots.size() * kBlockEntries);
        for (int i = 0; i < pages; ++i) {
          blocks[(roots.size() - kRootStride) * kBlockEntries + static_cast<size_t>(i)] = {
              static_cast<uint32_t>(i), static_cast<uint32_t>(begin + i * rows)};
          for (int h = 0; h < kv_heads; ++h) {
            const std::vector<float> data = normal(int64_t{rows} * dim);
            LQ_CHECK(EncodeRows(f, MatrixView<const float>(data.data(), rows, dim), 0,
                                memory[t][form].data() + i * p.page_stride + h * p.head_stride)
                         .ok());
          }
        }
        kv_bytes += form == kCoded ? f.block.bytes * kv_heads * seq.staged[t] / rows
                                   : f.block.bytes * kv_heads * std::max(0, first - seq.f[t]) / rows;
      }
    }
    view.seq = &seq, view.sequences = 1, view.roots = roots.data(), view.root_stride = kRootStride,
    view.blocks = blocks.data();
    k = normal(int64_t{count} * kv_heads * dim), v = k, q = normal(int64_t{count} * kv_heads * group * dim), out = q;
    call.plan = &plan, call.view = view, call.step_k = k.data(), call.step_v = v.data(), call.q = q.data(),
    call.num_q_heads = kv_heads * group;
    call.scale = 1.0f / std::sqrt(static_cast<float>(dim)), call.out = out.data();
  }
  Case(const Case&) = delete;

  static constexpr int kRootStride = 16;
  LayerPlan plan;
  SeqRow seq{};
  CacheView view{};
  std::vector<std::byte> memory[2][2];
  std::vector<uint32_t> roots;
  std::vector<Entry> blocks;
  std::vector<float> k, v, q, out;
  AttentionCall call{};
  int64_t kv_bytes = 0;
};

void Run(benchmark::State& state, int count) {
  const int dim = static_cast<int>(state.range(1)), group = static_cast<int>(state.range(2)),
            len = static_cast<int>(state.range(3));
  const int threads = static_cast<int>(state.range(4)), kv_heads = 2;
  const Preset preset = MakePreset(static_cast<int>(state.range(0)), dim);
  Case c(preset, kv_heads, group, dim, len, count);
  ThreadPool pool(threads);
  AttentionWorkspace workspace(threads, count, kv_heads * group, dim, len);
  AttendGeneric(c.call, workspace, pool);
  // The best call counts, as for the ceilings it is divided by: a neighbour's turn on the core is not the kernel's
  // time.
  double best = 1e9;
  for (auto _ : state) {
    const auto start = std::chrono::steady_clock::now();
    AttendGeneric(c.call, workspace, pool);
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  state.counters["best_us"] = best * 1e6;
  state.SetLabel(preset.name);
  if (count == 1) {
    state.counters["KV_GBps"] = double(c.kv_bytes) / best * 1e-9;
    state.counters["read_x"] =
        best * MeasureReadGbps(pool, std::max<int64_t>(c.kv_bytes, 4096 * threads)) * 1e9 / double(c.kv_bytes);
  } else {
    double rows = 0;
    for (int i = 0; i < count; ++i) rows += len - count + i + 1;
    const double gflops = 4 * rows * kv_heads * group * dim / best * 1e-9;
    state.counters["GFLOPs"] = gflops;
    state.counters["of_fma"] = gflops / MeasureFmaGflops(pool);
  }
}

void BM_Decode(benchmark::State& state) { Run(state, 1); }
BENCHMARK(BM_Decode)
    ->ArgNames({"format", "dim", "group", "context", "threads"})
    ->ArgsProduct({benchmark::CreateDenseRange(0, 8, 1), {64}, {2}, {1024}, {1, 2}})
    ->ArgsProduct({{1, 4, 5}, {128}, {4}, {4096}, {1, 2}})
    ->Unit(benchmark::kMicrosecond)
    ->UseRealTime();

void BM_Prefill512(benchmark::State& state) { Run(state, 512); }
BENCHMARK(BM_Prefill512)
    ->ArgNames({"format", "dim", "group", "context", "threads"})
    ->ArgsProduct({benchmark::CreateDenseRange(0, 8, 1), {64}, {2}, {2048}, {1}})
    ->ArgsProduct({{1, 4}, {128}, {4}, {4096}, {1}})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

}  // namespace
}  // namespace livequant

BENCHMARK_MAIN();
