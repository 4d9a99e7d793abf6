// apps/inspect.cc: livequant inspect: what a file or a model directory holds, and what would be refused of it.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <map>
#include <memory>
#include <optional>

#include "apps/console.h"
#include "apps/context.h"
#include "io/file.h"
#include "io/gguf.h"
#include "io/json.h"
#include "io/safetensors.h"
#include "method/method.h"
#include "model/gguf_source.h"
#include "model/model_files.h"
#include "model/weights.h"
#include "schema/policy.h"
#include "text/gguf_tokenizer.h"
#include "text/tokenizer.h"

namespace livequant::app {
namespace {

using nlohmann::json;

struct InspectFlags {
  std::string path, model;
  bool json = false;
};

struct Report {
  json fields = json::object();
  json refused = json::array();  // why it would not run, in the order of loading

  void Refuse(const Status& s) {
    if (!s.ok()) refused.push_back(s.ToString());
  }
};

void AddTensors(const std::map<std::string, std::pair<std::string, std::pair<std::vector<int64_t>, int64_t>>>& tensors,
                Report* report) {
  json list = json::array(), by_dtype = json::object();
  int64_t bytes = 0;
  for (const auto& [name, t] : tensors) {
    const auto& [dtype, rest] = t;
    list.push_back({{"name", name}, {"dtype", dtype}, {"shape", rest.first}, {"bytes", rest.second}});
    json& sum = by_dtype[dtype];
    if (sum.is_null()) sum = {{"tensors", 0}, {"bytes", 0}};
    sum["tensors"] = sum["tensors"].get<int64_t>() + 1;
    sum["bytes"] = sum["bytes"].get<int64_t>() + rest.second;
    bytes += rest.second;
  }
  report->fields["tensors"] = list;
  report->fields["tensor_bytes"] = bytes;
  report->fields["dtypes"] = by_dtype;
}

void AddTensors(const Safetensors& file, Report* report) {
  std::map<std::string, std::pair<std::string, std::pair<std::vector<int64_t>, int64_t>>> tensors;
  for (const auto& [name, t] : file.tensors())
    tensors[name] = {t.dtype, {t.shape, static_cast<int64_t>(t.bytes.size())}};
  AddTensors(tensors, report);
}

json ConfigJson(const LlamaConfig& c) {
  return {{"layers", c.num_hidden_layers},
          {"hidden_size", c.hidden_size},
          {"intermediate_size", c.intermediate_size},
          {"heads", c.num_attention_heads},
          {"kv_heads", c.num_key_value_heads},
          {"head_dim", c.head_dim},
          {"vocab_size", c.vocab_size},
          {"max_position_embeddings", c.max_position_embeddings},
          {"architecture", c.architecture},
          {"windows", c.windows},
          {"rope",
           {{"type", c.rope.type},
            {"theta", c.rope.theta},
            {"factor", c.rope.factor},
            {"original_max_positions", c.rope.original_max_positions},
            {"attention_factor", c.rope.attention_factor}}},
          {"tied_embeddings", c.tie_word_embeddings}};
}

void AddFiles(const std::vector<std::string>& paths, Report* report) {
  json files = json::array();
  for (const std::string& path : paths) {
    const auto file = MappedFile::Open(path);
    if (!file.ok()) continue;  // whoever needs it has said so
    files.push_back({{"path", path}, {"bytes", file->bytes().size()}, {"sha256", Sha256Hex(file->bytes())}});
  }
  report->fields["files"] = files;
}

// What loading would say after the files themselves are read: weights against the config, tokenizer against both.
void AddModel(const std::string& path, bool gguf, Report* report) {
  const auto files = ModelFiles::Open(path);
  if (!files.ok()) {
    report->Refuse(files.status());
  } else {
    report->fields["config"] = ConfigJson((*files)->config());
    report->Refuse(CheckLlamaWeights((*files)->config(), (*files)->weights()));
    if (const auto digest = (*files)->Digest(); digest.ok()) report->fields["model_digest"] = *digest;
    if (const SafetensorsSource* source = (*files)->safetensors(); source != nullptr) {
      const SafetensorsSource::Fp8Report fp8 = source->ReportFp8();
      if (fp8.tensors > 0)
        report->fields["fp8_weights"] = {
            {"tensors", fp8.tensors}, {"values", fp8.values}, {"rounded_to_bf16", fp8.rounded}};
    }
  }
  const auto tokenizer = gguf ? LoadGgufTokenizer(path) : Tokenizer::Load(path + "/tokenizer.json");
  report->Refuse(tokenizer.status());
  if (tokenizer.ok()) {
    report->fields["tokenizer"] = {{"ids", tokenizer->vocab_size()}, {"digest", tokenizer->digest()}};
    if (files.ok() && tokenizer->vocab_size() > (*files)->config().vocab_size)
      report->Refuse(
          Status(Code::kOutOfRange, fmt::format("the tokenizer has ids up to {}; the model's vocab_size is {}",
                                                tokenizer->vocab_size() - 1, (*files)->config().vocab_size)));
  }
}

void InspectDirectory(const std::string& path, Report* report) {
  report->fields["kind"] = "model directory";
  std::vector<std::string> paths = {path + "/config.json", path + "/tokenizer.json"};
  if (const auto file = Safetensors::OpenDirectory(path); file.ok()) {
    AddTensors(*file, report);
    paths.insert(paths.end(), file->paths().begin(), file->paths().end());
  }
  AddFiles(paths, report);
  AddModel(path, false, report);
}

json ValueJson(const GgufValue& v) {
  if (const auto* u = std::get_if<uint64_t>(&v.value)) return *u;
  if (const auto* i = std::get_if<int64_t>(&v.value)) return *i;
  if (const auto* d = std::get_if<double>(&v.value)) return *d;
  if (const auto* b = std::get_if<bool>(&v.value)) return *b;
  if (const auto* s = std::get_if<std::string_view>(&v.value)) return Excerpt(*s, 200);
  const auto& a = std::get<GgufArray>(v.value);
  return fmt::format("{} x {}", a.count, GgufTypeName(a.element));
}

Status InspectGguf(const std::string& path, const MappedFile& file, Report* report) {
  report->fields["kind"] = "GGUF";
  AddFiles({path}, report);
  const auto gguf = Gguf::Parse(file.bytes(), path);
  if (!gguf.ok()) {
    report->Refuse(gguf.status());
    return {};
  }
  report->fields["version"] = gguf->version();
  report->fields["alignment"] = gguf->alignment();
  json metadata = json::object();
  for (const auto& [key, value] : gguf->metadata()) metadata[ExcerptOfKey(key, 200)] = ValueJson(value);
  report->fields["metadata"] = metadata;
  std::map<std::string, std::pair<std::string, std::pair<std::vector<int64_t>, int64_t>>> tensors;
  for (const auto& [name, t] : gguf->tensors())
    tensors[ExcerptOfKey(name, 200)] = {GgufDTypeName(t.dtype), {t.shape, static_cast<int64_t>(t.bytes.size())}};
  AddTensors(tensors, report);
  AddModel(path, true, report);
  return {};
}

Status InspectSafetensors(const std::string& path, Report* report) {
  report->fields["kind"] = "safetensors";
  AddFiles({path}, report);
  const auto file = Safetensors::OpenFile(path);
  if (!file.ok()) {
    report->Refuse(file.status());
    return {};
  }
  report->fields["metadata"] = file->metadata();
  AddTensors(*file, report);
  return {};
}

Status InspectPolicy(const InspectFlags& flags, Report* report) {
  report->fields["kind"] = "policy";
  AddFiles({flags.path}, report);
  const std::string model = flags.model.empty() ? DefaultModelDir() : flags.model;
  LQ_ASSIGN_OR_RETURN(const LlamaConfig c, ReadModelConfig(model));
  report->fields["for_shape_of"] = model;
  const auto schema = SchemaFor(flags.path, c.shape(), {});
  if (!schema.ok()) {
    report->Refuse(schema.status());
    return {};
  }
  report->fields["schema"] = json::parse(PolicyJson(*schema));
  report->fields["schema_digest"] = Digest(*schema);
  const auto kernels = KernelsJson(*schema, false);
  report->Refuse(kernels.status());
  if (kernels.ok()) report->fields["kernels"] = *kernels;
  return {};
}

// A table of tensors would hide everything else: names and shapes are for --json, kinds and sums for people.
void Print(const Report& report) {
  for (const auto& [key, value] : report.fields.items()) {
    if (key == "tensors") {
      fmt::print("{:<16} {}\n", key, value.size());
    } else if (key == "dtypes") {
      for (const auto& [dtype, sum] : value.items())
        fmt::print("{:<16} {}: {} tensors, {}\n", "dtype", dtype, sum["tensors"].get<int64_t>(),
                   HumanBytes(sum["bytes"].get<double>()));
    } else if (key == "tensor_bytes") {
      fmt::print("{:<16} {}\n", key, HumanBytes(value.get<double>()));
    } else if (value.is_object() && (key == "config" || key == "metadata")) {
      for (const auto& [name, v] : value.items())
        fmt::print("{:<16} {} = {}\n", key, name, v.is_string() ? v.get<std::string>() : v.dump());
    } else if (key == "files") {
      for (const json& f : value)
        fmt::print("{:<16} {} {} sha256 {}\n", "file", f["path"].get<std::string>(),
                   HumanBytes(f["bytes"].get<double>()), f["sha256"].get<std::string>());
    } else {
      fmt::print("{:<16} {}\n", key, value.is_string() ? value.get<std::string>() : value.dump());
    }
  }
  for (const json& why : report.refused) fmt::print("{:<16} {}\n", "refused", why.get<std::string>());
  if (report.refused.empty()) fmt::print("{:<16} nothing\n", "refused");
}

Status Inspect(const InspectFlags& flags, Report* report) {
  report->fields["path"] = flags.path;
  std::error_code error;
  if (std::filesystem::is_directory(flags.path, error)) {
    InspectDirectory(flags.path, report);
    return {};
  }
  LQ_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(flags.path));
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
  if (text.starts_with("GGUF") || flags.path.ends_with(".gguf")) return InspectGguf(flags.path, file, report);
  // A safetensors header may begin with the byte '{' too (a length of 123), but then it has another one behind 8 bytes.
  const bool header = text.size() > 8 && text[8] == '{' && !text.starts_with("        ");
  const size_t first = text.find_first_not_of(" \t\r\n");
  const bool document = first != text.npos && text[first] == '{' && !header;
  if (!flags.path.ends_with(".safetensors") && (document || flags.path.ends_with(".json")))
    return InspectPolicy(flags, report);
  return InspectSafetensors(flags.path, report);
}

}  // namespace

void AddInspect(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<InspectFlags>();
  CLI::App* cmd =
      app.add_subcommand("inspect", "what a file or model holds, and what would be refused (then exit code 1)");
  cmd->add_option("path", flags->path, "model directory, safetensors, GGUF or policy file")->required();
  cmd->add_option("-m,--model", flags->model, "the model whose shape a policy is read for (default: the embedded one)");
  cmd->add_flag("--json", flags->json, "print JSON, with every tensor");
  cmd->callback([flags, exit_code] {
    Report report;
    if (const Status s = Inspect(*flags, &report); !s.ok()) {
      *exit_code = Fail(s, kExitFailed);
      return;
    }
    if (flags->json) {
      json out = report.fields;
      out["refused"] = report.refused;
      out["context"] = ContextJson({.task = "inspect"});
      fmt::print("{}\n", out.dump(2, ' ', false, json::error_handler_t::replace));
    } else {
      Print(report);
    }
    *exit_code = report.refused.empty() ? kExitOk : kExitFailed;
  });
}

}  // namespace livequant::app
