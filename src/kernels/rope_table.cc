// kernels/rope_table.cc: see rope_table.h.
#include "kernels/rope_table.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/check.h"

namespace livequant {
namespace {

// Wavelengths, in positions, decide: short ones stay, long ones are stretched, those between are mixed.
double Llama3(const RopeConfig& c, double base) {
  const double wavelength = 2 * std::numbers::pi / base, original = c.original_max_positions;
  if (wavelength < original / c.high_freq_factor) return base;
  if (wavelength > original / c.low_freq_factor) return base / c.factor;
  const double keep = (original / wavelength - c.low_freq_factor) / (c.high_freq_factor - c.low_freq_factor);
  return keep * base + (1 - keep) * base / c.factor;
}

// The pair, as a real number, that turns `turns` times in the positions of pretraining.
double PairThatTurns(const RopeConfig& c, int dims, double turns) {
  return dims * std::log(c.original_max_positions / (turns * 2 * std::numbers::pi)) / (2 * std::log(c.theta));
}

double Yarn(const RopeConfig& c, int dims, int pair, double base) {
  double first = PairThatTurns(c, dims, c.beta_fast), last = PairThatTurns(c, dims, c.beta_slow);
  if (c.truncate) {
    first = std::floor(first);
    last = std::ceil(last);
  }
  first = std::max(first, 0.0);
  last = std::min(last, dims - 1.0);
  if (first == last) last += 0.001;
  const double stretch = std::clamp((pair - first) / (last - first), 0.0, 1.0);
  return stretch * base / c.factor + (1 - stretch) * base;
}

}  // namespace

std::vector<double> RopeFrequencies(const RopeConfig& config, int head_dim) {
  const int dims = config.dims == 0 ? head_dim : config.dims;
  LQ_CHECK(ValidateRope(config).ok() && dims > 0 && dims % 2 == 0 && dims <= head_dim);
  std::vector<double> out;
  for (int i = 0; i < dims / 2; ++i) {
    const double base = std::pow(config.theta, -2.0 * i / dims);
    out.push_back(config.type == "linear"   ? base / config.factor
                  : config.type == "llama3" ? Llama3(config, base)
                  : config.type == "yarn"   ? Yarn(config, dims, i, base)
                                            : base);
  }
  return out;
}

RopeTable::RopeTable(const RopeConfig& config, int head_dim, int64_t max_len)
    : dims_(config.dims == 0 ? head_dim : config.dims), pairing_(config.pairing), max_len_(max_len) {
  LQ_CHECK(max_len >= 0);
  const std::vector<double> frequency = RopeFrequencies(config, head_dim);
  const size_t pairs = frequency.size();
  cos_.resize(static_cast<size_t>(max_len) * pairs);
  sin_.resize(cos_.size());
  for (size_t i = 0; i < pairs; ++i)
    for (int64_t t = 0; t < max_len; ++t) {
      const double angle = static_cast<double>(t) * frequency[i];
      cos_[static_cast<size_t>(t) * pairs + i] = static_cast<float>(std::cos(angle) * config.attention_factor);
      sin_[static_cast<size_t>(t) * pairs + i] = static_cast<float>(std::sin(angle) * config.attention_factor);
    }
}

}  // namespace livequant
