// model/llama.cc: see llama.h. One forward, one order of operations for decode, prefill and drafts:
//   embed; per layer: norm -> qkv -> RoPE -> Prepare -> Attend -> o -> += -> norm -> gate, up -> silu(gate) * up ->
//   down -> +=; norm, head.
// Every step of it treats rows one by one, so rows that nobody will look at may be left out: behind the last layer's
// attention only logit rows go on.
#include "model/llama.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/matmul.h"
#include "kernels/ops.h"
#include "model/model_files.h"
#include "model/weights.h"

namespace livequant {
namespace {

constexpr int64_t kRowGrain = 16;  // rows of one task of the row operations: one row of decode never forks

// body(first, count) over blocks of rows.
template <class Body>
void ForRows(int64_t rows, ThreadPool& pool, Body&& body) {
  pool.For((rows + kRowGrain - 1) / kRowGrain, [&](int64_t block, int) {
    const int64_t first = block * kRowGrain;
    body(first, std::min(kRowGrain, rows - first));
  });
}

MatrixView<float> Rows(MatrixView<float> m, int64_t first, int64_t count) {
  return {m.row(first), count, m.cols, m.stride};
}

// `from` into rows [first, first + from.rows) of `to`.
void CopyRows(MatrixView<float> from, MatrixView<float> to, int64_t first) {
  LQ_CHECK(from.cols == to.cols && first + from.rows <= to.rows);
  for (int64_t r = 0; r < from.rows; ++r)
    std::memcpy(to.row(first + r), from.row(r), static_cast<size_t>(from.cols) * sizeof(float));
}

// Each row += bias; an empty bias is none.
void AddBias(const std::vector<float>& bias, MatrixView<float> rows) {
  if (bias.empty()) return;
  LQ_CHECK(static_cast<int64_t>(bias.size()) == rows.cols);
  AddRows(MatrixView<const float>(bias.data(), rows.rows, rows.cols, 0), rows);
}

// Every head of every row through one RMSNorm of a head's size; an empty gamma is none. REQUIRES rows without gaps.
void NormHeads(const std::vector<float>& gamma, float eps, MatrixView<float> rows) {
  if (gamma.empty()) return;
  const int64_t d = static_cast<int64_t>(gamma.size());
  LQ_CHECK(rows.stride == rows.cols && rows.cols % d == 0);
  const MatrixView<float> heads(rows.data, rows.rows * (rows.cols / d), d);
  RmsNormRows(heads, gamma.data(), eps, heads);
}

}  // namespace

struct Llama::Impl {
  LlamaConfig config;
  LlamaWeights weights;
  RopeTable rope;
  std::string digest;

  int64_t q_cols() const { return int64_t{config.num_attention_heads} * config.head_dim; }
  int64_t kv_cols() const { return int64_t{config.num_key_value_heads} * config.head_dim; }

  void Embed(std::span<const SequenceTokens> batch, const KvStep& step, Workspace::Impl& w) const;
  Status Attention(const LlamaLayer& layer, int index, RopeStage key_stage, KvStep& step, Workspace::Impl& w,
                   ThreadPool& pool, const AttentionTaps* taps) const;
  void FeedForward(const LlamaLayer& layer, int64_t rows, Workspace::Impl& w, ThreadPool& pool) const;
};

// Buffers by row; a step of n rows uses the first n.
struct Llama::Workspace::Impl {
  int max_rows, max_logit_rows;
  std::vector<float> memory;
  std::vector<int32_t> positions, logit_rows;  // of each row; index among the step's rows of each logit row
  std::vector<AppendRequest> requests;
  MatrixView<float> x, normed, qkv, q, k, v, attended, projected, gate_up, hidden;

