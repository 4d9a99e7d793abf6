// Ids and receipts in the simulation of the owner: transitions that come again.
#include <algorithm>
#include <string>
#include <utility>

#include "cache/owner/owner_simulator.h"
#include "schema/schema.h"

namespace livequant {
namespace {

constexpr size_t kPast = 60;  // beyond the deepest ring: some are expired
constexpr TxnId kOwn = TxnId{1} << 63;

std::string Decimal(uint64_t value) { return std::to_string(value); }

}  // namespace

TxnId OwnerSimulator::NextId() { return ids_ += static_cast<TxnId>(choices_.Range(1, 3)); }

void OwnerSimulator::CheckReceipt(const Receipt& receipt, Transition transition, TxnId id, SeqId seq, uint64_t before,
                                  int64_t length) const {
  const std::string name = std::string("the receipt of a ") + TransitionName(transition) + " ";
  Demand(receipt.owner == limits_.id && receipt.transition == transition, name + "names another owner or transition");
  Demand(id != 0 ? receipt.txn == id : (receipt.txn & kOwn) != 0, name + "has id " + Decimal(receipt.txn));
  Demand(seq == 0 || receipt.seq == seq, name + "names sequence " + Decimal(receipt.seq));
  Demand(receipt.generation_before == before && receipt.generation > before, name + "has other generations");
  Demand(transition == Transition::kRelease || receipt.generation == owner_->generation(receipt.seq),
         name + "has a generation that the sequence has not");
  Demand(receipt.length == length, name + "has length " + std::to_string(receipt.length));
  std::string hex;
  for (const uint8_t byte : receipt.schema)
    for (const int digit : {byte >> 4, byte & 15}) hex += "0123456789abcdef"[digit];
  Demand(hex == schema_digest_, name + "has another schema digest");
}

// One transition, refused or accepted; accepted under an id its reply may be lost, and the caller asks again.
Result<Receipt> OwnerSimulator::Do(Transition transition, SeqId seq, int64_t length, const Call& call) {
  const TxnId id = choices_.Chance(70) ? NextId() : 0;
  const uint64_t before = seq == 0 ? 0 : owner_->generation(seq);
  const Result<Receipt> first = call(id, false);
  if (!first.ok()) {
    if (id == 0) return first;
    Demand(owner_->FindReceipt(id).status().code() == Code::kNotFound, "a refused transition has a receipt");
    --ids_;  // the id is free: the next one may be the same
    coverage_->Add("ids free again");
    return first;
  }
  CheckReceipt(*first, transition, id, seq, before, length);
  if (id != 0 && Lost()) {
    const Result<Receipt> again = call(id, false);
    Demand(again.ok() && *again == *first,
           std::string("a ") + TransitionName(transition) + " that came again: " + again.status().ToString());
    coverage_->Add("lost replies");
  }
  Remember(*first, id == 0 ? Call() : call);
  return first;
}

void OwnerSimulator::Remember(const Receipt& receipt, Call again) {
  past_.push_back({receipt, accepted_++, std::move(again)});
  if (past_.size() > kPast) past_.erase(past_.begin());
}

// A late repeat: the same receipt while the ring has it, then a refusal; never a second effect.
void OwnerSimulator::AskAgain() {
  if (past_.empty()) return;
  const Past& past = past_[static_cast<size_t>(choices_.Range(0, static_cast<int>(past_.size()) - 1))];
  const TxnId id = past.receipt.txn;
  const bool known = accepted_ - past.order <= limits_.receipts, own = (id & kOwn) != 0;
  Note(std::string(TransitionName(past.receipt.transition)) + " again" + (known ? "" : ", expired"));
  const auto found = owner_->FindReceipt(id);
  if (!known) {
    Demand(found.status().code() == Code::kIdExpired, "a receipt beyond the ring: " + found.status().ToString());
    if (past.again) {
      const auto again = past.again(own ? 0 : id, false);
      Demand(again.status().code() == Code::kIdExpired, "an expired id: " + again.status().ToString());
    }
    coverage_->Add("expired ids");
  } else {
    Demand(found.ok() && *found == past.receipt, "a receipt in the ring: " + found.status().ToString());
    if (past.again) {
      const auto again = past.again(own ? 0 : id, false);
      Demand(again.ok() && *again == past.receipt, "asked again: " + again.status().ToString());
      const auto other = past.again(own ? 0 : id, true);
      Demand(other.status().code() == Code::kIdMismatch, "an id with other content: " + other.status().ToString());
      coverage_->Add("receipts asked again");
      coverage_->Add("ids of other content");
    }
  }
  check_all_ = true;
}

// A release receipt is consumed when the last reader and the last transaction on the sequence are gone, no sooner.
void OwnerSimulator::CheckReclaimed() const {
  for (const Past& past : past_) {
    if (past.receipt.transition != Transition::kRelease || accepted_ - past.order > limits_.receipts) continue;
    const SeqId seq = past.receipt.seq;
    const bool awaited = std::any_of(readers_.begin(), readers_.end(), [&](const Reader& r) { return r.seq == seq; }) ||
                         std::any_of(held_.begin(), held_.end(), [&](const Held& h) { return h.seq == seq; });
    const auto reclaimed = owner_->Reclaimed(past.receipt.txn);
    Demand(reclaimed.ok() && *reclaimed == !awaited,
           "the release of seq " + std::to_string(seq) +
               (awaited ? " was reclaimed under a reader" : " is not reclaimed"));
    if (awaited) coverage_->Add("reclaims awaited");
  }
}

}  // namespace livequant
