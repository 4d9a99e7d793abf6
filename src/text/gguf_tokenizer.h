// text/gguf_tokenizer.h: the tokenizer inside a GGUF file as the tokenizer.json that it was made from.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"
#include "io/gguf.h"
#include "text/tokenizer.h"

namespace livequant {

// The text of a tokenizer.json for Tokenizer::Parse. Read: tokenizer.ggml.model "gpt2" (byte-level BPE: tokens, token
// types, merges) with a pre-tokenizer (tokenizer.ggml.pre) that this table names: gpt-2, llama-bpe and its aliases,
// qwen2 and its aliases. Control tokens become special added tokens, user-defined ones added tokens; unused ones are
// left out, as the original files leave them out. add_bos_token and add_eos_token become the template around a text;
// without the first, llama-bpe and its aliases have a beginning token and the others none. kUnsupported names another
// model or pre-tokenizer; kInvalidArgument what is missing, malformed or repeated. Source: ggml-org/llama.cpp,
// src/llama-vocab.cpp.
Result<std::string> GgufTokenizerJson(const Gguf& gguf, std::string_view what);

// The tokenizer of a GGUF file. Errors of Gguf::Parse, of the above and of Tokenizer::Parse; kNotFound, kIo besides.
Result<Tokenizer> LoadGgufTokenizer(const std::string& path);

}  // namespace livequant