  Impl(const LlamaConfig& c, int rows, int logits) : max_rows(rows), max_logit_rows(logits) {
    const int64_t q_cols = int64_t{c.num_attention_heads} * c.head_dim,
                  kv_cols = int64_t{c.num_key_value_heads} * c.head_dim;
    const int64_t h = c.hidden_size, i = c.intermediate_size;
    const std::pair<MatrixView<float>*, int64_t> parts[] = {
        {&x, h},           {&normed, h},  {&qkv, q_cols + 2 * kv_cols}, {&q, q_cols},
        {&k, kv_cols},     {&v, kv_cols}, {&attended, q_cols},          {&projected, h},
        {&gate_up, 2 * i}, {&hidden, i}};
    constexpr int64_t kAlign = 16;  // floats: no two parts share a cache line
    const auto padded = [&](int64_t cols) { return (rows * cols + kAlign - 1) / kAlign * kAlign; };
    int64_t total = 0;
    for (const auto& part : parts) total += padded(part.second);
    memory.resize(static_cast<size_t>(total));
    float* next = memory.data();
    for (const auto& [view, cols] : parts) {
      *view = {next, rows, cols};
      next += padded(cols);
    }
    positions.resize(static_cast<size_t>(rows));
    logit_rows.reserve(static_cast<size_t>(rows));
    requests.reserve(static_cast<size_t>(rows));
  }
  int64_t bytes() const {
    return static_cast<int64_t>(memory.size() * sizeof(float) + positions.size() * sizeof(int32_t) +
                                logit_rows.capacity() * sizeof(int32_t) + requests.capacity() * sizeof(AppendRequest));
  }
};

Llama::Workspace::Workspace() = default;
Llama::Workspace::~Workspace() = default;
int64_t Llama::Workspace::bytes() const { return impl_->bytes(); }

Llama::Llama() : impl_(std::make_unique<Impl>()) {}
Llama::~Llama() = default;
const LlamaConfig& Llama::config() const { return impl_->config; }
const std::string& Llama::digest() const { return impl_->digest; }
int64_t Llama::parameters() const { return impl_->weights.parameters; }
float AttentionScale(const LlamaConfig& config) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(config.head_dim)));
}

int64_t Llama::weight_bytes() const { return impl_->weights.step_bytes; }

Result<std::shared_ptr<const Llama>> Llama::Load(const std::string& path) {
  LQ_ASSIGN_OR_RETURN(const std::unique_ptr<const ModelFiles> files, ModelFiles::Open(path));
  std::shared_ptr<Llama> model(new Llama());
  model->impl_->config = files->config();
  Result<LlamaWeights> weights = ReadLlamaWeights(files->config(), files->weights());
  if (!weights.ok()) return Status(weights.status().code(), fmt::format("{}: {}", path, weights.status().message()));
  model->impl_->weights = *std::move(weights);
  LQ_ASSIGN_OR_RETURN(model->impl_->digest, files->Digest());
  const LlamaConfig& c = model->impl_->config;
  model->impl_->rope = RopeTable(c.rope, c.head_dim, c.max_position_embeddings);
  return std::shared_ptr<const Llama>(std::move(model));
}

std::unique_ptr<Llama::Workspace> Llama::NewWorkspace(int max_rows, int max_logit_rows) const {
  LQ_CHECK(max_logit_rows >= 1 && max_rows >= max_logit_rows);
  std::unique_ptr<Workspace> w(new Workspace());
  w->impl_ = std::make_unique<Workspace::Impl>(impl_->config, max_rows, max_logit_rows);
  return w;
}

// The batch against config, workspace and cache; fills the append requests.
static Status CheckBatch(std::span<const SequenceTokens> batch, const LlamaConfig& c, const KvCache& cache,
                         int max_rows, int max_logit_rows, MatrixView<float> logits,
                         std::vector<AppendRequest>& requests) {
  if (batch.empty()) return Status(Code::kInvalidArgument, "forward: an empty batch");
  int64_t rows = 0, logit_rows = 0;
  requests.clear();
  for (size_t i = 0; i < batch.size(); ++i) {
    const SequenceTokens& s = batch[i];
    const int64_t n = static_cast<int64_t>(s.tokens.size());
    if (n == 0)
      return Status(Code::kInvalidArgument, fmt::format("forward: sequence {} of the batch has no tokens", i));
    rows += n;
    logit_rows += s.all_logits ? n : 1;
    if (rows > max_rows)
      return Status(Code::kInvalidArgument, fmt::format("forward: more than {} rows, the workspace's limit", max_rows));
    for (const int32_t id : s.tokens)
      if (id < 0 || id >= c.vocab_size)
        return Status(Code::kOutOfRange,
                      fmt::format("token id {} is outside the vocabulary: ids are 0 to {}", id, c.vocab_size - 1));
    const int64_t length = cache.owner().length(s.seq);
    if (length + n > c.max_position_embeddings)
      return Status(Code::kOutOfRange, fmt::format("{} rows and {} more exceed max_position_embeddings, {}", length, n,
                                                   c.max_position_embeddings));
    requests.push_back({.seq = s.seq, .rows = static_cast<int>(n), .mode = s.mode});
  }
  if (logit_rows > max_logit_rows)
    return Status(Code::kInvalidArgument,
                  fmt::format("forward: {} logit rows; the workspace has {}", logit_rows, max_logit_rows));
  if (logits.rows != logit_rows || logits.cols != c.vocab_size)
    return Status(Code::kInvalidArgument, fmt::format("forward: logits are [{}, {}]; this batch needs [{}, {}]",
                                                      logits.rows, logits.cols, logit_rows, c.vocab_size));
  return {};
}

