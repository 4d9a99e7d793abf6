// bench/kernels_bench.cc: matrix products, row operations and the thread pool beside what the machine can do at best.
//
//   kernels_bench [--benchmark_filter=...] [--benchmark_format=json]
//
// Counters: `of_fma` and `of_read` are the achieved rate over the ceiling of the same run, measured
// just before and again just after each benchmark; the larger one counts. `GFLOPs` and `GBps` are the best repeat's
// (BestOf). The context names the instruction set and the arithmetic; a label names the cache level that the working
// set fits in. Where OpenBLAS is found, its sgemm is a peer at f32: it may sum in any order and its weights are already
// f32.
#include <benchmark/benchmark.h>
#include <time.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/rng.h"
#include "kernels/ceiling.h"
#include "kernels/matmul.h"
#include "kernels/ops.h"
#ifdef LIVEQUANT_OPENBLAS
#include <cblas.h>
extern "C" char* openblas_get_corename(void);
extern "C" void openblas_set_num_threads(int threads);
#endif

namespace livequant {
namespace {

std::vector<float> Normals(Rng& rng, int64_t count) {
  std::vector<float> x(static_cast<size_t>(count));
  for (float& v : x) v = static_cast<float>(rng.Normal());
  return x;
}

PackedMatrix RandomMatrix(Rng& rng, DType dtype, int64_t n, int64_t k) {
  std::vector<uint16_t> w(static_cast<size_t>(n * k * DTypeBytes(dtype) / 2));
  for (uint16_t& v : w) v = static_cast<uint16_t>(0x3C00 | (rng.Next() & 0x80FF));  // near one in all three formats
  auto packed = PackedMatrix::Pack(dtype, w.data(), n, k);
  LQ_CHECK(packed.ok());
  return *std::move(packed);
}

// Best seconds of one call: the least disturbed repeat, as the ceilings are measured. One thread is timed by the CPU
// time that it got, which a busy machine does not inflate; several by the clock on the wall.
class BestOf {
 public:
  explicit BestOf(int threads) : clock_(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC) {}
  void Start() { start_ = Now(); }
  void Stop() { best_ = std::min(best_, Now() - start_); }
  double seconds() const { return best_; }

