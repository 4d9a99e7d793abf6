// tests/kv/kv_support.cc: see tests/kv/kv_support.h.
#include "kv/kv_support.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "method/method.h"
#include "numeric/float_formats.h"
#include "support/effort.h"

namespace livequant {
namespace {

const char* const kVariants[] = {
    "mixed",           // layers take kivi2, f16, int4, qserve8 in turn
    "kivi4_k_int8_v",  // K and V of different methods in one layer
    "f16_k_kivi2_v",   //
    "tiles128",        // both tensors close 128 rows at once
    "kivi2_pinned5",   // the first group is a short one
    "kivi2_sync_pinned40",
    "int4_pinned3",       //
    "qserve4_pinned1",    //
    "kivi2_pre",          // keys coded before RoPE
    "int8_pre",           //
    "kivi4_pre_pinned5",  //
    "int8_f32_exact",     // exact rows keep all their bits
    "fp8_e4m3_scaled",    // static scales that are not 1
};

bool StartsWith(const std::string& s, const char* prefix) { return s.rfind(prefix, 0) == 0; }

// A value near a standard normal from a hash.
float NormalFromHash(uint64_t h) {
  double sum = -4;
  for (int i = 0; i < 8; ++i) sum += static_cast<double>((h >> (8 * i)) & 255) / 255;
  return static_cast<float>(sum / 0.8165 + 1e-6 * static_cast<double>(h & 0xFFFF));
}

const Closure& ClosureOf(const LayerSchema& layer, int tensor) {
  return tensor == kK ? layer.k_closure : layer.v_closure;
}
const TensorCoding& CodingOf(const LayerSchema& layer, int tensor) { return tensor == kK ? layer.k : layer.v; }

}  // namespace

const std::vector<std::string>& CaseNames() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all = PresetNames();
    all.insert(all.end(), std::begin(kVariants), std::end(kVariants));
    if (kThreadSanitizer)  // races are not of a format's making: a third of the formats
      for (size_t i = 0; i < all.size(); ++i)
        all.erase(all.begin() + static_cast<std::ptrdiff_t>(i) + 1,
                  all.begin() + static_cast<std::ptrdiff_t>(std::min(i + 3, all.size())));
    return all;
  }();
  return names;
}

CacheSchema CaseSchema(const std::string& name, int layers, int heads, int head_dim) {
  const RopeConfig rope{.theta = 10000.0};
  const auto preset = [&](const std::string& of) {
    auto layer = PresetLayer(of, heads, head_dim);
    EXPECT_TRUE(layer.ok()) << of << ": " << layer.status().ToString();
    return *layer;
  };
  CacheSchema schema;
  schema.rope = rope;
  for (int i = 0; i < layers; ++i) {
    LayerSchema layer;
    if (name == "mixed") {
      const char* const turn[] = {"kivi2", "f16", "int4", "qserve8"};
      layer = preset(turn[i % 4]);
    } else if (name == "kivi4_k_int8_v") {
      layer = preset("kivi4");
      layer.v = preset("int8").v;
      layer.v_closure = preset("int8").v_closure;
    } else if (name == "f16_k_kivi2_v") {
      layer = preset("kivi2");
      layer.k = preset("f16").k;
      layer.k_closure = preset("f16").k_closure;
    } else if (name == "tiles128") {
      layer = preset("kivi4");
      layer.k_closure = layer.v_closure = {0, 128};
    } else if (name == "int8_f32_exact") {
      layer = preset("int8");
      layer.exact_dtype = DType::kF32;
    } else if (name == "fp8_e4m3_scaled") {
      layer = preset("fp8_e4m3");
      layer.k.static_scale = 4.0f;
      layer.v.static_scale = 0.25f;
    } else {
      for (const std::string& p : PresetNames())  // the longest preset that the name begins with
        if (StartsWith(name, p.c_str()) && (name.size() == p.size() || name[p.size()] == '_')) layer = preset(p);
      if (StartsWith(name, "kivi2_sync")) layer = preset("kivi2_sync");
      if (const size_t at = name.find("pinned"); at != std::string::npos)
        layer.pinned_rows = std::stoi(name.substr(at + 6));
      if (name.find("_pre") != std::string::npos) layer.k_stage = RopeStage::kPre;
    }
    schema.layers.push_back(layer);
  }
  if (name == "fp8_e4m3_scaled") schema.provenance.scale_source = "dataset";
  EXPECT_TRUE(Validate(schema).ok()) << name << ": " << Validate(schema).ToString();
  return schema;
}

