// text/gguf_sentencepiece.h: tokenizer.ggml.model "llama", a SentencePiece BPE model, into a Tokenizer::Impl. Private
// to text/.
#pragma once

#include "text/gguf_fields.h"
#include "text/tokenizer_impl.h"

namespace livequant {

// Fills *out, which has to be fresh. What the file must say, and what it means: gguf_tokenizer.h. On failure *out is of
// no use.
Status ReadGgufSentencePiece(const GgufFields& fields, Tokenizer::Impl* out);

}  // namespace livequant