void Llama::Impl::Embed(std::span<const SequenceTokens> batch, const KvStep& step, Workspace::Impl& w) const {
  const int64_t row_bytes = config.hidden_size * DTypeBytes(weights.embedding_dtype);
  w.logit_rows.clear();
  int32_t row = 0;
  for (size_t i = 0; i < batch.size(); ++i) {
    const int n = step.count(static_cast<int>(i));
    LQ_CHECK(step.first_row(static_cast<int>(i)) == row);
    for (int t = 0; t < n; ++t, ++row) {
      WidenValues(weights.embedding_dtype,
                  weights.embedding.data() + batch[i].tokens[static_cast<size_t>(t)] * row_bytes, config.hidden_size,
                  w.x.row(row));
      w.positions[static_cast<size_t>(row)] = static_cast<int32_t>(step.position(static_cast<int>(i)) + t);
      if (batch[i].all_logits || t == n - 1) w.logit_rows.push_back(row);
    }
  }
}

// x[rows] -> attended[rows], the layer's K and V rows handed to the step.
Status Llama::Impl::Attention(const LlamaLayer& layer, int index, RopeStage key_stage, KvStep& step, Workspace::Impl& w,
                              ThreadPool& pool, const AttentionTaps* taps) const {
  const int64_t rows = step.rows(), nq = q_cols(), nk = kv_cols();
  ForRows(rows, pool, [&](int64_t first, int64_t n) {
    RmsNormRows(Rows(w.x, first, n), layer.input_norm.data(), config.rms_norm_eps, Rows(w.normed, first, n));
  });
  MatMul(Rows(w.normed, 0, rows), layer.qkv, Rows(w.qkv, 0, rows), pool);
  ForRows(rows, pool, [&](int64_t first, int64_t n) {
    AddBias(layer.qkv_bias, Rows(w.qkv, first, n));
    for (int64_t r = first; r < first + n; ++r) {
      const float* from = w.qkv.row(r);
      std::memcpy(w.q.row(r), from, static_cast<size_t>(nq) * sizeof(float));
      std::memcpy(w.k.row(r), from + nq, static_cast<size_t>(nk) * sizeof(float));
      std::memcpy(w.v.row(r), from + nq + nk, static_cast<size_t>(nk) * sizeof(float));
    }
    NormHeads(layer.q_norm, config.rms_norm_eps, Rows(w.q, first, n));
    NormHeads(layer.k_norm, config.rms_norm_eps, Rows(w.k, first, n));
    const auto positions =
        std::span<const int32_t>(w.positions).subspan(static_cast<size_t>(first), static_cast<size_t>(n));
    RopeRows(Rows(w.q, first, n), config.num_attention_heads, config.head_dim, positions, rope);
    if (key_stage == RopeStage::kPost)
      RopeRows(Rows(w.k, first, n), config.num_key_value_heads, config.head_dim, positions, rope);
  });
  if (taps != nullptr) {  // Prepare rounds k and v in place
    CopyRows(Rows(w.k, 0, rows), taps->k, index * rows);
    CopyRows(Rows(w.v, 0, rows), taps->v, index * rows);
    CopyRows(Rows(w.q, 0, rows), taps->q, index * rows);
  }
  LQ_RETURN_IF_ERROR(step.Prepare(index, w.k.data, w.v.data, pool));
  LQ_RETURN_IF_ERROR(
      step.Attend(index, w.q.data, config.num_attention_heads, AttentionScale(config), w.attended.data, pool));
  if (taps != nullptr) CopyRows(Rows(w.attended, 0, rows), taps->out, index * rows);
  return {};
}

