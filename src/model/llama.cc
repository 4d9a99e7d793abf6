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

constexpr int64_t kRowGrain = 16;  // rows of one task of the row operations
// Up to so many rows every thread of a team does for itself, in buffers of its own: done before another's would be
// here.
constexpr int64_t kOwnRows = 4;

MatrixView<float> Columns(MatrixView<float> m, int64_t first, int64_t count) {
  return {m.data + first, m.rows, count, m.stride};
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

// Each row += columns [first, first + rows.cols) of bias; an empty bias is none.
void AddBias(const std::vector<float>& bias, int64_t first, MatrixView<float> rows) {
  if (bias.empty()) return;
  LQ_CHECK(static_cast<int64_t>(bias.size()) >= first + rows.cols);
  AddRows(MatrixView<const float>(bias.data() + first, rows.rows, rows.cols, 0), rows);
}

// Every head of every row through one RMSNorm of a head's size; an empty gamma is none.
void NormHeads(const std::vector<float>& gamma, float eps, MatrixView<float> rows) {
  if (gamma.empty()) return;
  const int64_t d = static_cast<int64_t>(gamma.size());
  LQ_CHECK(rows.cols % d == 0);
  for (int64_t c = 0; c < rows.cols; c += d) RmsNormRows(Columns(rows, c, d), gamma.data(), eps, Columns(rows, c, d));
}

// `rows` and a bias, in `to`: rows of a step may belong to all threads, so none adds to them. Without a bias `rows`.
MatrixView<float> OwnCopy(const std::vector<float>& bias, MatrixView<float> rows, MatrixView<float> to) {
  if (bias.empty()) return rows;
  if (to.data != rows.data) CopyRows(rows, to, 0);
  AddBias(bias, 0, to);
  return to;
}

}  // namespace

struct Llama::Impl {
  LlamaConfig config;
  LlamaWeights weights;
  RopeTable rope;
  std::string digest;

  struct Run;
};

// Buffers by row; a step of n rows uses the first n. A row that every thread does for itself has a place on each.
struct Llama::Workspace::Impl {
  // What follows from a row alone: the residual stream, and what is normed or added to it next.
  struct Own {
    MatrixView<float> x, normed;
  };

  int max_rows, max_logit_rows;
  std::vector<float> memory, own_memory;
  std::vector<int32_t> positions, logit_rows;  // of each row; index among the step's rows of each logit row
  std::vector<AppendRequest> requests;
  Status entered;        // what thread 0 heard when the step entered a layer
  Own all;               // of steps with many rows
  std::vector<Own> own;  // by thread, of steps with few
  MatrixView<float> qkv, q, k, v, attended, projected, gate_up, hidden;

  Impl(const LlamaConfig& c, int rows, int logits) : max_rows(rows), max_logit_rows(logits) {
    const int64_t q_cols = int64_t{c.num_attention_heads} * c.head_dim,
                  kv_cols = int64_t{c.num_key_value_heads} * c.head_dim;
    const int64_t h = c.hidden_size, i = c.intermediate_size;
    Place(memory, rows,
          {{&all.x, h},
           {&all.normed, h},
           {&qkv, q_cols + 2 * kv_cols},
           {&q, q_cols},
           {&k, kv_cols},
           {&v, kv_cols},
           {&attended, q_cols},
           {&projected, h},
           {&gate_up, 2 * i},
           {&hidden, i}});
    positions.resize(static_cast<size_t>(rows));
    logit_rows.reserve(static_cast<size_t>(rows));
    requests.reserve(static_cast<size_t>(rows));
  }

  // Places for `threads` threads; made anew when a wider pool comes.
  void MakeOwn(int threads) {
    if (static_cast<size_t>(threads) <= own.size()) return;
    own.resize(static_cast<size_t>(threads));
    std::vector<std::pair<MatrixView<float>*, int64_t>> parts;
    for (Own& o : own) parts.insert(parts.end(), {{&o.x, all.x.cols}, {&o.normed, all.normed.cols}});
    Place(own_memory, std::min<int64_t>(kOwnRows, max_rows), parts);
  }

