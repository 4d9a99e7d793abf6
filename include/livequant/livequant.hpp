// livequant/livequant.hpp: livequant.h for C++20. Header only: handles that free themselves, spans that know their
// length, and errors as exceptions.
//
//   lq::Schema schema("kivi2", {.num_layers = 32, .num_kv_heads = 8, .head_dim = 128});
//   lq::Cache cache(schema, {.max_len = 4096, .max_q_heads = 32});
//   lq::Sequence seq = cache.Open();
//   lq::Step step = cache.Begin(seq, rows);
//   for each layer: step.Prepare(layer, k, v); step.Attend(layer, q, num_q_heads, scale, out);
//   step.Publish();
//
// Why exceptions: constructors here acquire, nearly every call can fail, and C++20 has no std::expected. Who builds
// without them has the C header, and nothing is added here but what a compiler can check: lengths, ownership, order of
// destruction. Handles share their cache: it is freed when the last of them is gone. Threads, strides and what each
// call refuses: as the C function of the same name says.
#pragma once

#include <livequant/livequant.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace lq {

// What a C function refused: its status, and its sentence as what().
class Error : public std::runtime_error {
 public:
  Error(lq_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  lq_status status() const noexcept { return status_; }

 private:
  lq_status status_;
};

// Throws Error unless `status` is LQ_OK.
inline void Check(lq_status status) {
  if (status != LQ_OK) throw Error(status, lq_last_error());
}

// lq_rope, with the defaults said.
struct Rope {
  std::string type = "default";
  double theta = 10000;
  int32_t dims = 0;
  bool interleaved = false;
  double factor = 0;
  int32_t original_max_positions = 0;
  double low_freq_factor = 0, high_freq_factor = 0;
  double beta_fast = 0, beta_slow = 0;
  bool truncate = true;
  double attention_factor = 0;
};

// lq_shape; an empty vector is a null array.
struct Shape {
  int32_t num_layers = 0, num_kv_heads = 0, head_dim = 0;
  std::optional<Rope> rope = {};
  std::vector<int32_t> windows = {}, kv_heads = {}, head_dims = {};
};

class Schema {
 public:
  // lq_schema_create. LQ_INVALID_ARGUMENT also: an array of the shape that is not num_layers long.
  Schema(const std::string& text, const Shape& shape) {
    const auto array = [&](const std::vector<int32_t>& values, const char* name) -> const int32_t* {
      if (values.empty()) return nullptr;
      if (static_cast<int64_t>(values.size()) != shape.num_layers)
        throw Error(LQ_INVALID_ARGUMENT, std::string(name) + " has " + std::to_string(values.size()) + " values for " +
                                             std::to_string(shape.num_layers) + " layers");
      return values.data();
    };
    lq_rope rope = {};
    lq_shape s = {};
    s.struct_size = sizeof(s);
    s.num_layers = shape.num_layers, s.num_kv_heads = shape.num_kv_heads, s.head_dim = shape.head_dim;
    s.windows = array(shape.windows, "windows");
    s.kv_heads = array(shape.kv_heads, "kv_heads"), s.head_dims = array(shape.head_dims, "head_dims");
    if (shape.rope.has_value()) {
      const Rope& r = *shape.rope;
      rope.struct_size = sizeof(rope), rope.type = r.type.c_str(), rope.theta = r.theta, rope.dims = r.dims;
      rope.interleaved = r.interleaved, rope.factor = r.factor;
      rope.original_max_positions = r.original_max_positions;
      rope.low_freq_factor = r.low_freq_factor, rope.high_freq_factor = r.high_freq_factor;
      rope.beta_fast = r.beta_fast, rope.beta_slow = r.beta_slow;
      rope.no_truncate = !r.truncate, rope.attention_factor = r.attention_factor;
      s.rope = &rope;
    }
    lq_schema* raw = nullptr;
    Check(lq_schema_create(text.c_str(), &s, &raw));
    handle_.reset(raw, lq_schema_free);
  }
  std::string Digest() const { return lq_schema_digest(get()); }
  int32_t num_layers() const { return lq_schema_num_layers(get()); }
  lq_layer Layer(int32_t layer) const {
    lq_layer out = {};
    out.struct_size = sizeof(out);
    Check(lq_schema_layer(get(), layer, &out));
    return out;
  }
  lq_ledger Ledger(int64_t tokens) const {
    lq_ledger out = {};
    Check(lq_schema_ledger(get(), tokens, &out));
    return out;
  }
  const lq_schema* get() const { return handle_.get(); }

