// What a sequence should be, as a list of rows. Shares no line with cache/owner: schedules are spelled out again, rows
// are hashes.
//
// A row is the write that made it. Its exact bytes derive from hash(write, layer, tensor); its code derives from that
// hash and, where rows share qparams, from a digest of all rows that closed with it. So a row in the wrong place, or a
// group closed over the wrong rows, differs in all its bytes.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "base/rng.h"
#include "schema/schema.h"

namespace livequant {

inline constexpr int kOracleLayers = 3;

inline uint64_t RowHash(uint64_t write, int layer, int tensor) {
  return Mix64(write * 0x2545F4914F6CDD1Du + static_cast<uint64_t>(layer * 2 + tensor));
}
inline uint64_t FoldDigest(uint64_t digest, uint64_t row_hash) { return Mix64(digest * 3 ^ row_hash); }
inline constexpr uint64_t kEmptyDigest = 0x6A09E667F3BCC908u;

struct OracleRow {
  uint64_t write = 0;
  std::array<std::array<uint64_t, 2>, kOracleLayers> digest{};  // [layer][tensor], once coded
};

// The schedules of a schema, computed by counting.
class OracleSchedule {
 public:
  explicit OracleSchedule(const CacheSchema& schema) : read_step_(schema.read_step) {
    for (const LayerSchema& layer : schema.layers) {
      layers_.push_back({{layer.k_closure.lag, layer.v_closure.lag},
                         {layer.k_closure.step, layer.v_closure.step},
                         {layer.k.axis == ScaleAxis::kChannel ? layer.k.group : 1,
                          layer.v.axis == ScaleAxis::kChannel ? layer.v.group : 1},
                         layer.pinned_rows,
                         layer.window});
    }
  }
  int layers() const { return static_cast<int>(layers_.size()); }
  int pinned(int layer) const { return layers_[static_cast<size_t>(layer)].pinned; }
  int window(int layer) const { return layers_[static_cast<size_t>(layer)].window; }
  int group(int layer, int tensor) const { return layers_[static_cast<size_t>(layer)].group[tensor]; }
  bool immediate(int layer, int tensor) const {
    const Layer& l = layers_[static_cast<size_t>(layer)];
    return l.step[tensor] == 1 && l.lag[tensor] <= 0;
  }
  // Rows that may be coded when n exist: steps that fit behind the lag.
  int raw(int layer, int tensor, int n) const {
    const Layer& l = layers_[static_cast<size_t>(layer)];
    int coded = 0;
    while (coded + l.step[tensor] <= n - l.lag[tensor]) coded += l.step[tensor];
    return coded;
  }
  int frontier(int layer, int tensor, int n) const { return std::min(n, raw(layer, tensor, n)); }
  // Rows that the query at position q reads coded, before max() with f.
  int read(int layer, int tensor, int q) const {
    if (read_step_ == 1) return std::min(q + 1, raw(layer, tensor, q));
    const int boundary = q - q % read_step_;
    return std::min(boundary, raw(layer, tensor, boundary));
  }
  // Rows of a draft of at most `rows`: no group of several rows may close over draft rows before its last one.
  int draft_rows(int len, int rows) const {
    int n = 1;
    const auto fits = [&](int count) {
      for (int layer = 0; layer < layers(); ++layer)
        for (int t = 0; t < 2; ++t)
          if (layers_[static_cast<size_t>(layer)].step[t] > 1 && raw(layer, t, len + count - 1) > len) return false;
      return true;
    };
    while (n < rows && fits(n + 1)) ++n;
    return n;
  }

 private:
  struct Layer {
    int lag[2], step[2], group[2], pinned, window;
  };
  std::vector<Layer> layers_;
  int read_step_;
};

struct OracleSequence {
  std::vector<OracleRow> rows;
  std::array<std::array<int, 2>, kOracleLayers> f{};  // [layer][tensor]

  int len() const { return static_cast<int>(rows.size()); }

  // Rows [f, to) of one tensor close now, group by group.
  void Close(const OracleSchedule& schedule, int layer, int tensor, int to) {
    int& f_now = f[static_cast<size_t>(layer)][static_cast<size_t>(tensor)];
    int p = std::max(f_now, schedule.pinned(layer));
    const int group = schedule.group(layer, tensor);
    while (p < to) {
      const int end = std::min(to, (p / group + 1) * group);
      uint64_t digest = kEmptyDigest;
      if (group > 1)
        for (int i = p; i < end; ++i)
          digest = FoldDigest(digest, RowHash(rows[static_cast<size_t>(i)].write, layer, tensor));
      for (; p < end; ++p)
        rows[static_cast<size_t>(p)].digest[static_cast<size_t>(layer)][static_cast<size_t>(tensor)] = digest;
    }
    f_now = std::max(f_now, to);
  }
  // `writes` are accepted.
  void Append(const OracleSchedule& schedule, const std::vector<uint64_t>& writes, int accepted) {
    for (int i = 0; i < accepted; ++i) rows.push_back({writes[static_cast<size_t>(i)], {}});
    for (int layer = 0; layer < schedule.layers(); ++layer)
      for (int t = 0; t < 2; ++t) Close(schedule, layer, t, schedule.frontier(layer, t, len()));
  }
  void Truncate(int n) {
    rows.resize(static_cast<size_t>(n));
    for (auto& layer : f)
      for (int& value : layer) value = std::min(value, n);
  }
};

}  // namespace livequant
