// api/api.cc: include/livequant/livequant.h on top of kv. Handles in, codes out: the only place where a Status becomes
// a C int, and where no exception may leave. Nothing here knows what a row means.
#include <livequant/livequant.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "cache/ledger/ledger.h"
#include "cache/owner/owner.h"
#include "kv/kv_cache.h"
#include "kv/planes.h"
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
  LQ_CHECK(status.code() <= Code::kCancelled);  // the others are about ids of callers, which nothing here passes on
  return Fail(static_cast<lq_status>(status.code()), status.message());
}

// fn() with what it may throw as a status.
template <class Fn>
lq_status Guard(Fn&& fn) {
  try {
    return fn();
  } catch (const std::bad_alloc&) {
    return Fail(LQ_OUT_OF_MEMORY, "out of memory");
  } catch (const std::system_error& e) {  // a thread that the system refused
    return Fail(LQ_OUT_OF_MEMORY, e.what());
  }
}

lq_status Null(const char* what) { return Fail(LQ_INVALID_ARGUMENT, std::string(what) + " is null"); }

// A struct of 0.1.0 ended behind these fields; an older one does not exist.
constexpr size_t FirstSize(const lq_shape*) { return offsetof(lq_shape, rope); }
constexpr size_t FirstSize(const lq_rope*) { return sizeof(lq_rope); }
constexpr size_t FirstSize(const lq_cache_options*) { return sizeof(lq_cache_options); }
constexpr size_t FirstSize(const lq_layer*) { return sizeof(lq_layer); }
constexpr size_t FirstSize(const lq_array*) { return sizeof(lq_array); }

template <class T>
lq_status CheckSize(const T* value, const char* name) {
  const size_t size = value->struct_size;
  if (size == sizeof(T) || size == FirstSize(value)) return LQ_OK;
  return Fail(LQ_INVALID_ARGUMENT, std::string(name) + ".struct_size is " + std::to_string(size) +
                                       "; this library knows " + std::to_string(FirstSize(value)) + " and " +
                                       std::to_string(sizeof(T)));
}

// The caller's struct, fields that it does not know 0. REQUIRES CheckSize.
template <class T>
T Known(const T* value) {
  T out = {};
  std::memcpy(&out, value, value->struct_size);
  return out;
}

lq_status RopeOf(const lq_rope* from, int32_t head_dim, livequant::RopeConfig* out) {
  if (const lq_status s = CheckSize(from, "lq_rope"); s != LQ_OK) return s;
  if (from->type == nullptr) return Null("lq_rope.type");
  const livequant::RopeConfig none;
  const auto said = [](double value, double otherwise) { return value == 0 ? otherwise : value; };
  out->type = from->type;
  out->theta = said(from->theta, none.theta);
  out->dims = from->dims == 0 ? head_dim : from->dims;
  out->pairing = static_cast<livequant::RopePairing>(from->interleaved != 0);
  out->factor = said(from->factor, none.factor);
  out->original_max_positions = from->original_max_positions;
  out->low_freq_factor = from->low_freq_factor, out->high_freq_factor = from->high_freq_factor;
  out->beta_fast = from->beta_fast, out->beta_slow = from->beta_slow;
  out->truncate = from->no_truncate == 0;
  out->attention_factor = said(from->attention_factor, none.attention_factor);
  const Status valid = livequant::ValidateRope(*out);
  return valid.ok() ? LQ_OK : Fail(valid);
}

livequant::Result<livequant::CacheSchema> SchemaOf(const char* text, const livequant::CacheShape& shape) {
  return std::strchr(text, '{') != nullptr ? livequant::ParsePolicy(text, shape) : livequant::PresetSchema(text, shape);
}