std::string CaseTestName(const ::testing::TestParamInfo<std::string>& info) { return info.param; }

bool KiviLike(const CacheSchema& schema) {
  return std::any_of(schema.layers.begin(), schema.layers.end(),
                     [](const LayerSchema& l) { return l.k.axis == ScaleAxis::kChannel; });
}

std::vector<Id> Ids(uint64_t stream, int64_t from, int64_t to) {
  std::vector<Id> ids;
  for (int64_t p = from; p < to; ++p) ids.push_back(Mix64(stream * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(p)));
  return ids;
}

void FillRow(Id id, int layer, int tensor, std::span<float> out) {
  for (size_t c = 0; c < out.size(); ++c) {
    const uint64_t channel = Mix64((static_cast<uint64_t>(layer) << 40) ^ (static_cast<uint64_t>(tensor) << 32) ^ c);
    // Some channels are large in every row and few rows have one large value: as keys have them. Queries stay small.
    const float scale = tensor == 2 ? 0.5f : channel % 16 == 0 ? 6.0f : 0.25f + static_cast<float>(channel % 7) * 0.25f;
    out[c] = NormalFromHash(Mix64(id ^ channel)) * scale;
  }
}

// ---- harness ----

Harness::Harness(const CacheSchema& schema, const Options& o) : pool_(o.threads), q_group_(o.q_group) {
  KvOptions options;
  options.max_sequences = o.sequences;
  options.max_len = o.max_len;
  options.max_step_rows = o.step_rows;
  options.pool_tokens = o.pool_tokens;
  options.allow_fallback = o.allow_fallback;
  options.threads = o.threads;
  for (const LayerSchema& layer : schema.layers)
    options.max_q_heads = std::max(options.max_q_heads, layer.num_kv_heads * o.q_group);
  auto cache = KvCache::Open(schema, options);
  EXPECT_TRUE(cache.ok()) << cache.status().ToString();
  LQ_CHECK(cache.ok());
  cache_ = *std::move(cache);
}

SeqId Harness::Open() {
  auto seq = owner().Open();
  EXPECT_TRUE(seq.ok()) << seq.status().ToString();
  LQ_CHECK(seq.ok());
  return seq->seq;
}

