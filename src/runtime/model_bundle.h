// runtime/model_bundle.h: what a model directory or a GGUF file gives: the model, its tokenizer, and the identity that
// its caches carry.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "method/method.h"
#include "model/llama.h"
#include "schema/schema.h"
#include "text/tokenizer.h"

namespace livequant {

struct ModelBundle {
  std::string path;  // a directory or a GGUF file
  std::shared_ptr<const Llama> model;
  std::optional<Tokenizer> tokenizer;  // absent: loaded without
  Identity identity;                   // digests of model and tokenizer; no adapter, no calibration

  enum class WithTokenizer { kYes, kNo };
  // What Llama::Load reads and, if asked for, the directory's tokenizer.json or the GGUF file's tokenizer. Errors name
  // the file; a tokenizer with ids beyond the model's vocabulary is kOutOfRange (both numbers).
  static Result<ModelBundle> Load(const std::string& path, WithTokenizer with = WithTokenizer::kYes);

  CacheShape shape() const;
  // method/SchemaFor with this model's shape, `read_step` (schema/ParseContract) and identity filled in, validated.
  Result<CacheSchema> Schema(const std::string& spec, const std::vector<int>& skip_layers = {},
                             int read_step = kStepwise) const;
};

}  // namespace livequant
