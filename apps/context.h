// apps/context.h: the flags that commands share, and the one `context` object that every JSON result carries.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "attention/attention.h"
#include "base/status.h"
#include "kv/key_spike.h"
#include "schema/schema.h"

namespace livequant::app {

// The model that a clone brings along: $LIVEQUANT_MODEL, else models/books-7m beside the binary's build tree or in the
// source tree.
std::string DefaultModelDir();

// Everything that a figure needs to be repeated. Fields that do not apply are null, never left out.
struct ContextInfo {
  std::string task;                 // "run", "eval perplexity", ...
  std::string model, model_digest;  // directory and SHA-256
  std::string data_hash;            // SHA-256 of the text or ids
  int64_t context_length = 0;
  std::map<std::string, CacheSchema> schemas;  // by the name that was asked for
  std::string contract;
  int threads = 0;
  bool has_seed = false;
  uint64_t seed = 0;
  std::string baseline;
  bool allow_fallback = false;
  int64_t fallback_calls = 0;
};
nlohmann::json ContextJson(const ContextInfo& info);

// [{"layers": "0-7", "phase": "decode", "attention": "generic_f32", "decode_k": ..., "decode_v": ..., "fallback":
// false}]: like layers are one entry. kUnsupported: a layer that no kernel reads, unless allow_fallback.
Result<nlohmann::json> KernelsJson(const CacheSchema& schema, bool allow_fallback);

// What this machine is: CPU, cores, ISA, memory, GPUs.
nlohmann::json HardwareJson();

const char* Version();
const char* Commit();
// The command line, as typed, for the context object.
void SetCommandLine(int argc, char** argv);

// null, or the fields of a key spike; and one warning on stderr that names the format, layer and head, if there is one.
nlohmann::json SpikeJson(const std::optional<KeySpike>& spike);
void WarnOfSpike(const std::string& format, const std::optional<KeySpike>& spike);

// Threads asked for by -t: 0 means every core that this process may use.
int ThreadsOrDefault(int asked);

// One function per command: declares flags, and sets `exit_code` when the command ran.
void AddRun(CLI::App& app, int* exit_code);
void AddEval(CLI::App& app, int* exit_code);
void AddLedger(CLI::App& app, int* exit_code);
void AddDoctor(CLI::App& app, int* exit_code);
void AddDemo(CLI::App& app, int* exit_code);
void AddInspect(CLI::App& app, int* exit_code);
void AddEncode(CLI::App& app, int* exit_code);  // encode and decode

}  // namespace livequant::app