 private:
  std::shared_ptr<lq_schema> handle_;
};

// lq_cache_options; `memory`, if not empty, must outlive the cache and everything made from it.
struct Options {
  int32_t max_sequences = 1;
  int64_t max_len = 0, pool_tokens = 0;
  int32_t max_step_rows = 512, max_q_heads = 0, threads = 1;
  bool allow_fallback = false;
  int64_t budget_bytes = 0;  // of own memory; 0: none
  std::span<std::byte> memory = {};
};

// Rows at a stride: row r starts at data[r * stride]. Stride 0: rows without gaps, whatever their width.
template <class T>
struct Rows {
  std::span<T> data;
  int64_t stride = 0;
  Rows(std::span<T> values, int64_t row_stride = 0) : data(values), stride(row_stride) {}
  template <class Container>
    requires std::convertible_to<Container&, std::span<T>>
  Rows(Container&& values) : data(values) {}

  // The stride of `rows` rows of `width` values. LQ_INVALID_ARGUMENT: they do not fit in the span.
  int64_t StrideFor(const char* name, int64_t rows, int64_t width) const {
    if (width < 1) return stride;  // no such heads, as the C function will say
    const int64_t used = stride == 0 ? width : stride, size = static_cast<int64_t>(data.size());
    const bool fits = rows <= 1 ? width <= size : used >= width && width <= size && rows - 1 <= (size - width) / used;
    if (fits) return used;
    throw Error(LQ_INVALID_ARGUMENT, std::string(name) + " has " + std::to_string(size) + " values at a stride of " +
                                         std::to_string(used) + "; the step has " + std::to_string(rows) + " rows of " +
                                         std::to_string(width));
  }
};

// One array of a lease.
struct Array {
  lq_dtype dtype;
  int64_t shape[3];
  std::vector<std::byte> bytes;
};
enum class Tensor : int32_t { kKeys = 0, kValues = 1 };

// A sequence as it was; see lq_lease.
class Lease {
 public:
  int64_t length() const { return lq_lease_length(handle_.get()); }
  // [length][head_dim] of one KV head.
  std::vector<float> Read(int32_t layer, Tensor tensor, int32_t head) const {
    std::vector<float> out(static_cast<size_t>(length() * schema_.Layer(layer).head_dim));
    // An empty sequence has no rows to write, and C wants a place all the same.
    float nowhere = 0;
    Check(lq_lease_read(handle_.get(), layer, static_cast<int32_t>(tensor), head, out.empty() ? &nowhere : out.data()));
    return out;
  }
  Array ReadArray(int32_t layer, Tensor tensor, lq_part part) const {
    lq_array info = {};
    info.struct_size = sizeof(info);
    const int32_t which = static_cast<int32_t>(tensor);
    Check(lq_lease_array(handle_.get(), layer, which, part, &info, nullptr, 0));
    Array out{static_cast<lq_dtype>(info.dtype), {info.shape[0], info.shape[1], info.shape[2]}, {}};
    out.bytes.resize(static_cast<size_t>(info.bytes));
    if (info.bytes > 0) Check(lq_lease_array(handle_.get(), layer, which, part, &info, out.bytes.data(), info.bytes));
    return out;
  }

