// apps/console.h: what people see while a command runs. Results go to stdout, everything else to stderr.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace livequant::app {

inline constexpr int kExitOk = 0, kExitFailed = 1, kExitUsage = 2, kExitInterrupted = 130;

// Prints "error: ..." to stderr and returns the exit code: kExitInterrupted for kCancelled, else `code`.
int Fail(const Status& status, int code);

// Set by the first Ctrl-C; a second one ends the process at once.
std::atomic<bool>& Interrupted();
void InstallInterruptHandler();

// A bar on stderr, drawn only where stderr is a terminal and at most ten times a second.
class Progress {
 public:
  explicit Progress(std::string label);
  ~Progress();
  // Thread safe. done <= total.
  void Update(int64_t done, int64_t total);

 private:
  std::string label_;
  bool terminal_;
  std::atomic<int64_t> last_ms_{-1000};
  int64_t start_ms_;
  std::atomic<bool> drawn_{false};
};

// Columns padded to their widest cell; the first column left, the others right.
std::string Table(const std::vector<std::vector<std::string>>& rows);

// "109 MiB", "101.875 MiB", "512 B": exact multiples stay exact.
std::string HumanBytes(double bytes);
// "4096", "64KiB", "1.5GiB", "8G": bytes. kInvalidArgument names the text.
Result<int64_t> ParseBytes(const std::string& text);
// "1,2,5-7" -> {1,2,5,6,7}. kInvalidArgument names the part.
Result<std::vector<int>> ParseIntList(const std::string& text, const std::string& flag);
std::vector<std::string> Split(const std::string& text, char separator);

// Largest resident set of this process so far, bytes.
int64_t PeakRssBytes();

}  // namespace livequant::app
