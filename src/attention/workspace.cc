// attention/workspace.cc: see attention.h and attention/cpu/workspace.h.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "attention/cpu/workspace.h"

namespace livequant {

void AttentionWorkspace::Impl::Free::operator()(float* p) const { std::free(p); }

AttentionWorkspace::AttentionWorkspace(int threads, int max_rows, int max_q_heads, int max_head_dim, int64_t max_len)
    : impl_(nullptr) {
  LQ_CHECK(threads > 0 && max_rows > 0 && max_q_heads > 0 && max_head_dim > 0 && max_len > 0);
  auto impl = std::make_unique<Impl>();
  impl->threads = threads;
  impl->max_rows = max_rows;
  impl->max_q_heads = max_q_heads;
  impl->max_head_dim = max_head_dim;
  impl->max_len = max_len;
  impl->padded_dim = PaddedDim(max_head_dim);
  impl->block = std::max(kBlockRows, max_q_heads);
  const int64_t block = impl->block, dim = impl->padded_dim, state = (block + 15) / 16 * 16 * 2 + block * dim;
  const int64_t coded = (block + 15) / 16 * 16;
  const int64_t per_thread = block * (dim + kLeafRows + kTileRows) + 2 * kTileRows * dim + 3 * state + 2 * coded;
  // Leaf states for as many query rows as a small call has: no more rows than threads, else there are items enough.
  const int64_t leaves = (max_len + kLeafRows - 1) / kLeafRows;
  impl->slot_floats = threads == 1 ? 0 : leaves * std::min(max_rows, threads) * max_q_heads * (dim + 2);
  impl->slot_floats = (impl->slot_floats + 15) / 16 * 16;
  const int64_t floats = threads * per_thread + impl->slot_floats;
  float* p = static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(floats) * sizeof(float)));
  LQ_CHECK(p != nullptr);
  impl->memory.reset(p);
  std::memset(p, 0, static_cast<size_t>(floats) * sizeof(float));
  auto take = [&p](int64_t n) { return std::exchange(p, p + n); };
  auto take_state = [&] {
    SoftmaxState s;
    s.max = take(coded), s.sum = take(coded), s.out = take(block * dim);
    return s;
  };
  for (int t = 0; t < threads; ++t) {
    Impl::Thread th;
    th.q = take(block * dim);
    th.score = take(block * kLeafRows);
    th.mixed = take(block * kTileRows);
    th.rows = take(kTileRows * dim);
    th.keys = take(kTileRows * dim);
    th.leaf = take_state(), th.node = take_state(), th.total = take_state();
    for (auto& c : th.coded) c = reinterpret_cast<int32_t*>(take(coded));
    impl->thread.push_back(th);
  }
  impl->slots = p;
  // One item a row and KV head at most; a split adds at most kPiecesPerThread pieces a thread.
  const size_t items = static_cast<size_t>(max_rows) * static_cast<size_t>(max_q_heads);
  impl->items.reserve(items);
  impl->pieces.reserve(items + static_cast<size_t>(threads) * kPiecesPerThread);
  impl->bytes =
      floats * static_cast<int64_t>(sizeof(float)) +
      static_cast<int64_t>(impl->items.capacity() * sizeof(Impl::Item) + impl->pieces.capacity() * sizeof(Impl::Piece) +
                           impl->thread.capacity() * sizeof(Impl::Thread));
  impl_ = impl.release();
}

AttentionWorkspace::~AttentionWorkspace() { delete impl_; }
AttentionWorkspace::AttentionWorkspace(AttentionWorkspace&& other) noexcept
    : impl_(std::exchange(other.impl_, nullptr)) {}
int64_t AttentionWorkspace::bytes() const { return impl_->bytes; }

}  // namespace livequant
