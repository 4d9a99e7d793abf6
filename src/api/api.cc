// api/api.cc: include/livequant/livequant.h on top of kv. Handles in, codes out: the only place where a Status becomes
// a C int, and where no exception may leave. Nothing here knows what a row means.
#include <livequant/livequant.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <type_traits>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "cache/ledger/ledger.h"
#include "cache/owner/owner.h"
#include "kv/kv_cache.h"
#include "method/method.h"
#include "schema/schema.h"

using livequant::Code;
using livequant::Status;

struct lq_schema {
  livequant::CacheSchema value;
  std::string digest;
};

struct lq_cache {
  std::mutex mutex;
  livequant::ThreadPool pool;
  std::unique_ptr<livequant::KvCache> kv;
  explicit lq_cache(int threads) : pool(threads) {}
};

struct lq_step {
  lq_cache* cache;
  livequant::KvStep step;
  std::vector<float> k, v, q, out;  // rows without gaps; keys and values stay until the next layer is prepared
};

struct lq_lease {
  lq_cache* cache;
  livequant::Owner::Lease lease;
};

namespace {

thread_local std::string last_error;

lq_status Fail(lq_status code, std::string message) {
  last_error = std::move(message);
  return code;
}

lq_status Fail(const Status& status) {
  static_assert(static_cast<int>(Code::kCancelled) == LQ_CANCELLED &&
                    static_cast<int>(Code::kOutOfPages) == LQ_OUT_OF_PAGES &&
                    static_cast<int>(Code::kFailedTxn) == LQ_FAILED_STEP && static_cast<int>(Code::kIo) == LQ_IO,
                "lq_status lists the codes of base/status.h in their order");
  return Fail(static_cast<lq_status>(status.code()), status.message());
}

// fn() with what it may throw as a status.
template <class Fn>
lq_status Guard(Fn&& fn) {
  try {
    return fn();
  } catch (const std::bad_alloc&) {
    return Fail(LQ_OUT_OF_MEMORY, "out of memory");
  }
}

lq_status Null(const char* what) { return Fail(LQ_INVALID_ARGUMENT, std::string(what) + " is null"); }

template <class T>
bool SizeIsWrong(const T* value, const char* name, lq_status* why) {
  if (value->struct_size == sizeof(T)) return false;
  *why = Fail(LQ_INVALID_ARGUMENT, std::string(name) + ".struct_size is " + std::to_string(value->struct_size) +
                                       "; this library's is " + std::to_string(sizeof(T)));
  return true;
}

livequant::KvOptions OptionsOf(const lq_cache_options& o) {
  livequant::KvOptions kv;
  kv.max_sequences = o.max_sequences == 0 ? 1 : o.max_sequences;
  kv.max_len = o.max_len;
  kv.pool_tokens = o.pool_tokens;
  if (o.max_step_rows != 0) kv.max_step_rows = o.max_step_rows;
  kv.max_q_heads = o.max_q_heads;
  kv.memory_bytes = o.memory_bytes;
  kv.memory = static_cast<std::byte*>(o.memory);
  kv.allow_fallback = o.allow_fallback != 0;
  kv.threads = o.threads == 0 ? 1 : o.threads;
  return kv;
}

// Rows [rows][width] at a stride into a buffer without gaps.
void Gather(const float* from, int64_t stride, int64_t rows, int64_t width, std::vector<float>& to) {
  to.resize(static_cast<size_t>(rows * width));
  for (int64_t r = 0; r < rows; ++r)
    std::memcpy(to.data() + r * width, from + r * stride, static_cast<size_t>(width) * sizeof(float));
}

lq_status CheckStride(const char* name, int64_t stride, int64_t width) {
  if (stride >= width) return LQ_OK;
  return Fail(LQ_INVALID_ARGUMENT,
              std::string(name) + " is " + std::to_string(stride) + "; a row has " + std::to_string(width) + " values");
}

const livequant::LayerSchema* LayerOf(const lq_cache& cache, int32_t layer, lq_status* why) {
  const auto& layers = cache.kv->schema().layers;
  if (layer >= 0 && layer < static_cast<int32_t>(layers.size())) return &layers[static_cast<size_t>(layer)];
  *why = Fail(LQ_INVALID_ARGUMENT,
              "layer is " + std::to_string(layer) + "; layers are 0 to " + std::to_string(layers.size() - 1));
  return nullptr;
}

}  // namespace

