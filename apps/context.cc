#include "apps/context.h"

#include <fmt/format.h>

#include <hwy/targets.h>
#include <sched.h>
#include <unistd.h>
#include <algorithm>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "commit.h"
#include "method/method.h"

namespace livequant::app {
namespace {

std::string g_command;

std::string CpuModel() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  return "unknown";
}

int64_t MemoryBytes() { return int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE); }

nlohmann::json Gpus() {
  nlohmann::json gpus = nlohmann::json::array();
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/driver/nvidia/gpus", error)) {
    std::ifstream info(entry.path() / "information");
    for (std::string line; std::getline(info, line);)
      if (line.rfind("Model:", 0) == 0) gpus.push_back(line.substr(line.find_first_not_of(" \t", 6)));
  }
  return gpus;
}

// "0-2,5" from rising numbers.
std::string Ranges(const std::vector<int>& numbers) {
  std::string out;
  for (size_t i = 0; i < numbers.size();) {
    size_t j = i;
    while (j + 1 < numbers.size() && numbers[j + 1] == numbers[j] + 1) ++j;
    if (!out.empty()) out += ',';
    out += i == j ? fmt::format("{}", numbers[i]) : fmt::format("{}-{}", numbers[i], numbers[j]);
    i = j + 1;
  }
  return out;
}

}  // namespace

std::string DefaultModelDir() {
  if (const char* named = std::getenv("LIVEQUANT_MODEL")) return named;
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::filesystem::path beside = self.parent_path().parent_path().parent_path() / "models/books-7m";
  if (!error && std::filesystem::exists(beside / "config.json", error)) return beside.string();
  return LIVEQUANT_SOURCE_DIR "/models/books-7m";
}

const char* Version() { return LIVEQUANT_VERSION; }
const char* Commit() { return LIVEQUANT_COMMIT; }

void SetCommandLine(int argc, char** argv) {
  for (int i = 0; i < argc; ++i) {
    const std::string word = argv[i];
    const bool plain = !word.empty() && word.find_first_of(" \t\n'\"\\$`*?;&|<>()") == std::string::npos;
    g_command += (i ? " " : "") +
                 (plain ? word : nlohmann::json(word).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  }
}

int ThreadsOrDefault(int asked) {
  if (asked > 0) return asked;
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

nlohmann::json HardwareJson() {
  nlohmann::json isa = nlohmann::json::array();
  const int64_t supported = hwy::SupportedTargets();
  for (int64_t bit = 1; bit != 0 && bit <= supported; bit <<= 1)
    if (supported & bit) isa.push_back(hwy::TargetName(bit));
  return {{"cpu", CpuModel()},
          {"cores", ThreadsOrDefault(0)},
          {"isa", isa},
          {"memory_bytes", MemoryBytes()},
          {"gpus", Gpus()}};
}

Result<nlohmann::json> KernelsJson(const CacheSchema& schema, bool allow_fallback) {
  nlohmann::json out = nlohmann::json::array();
  for (const Phase phase : {Phase::kPrefill, Phase::kDecode, Phase::kVerify}) {
    std::vector<std::pair<KernelChoice, std::vector<int>>> groups;
    for (size_t i = 0; i < schema.layers.size(); ++i) {
      auto choice = ChooseKernel(schema.layers[i], phase, allow_fallback);
      if (!choice.ok())
        return Status(choice.status().code(),
                      fmt::format("layer {}: {}; --allow-fallback reads it by the slow reference path", i,
                                  choice.status().message()));
      const auto same = [&](const KernelChoice& c) {
        return c.attention == choice->attention && c.decode_k == choice->decode_k && c.decode_v == choice->decode_v;
      };
      auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return same(g.first); });
      if (group == groups.end()) group = groups.insert(groups.end(), {*choice, {}});
      group->second.push_back(static_cast<int>(i));
    }
    for (const auto& [choice, layers] : groups)
      out.push_back({{"layers", Ranges(layers)},
                     {"phase", PhaseName(phase)},
                     {"attention", choice.attention},
                     {"decode_k", choice.decode_k},
                     {"decode_v", choice.decode_v},
                     {"fallback", choice.fallback}});
  }
  return out;
}

nlohmann::json SpikeJson(const std::optional<KeySpike>& spike) {
  if (!spike) return nullptr;
  return {{"layer", spike->layer},     {"head", spike->head},       {"position", spike->position},
          {"channel", spike->channel}, {"largest", spike->largest}, {"median", spike->median}};
}

void WarnOfSpike(const std::string& format, const std::optional<KeySpike>& spike) {
  if (!spike) return;
  fmt::print(
      stderr,
      "warning: {} keeps one scale a key row, and layer {}, head {} has keys that it serves badly: at position {} "
      "channel {} is {:.4g}, {:.0f} times the row's median {:.3g}; a format with scales per channel (kivi) or a "
      "policy that leaves this layer in f16 keeps the small channels\n",
      format, spike->layer, spike->head, spike->position, spike->channel, spike->largest, spike->ratio(),
      spike->median);
}

nlohmann::json ContextJson(const ContextInfo& info) {
  const auto text = [](const std::string& s) { return s.empty() ? nlohmann::json() : nlohmann::json(s); };
  nlohmann::json policy = nlohmann::json::object(), digest = policy, kernels = policy;
  for (const auto& [name, schema] : info.schemas) {
    policy[name] = nlohmann::json::parse(PolicyJson(schema));
    digest[name] = Digest(schema);
    auto chosen = KernelsJson(schema, info.allow_fallback);
    kernels[name] = chosen.ok() ? *chosen : nlohmann::json(chosen.status().message());
  }
  return {{"version", Version()},
          {"commit", Commit()},
          {"model", info.model.empty() ? nlohmann::json()
                                       : nlohmann::json{{"directory", info.model}, {"digest", info.model_digest}}},
          {"task", info.task},
          {"data_hash", text(info.data_hash)},
          {"context_length", info.context_length > 0 ? nlohmann::json(info.context_length) : nlohmann::json()},
          {"policy", policy},
          {"schema_digest", digest},
          {"contract", text(info.contract)},
          {"kernels", kernels},
          {"backend", "cpu"},
          {"hardware", HardwareJson()},
          {"threads", info.threads > 0 ? nlohmann::json(info.threads) : nlohmann::json()},
          {"seed", info.has_seed ? nlohmann::json(info.seed) : nlohmann::json()},
          {"baseline", text(info.baseline)},
          {"allow_fallback", info.allow_fallback},
          {"fallback_calls", info.fallback_calls},
          {"command", g_command}};
}

}  // namespace livequant::app
