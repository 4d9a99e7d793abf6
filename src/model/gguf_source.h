// model/gguf_source.h: a GGUF file as a model: its metadata as the config.json that would have made it, its tensors as
// weights under Hugging Face's names.
//
//   blk.N.attn_q.weight -> model.layers.N.self_attn.q_proj.weight, token_embd.weight -> model.embed_tokens.weight, ...
//
// Architecture "llama" stores the rows of each Q and K head in the order that interleaved RoPE wants: row 2i + j of a
// head is row j * d/2 + i of the Hugging Face checkpoint, i < d/2, j < 2. Read gives the latter back. Q8_0 and Q4_0 are
// dequantized to f32 exactly: one product of an f16 and an integer of at most 8 bits. Source: ggml-org/ggml
// docs/gguf.md; ggml-org/llama.cpp, convert_hf_to_gguf.py (permute), gguf-py/gguf/constants.py (names).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "io/gguf.h"
#include "model/weight_source.h"

namespace livequant {

// The text of a config.json for ParseLlamaConfig: architectures llama, mistral, qwen2, qwen3. RoPE factors of
// rope_freqs.weight are read if they are Llama 3's (every one of them as its formula gives it). kUnsupported names a
// key that changes results and is not known here; kInvalidArgument a key that is missing or of another type.
Result<std::string> GgufConfigJson(const Gguf& gguf, std::string_view what);

class GgufSource final : public WeightSource {
 public:
  // `gguf` and the file behind it must outlive the source. kInvalidArgument: Q or K rows that its heads do not divide,
  // two tensors of one meaning. REQUIRES GgufConfigJson(gguf) to have been ok.
  static Result<std::unique_ptr<GgufSource>> Make(const Gguf& gguf, std::string_view what);
  void Read(const std::string& name, int64_t first, int64_t count, std::byte* out) const override;

 private:
  struct Entry {
    const GgufTensor* tensor = nullptr;
    int64_t permuted_heads = 0;  // 0: rows as they are
  };
  GgufSource() = default;
  std::map<std::string, Entry> entries_;
};

}  // namespace livequant