  int64_t bytes() const {
    return static_cast<int64_t>((memory.size() + own_memory.size()) * sizeof(float) +
                                positions.size() * sizeof(int32_t) + logit_rows.capacity() * sizeof(int32_t) +
                                requests.capacity() * sizeof(AppendRequest));
  }

 private:
  // Matrices of `rows` rows and so many columns, one behind the other.
  static void Place(std::vector<float>& memory, int64_t rows,
                    const std::vector<std::pair<MatrixView<float>*, int64_t>>& parts) {
    constexpr int64_t kAlign = 16;  // floats: no two parts share a cache line
    const auto padded = [&](int64_t cols) { return (rows * cols + kAlign - 1) / kAlign * kAlign; };
    int64_t total = 0;
    for (const auto& part : parts) total += padded(part.second);
    memory.resize(static_cast<size_t>(total) + kAlign);
    float* next = memory.data() + kAlign - reinterpret_cast<uintptr_t>(memory.data()) / sizeof(float) % kAlign;
    for (const auto& [view, cols] : parts) {
      *view = {next, rows, cols};
      next += padded(cols);
    }
  }
};

// One step as a team runs it: every thread has one of these and goes through the same calls.
struct Llama::Impl::Run {
  const Impl& model;
  std::span<const SequenceTokens> batch;
  KvStep& step;
  Workspace::Impl& w;
  const AttentionTaps* taps;
  Team& team;
  int64_t group, qkv_cols;   // query heads a KV head; columns of qkv a KV head
  bool few;                  // rows, so that each thread does them all in a place of its own
  Workspace::Impl::Own own;  // this thread's place, or everybody's

  Run(const Impl& model, std::span<const SequenceTokens> batch, KvStep& step, Workspace::Impl& w,
      const AttentionTaps* taps, Team& team)
      : model(model),
        batch(batch),
        step(step),
        w(w),
        taps(taps),
        team(team),
        group(model.config.num_attention_heads / model.config.num_key_value_heads),
        qkv_cols((group + 2) * model.config.head_dim),
        few(step.rows() <= kOwnRows),
        own(few ? w.own[static_cast<size_t>(team.thread())] : w.all) {}

  // body(first, count) over blocks of rows: every thread all of them if they are few, else shared out, with a barrier
  // at the end.
  template <class Body>
  void ForRows(int64_t rows, Body&& body) {
    if (few) return body(0, rows);
    team.For((rows + kRowGrain - 1) / kRowGrain, [&](int64_t block, int) {
      const int64_t first = block * kRowGrain;
      body(first, std::min(kRowGrain, rows - first));
    });
  }