 private:
  friend class Sequence;
  struct Free {
    void operator()(lq_lease* lease) const { lq_lease_free(lease); }
  };
  Lease(std::shared_ptr<lq_cache> cache, Schema schema, lq_lease* lease)
      : cache_(std::move(cache)), schema_(std::move(schema)), handle_(lease) {}
  std::shared_ptr<lq_cache> cache_;  // freed after the lease
  Schema schema_;
  std::unique_ptr<lq_lease, Free> handle_;
};

// Rows of one request, published together. Released when it goes.
class Sequence {
 public:
  Sequence(Sequence&& other) noexcept
      : cache_(std::move(other.cache_)), schema_(std::move(other.schema_)), id_(other.id_) {
    other.cache_ = nullptr;
  }
  Sequence& operator=(Sequence&& other) noexcept {
    std::swap(cache_, other.cache_), std::swap(schema_, other.schema_), std::swap(id_, other.id_);
    return *this;
  }
  ~Sequence() {
    if (cache_ != nullptr) (void)lq_sequence_release(cache_.get(), id_);  // released before: nothing is left to do
  }
  lq_seq id() const { return id_; }
  int64_t length() const {
    int64_t out = 0;
    Check(lq_sequence_length(cache_.get(), id_, &out));
    return out;
  }
  Sequence Fork() const {
    lq_seq out = 0;
    Check(lq_sequence_fork(cache_.get(), id_, &out));
    return {cache_, schema_, out};
  }
  void Truncate(int64_t length) { Check(lq_sequence_truncate(cache_.get(), id_, length)); }
  // Before the end of this object. Every later call is LQ_CLOSED.
  void Release() { Check(lq_sequence_release(cache_.get(), id_)); }
  std::vector<std::byte> State() const {
    int64_t bytes = 0;
    Check(lq_sequence_state(cache_.get(), id_, nullptr, 0, &bytes));
    for (;;) {  // another thread may publish between the two calls
      std::vector<std::byte> out(static_cast<size_t>(bytes));
      Check(lq_sequence_state(cache_.get(), id_, out.data(), static_cast<int64_t>(out.size()), &bytes));
      if (bytes == static_cast<int64_t>(out.size())) return out;
    }
  }
  Lease Acquire() const {
    lq_lease* out = nullptr;
    Check(lq_lease_acquire(cache_.get(), id_, &out));
    return {cache_, schema_, out};
  }

 private:
  friend class Cache;
  Sequence(std::shared_ptr<lq_cache> cache, Schema schema, lq_seq id)
      : cache_(std::move(cache)), schema_(std::move(schema)), id_(id) {}
  std::shared_ptr<lq_cache> cache_;
  Schema schema_;
  lq_seq id_;
};

// One step of a batch; what was not published when it goes never happened.
class Step {
 public:
  int32_t rows() const { return lq_step_rows(handle_.get()); }
  int32_t first_row(int32_t i) const { return lq_step_first_row(handle_.get(), i); }
  int32_t count(int32_t i) const { return lq_step_count(handle_.get(), i); }
  int64_t position(int32_t i) const { return lq_step_position(handle_.get(), i); }
  void Prepare(int32_t layer, Rows<const float> k, Rows<const float> v) {
    const int64_t width = Width(layer, schema_.Layer(layer).num_kv_heads);
    const int64_t k_stride = k.StrideFor("k", rows(), width), v_stride = v.StrideFor("v", rows(), width);
    Check(lq_step_prepare(handle_.get(), layer, k.data.data(), k_stride, v.data.data(), v_stride));
  }
  void Attend(int32_t layer, Rows<const float> q, int32_t num_q_heads, float scale, Rows<float> out) {
    const int64_t width = Width(layer, num_q_heads < 0 ? 0 : num_q_heads);
    const int64_t q_stride = q.StrideFor("q", rows(), width), out_stride = out.StrideFor("out", rows(), width);
    Check(
        lq_step_attend(handle_.get(), layer, q.data.data(), q_stride, num_q_heads, scale, out.data.data(), out_stride));
  }
  void Publish() { Check(lq_step_publish(handle_.get(), nullptr)); }
  // The first accepted[i] rows of request i. LQ_INVALID_ARGUMENT also: not one number a request.
  void Publish(std::span<const int32_t> accepted) {
    if (accepted.size() != requests_)
      throw Error(LQ_INVALID_ARGUMENT, std::to_string(accepted.size()) + " numbers of accepted rows for " +
                                           std::to_string(requests_) + " requests");
    Check(lq_step_publish(handle_.get(), accepted.data()));
  }