extern "C" {

const char* lq_last_error(void) { return last_error.c_str(); }
const char* lq_version(void) { return LIVEQUANT_VERSION; }

lq_status lq_schema_create(const char* text, const lq_shape* shape, lq_schema** out) {
  if (text == nullptr) return Null("text");
  if (shape == nullptr) return Null("shape");
  if (out == nullptr) return Null("out");
  lq_status why;
  if (SizeIsWrong(shape, "lq_shape", &why)) return why;
  return Guard([&] {
    livequant::CacheShape s{
        .num_layers = shape->num_layers, .num_kv_heads = shape->num_kv_heads, .head_dim = shape->head_dim, .rope = {}};
    s.rope.dims = shape->head_dim;
    if (shape->rope_theta != 0) s.rope.theta = shape->rope_theta;
    const bool policy = std::strchr(text, '{') != nullptr;
    auto made = policy ? livequant::ParsePolicy(text, s) : livequant::PresetSchema(text, s);
    if (!made.ok()) return Fail(made.status());
    if (const Status valid = livequant::Validate(*made); !valid.ok()) return Fail(valid);
    *out = new lq_schema{*made, livequant::Digest(*made)};
    return LQ_OK;
  });
}

void lq_schema_free(lq_schema* schema) { delete schema; }
const char* lq_schema_digest(const lq_schema* schema) { return schema == nullptr ? "" : schema->digest.c_str(); }

lq_status lq_schema_ledger(const lq_schema* schema, int64_t tokens, lq_ledger* out) {
  if (schema == nullptr) return Null("schema");
  if (out == nullptr) return Null("out");
  if (tokens < 0 || tokens > livequant::kMaxLedgerTokens)
    return Fail(LQ_OUT_OF_RANGE, "tokens is " + std::to_string(tokens) + "; 0 to " +
                                     std::to_string(livequant::kMaxLedgerTokens) + " can be counted");
  return Guard([&] {
    const auto segments = livequant::SegmentsOf(schema->value);
    const livequant::LedgerBytes b = livequant::Ledger(segments, tokens);
    *out = {.codes = b.codes,
            .qparams = b.qparams,
            .residual = b.residual,
            .sparse = b.sparse,
            .exact_prefix = b.exact_prefix,
            .pages = b.pages,
            .slack = b.slack,
            .decode_read_bytes = tokens == 0 ? 0 : livequant::DecodeReadBytes(segments, tokens)};
    return LQ_OK;
  });
}

lq_status lq_cache_memory_bytes(const lq_schema* schema, const lq_cache_options* options, int64_t* out) {
  if (schema == nullptr) return Null("schema");
  if (options == nullptr) return Null("options");
  if (out == nullptr) return Null("out");
  lq_status why;
  if (SizeIsWrong(options, "lq_cache_options", &why)) return why;
  return Guard([&] {
    const auto bytes = livequant::KvCache::MemoryBytes(schema->value, OptionsOf(*options));
    if (!bytes.ok()) return Fail(bytes.status());
    *out = *bytes;
    return LQ_OK;
  });
}

lq_status lq_cache_create(const lq_schema* schema, const lq_cache_options* options, lq_cache** out) {
  if (schema == nullptr) return Null("schema");
  if (options == nullptr) return Null("options");
  if (out == nullptr) return Null("out");
  lq_status why;
  if (SizeIsWrong(options, "lq_cache_options", &why)) return why;
  if (options->threads < 0 || options->threads > 1024)
    return Fail(LQ_OUT_OF_RANGE, "threads is " + std::to_string(options->threads) + "; 0 (one) to 1024");
  return Guard([&] {
    const livequant::KvOptions kv = OptionsOf(*options);
    auto cache = std::make_unique<lq_cache>(kv.threads);
    auto made = livequant::KvCache::Open(schema->value, kv);
    if (!made.ok()) return Fail(made.status());
    cache->kv = *std::move(made);
    *out = cache.release();
    return LQ_OK;
  });
}

void lq_cache_free(lq_cache* cache) { delete cache; }

lq_status lq_cache_used_bytes(lq_cache* cache, int64_t* out) {
  if (cache == nullptr) return Null("cache");
  if (out == nullptr) return Null("out");
  *out = cache->kv->owner().used_bytes();
  return LQ_OK;
}

lq_status lq_cache_fallback_calls(lq_cache* cache, int64_t* out) {
  if (cache == nullptr) return Null("cache");
  if (out == nullptr) return Null("out");
  *out = cache->kv->fallback_calls();
  return LQ_OK;
}

lq_status lq_sequence_open(lq_cache* cache, lq_seq* out) {
  if (cache == nullptr) return Null("cache");
  if (out == nullptr) return Null("out");
  const auto seq = cache->kv->owner().Open();
  if (!seq.ok()) return Fail(seq.status());
  *out = *seq;
  return LQ_OK;
}

lq_status lq_sequence_fork(lq_cache* cache, lq_seq parent, lq_seq* out) {
  if (cache == nullptr) return Null("cache");
  if (out == nullptr) return Null("out");
  const auto seq = cache->kv->owner().Fork(parent);
  if (!seq.ok()) return Fail(seq.status());
  *out = *seq;
  return LQ_OK;
}

lq_status lq_sequence_truncate(lq_cache* cache, lq_seq seq, int64_t length) {
  if (cache == nullptr) return Null("cache");
  const Status s = cache->kv->owner().Truncate(seq, length);
  return s.ok() ? LQ_OK : Fail(s);
}

lq_status lq_sequence_release(lq_cache* cache, lq_seq seq) {
  if (cache == nullptr) return Null("cache");
  const Status s = cache->kv->owner().Release(seq);
  return s.ok() ? LQ_OK : Fail(s);
}

lq_status lq_sequence_length(lq_cache* cache, lq_seq seq, int64_t* out) {
  if (cache == nullptr) return Null("cache");
  if (out == nullptr) return Null("out");
  const auto lease = cache->kv->owner().Acquire(seq);
  if (!lease.ok()) return Fail(lease.status());
  *out = lease->length();
  return LQ_OK;
}

lq_status lq_sequence_state(lq_cache* cache, lq_seq seq, void* out, int64_t capacity, int64_t* bytes) {
  if (cache == nullptr) return Null("cache");
  if (bytes == nullptr) return Null("bytes");
  if (out == nullptr && capacity != 0) return Null("out");
  return Guard([&] {
    const auto lease = cache->kv->owner().Acquire(seq);
    if (!lease.ok()) return Fail(lease.status());
    const std::vector<std::byte> state = cache->kv->StateBytes(*lease);
    *bytes = static_cast<int64_t>(state.size());
    if (capacity > 0) std::memcpy(out, state.data(), static_cast<size_t>(std::min(capacity, *bytes)));
    return LQ_OK;
  });
}

lq_status lq_begin(lq_cache* cache, const lq_append* requests, int32_t count, lq_step** out) {
  if (cache == nullptr) return Null("cache");
  if (out == nullptr) return Null("out");
  if (requests == nullptr && count > 0) return Null("requests");
  if (count < 1) return Fail(LQ_INVALID_ARGUMENT, "count is " + std::to_string(count) + "; a step has a request");
  return Guard([&] {
    std::vector<livequant::AppendRequest> list;
    for (int32_t i = 0; i < count; ++i)
      list.push_back({.seq = requests[i].seq,
                      .rows = requests[i].rows,
                      .mode = requests[i].draft != 0 ? livequant::Mode::kPrefix : livequant::Mode::kAll});
    auto step = cache->kv->Begin(list);
    if (!step.ok()) return Fail(step.status());
    *out = new lq_step{cache, *std::move(step), {}, {}, {}, {}};
    return LQ_OK;
  });
}

int32_t lq_step_rows(const lq_step* step) { return step == nullptr ? -1 : step->step.rows(); }
int32_t lq_step_first_row(const lq_step* step, int32_t i) {
  return step == nullptr || i < 0 || i >= step->step.sequences() ? -1 : step->step.first_row(i);
}
int32_t lq_step_count(const lq_step* step, int32_t i) {
  return step == nullptr || i < 0 || i >= step->step.sequences() ? -1 : step->step.count(i);
}
int64_t lq_step_position(const lq_step* step, int32_t i) {
  return step == nullptr || i < 0 || i >= step->step.sequences() ? -1 : step->step.position(i);
}

lq_status lq_step_prepare(lq_step* step, int32_t layer, const float* k, int64_t k_stride, const float* v,
                          int64_t v_stride) {
  if (step == nullptr) return Null("step");
  if (k == nullptr) return Null("k");
  if (v == nullptr) return Null("v");
  lq_status why;
  const livequant::LayerSchema* schema = LayerOf(*step->cache, layer, &why);
  if (schema == nullptr) return why;
  const int64_t width = int64_t{schema->num_kv_heads} * schema->head_dim;
  if ((why = CheckStride("k_stride", k_stride, width)) != LQ_OK) return why;
  if ((why = CheckStride("v_stride", v_stride, width)) != LQ_OK) return why;
  return Guard([&] {
    Gather(k, k_stride, step->step.rows(), width, step->k);
    Gather(v, v_stride, step->step.rows(), width, step->v);
    const std::lock_guard lock(step->cache->mutex);
    const Status s = step->step.Prepare(layer, step->k.data(), step->v.data(), step->cache->pool);
    return s.ok() ? LQ_OK : Fail(s);
  });
}

lq_status lq_step_attend(lq_step* step, int32_t layer, const float* q, int64_t q_stride, int32_t num_q_heads,
                         float scale, float* out, int64_t out_stride) {
  if (step == nullptr) return Null("step");
  if (q == nullptr) return Null("q");
  if (out == nullptr) return Null("out");
  lq_status why;
  const livequant::LayerSchema* schema = LayerOf(*step->cache, layer, &why);
  if (schema == nullptr) return why;
  if (num_q_heads < 1 || num_q_heads > step->cache->kv->options().max_q_heads)
    return Fail(LQ_INVALID_ARGUMENT, "num_q_heads is " + std::to_string(num_q_heads) + "; 1 to max_q_heads, " +
                                         std::to_string(step->cache->kv->options().max_q_heads));
  const int64_t width = int64_t{num_q_heads} * schema->head_dim, rows = step->step.rows();
  if ((why = CheckStride("q_stride", q_stride, width)) != LQ_OK) return why;
  if ((why = CheckStride("out_stride", out_stride, width)) != LQ_OK) return why;
  return Guard([&] {
    Gather(q, q_stride, rows, width, step->q);
    step->out.resize(step->q.size());
    {
      const std::lock_guard lock(step->cache->mutex);
      const Status s =
          step->step.Attend(layer, step->q.data(), num_q_heads, scale, step->out.data(), step->cache->pool);
      if (!s.ok()) return Fail(s);
    }
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(out + r * out_stride, step->out.data() + r * width, static_cast<size_t>(width) * sizeof(float));
    return LQ_OK;
  });
}

lq_status lq_step_publish(lq_step* step, const int32_t* accepted) {
  if (step == nullptr) return Null("step");
  return Guard([&] {
    const auto receipts = accepted == nullptr
                              ? step->step.Publish()
                              : step->step.Publish(std::vector<int>(accepted, accepted + step->step.sequences()));
    return receipts.ok() ? LQ_OK : Fail(receipts.status());
  });
}

void lq_step_free(lq_step* step) { delete step; }

lq_status lq_lease_acquire(lq_cache* cache, lq_seq seq, lq_lease** out) {
  if (cache == nullptr) return Null("cache");
  if (out == nullptr) return Null("out");
  return Guard([&] {
    auto lease = cache->kv->owner().Acquire(seq);
    if (!lease.ok()) return Fail(lease.status());
    *out = new lq_lease{cache, *std::move(lease)};
    return LQ_OK;
  });
}

void lq_lease_free(lq_lease* lease) { delete lease; }
int64_t lq_lease_length(const lq_lease* lease) { return lease == nullptr ? -1 : lease->lease.length(); }

lq_status lq_lease_read(lq_lease* lease, int32_t layer, int32_t tensor, int32_t head, float* out) {
  if (lease == nullptr) return Null("lease");
  if (out == nullptr) return Null("out");
  lq_status why;
  const livequant::LayerSchema* schema = LayerOf(*lease->cache, layer, &why);
  if (schema == nullptr) return why;
  if (tensor != 0 && tensor != 1)
    return Fail(LQ_INVALID_ARGUMENT, "tensor is " + std::to_string(tensor) + "; 0 is keys, 1 is values");
  if (head < 0 || head >= schema->num_kv_heads)
    return Fail(LQ_INVALID_ARGUMENT,
                "head is " + std::to_string(head) + "; KV heads are 0 to " + std::to_string(schema->num_kv_heads - 1));
  return Guard([&] {
    lease->cache->kv->ReadRows(lease->lease, layer, tensor == 0 ? livequant::kK : livequant::kV, head, out);
    return LQ_OK;
  });
}

}  // extern "C"
