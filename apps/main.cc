// apps/main.cc: livequant run | eval | ledger | doctor | demo | inspect | encode | decode.
//
// Exit codes: 0 done, 1 the run failed, 2 bad usage (flags, policy, prompt), 130 interrupted.
#include <fmt/format.h>

#include <exception>

#include "apps/console.h"
#include "apps/context.h"

int main(int argc, char** argv) {
  using namespace livequant::app;
  SetCommandLine(argc, argv);
  InstallInterruptHandler();
  CLI::App app("language models whose KV cache is quantized: exact bytes, quality and speed of each format",
               "livequant");
  app.require_subcommand(1);
  app.set_version_flag("--version", fmt::format("livequant {} ({})", Version(), Commit()));
  int exit_code = kExitOk;
  AddRun(app, &exit_code);
  AddEval(app, &exit_code);
  AddLedger(app, &exit_code);
  AddDoctor(app, &exit_code);
  AddDemo(app, &exit_code);
  AddInspect(app, &exit_code);
  AddEncode(app, &exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitOk : kExitUsage;
  } catch (const std::exception& error) {  // nothing of ours throws; libraries may (std::bad_alloc)
    fmt::print(stderr, "error: {}\n", error.what());
    return kExitFailed;
  }
  return exit_code;
}
