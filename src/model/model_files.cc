// model/model_files.cc: see model_files.h.
#include "model/model_files.h"

#include <fmt/format.h>

#include <filesystem>

#include "model/gguf_source.h"

namespace livequant {
namespace {

constexpr int64_t kMaxConfigBytes = 4 << 20;

Result<LlamaConfig> ConfigOf(const Gguf& gguf, const std::string& path) {
  LQ_ASSIGN_OR_RETURN(const std::string text, GgufConfigJson(gguf, path));
  Result<LlamaConfig> config = ParseLlamaConfig(text);
  if (config.ok()) return config;
  return Status(config.status().code(),
                fmt::format("{}: its metadata as a config: {}", path, config.status().message()));
}

}  // namespace

bool IsModelFile(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error);
}

Result<LlamaConfig> ReadModelConfig(const std::string& path) {
  if (!IsModelFile(path)) {
    LQ_ASSIGN_OR_RETURN(const std::string text, ReadFile(path + "/config.json", kMaxConfigBytes));
    return ParseLlamaConfig(text);
  }
  LQ_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  LQ_ASSIGN_OR_RETURN(const Gguf gguf, Gguf::Parse(file.bytes(), path));
  return ConfigOf(gguf, path);
}

Result<std::unique_ptr<const ModelFiles>> ModelFiles::Open(const std::string& path) {
  std::unique_ptr<ModelFiles> files(new ModelFiles());
  if (IsModelFile(path)) {
    LQ_ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(path));
    files->file_.emplace(std::move(file));
    LQ_ASSIGN_OR_RETURN(Gguf gguf, Gguf::Parse(files->file_->bytes(), path));
    files->gguf_.emplace(std::move(gguf));
    LQ_ASSIGN_OR_RETURN(files->config_, ConfigOf(*files->gguf_, path));
    LQ_ASSIGN_OR_RETURN(files->weights_, GgufSource::Make(*files->gguf_, path));
    files->paths_ = {path};
    return std::unique_ptr<const ModelFiles>(std::move(files));
  }
  LQ_ASSIGN_OR_RETURN(files->config_text_, ReadFile(path + "/config.json", kMaxConfigBytes));
  LQ_ASSIGN_OR_RETURN(files->config_, ParseLlamaConfig(files->config_text_));
  LQ_ASSIGN_OR_RETURN(const std::optional<Fp8Scheme> scheme, ParseFp8Scheme(files->config_text_));
  LQ_ASSIGN_OR_RETURN(Safetensors tensors, Safetensors::OpenDirectory(path));
  files->safetensors_.emplace(std::move(tensors));
  LQ_ASSIGN_OR_RETURN(auto source, SafetensorsSource::Make(files->safetensors_->tensors(), scheme));
  files->safetensors_source_ = source.get();
  files->weights_ = std::move(source);
  files->paths_ = files->safetensors_->paths();
  return std::unique_ptr<const ModelFiles>(std::move(files));
}

Result<std::string> ModelFiles::Digest() const {
  Sha256 digest;
  if (!gguf_) digest.Add(config_text_);
  for (const std::string& path : paths_) {
    LQ_ASSIGN_OR_RETURN(const MappedFile bytes, MappedFile::Open(path));
    digest.Add(bytes.bytes());
  }
  return digest.Hex();
}

}  // namespace livequant