 private:
  friend class Cache;
  struct Free {
    void operator()(lq_step* step) const { lq_step_free(step); }
  };
  Step(std::shared_ptr<lq_cache> cache, Schema schema, lq_step* step, size_t requests)
      : cache_(std::move(cache)), schema_(std::move(schema)), handle_(step), requests_(requests) {}
  int64_t Width(int32_t layer, int32_t heads) const { return int64_t{heads} * schema_.Layer(layer).head_dim; }
  std::shared_ptr<lq_cache> cache_;  // freed after the step
  Schema schema_;
  std::unique_ptr<lq_step, Free> handle_;
  size_t requests_;
};

// One request of a step.
struct Append {
  const Sequence* sequence;
  int32_t rows;
  bool draft = false;
};

class Cache {
 public:
  Cache(const Schema& schema, const Options& options) : schema_(schema) {
    const lq_cache_options o = Of(options);
    lq_cache* raw = nullptr;
    Check(lq_cache_create(schema.get(), &o, &raw));
    cache_.reset(raw, lq_cache_free);
  }
  // Bytes that Options::memory needs, aligned to LQ_MEMORY_ALIGNMENT.
  static int64_t MemoryBytes(const Schema& schema, const Options& options) {
    const lq_cache_options o = Of(options);
    int64_t out = 0;
    Check(lq_cache_memory_bytes(schema.get(), &o, &out));
    return out;
  }
  const Schema& schema() const { return schema_; }
  Sequence Open() {
    lq_seq out = 0;
    Check(lq_sequence_open(cache_.get(), &out));
    return {cache_, schema_, out};
  }
  Step Begin(std::span<const Append> requests) {
    std::vector<lq_append> list;
    for (const Append& r : requests) {
      if (r.sequence == nullptr || r.sequence->cache_ != cache_)
        throw Error(LQ_INVALID_ARGUMENT, "request " + std::to_string(list.size()) + ": a sequence of another cache");
      list.push_back({r.sequence->id(), r.rows, r.draft});
    }
    lq_step* out = nullptr;
    Check(lq_begin(cache_.get(), list.data(), static_cast<int32_t>(list.size()), &out));
    return {cache_, schema_, out, list.size()};
  }
  Step Begin(const Sequence& sequence, int32_t rows, bool draft = false) {
    const Append one{&sequence, rows, draft};
    return Begin({&one, 1});
  }
  int64_t used_bytes() const {
    int64_t out = 0;
    Check(lq_cache_used_bytes(cache_.get(), &out));
    return out;
  }
  int64_t fallback_calls() const {
    int64_t out = 0;
    Check(lq_cache_fallback_calls(cache_.get(), &out));
    return out;
  }

 private:
  static lq_cache_options Of(const Options& o) {
    lq_cache_options c = {};
    c.struct_size = sizeof(c);
    c.max_sequences = o.max_sequences, c.max_len = o.max_len, c.pool_tokens = o.pool_tokens;
    c.max_step_rows = o.max_step_rows, c.max_q_heads = o.max_q_heads, c.threads = o.threads;
    c.allow_fallback = o.allow_fallback;
    c.memory = o.memory.empty() ? nullptr : o.memory.data();
    c.memory_bytes = o.memory.empty() ? o.budget_bytes : static_cast<int64_t>(o.memory.size());
    return c;
  }
  Schema schema_;
  std::shared_ptr<lq_cache> cache_;
};

}  // namespace lq