Result<KvStep> Harness::Run(std::span<const StepInput> inputs, std::vector<std::vector<RowOutput>>* outputs,
                            bool attend) {
  std::vector<AppendRequest> requests;
  for (const StepInput& input : inputs) requests.push_back({input.seq, static_cast<int>(input.ids.size()), input.mode});
  LQ_ASSIGN_OR_RETURN(KvStep step, cache_->Begin(requests));
  outputs->assign(inputs.size(), {});
  for (size_t i = 0; i < inputs.size(); ++i) (*outputs)[i].resize(static_cast<size_t>(step.count(static_cast<int>(i))));
  std::vector<float> rows[3], out;
  for (size_t l = 0; l < schema().layers.size(); ++l) {
    const LayerSchema& layer = schema().layers[l];
    const size_t width = static_cast<size_t>(layer.num_kv_heads) * layer.head_dim;
    for (int t = 0; t < 3; ++t) {
      const size_t w = t == 2 ? width * q_group_ : width;
      rows[t].assign(static_cast<size_t>(step.rows()) * w, 0.0f);
      for (int i = 0; i < step.sequences(); ++i)
        for (int r = 0; r < step.count(i); ++r)
          FillRow(inputs[i].ids[r], static_cast<int>(l), t, std::span(rows[t]).subspan((step.first_row(i) + r) * w, w));
    }
    const float scale = 1.0f / std::sqrt(static_cast<float>(layer.head_dim));
    out.assign(rows[2].size(), std::numeric_limits<float>::quiet_NaN());
    if (attend && ++attended_ % 2 == 0) {
      LQ_RETURN_IF_ERROR(PrepareAndAttend(step, static_cast<int>(l), rows[0].data(), rows[1].data(), rows[2].data(),
                                          layer.num_kv_heads * q_group_, scale, out.data()));
    } else {
      LQ_RETURN_IF_ERROR(step.Prepare(static_cast<int>(l), rows[0].data(), rows[1].data(), pool_));
      if (!attend) continue;
      LQ_RETURN_IF_ERROR(
          step.Attend(static_cast<int>(l), rows[2].data(), layer.num_kv_heads * q_group_, scale, out.data(), pool_));
    }
    for (int i = 0; i < step.sequences(); ++i)
      for (int r = 0; r < step.count(i); ++r) {
        const float* row = out.data() + (step.first_row(i) + r) * width * q_group_;
        (*outputs)[i][r].insert((*outputs)[i][r].end(), row, row + width * q_group_);
      }
  }
  return step;
}

Status Harness::PrepareAndAttend(KvStep& step, int layer, float* k, float* v, const float* q, int num_q_heads,
                                 float scale, float* out) {
  LQ_RETURN_IF_ERROR(step.Enter(layer, k, v, pool_.threads()));
  std::vector<Status> heard(static_cast<size_t>(pool_.threads()));
  pool_.Together([&](Team& team) {
    heard[static_cast<size_t>(team.thread())] = step.PrepareAndAttend(q, num_q_heads, scale, out, team);
  });
  for (const Status& s : heard) EXPECT_EQ(s.ToString(), heard[0].ToString());
  return heard[0];
}

std::vector<std::vector<RowOutput>> Harness::Append(std::span<const StepInput> inputs, bool attend) {
  std::vector<std::vector<RowOutput>> outputs;
  auto step = Run(inputs, &outputs, attend);
  EXPECT_TRUE(step.ok()) << step.status().ToString();
  if (!step.ok()) return outputs;
  auto receipts = step->Publish();
  EXPECT_TRUE(receipts.ok()) << receipts.status().ToString();
  ExpectSound();
  return outputs;
}

std::vector<RowOutput> Harness::AppendAll(SeqId seq, std::span<const Id> ids, int chunk, bool attend) {
  std::vector<RowOutput> all;
  for (size_t at = 0; at < ids.size() && !::testing::Test::HasFailure(); at += static_cast<size_t>(chunk)) {
    const auto part = ids.subspan(at, std::min(ids.size() - at, static_cast<size_t>(chunk)));
    const StepInput input{seq, {part.begin(), part.end()}};
    std::vector<std::vector<RowOutput>> outputs = Append({&input, 1}, attend);
    for (RowOutput& row : outputs[0]) all.push_back(std::move(row));
  }
  return all;
}

void Harness::ExpectSound() {
  const Status sound = owner().CheckInvariants();
  EXPECT_TRUE(sound.ok()) << sound.ToString();
}

// ---- oracle ----

Shadow::Shadow(const CacheSchema& schema) : schema_(schema), layers_(schema.layers.size()) {}