  void Embed();
  Status Attention(const LlamaLayer& layer, int index, RopeStage key_stage);
  void PrepareHeads(const LlamaLayer& layer, RopeStage key_stage, int64_t first, int64_t count, Team::Range kv_heads);
  int64_t KeepLogitRows();
  void FeedForward(const LlamaLayer& layer, int64_t rows);
  void HiddenUnits(const LlamaLayer& layer, int64_t first_row, int64_t rows, Team::Range columns);
  void AddProjected(const std::vector<float>& bias, int64_t first, int64_t n);
  Status Layers(const CacheSchema& schema, MatrixView<float> logits, MatrixView<float> residuals);
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

void Llama::Impl::Run::Embed() {
  const int64_t row_bytes = model.config.hidden_size * DTypeBytes(model.weights.embedding_dtype);
  ForRows(step.rows(), [&](int64_t first, int64_t count) {
    for (size_t i = 0; i < batch.size(); ++i) {
      const int64_t base = step.first_row(static_cast<int>(i)), n = step.count(static_cast<int>(i));
      for (int64_t r = std::max(first, base); r < std::min(first + count, base + n); ++r)
        WidenValues(model.weights.embedding_dtype,
                    model.weights.embedding.data() + batch[i].tokens[static_cast<size_t>(r - base)] * row_bytes,
                    model.config.hidden_size, own.x.row(r));
    }
  });
}

// Rows [first, first + count) of q, k and v from qkv, for these KV heads and their query heads: bias, norm, RoPE.
void Llama::Impl::Run::PrepareHeads(const LlamaLayer& layer, RopeStage key_stage, int64_t first, int64_t count,
                                    Team::Range kv_heads) {
  const LlamaConfig& c = model.config;
  const int64_t d = c.head_dim, heads = kv_heads.end - kv_heads.begin;
  if (heads == 0) return;
  // Columns of all these heads in one of the three, `width` a KV head, which begin at `offset` in a KV head's part of
  // qkv.
  const auto take = [&](MatrixView<float> to, int64_t offset, int64_t width) {
    const MatrixView<float> rows = Columns(Rows(to, first, count), kv_heads.begin * width, heads * width);
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t from = (kv_heads.begin + h) * qkv_cols + offset;
      const MatrixView<float> part = Columns(rows, h * width, width);
      CopyRows(Columns(Rows(w.qkv, first, count), from, width), part, 0);
      AddBias(layer.qkv_bias, from, part);
    }
    return rows;
  };
  const auto positions =
      std::span<const int32_t>(w.positions).subspan(static_cast<size_t>(first), static_cast<size_t>(count));
  const MatrixView<float> q = take(w.q, 0, group * d), k = take(w.k, group * d, d);
  take(w.v, (group + 1) * d, d);
  NormHeads(layer.q_norm, c.rms_norm_eps, q);
  NormHeads(layer.k_norm, c.rms_norm_eps, k);
  RopeRows(q, static_cast<int>(heads * group), c.head_dim, positions, model.rope);
  if (key_stage == RopeStage::kPost) RopeRows(k, static_cast<int>(heads), c.head_dim, positions, model.rope);
}

// own.x[rows] -> attended[rows], the layer's K and V rows handed to the step, which has entered it.
Status Llama::Impl::Run::Attention(const LlamaLayer& layer, int index, RopeStage key_stage) {
  const int64_t rows = step.rows();
  const LlamaConfig& c = model.config;
  ForRows(rows, [&](int64_t first, int64_t n) {
    RmsNormRows(Rows(own.x, first, n), layer.input_norm.data(), c.rms_norm_eps, Rows(own.normed, first, n));
  });
  if (few && step.ByHead(team) && qkv_cols % PackedMatrix::kPanel == 0) {
    // A thread needs nothing but its own heads until their attention is done.
    const Team::Range heads = team.Share(c.num_key_value_heads);
    MatMulColumns(Rows(own.normed, 0, rows), layer.qkv, heads.begin * qkv_cols, (heads.end - heads.begin) * qkv_cols,
                  Rows(w.qkv, 0, rows));
    PrepareHeads(layer, key_stage, 0, rows, heads);
  } else {
    MatMul(Rows(own.normed, 0, rows), layer.qkv, Rows(w.qkv, 0, rows), team);
    if (few) {
      PrepareHeads(layer, key_stage, 0, rows, team.Share(c.num_key_value_heads));
    } else {
      ForRows(rows, [&](int64_t first, int64_t n) {
        PrepareHeads(layer, key_stage, first, n, {0, c.num_key_value_heads});
      });
    }
  }
  if (taps != nullptr) {  // before the step rounds k and v in place
    team.Barrier();
    if (team.thread() == 0) {
      CopyRows(Rows(w.k, 0, rows), taps->k, index * rows);
      CopyRows(Rows(w.v, 0, rows), taps->v, index * rows);
      CopyRows(Rows(w.q, 0, rows), taps->q, index * rows);
    }
    team.Barrier();
  }
  LQ_RETURN_IF_ERROR(step.PrepareAndAttend(w.q.data, c.num_attention_heads, AttentionScale(c), w.attended.data, team));
  if (taps != nullptr && team.thread() == 0) CopyRows(Rows(w.attended, 0, rows), taps->out, index * rows);
  return {};
}