// The schema of layers that may differ in geometry: for each geometry, the text as if all layers had it, and of that
// the layers that do.
livequant::Result<livequant::CacheSchema> SchemaOfLayers(const char* text, const lq_shape& shape,
                                                         livequant::CacheShape common) {
  const size_t layers = static_cast<size_t>(common.num_layers);
  const auto geometry = [&](size_t l) {
    return std::pair<int, int>(shape.kv_heads != nullptr ? shape.kv_heads[l] : shape.num_kv_heads,
                               shape.head_dims != nullptr ? shape.head_dims[l] : shape.head_dim);
  };
  livequant::CacheSchema out;
  std::set<std::pair<int, int>> seen;
  for (size_t l = 0; l < layers; ++l) {
    if (!seen.insert(geometry(l)).second) continue;
    std::tie(common.num_kv_heads, common.head_dim) = geometry(l);
    auto made = SchemaOf(text, common);
    if (!made.ok())
      return Status(made.status().code(), "layer " + std::to_string(l) + "'s geometry: " + made.status().message());
    if (l == 0) out = *made;
    for (size_t like = l; like < layers; ++like)
      if (geometry(like) == geometry(l)) out.layers[like] = made->layers[like];
  }
  return out;
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

const livequant::LayerSchema* LayerOf(const livequant::CacheSchema& schema, int32_t layer, lq_status* why) {
  const auto& layers = schema.layers;
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
  if (const lq_status s = CheckSize(shape, "lq_shape"); s != LQ_OK) return s;
  return Guard([&] {
    const lq_shape given = Known(shape);
    const bool alike = given.kv_heads == nullptr && given.head_dims == nullptr;
    if (given.num_layers < 1 || given.num_layers > livequant::kMaxLayers)
      return Fail(LQ_INVALID_ARGUMENT, "num_layers is " + std::to_string(given.num_layers) + "; 1 to " +
                                           std::to_string(livequant::kMaxLayers));
    if ((given.kv_heads != nullptr && given.num_kv_heads != 0) || (given.head_dims != nullptr && given.head_dim != 0))
      return Fail(LQ_INVALID_ARGUMENT, "a number for every layer and an array by layer: one of them must be 0 or null");
    livequant::CacheShape s{
        .num_layers = given.num_layers, .num_kv_heads = given.num_kv_heads, .head_dim = given.head_dim, .rope = {}};
    s.rope.dims = given.head_dim;
    if (given.rope != nullptr) {
      if (given.rope_theta != 0)
        return Fail(LQ_INVALID_ARGUMENT, "rope_theta is " + std::to_string(given.rope_theta) +
                                             "; it must be 0 beside rope, part has a theta of its own");
      if (const lq_status r = RopeOf(given.rope, given.head_dim, &s.rope); r != LQ_OK) return r;
    } else if (given.rope_theta != 0) {
      s.rope.theta = given.rope_theta;
    }
    if (given.windows != nullptr) s.windows.assign(given.windows, given.windows + given.num_layers);
    auto made = alike ? SchemaOf(text, s) : SchemaOfLayers(text, given, s);
    if (!made.ok()) return Fail(made.status());
    if (const Status valid = livequant::Validate(*made); !valid.ok()) return Fail(valid);
    *out = new lq_schema{*made, livequant::Digest(*made)};
    return LQ_OK;
  });
}

void lq_schema_free(lq_schema* schema) { delete schema; }
const char* lq_schema_digest(const lq_schema* schema) { return schema == nullptr ? "" : schema->digest.c_str(); }

int32_t lq_schema_num_layers(const lq_schema* schema) {
  return schema == nullptr ? -1 : static_cast<int32_t>(schema->value.layers.size());
}

lq_status lq_schema_layer(const lq_schema* schema, int32_t layer, lq_layer* out) {
  if (schema == nullptr) return Null("schema");
  if (out == nullptr) return Null("out");
  if (const lq_status s = CheckSize(out, "lq_layer"); s != LQ_OK) return s;
  lq_status why;
  const livequant::LayerSchema* l = LayerOf(schema->value, layer, &why);
  if (l == nullptr) return why;
  out->num_kv_heads = l->num_kv_heads, out->head_dim = l->head_dim;
  out->window = l->window, out->pinned_rows = l->pinned_rows;
  out->keys_before_rope = l->k_stage == livequant::RopeStage::kPre;
  return LQ_OK;
}

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
  if (const lq_status s = CheckSize(options, "lq_cache_options"); s != LQ_OK) return s;
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
  if (const lq_status s = CheckSize(options, "lq_cache_options"); s != LQ_OK) return s;
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
  *out = seq->seq;
  return LQ_OK;
}

lq_status lq_sequence_fork(lq_cache* cache, lq_seq parent, lq_seq* out) {
  if (cache == nullptr) return Null("cache");
  if (out == nullptr) return Null("out");
  const auto seq = cache->kv->owner().Fork(parent);
  if (!seq.ok()) return Fail(seq.status());
  *out = seq->seq;
  return LQ_OK;
}

lq_status lq_sequence_truncate(lq_cache* cache, lq_seq seq, int64_t length) {
  if (cache == nullptr) return Null("cache");
  const Status s = cache->kv->owner().Truncate(seq, length).status();
  return s.ok() ? LQ_OK : Fail(s);
}