void Shadow::Append(std::span<const Id> ids) {
  ids_.insert(ids_.end(), ids.begin(), ids.end());
  for (size_t l = 0; l < layers_.size(); ++l)
    for (int t : {kK, kV}) {
      const LayerSchema& layer = schema_.layers[l];
      const TensorCoding& coding = CodingOf(layer, t);
      int64_t& f = layers_[l].f[t];
      const int64_t to = std::max(f, ClosureOf(layer, t).frontier(len()));
      auto& closed = layers_[l].closed[t];
      closed.resize(static_cast<size_t>(to));
      for (int64_t p = std::max<int64_t>(f, layer.pinned_rows); p < to;) {
        const int64_t end =
            coding.axis == ScaleAxis::kChannel ? std::min(to, p / coding.group * coding.group + coding.group) : p + 1;
        auto group = std::make_shared<Closed>();
        group->start = static_cast<int32_t>(p);
        group->ids.assign(ids_.begin() + p, ids_.begin() + end);
        for (; p < end; ++p) closed[static_cast<size_t>(p)] = group;
      }
      f = to;
    }
}

void Shadow::Truncate(int64_t len) {
  ids_.resize(static_cast<size_t>(len));
  for (Layer& layer : layers_)
    for (int t : {kK, kV}) {
      layer.f[t] = std::min(layer.f[t], len);
      layer.closed[t].resize(static_cast<size_t>(layer.f[t]));
    }
}

std::vector<float> Shadow::ExactOf(Id id, int layer, int tensor, int head, bool pinned, int64_t position) const {
  const LayerSchema& s = schema_.layers[static_cast<size_t>(layer)];
  std::vector<float> all(static_cast<size_t>(s.num_kv_heads) * s.head_dim);
  FillRow(id, layer, tensor, all);
  std::vector<float> x(all.begin() + int64_t{head} * s.head_dim, all.begin() + int64_t{head + 1} * s.head_dim);
  if (pinned && tensor == kK && s.k_stage == RopeStage::kPre) {
    const RopeTable table(schema_.rope, s.head_dim, s.pinned_rows);
    const int32_t at = static_cast<int32_t>(position);
    RopeRows({x.data(), 1, s.head_dim}, 1, s.head_dim, {&at, 1}, table);
  }
  for (float& value : x) value = static_cast<float>(RoundTo(s.exact_dtype, value));
  return x;
}

std::vector<float> Shadow::Exact(int layer, int tensor, int head, int64_t position) const {
  return ExactOf(ids_[static_cast<size_t>(position)], layer, tensor, head,
                 position < schema_.layers[static_cast<size_t>(layer)].pinned_rows, position);
}

std::vector<float> Shadow::Coded(int layer, int tensor, int head, int64_t position) const {
  const LayerSchema& s = schema_.layers[static_cast<size_t>(layer)];
  Closed& group = *layers_[static_cast<size_t>(layer)].closed[tensor][static_cast<size_t>(position)];
  const int64_t rows = static_cast<int64_t>(group.ids.size()), d = s.head_dim;
  if (group.decoded.empty()) {
    const BlockFormat format = CodedFormat(s, static_cast<TensorIndex>(tensor));
    const int slot = group.start % s.coded_page_rows;
    group.decoded.resize(static_cast<size_t>(s.num_kv_heads * rows * d));
    for (int h = 0; h < s.num_kv_heads; ++h) {
      std::vector<float> in;
      for (const Id id : group.ids) {
        const std::vector<float> x = ExactOf(id, layer, tensor, h, false, 0);
        in.insert(in.end(), x.begin(), x.end());
      }
      std::vector<std::byte> block(static_cast<size_t>(format.block.bytes));
      const Status encoded = EncodeRows(format, {in.data(), rows, d}, slot, block.data());
      EXPECT_TRUE(encoded.ok()) << encoded.ToString();
      DecodeRowsReference(format, block.data(), slot, {group.decoded.data() + h * rows * d, rows, d});
    }
  }
  const float* row = group.decoded.data() + (head * rows + position - group.start) * d;
  return {row, row + d};
}

