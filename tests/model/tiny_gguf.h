// tests/model/tiny_gguf.h: a TinyLlama as a GGUF file, its Q and K rows in the order of interleaved RoPE.
#pragma once

#include "model/tiny_llama.h"
#include "support/gguf_builder.h"

namespace livequant {

// Matrices keep their dtype (F32, F16 or BF16), vectors are F32.
GgufBuilder TinyGguf(const TinyLlama& tiny);

}  // namespace livequant
