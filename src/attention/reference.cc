// attention/reference.cc: the definition of attention over a cache (attention.h), to be read beside the formulas.
//
// Invariants: nothing here is shared with the fast path. Tables are expanded to one place per row, rows are decoded by
// the reference decoder, sums run in double over positions in rising order, and there is one softmax per query and
// head.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention/attention.h"

namespace livequant {
namespace {

// The rows of one tensor of one sequence and KV head, decoded when first read. Keys leave rotated.
class RowSource {
 public:
  RowSource(const AttentionCall& call, int sequence, int head, TensorIndex tensor)
      : call_(call), sequence_(sequence), head_(head), tensor_(tensor), dim_(call.plan->schema.head_dim) {
    const SeqRow& s = call.view.seq[sequence];
    for (int form : {kCoded, kExact}) {
      rows_[form].resize(static_cast<size_t>(s.len) * dim_);
      known_[form].resize(static_cast<size_t>(s.len));
      ExpandTable(form, form == kCoded ? s.staged[tensor] : s.len - s.count);
    }
  }

  // Row j in the form that the query at position q reads.
  const double* Row(int64_t j, int64_t q) {
    const bool coded = j >= call_.view.pinned && j < call_.view.coded_rows(sequence_, tensor_, q);
    const int form = coded ? kCoded : kExact;
    double* row = rows_[form].data() + j * dim_;
    if (!known_[form][static_cast<size_t>(j)]) {
      Decode(form, j, row);
      known_[form][static_cast<size_t>(j)] = true;
    }
    return row;
  }

 private:
  struct Place {
    bool exists = false;
    uint32_t page = 0;
    int slot = 0;
  };

  // Rows of entry i: [start, min(align_down(start, rows) + rows, start of entry i + 1, end of the plane)).
  void ExpandTable(int form, int64_t plane_end) {
    const CacheView& view = call_.view;
    const int64_t rows = view.plane[tensor_][form].rows;
    const int count = view.seq[sequence_].entries[tensor_][form];
    places_[form].resize(static_cast<size_t>(view.seq[sequence_].len));
    for (int i = 0; i < count; ++i) {
      const Entry& e = view.entry(sequence_, tensor_, form, i);
      const int64_t base = e.start / rows * rows;
      int64_t end = std::min(base + rows, plane_end);
      if (i + 1 < count) end = std::min<int64_t>(end, view.entry(sequence_, tensor_, form, i + 1).start);
      for (int64_t j = e.start; j < end; ++j)
        places_[form][static_cast<size_t>(j)] = {true, e.page, static_cast<int>(j - base)};
    }
  }

  void Decode(int form, int64_t j, double* out) {
    const SeqRow& s = call_.view.seq[sequence_];
    const int64_t first = s.len - s.count;
    std::vector<float> row(static_cast<size_t>(dim_));
    if (form == kExact && j >= first) {
      const float* step = tensor_ == kK ? call_.step_k : call_.step_v;
      const int64_t width = int64_t{call_.plan->schema.num_kv_heads} * dim_;
      std::copy_n(step + (s.first_query + j - first) * width + int64_t{head_} * dim_, dim_, row.data());
    } else {
      const Place& p = places_[form][static_cast<size_t>(j)];
      LQ_CHECK(p.exists);
      DecodeRowsReference(call_.plan->format[tensor_][form], call_.view.head_block(tensor_, form, p.page, head_),
                          p.slot, MatrixView<float>(row.data(), 1, dim_));
    }
    std::copy(row.begin(), row.end(), out);
    if (tensor_ == kK && call_.plan->schema.k_stage == RopeStage::kPre && j >= call_.view.pinned) Rotate(j, out);
  }

  void Rotate(int64_t position, double* row) const {
    const RopeTable& table = *call_.plan->rope;
    const int half = table.dims() / 2;
    const bool split = table.pairing() == RopePairing::kHalfSplit;
    for (int i = 0; i < half; ++i) {
      double& x = row[split ? i : 2 * i];
      double& y = row[split ? i + half : 2 * i + 1];
      const double c = table.cos(position)[i], s = table.sin(position)[i], rotated = x * c - y * s;
      y = y * c + x * s;
      x = rotated;
    }
  }

  const AttentionCall& call_;
  int sequence_, head_;
  TensorIndex tensor_;
  int dim_;
  std::vector<Place> places_[2];
  std::vector<double> rows_[2];
  std::vector<bool> known_[2];
};

}  // namespace

void AttendReference(const AttentionCall& call) {
  const LayerSchema& schema = call.plan->schema;
  const int dim = schema.head_dim;
  LQ_CHECK(call.num_q_heads > 0 && call.num_q_heads % schema.num_kv_heads == 0);
  const int group = call.num_q_heads / schema.num_kv_heads;
  for (int sequence = 0; sequence < call.view.sequences; ++sequence) {
    const SeqRow& s = call.view.seq[sequence];
    for (int head = 0; head < schema.num_kv_heads && s.count > 0; ++head) {
      RowSource keys(call, sequence, head, kK), values(call, sequence, head, kV);
      for (int r = 0; r < s.count; ++r) {
        const int64_t position = s.len - s.count + r;
        const int64_t low = call.view.window > 0 ? std::max<int64_t>(0, position - call.view.window + 1) : 0;
        for (int g = 0; g < group; ++g) {
          const int64_t at = (int64_t{s.first_query} + r) * call.num_q_heads * dim + (int64_t{head} * group + g) * dim;
          std::vector<double> weight(static_cast<size_t>(position - low + 1)), sum(static_cast<size_t>(dim));
          double top = -std::numeric_limits<double>::infinity(), total = 0;
          for (int64_t j = low; j <= position; ++j) {
            const double* k = keys.Row(j, position);
            double dot = 0;
            for (int c = 0; c < dim; ++c) dot += double{call.q[at + c]} * k[c];
            weight[static_cast<size_t>(j - low)] = dot * call.scale;
            top = std::max(top, dot * call.scale);
          }
          for (double& w : weight) total += w = std::exp(w - top);
          for (int64_t j = low; j <= position; ++j) {
            const double* v = values.Row(j, position);
            for (int c = 0; c < dim; ++c) sum[static_cast<size_t>(c)] += weight[static_cast<size_t>(j - low)] * v[c];
          }
          for (int c = 0; c < dim; ++c) call.out[at + c] = static_cast<float>(sum[static_cast<size_t>(c)] / total);
        }
      }
    }
  }
}

}  // namespace livequant