std::vector<float> Shadow::AtRest(int layer, int tensor, int head, int64_t position) const {
  const bool coded = position >= schema_.layers[static_cast<size_t>(layer)].pinned_rows &&
                     position < layers_[static_cast<size_t>(layer)].f[tensor];
  return coded ? Coded(layer, tensor, head, position) : Exact(layer, tensor, head, position);
}

namespace {

// The error that a value of a set of values coded together may have. Sources: methods.md 1.1, 4.2, 8.2, 9.1.
double ErrorBound(const TensorCoding& coding, double x, double low, double high) {
  constexpr double kTinyF16 = 0x1p-14;
  const double levels = std::exp2(coding.bits) - 1, largest = std::max(std::abs(low), std::abs(high));
  switch (coding.zero) {
    case ZeroConvention::kNone:
      if (coding.kind == CodeKind::kScaledFp) {
        const double s = coding.static_scale, most = MaxFinite(coding.dtype) * s;
        if (std::abs(x) > most) return std::abs(x) - most;
        const bool e4m3 = coding.dtype == DType::kFp8E4M3;
        return std::max(std::abs(x) * (e4m3 ? 0x1p-4 : 0x1p-3), s * (e4m3 ? 0x1p-10 : 0x1p-17)) * (1 + 1e-6);
      }
      return coding.dtype == DType::kF32 ? 0 : std::abs(x) * (coding.dtype == DType::kF16 ? 0x1p-11 : 0x1p-8) + 0x1p-25;
    case ZeroConvention::kSymmetric: {
      const double s = std::max(largest / (std::exp2(coding.bits - 1) - 1), kTinyF16);
      return s / 2 * (1 + 0x1p-9);
    }
    case ZeroConvention::kMinimum: {
      const double s = (high - low) / levels;
      return s / 2 + 0x1p-10 * (std::abs(low) + std::abs(high)) + levels * 0x1p-24 + kTinyF16;
    }
    case ZeroConvention::kFloatOffset: {
      const double s = std::max((high - low) / levels, kTinyF16);
      return s * (0.5 + 0x1p-9 * (std::abs(low) / s + levels + 1));
    }
  }
  return 0;
}

}  // namespace

double Shadow::WorstErrorOverBound(int layer, int tensor) const {
  const LayerSchema& s = schema_.layers[static_cast<size_t>(layer)];
  const TensorCoding& coding = CodingOf(s, tensor);
  const Layer& state = layers_[static_cast<size_t>(layer)];
  const int d = s.head_dim;
  double worst = 0;
  for (int head = 0; head < s.num_kv_heads; ++head)
    for (int64_t p = s.pinned_rows; p < state.f[tensor]; ++p) {
      const Closed& group = *state.closed[tensor][static_cast<size_t>(p)];
      const std::vector<float> decoded = Coded(layer, tensor, head, p);
      std::vector<std::vector<float>> exact;
      for (const Id id : group.ids) exact.push_back(ExactOf(id, layer, tensor, head, false, 0));
      for (int c = 0; c < d; ++c) {
        const float x = exact[static_cast<size_t>(p - group.start)][static_cast<size_t>(c)];
        float low = x, high = x;
        const auto include = [&](float y) { low = std::min(low, y), high = std::max(high, y); };
        if (coding.axis == ScaleAxis::kChannel)
          for (const auto& row : exact) include(row[static_cast<size_t>(c)]);
        if (coding.axis == ScaleAxis::kRow)
          for (int i = c / coding.group * coding.group; i < (c / coding.group + 1) * coding.group; ++i)
            include(exact[0][i]);
        const double error = std::abs(double{decoded[static_cast<size_t>(c)]} - x),
                     bound = ErrorBound(coding, x, low, high);
        worst = std::max(worst, error == 0 ? 0.0 : bound == 0 ? 1e9 : error / bound);
      }
    }
  return worst;
}

