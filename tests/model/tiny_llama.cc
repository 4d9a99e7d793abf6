// tests/model/tiny_llama.cc: see tiny_llama.h.
#include "model/tiny_llama.h"

#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>

#include "base/check.h"

namespace livequant {
namespace {

// Nearest even, by hand: the tests' own rounding. Only values far from overflow and from subnormals are given.
uint16_t Bf16Bits(float x) {
  const uint32_t b = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((b + 0x7FFF + ((b >> 16) & 1)) >> 16);
}
uint16_t F16Bits(float x) {
  if (x == 0) return 0;
  int exponent;
  const double m = std::frexp(std::fabs(static_cast<double>(x)), &exponent);  // m in [0.5, 1)
  int e = exponent + 14;
  if (e < 1) return 0;
  double mantissa = std::nearbyint(m * 2048);  // 1024 .. 2048
  if (mantissa == 2048) {
    mantissa = 1024;
    ++e;
  }
  LQ_CHECK(e < 31);
  return static_cast<uint16_t>((std::signbit(x) ? 0x8000 : 0) | (e << 10) | (static_cast<int>(mantissa) - 1024));
}
float Rounded(float x, const std::string& dtype) {
  if (dtype == "BF16") return std::bit_cast<float>(static_cast<uint32_t>(Bf16Bits(x)) << 16);
  if (dtype == "F16") {
    const uint16_t b = F16Bits(x);
    if ((b & 0x7FFF) == 0) return 0;
    const double value = std::ldexp(1024.0 + (b & 1023), ((b >> 10) & 31) - 25);
    return static_cast<float>((b & 0x8000) ? -value : value);
  }
  return x;
}
void AppendValue(std::string& out, float x, const std::string& dtype) {
  if (dtype == "F32") {
    out.append(reinterpret_cast<const char*>(&x), 4);
  } else {
    const uint16_t b = dtype == "BF16" ? Bf16Bits(x) : F16Bits(x);
    out.append(reinterpret_cast<const char*>(&b), 2);
  }
}

using Row = std::vector<double>;

Row Times(const TinyTensor& w, const Row& x) {
  Row y(static_cast<size_t>(w.shape[0]));
  const size_t cols = static_cast<size_t>(w.shape[1]);
  LQ_CHECK(x.size() == cols);
  for (size_t n = 0; n < y.size(); ++n)
    for (size_t k = 0; k < cols; ++k) y[n] += static_cast<double>(w.values[n * cols + k]) * x[k];
  return y;
}
Row Norm(const TinyTensor& gamma, const Row& x, double eps) {
  double squares = 0;
  for (const double v : x) squares += v * v;
  const double by = 1 / std::sqrt(squares / static_cast<double>(x.size()) + eps);
  Row y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] * by * gamma.values[i];
  return y;
}
void Rotate(Row& x, size_t head_dim, size_t position, double theta) {
  for (size_t h = 0; h < x.size(); h += head_dim)
    for (size_t i = 0; i < head_dim / 2; ++i) {
      const double angle = static_cast<double>(position) *
                           std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
      const double a = x[h + i], b = x[h + i + head_dim / 2];
      x[h + i] = a * std::cos(angle) - b * std::sin(angle);
      x[h + i + head_dim / 2] = b * std::cos(angle) + a * std::sin(angle);
    }
}

}  // namespace

void TinyLlama::Fill(Rng& rng, const std::string& dtype) {
  tensors.clear();
  const auto matrix = [&](const std::string& name, int64_t rows, int64_t cols, double gain) {
    TinyTensor t{.shape = {rows, cols}, .values = {}, .dtype = dtype};
    for (int64_t i = 0; i < rows * cols; ++i)
      t.values.push_back(
          Rounded(static_cast<float>(rng.Normal() * gain / std::sqrt(static_cast<double>(cols))), dtype));
    tensors[name] = std::move(t);
  };
  const auto norm = [&](const std::string& name) {
    TinyTensor t{.shape = {hidden}, .values = {}, .dtype = dtype};
    for (int64_t i = 0; i < hidden; ++i) t.values.push_back(Rounded(static_cast<float>(rng.Uniform(0.5, 1.5)), dtype));
    tensors[name] = std::move(t);
  };
  const int64_t q = int64_t{heads} * head_dim, kv = int64_t{kv_heads} * head_dim;
  matrix("model.embed_tokens.weight", vocab, hidden, 4);
  if (!tied) matrix("lm_head.weight", vocab, hidden, 2);
  norm("model.norm.weight");
  for (int l = 0; l < layers; ++l) {
    const std::string p = "model.layers." + std::to_string(l) + ".";
    norm(p + "input_layernorm.weight");
    norm(p + "post_attention_layernorm.weight");
    matrix(p + "self_attn.q_proj.weight", q, hidden, 1.5);
    matrix(p + "self_attn.k_proj.weight", kv, hidden, 1.5);
    matrix(p + "self_attn.v_proj.weight", kv, hidden, 1);
    matrix(p + "self_attn.o_proj.weight", hidden, q, 1);
    matrix(p + "mlp.gate_proj.weight", intermediate, hidden, 1.5);
    matrix(p + "mlp.up_proj.weight", intermediate, hidden, 1);
    matrix(p + "mlp.down_proj.weight", hidden, intermediate, 1);
  }
}

