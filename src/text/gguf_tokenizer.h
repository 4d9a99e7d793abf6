// text/gguf_tokenizer.h: the tokenizer inside a GGUF file.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"
#include "io/gguf.h"
#include "text/tokenizer.h"

namespace livequant {

// Two kinds by tokenizer.ggml.model. Both need tokens and token types; add_bos_token and add_eos_token become what
// stands around a text, and then need their id.
//
// "gpt2": byte-level BPE, made into the tokenizer.json that it was before. Needs merges and a pre-tokenizer
// (tokenizer.ggml.pre) that we know: gpt-2, llama-bpe and its aliases, qwen2 and its aliases. Control tokens become
// special added tokens, user-defined ones added tokens; unused ones are left out, as the original files leave them out.
// Without add_bos_token, llama-bpe and its aliases have a beginning token and the others none.
//
// "llama": a BPE model of SentencePiece. Needs scores. The piece of the highest score is merged first, of equal ones
// the leftmost; normal, user-defined and unused pieces are merged to, and an unused one falls apart again. What has no
// token becomes its bytes where the file has byte tokens (all 256 or none), else one unknown token a run. Control,
// unknown and user-defined tokens are found in the text first; add_space_prefix (true where absent) puts a space in
// front of the text and of what follows such a token, as in llama.cpp and in tokenizer.json with Prepend (SentencePiece
// itself puts none behind a user-defined piece). add_bos_token is true where absent. Merges in the file are not used:
// the scores say as much. A charsmap, extra white space to remove and any tokenizer.ggml.pre but "default" are refused.
//
// kUnsupported names another model or pre-tokenizer, type or setting; kInvalidArgument what is missing, malformed or
// repeated; kOutOfRange which limit was passed. Source: ggml-org/llama.cpp, src/llama-vocab.cpp; google/sentencepiece,
// src/bpe_model.cc.
Result<Tokenizer> GgufTokenizer(const Gguf& gguf, std::string_view what);

// The tokenizer of a GGUF file. Errors of Gguf::Parse and of the above; kNotFound, kIo besides.
Result<Tokenizer> LoadGgufTokenizer(const std::string& path);

}  // namespace livequant
