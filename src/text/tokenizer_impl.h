// text/tokenizer_impl.h: what a tokenizer.json becomes. Private to text/.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/decoder.h"
#include "text/normalizer.h"
#include "text/pretokenizer.h"
#include "text/tokenizer.h"
#include "text/unigram.h"

namespace livequant {

struct Token {
  int32_t id;
  bool special;
  std::string spelling;  // as the file has it
  std::string bytes;     // decoded, anywhere but at the start of a text
  std::string first;     // decoded at the start of a text, where that differs in some token
};

struct Tokenizer::Impl {
  std::string digest;
  std::vector<Token> tokens;  // by id, which need not be without gaps
  std::variant<BpeModel, UnigramModel> model;
  AddedTokens raw_added, normalized_added;  // looked for before and after the normalizer
  Normalizer normalizer;
  std::vector<PreTokenizerStep> pre_tokenizer;
  DecoderSteps decoder;
  std::vector<int32_t> before, after;  // what the post-processor adds

  // The token of an id, or null.
  const Token* Find(int32_t id) const;
};

}  // namespace livequant