lq_status lq_sequence_release(lq_cache* cache, lq_seq seq) {
  if (cache == nullptr) return Null("cache");
  const Status s = cache->kv->owner().Release(seq).status();
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
  if (capacity < 0) return Fail(LQ_INVALID_ARGUMENT, "capacity is " + std::to_string(capacity) + "; at least 0");
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
  const livequant::LayerSchema* schema = LayerOf(step->cache->kv->schema(), layer, &why);
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
  const livequant::LayerSchema* schema = LayerOf(step->cache->kv->schema(), layer, &why);
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

namespace {

lq_status CheckTensor(int32_t tensor) {
  if (tensor == 0 || tensor == 1) return LQ_OK;
  return Fail(LQ_INVALID_ARGUMENT, "tensor is " + std::to_string(tensor) + "; 0 is keys, 1 is values");
}

lq_dtype DTypeOf(livequant::DType dtype) {
  switch (dtype) {
    case livequant::DType::kF32:
      return LQ_F32;
    case livequant::DType::kF16:
      return LQ_F16;
    case livequant::DType::kBF16:
      return LQ_BF16;
    case livequant::DType::kFp8E4M3:
    case livequant::DType::kFp8E5M2:
      break;  // codes only, part are bytes
  }
  return LQ_U8;
}

}  // namespace

lq_status lq_lease_array(lq_lease* lease, int32_t layer, int32_t tensor, int32_t part, lq_array* info, void* out,
                         int64_t capacity) {
  if (lease == nullptr) return Null("lease");
  if (info == nullptr) return Null("info");
  if (const lq_status s = CheckSize(info, "lq_array"); s != LQ_OK) return s;
  lq_status why;
  const livequant::LayerSchema* schema = LayerOf(lease->cache->kv->schema(), layer, &why);
  if (schema == nullptr) return why;
  if ((why = CheckTensor(tensor)) != LQ_OK) return why;
  if (part < LQ_CODES || part > LQ_EXACT)
    return Fail(LQ_INVALID_ARGUMENT, "part is " + std::to_string(part) + "; codes, scales, zeros, exact are 0 to 3");
  return Guard([&] {
    const auto index = tensor == 0 ? livequant::kK : livequant::kV;
    const auto planes = livequant::ReadPlanes(*lease->cache->kv, lease->lease, layer, index);
    if (!planes.ok()) return Fail(planes.status());
    const livequant::PlaneShape& s = planes->shape;
    const livequant::TensorCoding& coding = tensor == 0 ? schema->k : schema->v;
    const std::vector<std::byte>* bytes[] = {&planes->codes, &planes->scales, &planes->zeros, &planes->exact};
    const int64_t shapes[][3] = {{s.heads, s.coded_rows(), s.row_bytes},
                                 {s.heads, s.owners, s.each},
                                 {s.heads, s.has_zeros ? s.owners : 0, s.each},
                                 {s.heads, s.exact_rows(), schema->head_dim}};
    info->dtype = part == LQ_CODES ? LQ_U8 : DTypeOf(part == LQ_EXACT ? schema->exact_dtype : coding.qparam);
    std::copy_n(shapes[part], 3, info->shape);
    info->bytes = static_cast<int64_t>(bytes[part]->size());
    if (out == nullptr) return LQ_OK;
    if (capacity < info->bytes)
      return Fail(LQ_OUT_OF_RANGE, "capacity is " + std::to_string(capacity) + "; the array has " +
                                       std::to_string(info->bytes) + " bytes");
    if (info->bytes > 0) std::memcpy(out, bytes[part]->data(), bytes[part]->size());
    return LQ_OK;
  });
}

lq_status lq_lease_read(lq_lease* lease, int32_t layer, int32_t tensor, int32_t head, float* out) {
  if (lease == nullptr) return Null("lease");
  if (out == nullptr) return Null("out");
  lq_status why;
  const livequant::LayerSchema* schema = LayerOf(lease->cache->kv->schema(), layer, &why);
  if (schema == nullptr) return why;
  if ((why = CheckTensor(tensor)) != LQ_OK) return why;
  if (head < 0 || head >= schema->num_kv_heads)
    return Fail(LQ_INVALID_ARGUMENT,
                "head is " + std::to_string(head) + "; KV heads are 0 to " + std::to_string(schema->num_kv_heads - 1));
  return Guard([&] {
    lease->cache->kv->ReadRows(lease->lease, layer, tensor == 0 ? livequant::kK : livequant::kV, head, out);
    return LQ_OK;
  });
}

}  // extern "C"
