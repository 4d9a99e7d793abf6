// examples/embed.cc: somebody else's attention loop over a livequant cache, on memory of its own.
//
//   embed [FORMAT]            decodes 200 steps of a toy model under FORMAT (default kivi2), forks it, takes 40 rows
//                             back, and prints what the cache held and how far its answers were from exact attention
//   embed RECORD.safetensors  does again what `livequant run --record` did, and compares every attention output and
//                             every cache byte: exit 1 if one differs
//
// The toy is a stand-in: each layer's rows come from a hash of (stream, position, layer). What matters is the order of
// calls: begin, then for each layer prepare and attend, then publish.
#include <livequant/livequant.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <vector>

#include "record.h"

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

// A cache on memory of ours, which stands in options->memory.
lq_cache* Open(const lq_schema* schema, lq_cache_options* options) {
  Check(lq_cache_memory_bytes(schema, options, &options->memory_bytes));
  options->memory = ::operator new(static_cast<size_t>(options->memory_bytes), std::align_val_t(LQ_MEMORY_ALIGNMENT));
  lq_cache* cache = nullptr;
  Check(lq_cache_create(schema, options, &cache));
  return cache;
}

int Toy(const char* format) {
  lq_shape shape = {};
  shape.struct_size = sizeof(shape);
  shape.num_layers = kLayers, shape.num_kv_heads = kKvHeads, shape.head_dim = kDim;
  lq_schema* schema = nullptr;
  Check(lq_schema_create(format, &shape, &schema));

  lq_cache_options options = {};
  options.struct_size = sizeof(options);
  options.max_sequences = 2, options.max_len = 512, options.max_q_heads = kQHeads;
  lq_cache* cache = Open(schema, &options);

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

lq_schema* SchemaOf(const Record& r) {
  const auto number = [&](const char* field) { return std::stod(r.rope.at(field).get<std::string>()); };
  const std::string type = r.rope.at("rope.type");
  lq_rope rope = {};
  rope.struct_size = sizeof(rope), rope.type = type.c_str();
  rope.theta = number("rope.theta"), rope.dims = static_cast<int>(number("rope.dims"));
  rope.interleaved = r.rope.at("rope.pairing") == "interleaved";
  rope.factor = number("rope.factor"), rope.attention_factor = number("rope.attention_factor");
  rope.original_max_positions = static_cast<int>(number("rope.original_max_positions"));
  rope.low_freq_factor = number("rope.low_freq_factor"), rope.high_freq_factor = number("rope.high_freq_factor");
  rope.beta_fast = number("rope.beta_fast"), rope.beta_slow = number("rope.beta_slow");
  rope.no_truncate = r.rope.at("rope.truncate") == "false";
  lq_shape shape = {};
  shape.struct_size = sizeof(shape), shape.rope = &rope;
  shape.num_layers = r.shape.at("layers"), shape.num_kv_heads = r.shape.at("kv_heads");
  shape.head_dim = r.shape.at("head_dim");
  lq_schema* schema = nullptr;
  Check(lq_schema_create(r.schema.c_str(), &shape, &schema));
  return schema;
}

// What a run did, again, with rows as they lie in the record.
int Replay(const char* path) {
  const Record r = ReadRecord(path);
  lq_schema* schema = SchemaOf(r);
  const int layers = r.shape.at("layers"), q_heads = r.shape.at("q_heads"), dim = r.shape.at("head_dim");
  const int64_t kv = r.shape.at("kv_heads").get<int64_t>() * dim, width = int64_t{q_heads} * dim;
  lq_cache_options options = {};
  options.struct_size = sizeof(options);
  options.max_q_heads = q_heads;
  for (const int rows : r.steps) {
    options.max_len += rows;
    if (rows > options.max_step_rows) options.max_step_rows = rows;
  }
  lq_cache* cache = Open(schema, &options);
  lq_seq seq = 0;
  Check(lq_sequence_open(cache, &seq));
  std::vector<std::vector<float>> k, v, q, expected;
  for (int layer = 0; layer < layers; ++layer) {
    k.push_back(r.at("k", layer).floats()), v.push_back(r.at("v", layer).floats());
    q.push_back(r.at("q", layer).floats()), expected.push_back(r.at("attention", layer).floats());
  }
  int64_t at = 0, outputs = 0, differing = 0;
  for (const int rows : r.steps) {
    const lq_append request = {seq, rows, 0};
    lq_step* step = nullptr;
    Check(lq_begin(cache, &request, 1, &step));
    for (int layer = 0; layer < layers; ++layer) {
      std::vector<float> out(static_cast<size_t>(rows * width));
      Check(lq_step_prepare(step, layer, &k[layer].at(at * kv), kv, &v[layer].at(at * kv), kv));
      Check(lq_step_attend(step, layer, &q[layer].at(at * width), width, q_heads, r.scale, out.data(), width));
      for (size_t i = 0; i < out.size(); ++i)
        differing += std::memcmp(&out[i], &expected[layer].at(at * width + i), sizeof(float)) != 0;
      outputs += static_cast<int64_t>(out.size());
    }
    Check(lq_step_publish(step, nullptr));
    lq_step_free(step);
    at += rows;
  }
  int64_t bytes = 0;
  Check(lq_sequence_state(cache, seq, nullptr, 0, &bytes));
  std::vector<char> state(static_cast<size_t>(bytes));
  Check(lq_sequence_state(cache, seq, state.data(), bytes, &bytes));
  const bool same_state = state == r.tensors.at("state").bytes;
  std::printf("%lld rows in %zu steps: %lld of %lld attention outputs differ; %lld cache bytes are %s\n",
              static_cast<long long>(at), r.steps.size(), static_cast<long long>(differing),
              static_cast<long long>(outputs), static_cast<long long>(bytes), same_state ? "equal" : "DIFFERENT");
  lq_cache_free(cache);
  ::operator delete(options.memory, std::align_val_t(LQ_MEMORY_ALIGNMENT));
  lq_schema_free(schema);
  return differing == 0 && same_state ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "kivi2";
  if (!what.ends_with(".safetensors")) return Toy(what.c_str());
  try {
    return Replay(what.c_str());
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s: %s\n", what.c_str(), e.what());
    return 1;
  }
}