std::string TinyLlama::ConfigJson() const {
  const auto number = [](const std::string& name, auto value) { return ",\"" + name + "\":" + std::to_string(value); };
  return std::string("{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"hidden_act\":\"silu\"") +
         number("vocab_size", vocab) + number("hidden_size", hidden) + number("intermediate_size", intermediate) +
         number("max_position_embeddings", max_positions) + number("num_hidden_layers", layers) +
         number("num_attention_heads", heads) + number("num_key_value_heads", kv_heads) + number("head_dim", head_dim) +
         number("rope_theta", theta) + number("rms_norm_eps", eps) + ",\"bos_token_id\":0,\"eos_token_id\":" + eos +
         ",\"tie_word_embeddings\":" + (tied ? "true" : "false") + "}";
}

std::string SafetensorsBytes(const std::map<std::string, TinyTensor>& tensors) {
  std::string header = "{", data;
  for (const auto& [name, t] : tensors) {
    const size_t begin = data.size();
    for (const float x : t.values) AppendValue(data, x, t.dtype);
    std::string shape;
    for (const int64_t d : t.shape) shape += (shape.empty() ? "" : ",") + std::to_string(d);
    header += (header.size() > 1 ? ",\"" : "\"") + name + "\":{\"dtype\":\"" + t.dtype + "\",\"shape\":[" + shape +
              "],\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(data.size()) + "]}";
  }
  header += "}";
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

void TinyLlama::Write(const std::filesystem::path& directory) const {
  WriteText(directory / "config.json", ConfigJson());
  WriteText(directory / "model.safetensors", SafetensorsBytes(tensors));
}

std::vector<double> TinyLlama::Logits(const std::vector<int32_t>& tokens) const {
  const size_t n = tokens.size(), d = static_cast<size_t>(head_dim), h = static_cast<size_t>(hidden);
  const auto tensor = [&](const std::string& name) -> const TinyTensor& { return tensors.at(name + ".weight"); };
  std::vector<Row> x(n, Row(h));
  for (size_t r = 0; r < n; ++r)
    for (size_t i = 0; i < h; ++i)
      x[r][i] = tensor("model.embed_tokens").values[static_cast<size_t>(tokens[r]) * h + i];
  for (int l = 0; l < layers; ++l) {
    const std::string p = "model.layers." + std::to_string(l) + ".";
    std::vector<Row> q, k, v;
    for (size_t r = 0; r < n; ++r) {
      const Row a = Norm(tensor(p + "input_layernorm"), x[r], eps);
      q.push_back(Times(tensor(p + "self_attn.q_proj"), a));
      k.push_back(Times(tensor(p + "self_attn.k_proj"), a));
      v.push_back(Times(tensor(p + "self_attn.v_proj"), a));
      Rotate(q[r], d, r, theta);
      Rotate(k[r], d, r, theta);
    }
    for (size_t r = 0; r < n; ++r) {
      Row attended(static_cast<size_t>(heads) * d);
      for (size_t head = 0; head < static_cast<size_t>(heads); ++head) {
        const size_t at = head * d, kv_at = head / static_cast<size_t>(heads / kv_heads) * d;
        Row score(r + 1);
        double largest = -1e300, sum = 0;
        for (size_t j = 0; j <= r; ++j) {
          for (size_t i = 0; i < d; ++i) score[j] += q[r][at + i] * k[j][kv_at + i];
          score[j] /= std::sqrt(static_cast<double>(d));
          largest = std::max(largest, score[j]);
        }
        for (double& s : score) sum += s = std::exp(s - largest);
        for (size_t j = 0; j <= r; ++j)
          for (size_t i = 0; i < d; ++i) attended[at + i] += score[j] / sum * v[j][kv_at + i];
      }
      const Row o = Times(tensor(p + "self_attn.o_proj"), attended);
      for (size_t i = 0; i < h; ++i) x[r][i] += o[i];
      const Row a = Norm(tensor(p + "post_attention_layernorm"), x[r], eps);
      Row gate = Times(tensor(p + "mlp.gate_proj"), a);
      const Row up = Times(tensor(p + "mlp.up_proj"), a);
      for (size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
      const Row down = Times(tensor(p + "mlp.down_proj"), gate);
      for (size_t i = 0; i < h; ++i) x[r][i] += down[i];
    }
  }
  std::vector<double> logits;
  for (size_t r = 0; r < n; ++r) {
    const Row row = Times(tensor(tied ? "model.embed_tokens" : "lm_head"), Norm(tensor("model.norm"), x[r], eps));
    logits.insert(logits.end(), row.begin(), row.end());
  }
  return logits;
}

CacheSchema TinyLlama::F32Schema() const {
  LayerSchema layer;
  layer.num_kv_heads = kv_heads;
  layer.head_dim = head_dim;
  layer.k.dtype = layer.v.dtype = layer.exact_dtype = DType::kF32;
  layer.k.bits = layer.v.bits = 32;
  CacheSchema schema;
  schema.layers.assign(static_cast<size_t>(layers), layer);
  schema.rope = {.type = "default", .theta = theta, .dims = head_dim};
  return schema;
}

TempDir::TempDir() {
  std::string name = (std::filesystem::temp_directory_path() / "livequant_test_XXXXXX").string();
  LQ_CHECK(mkdtemp(name.data()) != nullptr);
  path_ = name;
}
TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void WriteText(const std::filesystem::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  LQ_CHECK(file.good());
}

}  // namespace livequant
