// text/tokenizer_json.h: the text of a tokenizer.json into a Tokenizer::Impl. Private to text/.
#pragma once

#include <string_view>

#include "text/tokenizer_impl.h"

namespace livequant {

// Fills *out, which has to be fresh. Errors as Tokenizer::Parse; *out is then of no use.
Status ParseTokenizerJson(std::string_view text, Tokenizer::Impl* out);

}  // namespace livequant
