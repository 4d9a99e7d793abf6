// runtime/model_bundle.cc: see model_bundle.h.
#include "runtime/model_bundle.h"

#include <fmt/format.h>

#include "model/model_files.h"
#include "text/gguf_tokenizer.h"

namespace livequant {

Result<ModelBundle> ModelBundle::Load(const std::string& path, WithTokenizer with) {
  ModelBundle bundle;
  bundle.path = path;
  LQ_ASSIGN_OR_RETURN(bundle.model, Llama::Load(path));
  bundle.identity.model = bundle.model->digest();
  if (with == WithTokenizer::kNo) return bundle;
  const bool gguf = IsModelFile(path);
  const std::string file = gguf ? path : path + "/tokenizer.json";
  LQ_ASSIGN_OR_RETURN(Tokenizer tokenizer, gguf ? LoadGgufTokenizer(file) : Tokenizer::Load(file));
  if (tokenizer.vocab_size() > bundle.model->config().vocab_size)
    return Status(Code::kOutOfRange, fmt::format("{} has ids up to {}; the model's vocab_size is {}", file,
                                                 tokenizer.vocab_size() - 1, bundle.model->config().vocab_size));
  bundle.identity.tokenizer = tokenizer.digest();
  bundle.tokenizer = std::move(tokenizer);
  return bundle;
}

CacheShape ModelBundle::shape() const { return model->config().shape(); }

Result<CacheSchema> ModelBundle::Schema(const std::string& spec, const std::vector<int>& skip_layers,
                                        int read_step) const {
  LQ_ASSIGN_OR_RETURN(CacheSchema schema, SchemaFor(spec, shape(), skip_layers));
  schema.read_step = read_step;
  schema.identity.model = identity.model;
  schema.identity.tokenizer = identity.tokenizer;
  LQ_RETURN_IF_ERROR(Validate(schema));
  return schema;
}

}  // namespace livequant