// Behind the last layer's attention only logit rows go on: they move to the front. Returns how many there are.
int64_t Llama::Impl::Run::KeepLogitRows() {
  const int64_t kept = static_cast<int64_t>(w.logit_rows.size());
  if (kept == step.rows()) return kept;
  // logit_rows rises, so each row moves down and nothing is overwritten early.
  const auto move = [&](MatrixView<float> m) {
    for (int64_t i = 0; i < kept; ++i)
      if (const int64_t from = w.logit_rows[static_cast<size_t>(i)]; from != i)
        std::memcpy(m.row(i), m.row(from), static_cast<size_t>(m.cols) * sizeof(float));
  };
  if (few || team.thread() == 0) move(own.x);
  if (team.thread() == 0) move(w.attended);
  team.Barrier();
  return kept;
}

// Hidden units of rows [first_row, first_row + rows) from gate and up, for these columns of gate_up: whole turns.
void Llama::Impl::Run::HiddenUnits(const LlamaLayer& layer, int64_t first_row, int64_t rows, Team::Range columns) {
  if (columns.begin == columns.end) return;
  AddBias(layer.gate_up_bias, columns.begin,
          Columns(Rows(w.gate_up, first_row, rows), columns.begin, columns.end - columns.begin));
  const int64_t turns = (columns.end - columns.begin) / (2 * kUnits), whole = turns * 2 * kUnits;
  const int64_t rest = (columns.end - columns.begin - whole) / 2;
  for (int64_t r = first_row; r < first_row + rows; ++r) {
    float *gate = w.gate_up.row(r) + columns.begin, *hidden = w.hidden.row(r) + columns.begin / 2;
    const auto units = [](float* p, int64_t turns, int64_t n, int64_t stride) {
      return MatrixView<float>(p, turns, n, stride);
    };
    if (turns > 0)
      SiluMulRows(units(gate, turns, kUnits, 2 * kUnits), units(gate + kUnits, turns, kUnits, 2 * kUnits),
                  units(hidden, turns, kUnits, kUnits));
    if (rest > 0)
      SiluMulRows(units(gate + whole, 1, rest, rest), units(gate + whole + rest, 1, rest, rest),
                  units(hidden + whole / 2, 1, rest, rest));
  }
}

// own.x[rows] += o(attended[rows]); own.x += mlp(norm(own.x)).
void Llama::Impl::Run::FeedForward(const LlamaLayer& layer, int64_t rows) {
  const LlamaConfig& c = model.config;
  const int64_t i = c.intermediate_size;
  MatMul(Rows(w.attended, 0, rows), layer.o, Rows(w.projected, 0, rows), team);
  ForRows(rows, [&](int64_t first, int64_t n) {
    AddProjected(layer.o_bias, first, n);
    RmsNormRows(Rows(own.x, first, n), layer.post_attention_norm.data(), c.rms_norm_eps, Rows(own.normed, first, n));
  });
  if (few) {  // each thread its units: their gates and ups, and what becomes of them
    const Team::Range turns = team.Share((i + kUnits - 1) / kUnits);
    const Team::Range columns = {turns.begin * 2 * kUnits, std::min(turns.end * 2 * kUnits, 2 * i)};
    MatMulColumns(Rows(own.normed, 0, rows), layer.gate_up, columns.begin, columns.end - columns.begin,
                  Rows(w.gate_up, 0, rows));
    HiddenUnits(layer, 0, rows, columns);
    team.Barrier();
  } else {
    MatMul(Rows(own.normed, 0, rows), layer.gate_up, Rows(w.gate_up, 0, rows), team);
    ForRows(rows, [&](int64_t first, int64_t n) { HiddenUnits(layer, first, n, {0, 2 * i}); });
  }
  MatMul(Rows(w.hidden, 0, rows), layer.down, Rows(w.projected, 0, rows), team);
  ForRows(rows, [&](int64_t first, int64_t n) { AddProjected(layer.down_bias, first, n); });
}

// own.x += projected + bias, rows [first, first + n).
void Llama::Impl::Run::AddProjected(const std::vector<float>& bias, int64_t first, int64_t n) {
  AddRows(OwnCopy(bias, Rows(w.projected, first, n), Rows(own.normed, first, n)), Rows(own.x, first, n));
}