 private:
  double Now() const {
    timespec t;
    clock_gettime(clock_, &t);
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
  }
  clockid_t clock_;
  double start_ = 0, best_ = 1e300;
};

// M rows times one [N][K] matrix.
void BM_MatMul(benchmark::State& state) {
  const auto dtype = static_cast<DType>(state.range(0));
  const int64_t m = state.range(1), n = state.range(2), k = state.range(3);
  ThreadPool pool(static_cast<int>(state.range(4)));
  Rng rng(1);
  const PackedMatrix w = RandomMatrix(rng, dtype, n, k);
  const auto x = Normals(rng, m * k);
  std::vector<float> y(static_cast<size_t>(m * n));
  double ceiling = MeasureFmaGflops(pool);
  BestOf best(pool.threads());
  for (auto _ : state) {
    best.Start();
    MatMul({x.data(), m, k}, w, {y.data(), m, n}, pool);
    best.Stop();
    benchmark::DoNotOptimize(y.data());
  }
  ceiling = std::max(ceiling, MeasureFmaGflops(pool));
  const double gflops = 2e-9 * static_cast<double>(m * n * k) / best.seconds();
  state.SetLabel(DTypeName(dtype));
  state.counters["GFLOPs"] = gflops;
  state.counters["fma_ceiling"] = ceiling;
  state.counters["of_fma"] = gflops / ceiling;
}

// One row through all matrices of a small Llama (hidden 256, 8 layers, vocabulary 4096), 13 MB of bf16: what a decode
// step reads.
void BM_DecodeWeights(benchmark::State& state) {
  const auto dtype = static_cast<DType>(state.range(0));
  const int64_t m = state.range(1);
  ThreadPool pool(static_cast<int>(state.range(2)));
  Rng rng(1);
  std::vector<PackedMatrix> weights;
  const auto add = [&](int64_t n, int64_t k) { weights.push_back(RandomMatrix(rng, dtype, n, k)); };
  for (int layer = 0; layer < 8; ++layer) {
    add(256, 256), add(128, 256), add(128, 256), add(256, 256);
    add(704, 256), add(704, 256), add(256, 704);
  }
  add(4096, 256);
  int64_t bytes = 0;
  for (const PackedMatrix& w : weights) bytes += w.bytes();
  const auto x = Normals(rng, m * 704);
  std::vector<float> y(static_cast<size_t>(m * 4096));
  double ceiling = MeasureReadGbps(pool, bytes);
  BestOf best(pool.threads());
  for (auto _ : state) {
    best.Start();
    for (const PackedMatrix& w : weights) MatMul({x.data(), m, w.k()}, w, {y.data(), m, w.n()}, pool);
    best.Stop();
    benchmark::DoNotOptimize(y.data());
  }
  ceiling = std::max(ceiling, MeasureReadGbps(pool, bytes));
  const double gbps = 1e-9 * static_cast<double>(bytes) / best.seconds();
  state.SetLabel(std::string(DTypeName(dtype)) + ", " + std::to_string(bytes >> 10) +
                 " KiB: " + CacheLevelOf(bytes, pool.threads()));
  state.counters["GBps"] = gbps;
  state.counters["read_ceiling"] = ceiling;
  state.counters["of_read"] = gbps / ceiling;
}

// Bytes that an operation must read and write, over the read ceiling of as many bytes.
template <class Op>
void RowOperation(benchmark::State& state, int64_t bytes, Op&& op) {
  ThreadPool pool(1);
  double ceiling = MeasureReadGbps(pool, bytes);
  BestOf best(1);
  for (auto _ : state) {
    best.Start();
    op();
    best.Stop();
  }
  ceiling = std::max(ceiling, MeasureReadGbps(pool, bytes));
  const double gbps = 1e-9 * static_cast<double>(bytes) / best.seconds();
  state.SetLabel(CacheLevelOf(bytes, 1));
  state.counters["GBps"] = gbps;
  state.counters["read_ceiling"] = ceiling;
  state.counters["of_read"] = gbps / ceiling;
}

void BM_RmsNorm(benchmark::State& state) {
  const int64_t rows = state.range(0), cols = state.range(1);
  Rng rng(1);
  const auto x = Normals(rng, rows * cols), gamma = Normals(rng, cols);
  std::vector<float> y(x.size());
  RowOperation(state, rows * cols * 8, [&] {
    RmsNormRows({x.data(), rows, cols}, gamma.data(), 1e-5f, {y.data(), rows, cols});
    benchmark::DoNotOptimize(y.data());
  });
}

void BM_SiluMul(benchmark::State& state) {
  const int64_t rows = state.range(0), cols = state.range(1);
  Rng rng(1);
  const auto g = Normals(rng, rows * cols), u = Normals(rng, rows * cols);
  std::vector<float> y(g.size());
  RowOperation(state, rows * cols * 12, [&] {
    SiluMulRows({g.data(), rows, cols}, {u.data(), rows, cols}, {y.data(), rows, cols});
    benchmark::DoNotOptimize(y.data());
  });
}

void BM_AddRows(benchmark::State& state) {
  const int64_t rows = state.range(0), cols = state.range(1);
  Rng rng(1);
  const auto x = Normals(rng, rows * cols);
  std::vector<float> y(x.size());
  RowOperation(state, rows * cols * 12, [&] {
    AddRows({x.data(), rows, cols}, {y.data(), rows, cols});
    benchmark::DoNotOptimize(y.data());
  });
}

void BM_Rope(benchmark::State& state) {
  const int64_t rows = state.range(0);
  const auto pairing = state.range(1) == 0 ? RopePairing::kHalfSplit : RopePairing::kInterleaved;
  constexpr int kHeads = 4, kHeadDim = 64;
  const RopeTable table({.type = "default", .theta = 10000.0, .dims = 0, .pairing = pairing}, kHeadDim, rows);
  Rng rng(1);
  auto x = Normals(rng, rows * kHeads * kHeadDim);
  std::vector<int32_t> positions(static_cast<size_t>(rows));
  for (int32_t r = 0; r < static_cast<int32_t>(rows); ++r) positions[static_cast<size_t>(r)] = r;
  RowOperation(state, rows * (kHeads * kHeadDim * 8 + kHeadDim * 4), [&] {
    RopeRows({x.data(), rows, kHeads * kHeadDim}, kHeads, kHeadDim, positions, table);
    benchmark::DoNotOptimize(x.data());
  });
}

void BM_LogSumExp(benchmark::State& state) {
  Rng rng(1);
  const auto x = Normals(rng, state.range(0));
  RowOperation(state, state.range(0) * 4, [&] { benchmark::DoNotOptimize(LogSumExp(x)); });
}

// An empty loop: what forking and joining costs while the workers spin.
void BM_ForkJoin(benchmark::State& state) {
  ThreadPool pool(static_cast<int>(state.range(0)));
  BestOf best(pool.threads());
  for (auto _ : state) {
    best.Start();
    pool.For(state.range(0), [](int64_t i, int) { benchmark::DoNotOptimize(i); });
    best.Stop();
  }
  state.counters["best_us"] = best.seconds() * 1e6;
}

#ifdef LIVEQUANT_OPENBLAS
void BM_OpenBlasSgemm(benchmark::State& state) {
  const int64_t m = state.range(0), n = state.range(1), k = state.range(2);
  ThreadPool pool(static_cast<int>(state.range(3)));
  openblas_set_num_threads(pool.threads());
  Rng rng(1);
  const auto x = Normals(rng, m * k), w = Normals(rng, n * k);
  std::vector<float> y(static_cast<size_t>(m * n));
  double ceiling = MeasureFmaGflops(pool);
  BestOf best(pool.threads());
  for (auto _ : state) {
    best.Start();
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<int>(m), static_cast<int>(n), static_cast<int>(k),
                1.0f, x.data(), static_cast<int>(k), w.data(), static_cast<int>(k), 0.0f, y.data(),
                static_cast<int>(n));
    best.Stop();
    benchmark::DoNotOptimize(y.data());
  }
  ceiling = std::max(ceiling, MeasureFmaGflops(pool));
  const double gflops = 2e-9 * static_cast<double>(m * n * k) / best.seconds();
  state.SetLabel(std::string("f32, core ") + openblas_get_corename());
  state.counters["GFLOPs"] = gflops;
  state.counters["fma_ceiling"] = ceiling;
  state.counters["of_fma"] = gflops / ceiling;
}
#endif

void RegisterAll() {
  for (const int threads : {1, 2}) {
    for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      for (const int64_t m : {1, 8}) {
        benchmark::RegisterBenchmark("DecodeWeights", BM_DecodeWeights)
            ->ArgNames({"dtype", "m", "threads"})
            ->Args({static_cast<int64_t>(dtype), m, threads})
            ->UseRealTime();
      }
      for (const auto& [n, k] : {std::pair<int64_t, int64_t>{704, 256}, {256, 704}, {2048, 2048}}) {
        for (const int64_t m : {1, 8, 128, 512}) {
          benchmark::RegisterBenchmark("MatMul", BM_MatMul)
              ->ArgNames({"dtype", "m", "n", "k", "threads"})
              ->Args({static_cast<int64_t>(dtype), m, n, k, threads})
              ->UseRealTime();
        }
      }
    }
#ifdef LIVEQUANT_OPENBLAS
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{704, 256}, {2048, 2048}}) {
      for (const int64_t m : {1, 8, 128, 512}) {
        benchmark::RegisterBenchmark("OpenBlasSgemm", BM_OpenBlasSgemm)
            ->ArgNames({"m", "n", "k", "threads"})
            ->Args({m, n, k, threads})
            ->UseRealTime();
      }
    }
