// apps/doctor.cc: livequant doctor: what this machine is, and which kernel each cache format gets in which phase.
#include <fmt/format.h>

#include <memory>

#include "apps/console.h"
#include "apps/context.h"
#include "method/method.h"

namespace livequant::app {

void AddDoctor(CLI::App& app, int* exit_code) {
  struct DoctorFlags {
    bool json = false;
    int head_dim = 64, kv_heads = 2, layers = 8;
  };
  auto flags = std::make_shared<DoctorFlags>();
  CLI::App* cmd = app.add_subcommand("doctor", "CPU, ISA, GPU, and which kernel each format gets in each phase");
  cmd->add_flag("--json", flags->json, "print JSON");
  cmd->add_option("--head-dim", flags->head_dim, "head size to choose kernels for")->check(CLI::Range(1, 65536));
  cmd->callback([flags, exit_code] {
    ContextInfo info{.task = "doctor"};
    nlohmann::json formats = nlohmann::json::object();
    std::vector<std::vector<std::string>> rows = {
        {"format", "prefill", "decode", "verify", "reads K with", "reads V with"}};
    for (const std::string& name : PresetNames()) {
      auto schema = PresetSchema(
          name,
          {.num_layers = flags->layers, .num_kv_heads = flags->kv_heads, .head_dim = flags->head_dim, .rope = {}});
      Result<nlohmann::json> kernels =
          schema.ok() ? KernelsJson(*schema, false) : Result<nlohmann::json>(schema.status());
      if (!kernels.ok()) {
        formats[name] = {{"refused", kernels.status().message()}};
        rows.push_back({name, "refused: " + kernels.status().message()});
        continue;
      }
      formats[name] = *kernels;
      std::vector<std::string> row = {name};
      for (const auto& k : *kernels) row.push_back(k["attention"]);
      row.push_back((*kernels)[0]["decode_k"]);
      row.push_back((*kernels)[0]["decode_v"]);
      rows.push_back(row);
    }
    const nlohmann::json hardware = HardwareJson();
    if (flags->json) {
      fmt::print("{}\n",
                 nlohmann::json{{"hardware", hardware}, {"formats", formats}, {"context", ContextJson(info)}}.dump(2));
    } else {
      std::string isa, gpus;
      for (const auto& name : hardware["isa"]) isa += (isa.empty() ? "" : " ") + name.get<std::string>();
      for (const auto& name : hardware["gpus"]) gpus += (gpus.empty() ? "" : ", ") + name.get<std::string>();
      fmt::print("livequant {} ({})\ncpu       {} x {}\nisa       {}\nmemory    {}\ngpu       {}\n\n{}", Version(),
                 Commit(), hardware["cores"].get<int>(), hardware["cpu"].get<std::string>(), isa,
                 HumanBytes(hardware["memory_bytes"].get<double>()),
                 gpus.empty() ? "none; the CPU path serves every format" : gpus + " (no CUDA kernels in this build)",
                 Table(rows));
    }
    *exit_code = kExitOk;
  });
}

}  // namespace livequant::app