Status Llama::Impl::Run::Layers(const CacheSchema& schema, MatrixView<float> logits, MatrixView<float> residuals) {
  const LlamaConfig& c = model.config;
  const int last = c.num_hidden_layers - 1;
  Embed();
  const int64_t logit_rows = static_cast<int64_t>(w.logit_rows.size());
  for (int l = 0; l <= last; ++l) {
    const LlamaLayer& layer = model.weights.layers[static_cast<size_t>(l)];
    LQ_RETURN_IF_ERROR(Attention(layer, l, schema.layers[static_cast<size_t>(l)].k_stage));
    // Behind a barrier of the attention before, and before one of the feed-forward.
    if (l < last && team.thread() == 0) w.entered = step.Enter(l + 1, w.k.data, w.v.data, team.threads());
    FeedForward(layer, l == last ? KeepLogitRows() : step.rows());
    if (!w.entered.ok()) return w.entered;
    if (residuals.data != nullptr && team.thread() == 0)
      for (int64_t i = 0; i < logit_rows; ++i)
        std::memcpy(residuals.row(l * logit_rows + i), own.x.row(l == last ? i : w.logit_rows[static_cast<size_t>(i)]),
                    static_cast<size_t>(own.x.cols) * sizeof(float));
  }
  ForRows(logit_rows, [&](int64_t first, int64_t n) {
    RmsNormRows(Rows(own.x, first, n), model.weights.final_norm.data(), c.rms_norm_eps, Rows(own.normed, first, n));
  });
  MatMul(Rows(own.normed, 0, logit_rows), model.weights.lm_head, Rows(logits, 0, logit_rows), team);
  return {};
}

Result<KvStep> Llama::Forward(std::span<const SequenceTokens> batch, KvCache& cache, Workspace& workspace,
                              MatrixView<float> logits, ThreadPool& pool, MatrixView<float> residuals,
                              const AttentionTaps* taps) const {
  const LlamaConfig& c = impl_->config;
  Workspace::Impl& w = *workspace.impl_;
  LQ_CHECK(w.all.x.cols == c.hidden_size && static_cast<int>(cache.schema().layers.size()) == c.num_hidden_layers);
  LQ_RETURN_IF_ERROR(CheckBatch(batch, c, cache, w.max_rows, w.max_logit_rows, logits, w.requests));
  LQ_ASSIGN_OR_RETURN(KvStep step, cache.Begin(w.requests));
  w.logit_rows.clear();
  for (size_t i = 0; i < batch.size(); ++i) {
    const int n = step.count(static_cast<int>(i)), base = step.first_row(static_cast<int>(i));
    for (int t = 0; t < n; ++t) {
      w.positions[static_cast<size_t>(base + t)] = static_cast<int32_t>(step.position(static_cast<int>(i)) + t);
      if (batch[i].all_logits || t == n - 1) w.logit_rows.push_back(base + t);
    }
  }
  const int64_t logit_rows = static_cast<int64_t>(w.logit_rows.size());
  LQ_CHECK(residuals.data == nullptr ||
           (residuals.rows == c.num_hidden_layers * logit_rows && residuals.cols == c.hidden_size));
  w.MakeOwn(pool.threads());
  w.entered = step.Enter(0, w.k.data, w.v.data, pool.threads());
  if (!w.entered.ok()) return w.entered;
  Status status;
  pool.Together([&](Team& team) {
    Status mine = Impl::Run(*impl_, batch, step, w, taps, team).Layers(cache.schema(), logits, residuals);
    if (team.thread() == 0) status = std::move(mine);
  });
  if (!status.ok()) return status;
  return step;
}

Status Llama::Step(std::span<const SequenceTokens> batch, KvCache& cache, Workspace& workspace,
                   MatrixView<float> logits, ThreadPool& pool) const {
  LQ_ASSIGN_OR_RETURN(KvStep step, Forward(batch, cache, workspace, logits, pool));
  return step.Publish().status();
}

}  // namespace livequant