#endif
  }
  for (const int64_t rows : {4, 512}) {
    benchmark::RegisterBenchmark("RmsNorm", BM_RmsNorm)->ArgNames({"rows", "cols"})->Args({rows, 256});
    benchmark::RegisterBenchmark("SiluMul", BM_SiluMul)->ArgNames({"rows", "cols"})->Args({rows, 704});
    benchmark::RegisterBenchmark("AddRows", BM_AddRows)->ArgNames({"rows", "cols"})->Args({rows, 256});
    for (const int64_t pairing : {0, 1}) {
      benchmark::RegisterBenchmark("Rope", BM_Rope)->ArgNames({"rows", "interleaved"})->Args({rows, pairing});
    }
  }
  benchmark::RegisterBenchmark("LogSumExp", BM_LogSumExp)->Arg(4096)->Arg(131072);
  benchmark::RegisterBenchmark("ForkJoin", BM_ForkJoin)->ArgName("threads")->Arg(1)->Arg(2)->UseRealTime();
}

}  // namespace
}  // namespace livequant

int main(int argc, char** argv) {
  livequant::RegisterAll();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::AddCustomContext("isa", livequant::KernelIsa());
  benchmark::AddCustomContext("arithmetic", livequant::MatMulArithmetic());
#ifdef LIVEQUANT_OPENBLAS
  benchmark::AddCustomContext("openblas_core", openblas_get_corename());
#endif
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
