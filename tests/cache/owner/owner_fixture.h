// One owner on pages without bytes, and shorthand for what tests of the state machine do to it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "cache/owner/owner.h"
#include "cache/owner/schemas.h"

namespace livequant {

// CHECKs that the calls which a test takes for granted succeed.
class Fixture {
 public:
  explicit Fixture(const std::vector<ClassSpec>& specs, int64_t max_len = 2048, int64_t pages = 400,
                   int sequences = 8) {
    OwnerLimits limits;
    limits.max_sequences = sequences;
    limits.max_len = max_len;
    limits.allocate_memory = false;
    limits.faults = &faults;
    schema = SchemaOf(specs);
    limits.pages.assign(LayerClasses(schema).size() * 4, pages);
    auto made = Owner::Create(schema, limits);
    LQ_CHECK(made.ok());
    owner = *std::move(made);
  }
  SeqId Open() { return owner->Open()->seq; }
  Result<TxnId> Begin(SeqId seq, int rows, Mode mode = Mode::kAll) {
    const AppendRequest request{seq, rows, mode};
    TxnId id = 0;
    if (Status s = owner->Begin({&request, 1}, {&id, 1}); !s.ok()) return s;
    return id;
  }
  void Prepare(TxnId id) {
    for (int layer = 0; layer < static_cast<int>(schema.layers.size()); ++layer)
      ASSERT_TRUE(owner->MarkPrepared(id, layer).ok());
  }
  // Appends rows in one step.
  void Append(SeqId seq, int rows) {
    auto id = Begin(seq, rows);
    ASSERT_TRUE(id.ok()) << id.status().ToString();
    Prepare(*id);
    ASSERT_TRUE(owner->Publish(*id, rows).ok());
    Check();
  }
  // Appends one row at a time until the sequence has `len` rows.
  void GrowTo(SeqId seq, int64_t len) {
    while (owner->length(seq) < len) Append(seq, 1);
  }
  void Check() {
    const Status s = owner->CheckInvariants();
    ASSERT_TRUE(s.ok()) << s.ToString();
    const LedgerBytes census = owner->Census();
    ASSERT_EQ(owner->used_bytes(), census.total() + census.slack);
  }
  SeqRow Row(SeqId seq, int cls = 0) {
    auto lease = owner->Acquire(seq);
    LQ_CHECK(lease.ok());
    return lease->rows()[static_cast<size_t>(cls)];
  }
  std::vector<Entry> Table(const SeqRow& row, int tensor, int form, int layer = 0) {
    CacheView view = owner->ViewOfLayer(layer);
    view.seq = &row;
    view.sequences = 1;
    std::vector<Entry> entries;
    for (int i = 0; i < row.entries[tensor][form]; ++i) entries.push_back(view.entry(0, tensor, form, i));
    return entries;
  }
  std::vector<uint32_t> Starts(const SeqRow& row, int tensor, int form) {
    std::vector<uint32_t> out;
    for (const Entry& e : Table(row, tensor, form)) out.push_back(e.start);
    return out;
  }
  std::vector<uint32_t> Starts(SeqId seq, int tensor, int form) { return Starts(Row(seq), tensor, form); }
  std::vector<uint32_t> Pages(SeqId seq, int tensor, int form) {
    std::vector<uint32_t> out;
    for (const Entry& e : Table(Row(seq), tensor, form)) out.push_back(e.page);
    return out;
  }
  // len, fK, fV.
  std::vector<int> State(SeqId seq) {
    const SeqRow row = Row(seq);
    return {row.len, row.f[kK], row.f[kV]};
  }

  AllocationFaults faults;
  CacheSchema schema;
  std::unique_ptr<Owner> owner;
};

}  // namespace livequant
