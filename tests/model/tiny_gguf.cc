#include "model/tiny_gguf.h"

#include <cstring>

#include "numeric/float_formats.h"

namespace livequant {
namespace {

std::string GgufName(const std::string& name) {
  static const std::pair<const char*, const char*> kNames[] = {
      {"input_layernorm", "attn_norm"}, {"post_attention_layernorm", "ffn_norm"},
      {"self_attn.q_proj", "attn_q"},   {"self_attn.k_proj", "attn_k"},
      {"self_attn.v_proj", "attn_v"},   {"self_attn.o_proj", "attn_output"},
      {"mlp.gate_proj", "ffn_gate"},    {"mlp.up_proj", "ffn_up"},
      {"mlp.down_proj", "ffn_down"}};
  if (name == "model.embed_tokens.weight") return "token_embd.weight";
  if (name == "model.norm.weight") return "output_norm.weight";
  if (name == "lm_head.weight") return "output.weight";
  std::string out = name;
  out.replace(0, std::strlen("model.layers."), "blk.");
  for (const auto& [from, to] : kNames)
    if (const size_t at = out.find(from); at != out.npos) out.replace(at, std::strlen(from), to);
  return out;
}

std::string Stored(const std::vector<float>& values, const std::string& dtype) {
  std::string out;
  for (const float x : values) {
    if (dtype == "F32") out += LittleEndian(x);
    if (dtype == "F16") out += LittleEndian(F16FromDouble(double{x}));
    if (dtype == "BF16") out += LittleEndian(Bf16FromDouble(double{x}));
  }
  return out;
}

}  // namespace

GgufBuilder TinyGguf(const TinyLlama& tiny) {
  using B = GgufBuilder;
  const auto u32 = [](int64_t n) { return B::U32(static_cast<uint32_t>(n)); };
  B b;
  b.pairs = {{"general.architecture", B::String("llama")},
             {"llama.context_length", u32(tiny.max_positions)},
             {"llama.embedding_length", u32(tiny.hidden)},
             {"llama.block_count", u32(tiny.layers)},
             {"llama.feed_forward_length", u32(tiny.intermediate)},
             {"llama.attention.head_count", u32(tiny.heads)},
             {"llama.attention.head_count_kv", u32(tiny.kv_heads)},
             {"llama.attention.key_length", u32(tiny.head_dim)},
             {"llama.rope.freq_base", B::F32(static_cast<float>(tiny.theta))},
             {"llama.attention.layer_norm_rms_epsilon", B::F32(static_cast<float>(tiny.eps))},
             {"tokenizer.ggml.bos_token_id", u32(0)},
             {"tokenizer.ggml.eos_token_id", u32(1)}};
  for (const auto& [name, t] : tiny.tensors) {
    std::vector<float> values = t.values;
    const bool q = name.find("q_proj") != name.npos, k = name.find("k_proj") != name.npos;
    if (q || k) {
      const int64_t d = tiny.head_dim, half = d / 2, heads = q ? tiny.heads : tiny.kv_heads;
      const int64_t cols = t.shape.size() > 1 ? t.shape[1] : 1;
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < half; ++i)
          for (int64_t j = 0; j < 2; ++j)
            for (int64_t c = 0; c < cols; ++c)
              values[static_cast<size_t>((h * d + 2 * i + j) * cols + c)] =
                  t.values[static_cast<size_t>((h * d + j * half + i) * cols + c)];
    }
    GgufBuilder::Tensor out{.name = GgufName(name), .dims = {}, .bytes = {}};
    for (auto d = t.shape.rbegin(); d != t.shape.rend(); ++d) out.dims.push_back(static_cast<uint64_t>(*d));
    const std::string dtype = t.shape.size() == 1 ? "F32" : t.dtype;
    out.type = dtype == "F32" ? 0 : dtype == "F16" ? 1 : 30;
    out.bytes = Stored(values, dtype);
    b.tensors.push_back(std::move(out));
  }
  return b;
}

}  // namespace livequant