// x[rows] += o(attended[rows]); x += mlp(norm(x)).
void Llama::Impl::FeedForward(const LlamaLayer& layer, int64_t rows, Workspace::Impl& w, ThreadPool& pool) const {
  const int64_t i = config.intermediate_size;
  MatMul(Rows(w.attended, 0, rows), layer.o, Rows(w.projected, 0, rows), pool);
  ForRows(rows, pool, [&](int64_t first, int64_t n) {
    AddBias(layer.o_bias, Rows(w.projected, first, n));
    AddRows(Rows(w.projected, first, n), Rows(w.x, first, n));
    RmsNormRows(Rows(w.x, first, n), layer.post_attention_norm.data(), config.rms_norm_eps, Rows(w.normed, first, n));
  });
  MatMul(Rows(w.normed, 0, rows), layer.gate_up, Rows(w.gate_up, 0, rows), pool);
  ForRows(rows, pool, [&](int64_t first, int64_t n) {
    const MatrixView<float> both = Rows(w.gate_up, first, n);
    AddBias(layer.gate_up_bias, both);
    SiluMulRows(MatrixView<float>(both.data, n, i, both.stride), MatrixView<float>(both.data + i, n, i, both.stride),
                Rows(w.hidden, first, n));
  });
  MatMul(Rows(w.hidden, 0, rows), layer.down, Rows(w.projected, 0, rows), pool);
  ForRows(rows, pool, [&](int64_t first, int64_t n) {
    AddBias(layer.down_bias, Rows(w.projected, first, n));
    AddRows(Rows(w.projected, first, n), Rows(w.x, first, n));
  });
}

Result<KvStep> Llama::Forward(std::span<const SequenceTokens> batch, KvCache& cache, Workspace& workspace,
                              MatrixView<float> logits, ThreadPool& pool, MatrixView<float> residuals,
                              const AttentionTaps* taps) const {
  const LlamaConfig& c = impl_->config;
  Workspace::Impl& w = *workspace.impl_;
  LQ_CHECK(w.x.cols == c.hidden_size && static_cast<int>(cache.schema().layers.size()) == c.num_hidden_layers);
  LQ_RETURN_IF_ERROR(CheckBatch(batch, c, cache, w.max_rows, w.max_logit_rows, logits, w.requests));
  LQ_ASSIGN_OR_RETURN(KvStep step, cache.Begin(w.requests));
  impl_->Embed(batch, step, w);
  const int64_t logit_rows = static_cast<int64_t>(w.logit_rows.size());
  LQ_CHECK(residuals.data == nullptr ||
           (residuals.rows == c.num_hidden_layers * logit_rows && residuals.cols == c.hidden_size));
  for (int l = 0; l < c.num_hidden_layers; ++l) {
    const LlamaLayer& layer = impl_->weights.layers[static_cast<size_t>(l)];
    LQ_RETURN_IF_ERROR(
        impl_->Attention(layer, l, cache.schema().layers[static_cast<size_t>(l)].k_stage, step, w, pool, taps));
    int64_t rows = step.rows();
    if (l == c.num_hidden_layers - 1 &&
        logit_rows < rows) {  // logit_rows rises, so each row moves down and nothing is overwritten early
      for (int64_t i = 0; i < logit_rows; ++i) {
        const int64_t from = w.logit_rows[static_cast<size_t>(i)];
        if (from == i) continue;
        std::memcpy(w.x.row(i), w.x.row(from), static_cast<size_t>(w.x.cols) * sizeof(float));
        std::memcpy(w.attended.row(i), w.attended.row(from), static_cast<size_t>(w.attended.cols) * sizeof(float));
      }
      for (int64_t i = 0; i < logit_rows; ++i) w.logit_rows[static_cast<size_t>(i)] = static_cast<int32_t>(i);
      rows = logit_rows;
    }
    impl_->FeedForward(layer, rows, w, pool);
    if (residuals.data != nullptr)
      for (int64_t i = 0; i < logit_rows; ++i)
        std::memcpy(residuals.row(l * logit_rows + i), w.x.row(w.logit_rows[static_cast<size_t>(i)]),
                    static_cast<size_t>(w.x.cols) * sizeof(float));
  }
  ForRows(logit_rows, pool, [&](int64_t first, int64_t n) {
    RmsNormRows(Rows(w.x, first, n), impl_->weights.final_norm.data(), c.rms_norm_eps, Rows(w.normed, first, n));
  });
  MatMul(Rows(w.normed, 0, logit_rows), impl_->weights.lm_head, Rows(logits, 0, logit_rows), pool);
  return step;
}

Status Llama::Step(std::span<const SequenceTokens> batch, KvCache& cache, Workspace& workspace,
                   MatrixView<float> logits, ThreadPool& pool) const {
  LQ_ASSIGN_OR_RETURN(KvStep step, Forward(batch, cache, workspace, logits, pool));
  return step.Publish().status();
}

}  // namespace livequant
