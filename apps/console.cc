#include "apps/console.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>

namespace livequant::app {
namespace {

std::atomic<bool> g_interrupted{false};

void OnInterrupt(int) {
  if (g_interrupted.exchange(true)) _exit(kExitInterrupted);
}

int64_t NowMs() {
  using namespace std::chrono;
  return duration_cast<milliseconds>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

int Fail(const Status& status, int code) {
  fmt::print(stderr, "error: {}\n", status.message());
  return status.code() == Code::kCancelled ? kExitInterrupted : code;
}

std::atomic<bool>& Interrupted() { return g_interrupted; }

void InstallInterruptHandler() {
  struct sigaction action = {};
  action.sa_handler = OnInterrupt;
  sigaction(SIGINT, &action, nullptr);
}

Progress::Progress(std::string label)
    : label_(std::move(label)), terminal_(isatty(STDERR_FILENO) != 0), start_ms_(NowMs()) {}

Progress::~Progress() {
  if (drawn_) fmt::print(stderr, "\r\033[K");
}

void Progress::Update(int64_t done, int64_t total) {
  if (!terminal_ || total <= 0) return;
  const int64_t now = NowMs();
  int64_t last = last_ms_.load();
  if (now - last < 100 || !last_ms_.compare_exchange_strong(last, now)) return;
  constexpr int kWidth = 30;
  const double part = static_cast<double>(done) / static_cast<double>(total);
  const int filled = static_cast<int>(part * kWidth);
  const double left_s = part > 0 ? static_cast<double>(now - start_ms_) / 1000 * (1 - part) / part : 0;
  drawn_ = true;
  fmt::print(stderr, "\r\033[K{} [{}{}] {:3.0f} %, {:.0f} s left", label_,
             std::string(static_cast<size_t>(filled), '#'), std::string(static_cast<size_t>(kWidth - filled), '.'),
             part * 100, left_s);
  std::fflush(stderr);
}

std::string Table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> width;
  for (const auto& row : rows) {
    width.resize(std::max(width.size(), row.size()));
    for (size_t c = 0; c < row.size(); ++c) width[c] = std::max(width[c], row[c].size());
  }
  std::string out;
  for (const auto& row : rows) {
    for (size_t c = 0; c < row.size(); ++c)
      out += c == 0 ? fmt::format("{:<{}}", row[c], width[c]) : fmt::format("  {:>{}}", row[c], width[c]);
    out += '\n';
  }
  return out;
}

std::string HumanBytes(double bytes) {
  const char* unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int u = 0;
  while (std::fabs(bytes) >= 1024 && u < 4) {
    bytes /= 1024;
    ++u;
  }
  std::string number = fmt::format("{:.3f}", bytes);
  number.erase(number.find_last_not_of('0') + 1);
  if (number.back() == '.') number.pop_back();
  return number + " " + unit[u];
}

Result<int64_t> ParseBytes(const std::string& text) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  const std::string unit(rest, end);
  static const std::vector<std::pair<std::string, double>> kUnits = {
      {"", 1},         {"B", 1},      {"K", 0x1p10},   {"KiB", 0x1p10}, {"M", 0x1p20}, {"MiB", 0x1p20}, {"G", 0x1p30},
      {"GiB", 0x1p30}, {"T", 0x1p40}, {"TiB", 0x1p40}, {"KB", 1e3},     {"MB", 1e6},   {"GB", 1e9},     {"TB", 1e12}};
  for (const auto& [name, factor] : kUnits) {
    if (error != std::errc() || unit != name) continue;
    const double bytes = value * factor;
    if (!(bytes > 0) || bytes > 0x1p62) break;
    return static_cast<int64_t>(bytes);
  }
  return Status(
      Code::kInvalidArgument,
      fmt::format("'{}' is not a number of bytes: expected a positive number and B, KiB, MiB, GiB or TiB", text));
}

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  size_t from = 0;
  while (true) {
    const size_t to = text.find(separator, from);
    parts.push_back(text.substr(from, to == std::string::npos ? to : to - from));
    if (to == std::string::npos) return parts;
    from = to + 1;
  }
}

Result<std::vector<int>> ParseIntList(const std::string& text, const std::string& flag) {
  constexpr int kMost = 1 << 20;
  std::vector<int> out;
  const auto number = [](std::string_view s, int* value) {
    const auto [rest, error] = std::from_chars(s.data(), s.data() + s.size(), *value);
    return error == std::errc() && rest == s.data() + s.size() && *value >= 0;
  };
  for (const std::string& part : Split(text, ',')) {
    const size_t dash = part.find('-', 1);
    int first = 0, last = 0;
    const bool good = dash == std::string::npos ? number(part, &first) && (last = first, true)
                                                : number(std::string_view(part).substr(0, dash), &first) &&
                                                      number(std::string_view(part).substr(dash + 1), &last);
    if (!good || last < first || last - first > kMost || static_cast<int>(out.size()) > kMost)
      return Status(Code::kInvalidArgument,
                    fmt::format("{}: '{}' is not a number or range such as 3 or 5-7", flag, part));
    for (int i = first; i <= last; ++i) out.push_back(i);
  }
  return out;
}

int64_t PeakRssBytes() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

}  // namespace livequant::app
