// examples/embed.cc: somebody else's attention loop over a livequant cache, on memory of its own.
//
//   embed [FORMAT]      decodes 200 steps of a toy model under FORMAT (default kivi2), forks it, takes 40 rows back,
//   and
//                       prints what the cache held and how far its answers were from exact attention
//
// The model is a stand-in: each layer's rows come from a hash of (stream, position, layer). What matters is the order
// of calls: begin, then for each layer prepare and attend, then publish.
#include <livequant/livequant.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <vector>

namespace {

constexpr int kLayers = 2, kKvHeads = 2, kQHeads = 4, kDim = 64;

void Check(lq_status status) {
  if (status == LQ_OK) return;
  std::fprintf(stderr, "livequant: %s\n", lq_last_error());
  std::exit(1);
}

// What a model would have computed: `count` values for one row.
void Row(unsigned stream, int64_t position, int layer, int count, float* out) {
  unsigned x =
      stream * 2654435761u ^ static_cast<unsigned>(position) * 40503u ^ static_cast<unsigned>(layer) * 97u ^ 1u;
  for (int i = 0; i < count; ++i) {
    x ^= x << 13, x ^= x >> 17, x ^= x << 5;
    out[i] = static_cast<float>(x >> 8) * 0x1p-23f - 1.0f;
  }
}

// One step of one sequence: the new row of every layer goes in, its attention comes out.
std::vector<float> Step(lq_cache* cache, lq_seq seq, unsigned stream) {
  const lq_append request = {seq, 1, 0};
  lq_step* step = nullptr;
  Check(lq_begin(cache, &request, 1, &step));
  const int64_t position = lq_step_position(step, 0);
  float k[kKvHeads * kDim], v[kKvHeads * kDim], q[kQHeads * kDim];
  std::vector<float> out(kQHeads * kDim);
  for (int layer = 0; layer < kLayers; ++layer) {
    Row(stream, position, layer, kKvHeads * kDim, k);
    Row(stream + 1, position, layer, kKvHeads * kDim, v);
    Row(stream + 2, position, layer, kQHeads * kDim, q);
    Check(lq_step_prepare(step, layer, k, kKvHeads * kDim, v, kKvHeads * kDim));
    Check(lq_step_attend(step, layer, q, kQHeads * kDim, kQHeads, 1.0f / 8, out.data(), kQHeads * kDim));
  }
  Check(lq_step_publish(step, nullptr));
  lq_step_free(step);
  return out;
}

// The same attention of the last layer over exact rows, query head 0.
std::vector<double> Exact(unsigned stream, int64_t position) {
  float q[kQHeads * kDim], k[kKvHeads * kDim], v[kKvHeads * kDim];
  Row(stream + 2, position, kLayers - 1, kQHeads * kDim, q);
  std::vector<double> out(kDim);
  double sum = 0;
  for (int64_t j = 0; j <= position; ++j) {
    Row(stream, j, kLayers - 1, kKvHeads * kDim, k);
    Row(stream + 1, j, kLayers - 1, kKvHeads * kDim, v);
    double score = 0;
    for (int c = 0; c < kDim; ++c) score += double{q[c]} * k[c] / 8;
    const double weight = std::exp(score);  // the scores are small here
    for (int c = 0; c < kDim; ++c) out[c] += weight * v[c];
    sum += weight;
  }
  for (double& x : out) x /= sum;
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  const char* format = argc > 1 ? argv[1] : "kivi2";
  const lq_shape shape = {sizeof(shape), kLayers, kKvHeads, kDim, 0};
  lq_schema* schema = nullptr;
  Check(lq_schema_create(format, &shape, &schema));

  lq_cache_options options = {};
  options.struct_size = sizeof(options);
  options.max_sequences = 2, options.max_len = 512, options.max_q_heads = kQHeads;
  Check(lq_cache_memory_bytes(schema, &options, &options.memory_bytes));
  options.memory = ::operator new(static_cast<size_t>(options.memory_bytes), std::align_val_t(LQ_MEMORY_ALIGNMENT));
  lq_cache* cache = nullptr;
  Check(lq_cache_create(schema, &options, &cache));

  lq_seq seq = 0, branch = 0;
  Check(lq_sequence_open(cache, &seq));
  std::vector<float> out;
  for (int i = 0; i < 200; ++i) out = Step(cache, seq, 1);
  const std::vector<double> exact = Exact(1, 199);
  double worst = 0;
  for (int c = 0; c < kDim; ++c) worst = std::fmax(worst, std::fabs(out[c] - exact[c]));

  Check(lq_sequence_fork(cache, seq, &branch));
  Check(lq_sequence_truncate(cache, branch, 160));
  for (int i = 0; i < 10; ++i) Step(cache, branch, 7);
  int64_t length = 0, branch_length = 0, used = 0;
  Check(lq_sequence_length(cache, seq, &length));
  Check(lq_sequence_length(cache, branch, &branch_length));
  Check(lq_cache_used_bytes(cache, &used));
  lq_ledger ledger;
  Check(lq_schema_ledger(schema, length, &ledger));
  std::printf("%s: %lld rows and a branch of %lld in %lld bytes of pages; largest error of head 0: %.2e\n", format,
              static_cast<long long>(length), static_cast<long long>(branch_length), static_cast<long long>(used),
              worst);
  std::printf("ledger of %lld rows: codes %lld, qparams %lld, exact %lld\n", static_cast<long long>(length),
              static_cast<long long>(ledger.codes), static_cast<long long>(ledger.qparams),
              static_cast<long long>(ledger.residual + ledger.exact_prefix));
  lq_cache_free(cache);
  ::operator delete(options.memory, std::align_val_t(LQ_MEMORY_ALIGNMENT));
  lq_schema_free(schema);
  return worst < 0.5 ? 0 : 1;
}
