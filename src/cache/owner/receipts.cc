#include "cache/owner/receipts.h"

#include <algorithm>
#include <bit>

#include "base/check.h"
#include "base/rng.h"

namespace livequant {

IdMap::IdMap(int64_t most) : slots_(std::bit_ceil(static_cast<size_t>(2 * most + 2))) {}

size_t IdMap::Home(TxnId id) const { return static_cast<size_t>(Mix64(id)) & (slots_.size() - 1); }

int64_t IdMap::Find(TxnId id) const {
  if (id == 0) return -1;
  for (size_t i = Home(id);; i = (i + 1) & (slots_.size() - 1)) {
    if (slots_[i].id == id) return slots_[i].value;
    if (slots_[i].id == 0) return -1;
  }
}

void IdMap::Insert(TxnId id, int64_t value) {
  LQ_CHECK(id != 0);
  size_t i = Home(id);
  for (size_t seen = 0; slots_[i].id != 0; i = (i + 1) & (slots_.size() - 1))
    LQ_CHECK(slots_[i].id != id && ++seen < slots_.size() / 2);
  slots_[i] = {id, value};
}

void IdMap::Erase(TxnId id) {
  if (Find(id) < 0) return;
  const size_t mask = slots_.size() - 1;
  size_t hole = Home(id);
  while (slots_[hole].id != id) hole = (hole + 1) & mask;
  // Entries behind the hole that a search would no longer reach move into it.
  for (size_t i = (hole + 1) & mask; slots_[i].id != 0; i = (i + 1) & mask) {
    const size_t home = Home(slots_[i].id);
    if (((i - home) & mask) < ((i - hole) & mask)) continue;
    slots_[hole] = slots_[i];
    hole = i;
  }
  slots_[hole] = {};
}

ReceiptRing::ReceiptRing(int64_t depth) : ring_(static_cast<size_t>(depth)), index_(depth) { LQ_CHECK(depth >= 1); }

const Accepted* ReceiptRing::Find(TxnId id) const {
  const int64_t at = index_.Find(id);
  return at < 0 ? nullptr : &ring_[static_cast<size_t>(at)];
}

void ReceiptRing::Add(const Receipt& receipt, uint64_t content) {
  const size_t at = static_cast<size_t>(added_++ % ring_.size());
  if (const TxnId old = ring_[at].receipt.txn; old != 0) {
    index_.Erase(old);
    TxnId& highest = (old & kOwnId) != 0 ? expired_own_ : expired_callers_;
    highest = std::max(highest, old);
  }
  ring_[at] = {receipt, content, false};
  index_.Insert(receipt.txn, static_cast<int64_t>(at));
}

}  // namespace livequant