std::vector<RowOutput> Shadow::Attend(const Shadow& before, const Shadow& after, int q_group,
                                      std::vector<double>* limit) {
  const int64_t first = before.len(), len = after.len();
  std::vector<RowOutput> outputs(static_cast<size_t>(len - first));
  for (size_t l = 0; l < after.layers_.size(); ++l) {
    const LayerSchema& s = after.schema_.layers[l];
    const int layer = static_cast<int>(l), d = s.head_dim;
    double largest = 0;
    // The form of row j for the query at q, straight from cache_core.md 2.
    const auto reads_coded = [&](int tensor, int64_t j, int64_t q) {
      const Closure& c = ClosureOf(s, tensor);
      const auto raw = [&](int64_t n) -> int64_t { return n <= c.lag ? 0 : (n - c.lag) / c.step * c.step; };
      const int64_t step = after.schema_.read_step, b = q / step * step;
      const int64_t read = step == 1 ? std::min(q + 1, raw(q)) : std::min(b, raw(b));
      return j >= s.pinned_rows && j < std::max(before.layers_[l].f[tensor], read);
    };
    for (int head = 0; head < s.num_kv_heads; ++head) {
      std::vector<std::vector<float>> rows[2][2];  // [tensor][form][position]
      for (int t : {kK, kV})
        for (int64_t j = 0; j < len; ++j) {
          rows[t][kExact].push_back(after.Exact(layer, t, head, j));
          const bool coded = j >= s.pinned_rows && j < after.layers_[l].f[t];
          rows[t][kCoded].push_back(coded ? after.Coded(layer, t, head, j) : std::vector<float>());
          for (auto* row : {&rows[t][kExact].back(), &rows[t][kCoded].back()}) {
            if (t == kV)
              for (const float x : *row) largest = std::max(largest, std::abs(double{x}));
          }
        }
      const auto key = [&](int form, int64_t j) {
        const std::vector<float>& row = rows[kK][form][static_cast<size_t>(j)];
        std::vector<double> k(row.begin(), row.end());
        if (s.k_stage == RopeStage::kPre && j >= s.pinned_rows)
          for (int i = 0; i < d / 2; ++i) {
            const double angle = static_cast<double>(j) * std::pow(after.schema_.rope.theta, -2.0 * i / d);
            const double x = k[static_cast<size_t>(i)], y = k[static_cast<size_t>(i + d / 2)];
            k[static_cast<size_t>(i)] = x * std::cos(angle) - y * std::sin(angle);
            k[static_cast<size_t>(i + d / 2)] = y * std::cos(angle) + x * std::sin(angle);
          }
        return k;
      };
      std::vector<std::vector<double>> keys[2];
      for (int form : {kCoded, kExact})
        for (int64_t j = 0; j < len; ++j)
          keys[form].push_back(rows[kK][form][static_cast<size_t>(j)].empty() ? std::vector<double>() : key(form, j));
      for (int64_t q = first; q < len; ++q) {
        std::vector<float> query(static_cast<size_t>(s.num_kv_heads * q_group * d));
        FillRow(after.ids_[static_cast<size_t>(q)], layer, 2, query);
        RowOutput& out = outputs[static_cast<size_t>(q - first)];
        if (head == 0) out.resize(out.size() + query.size());
        for (int g = 0; g < q_group; ++g) {
          const size_t at = static_cast<size_t>((head * q_group + g) * d);
          std::vector<double> w(static_cast<size_t>(q + 1)), sum(static_cast<size_t>(d));
          double total = 0, top = -std::numeric_limits<double>::infinity();
          for (int64_t j = 0; j <= q; ++j) {
            const auto& k = keys[reads_coded(kK, j, q) ? kCoded : kExact][static_cast<size_t>(j)];
            double dot = 0;
            for (int c = 0; c < d; ++c) dot += double{query[at + static_cast<size_t>(c)]} * k[static_cast<size_t>(c)];
            w[static_cast<size_t>(j)] = dot / std::sqrt(static_cast<double>(d));
            top = std::max(top, w[static_cast<size_t>(j)]);
          }
          for (double& x : w) total += x = std::exp(x - top);
          for (int64_t j = 0; j <= q; ++j) {
            const auto& v = rows[kV][reads_coded(kV, j, q) ? kCoded : kExact][static_cast<size_t>(j)];
            for (int c = 0; c < d; ++c)
              sum[static_cast<size_t>(c)] += w[static_cast<size_t>(j)] * v[static_cast<size_t>(c)];
          }
          const size_t row_base = out.size() - query.size();
          for (int c = 0; c < d; ++c)
            out[row_base + at + static_cast<size_t>(c)] = static_cast<float>(sum[static_cast<size_t>(c)] / total);
        }
      }
    }
    limit->push_back(largest);
  }
  return outputs;
}

