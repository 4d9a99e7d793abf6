// model/model_files.h: what a model's path names: a directory (config.json and safetensors) or one GGUF file.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "io/file.h"
#include "io/gguf.h"
#include "io/safetensors.h"
#include "model/llama.h"
#include "model/safetensors_source.h"
#include "model/weight_source.h"

namespace livequant {

// A regular file is taken for GGUF, anything else for a directory.
bool IsModelFile(const std::string& path);

// The model's config alone; no weight is looked at but for what a GGUF file's config needs of its tensors' shapes.
Result<LlamaConfig> ReadModelConfig(const std::string& path);

// Config and weights, mapped and checked as far as each file goes by itself; ReadLlamaWeights checks them against each
// other. Not movable: the source points into it.
class ModelFiles {
 public:
  // Errors of the parsers, each with the file's name; kNotFound, kIo besides.
  static Result<std::unique_ptr<const ModelFiles>> Open(const std::string& path);
  const LlamaConfig& config() const { return config_; }
  const WeightSource& weights() const { return *weights_; }
  // nullptr where the other kind was opened.
  const Gguf* gguf() const { return gguf_ ? &*gguf_ : nullptr; }
  const SafetensorsSource* safetensors() const { return safetensors_source_; }
  const std::vector<std::string>& paths() const { return paths_; }  // of the weights
  // SHA-256, hex: of config.json and each weight file, or of the GGUF file. Reads all bytes.
  Result<std::string> Digest() const;

 private:
  ModelFiles() = default;
  LlamaConfig config_;
  std::string config_text_;  // of a directory
  std::optional<Safetensors> safetensors_;
  std::optional<MappedFile> file_;
  std::optional<Gguf> gguf_;
  std::unique_ptr<WeightSource> weights_;
  const SafetensorsSource* safetensors_source_ = nullptr;
  std::vector<std::string> paths_;
};

}  // namespace livequant
