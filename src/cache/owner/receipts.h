// cache/owner/receipts.h: accepted transitions by id: the last ones in a ring, open transactions in a map.
//
// An id is known while its record is in the ring. One that left is expired: a caller's id at or below the highest
// caller's id that left is never taken as new, so a retry that comes too late is refused instead of done twice. Callers
// therefore give ids that rise; those in flight may arrive in any order within the ring's depth. The owner's own ids
// (highest bit set) expire among themselves. Everything is allocated in the constructors. Not thread safe: the owner's
// lock guards it.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/owner/owner.h"

namespace livequant {

inline constexpr TxnId kOwnId = TxnId{1} << 63;

// Ids to small numbers; open addressing, capacity fixed.
class IdMap {
 public:
  explicit IdMap(int64_t most);          // entries at once
  int64_t Find(TxnId id) const;          // -1: not there
  void Insert(TxnId id, int64_t value);  // REQUIRES id != 0, not there, room
  void Erase(TxnId id);                  // nothing if it is not there

 private:
  struct Slot {
    TxnId id = 0;  // 0 = free
    int64_t value = 0;
  };
  size_t Home(TxnId id) const;
  std::vector<Slot> slots_;  // a power of two, at most half full
};

struct Accepted {
  Receipt receipt;
  uint64_t content = 0;    // fold of what was asked
  bool reclaimed = false;  // a release: its receipt was consumed
};

class ReceiptRing {
 public:
  explicit ReceiptRing(int64_t depth);  // receipts that it holds; REQUIRES >= 1
  int64_t depth() const { return static_cast<int64_t>(ring_.size()); }
  const Accepted* Find(TxnId id) const;  // null: not in the ring
  // The same, to be marked as reclaimed.
  Accepted* Find(TxnId id) { return const_cast<Accepted*>(static_cast<const ReceiptRing*>(this)->Find(id)); }
  // At or below the highest id of its kind that left the ring, and not in it.
  bool Expired(TxnId id) const { return id <= ((id & kOwnId) != 0 ? expired_own_ : expired_callers_) && !Find(id); }
  // The oldest record makes room.
  void Add(const Receipt& receipt, uint64_t content);

 private:
  std::vector<Accepted> ring_;
  IdMap index_;
  uint64_t added_ = 0;
  TxnId expired_own_ = 0, expired_callers_ = 0;
};

}  // namespace livequant