// ---- expectations ----

void ExpectRows(Harness& h, SeqId seq, const Shadow& shadow) {
  auto lease = h.owner().Acquire(seq);
  ASSERT_TRUE(lease.ok()) << lease.status().ToString();
  ASSERT_EQ(lease->length(), shadow.len());
  for (int layer = 0; layer < static_cast<int>(h.schema().layers.size()); ++layer) {
    const LayerSchema& s = h.schema().layers[static_cast<size_t>(layer)];
    for (int t : {kK, kV}) {
      ASSERT_EQ(lease->rows()[static_cast<size_t>(h.owner().class_of_layer(layer))].f[t], shadow.frontier(layer, t));
      for (int head = 0; head < s.num_kv_heads; ++head) {
        std::vector<float> rows(static_cast<size_t>(shadow.len() * s.head_dim), 12345.0f);
        h.cache().ReadRows(*lease, layer, static_cast<TensorIndex>(t), head, rows.data());
        for (int64_t p = 0; p < shadow.len(); ++p) {
          const std::vector<float> want = shadow.AtRest(layer, t, head, p);
          ASSERT_EQ(std::memcmp(want.data(), rows.data() + p * s.head_dim, want.size() * sizeof(float)), 0)
              << "layer " << layer << " tensor " << t << " head " << head << " position " << p << ": "
              << rows[p * s.head_dim] << " instead of " << want[0];
        }
      }
    }
  }
}

void ExpectAttention(Harness& h, const std::vector<RowOutput>& outputs, const Shadow& before, const Shadow& after) {
  std::vector<double> limit;
  const std::vector<RowOutput> want = Shadow::Attend(before, after, h.q_group(), &limit);
  ASSERT_EQ(outputs.size(), want.size());
  for (size_t r = 0; r < want.size(); ++r) {
    ASSERT_EQ(outputs[r].size(), want[r].size());
    size_t at = 0;
    for (size_t l = 0; l < limit.size(); ++l) {
      const LayerSchema& s = h.schema().layers[l];
      for (const size_t end = at + static_cast<size_t>(s.num_kv_heads * h.q_group() * s.head_dim); at < end; ++at)
        ASSERT_NEAR(outputs[r][at], want[r][at], 3e-5 * limit[l]) << "row " << r << " layer " << l << " value " << at;
    }
  }
}

void ExpectThreeClosures(Harness& h) {
  for (const LayerSchema& layer : h.schema().layers) {
    if (layer.k.axis != ScaleAxis::kChannel) continue;
    const OwnerStats stats = h.owner().stats();
    EXPECT_GE(stats.closed_rows[kK], 3 * layer.k_closure.step - layer.pinned_rows);
    EXPECT_GE(stats.closed_groups, (3 * layer.k_closure.step - layer.pinned_rows) / layer.k.group);
  }
}

void ExpectSameOutputs(std::span<const RowOutput> a, std::span<const RowOutput> b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t r = 0; r < a.size(); ++r) {
    ASSERT_EQ(a[r].size(), b[r].size());
    ASSERT_EQ(std::memcmp(a[r].data(), b[r].data(), a[r].size() * sizeof(float)), 0) << "row " << r;
  }
}

}  // namespace livequant
