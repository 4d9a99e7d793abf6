#include "cache/owner/owner_simulator.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <utility>

#include "cache/ledger/ledger.h"

namespace livequant {
namespace {

std::string Text(int64_t value) { return std::to_string(value); }

constexpr int kTraceLength = 24;
constexpr int kCheckAllEvery = 24;

}  // namespace

const std::vector<std::string>& Coverage::Required() {
  static const std::vector<std::string> names = {"closed K rows",
                                                 "closed V rows",
                                                 "closed groups",
                                                 "short groups",
                                                 "scars",
                                                 "truncate in a group",
                                                 "truncate to 0",
                                                 "truncate to len",
                                                 "pages copied",
                                                 "rows copied",
                                                 "marks returned",
                                                 "window drops",
                                                 "draft cuts",
                                                 "deferred reclaims",
                                                 "stale after truncate",
                                                 "stale after reorder",
                                                 "stale after release",
                                                 "stale after publish",
                                                 "pools ran dry",
                                                 "failed page",
                                                 "failed block",
                                                 "failed root",
                                                 "failed view",
                                                 "failed transaction",
                                                 "failed sequence",
                                                 "partial accepts",
                                                 "full accepts of drafts",
                                                 "aborts",
                                                 "forks",
                                                 "reorders with duplicates",
                                                 "batches",
                                                 "failed batches",
                                                 "duplicate layer",
                                                 "missing layer",
                                                 "poisoned",
                                                 "wrong count",
                                                 "not sealed",
                                                 "receipts asked again",
                                                 "lost replies",
                                                 "lost replies of begin",
                                                 "ids free again",
                                                 "ids of other content",
                                                 "expired ids",
                                                 "begin of an accepted id",
                                                 "reclaims awaited",
                                                 "beyond max_len",
                                                 "long holds",
                                                 "ledger compared",
                                                 "closes with pinned rows",
                                                 "truncate below pinned",
                                                 "truncate refused by a window",
                                                 "steps over 6 rows"};
  return names;
}

OwnerSimulator::OwnerSimulator(uint64_t seed, Choices choices, Coverage* coverage)
    : choices_(choices), coverage_(coverage) {
  Pick(seed);
  auto made = Owner::Create(schema_, limits_);
  Demand(made.ok(), "create: " + made.status().ToString());
  owner_ = *std::move(made);
  schedule_ = std::make_unique<OracleSchedule>(schema_);
  codec_ = std::make_unique<MiniCodec>(schema_, *owner_);
  OpenOne();
}

OwnerSimulator::~OwnerSimulator() = default;

// A schema and limits. The closure pairs are those of the presets; KIVI and tiles are scaled down with their pages.
void OwnerSimulator::Pick(uint64_t seed) {
  Rng rng(Mix64(seed ^ 0xC0FFEE));
  const int pair = static_cast<int>(seed % 7);
  ClassSpec spec;
  switch (pair) {
    case 0:
      spec.k = spec.v = {-1, 1};
      break;  // f16, fp8, int8
    case 1:
      spec.k = spec.v = {0, 1};
      break;  // qserve
    case 2:
      spec.k = {0, 8}, spec.v = {8, 1}, spec.group = 4;
      break;  // kivi, pinned code
    case 3:
      spec.k = spec.v = {7, 4}, spec.group = 4;
      break;  // kivi synchronized: R 10
    case 4:
      spec.k = spec.v = {0, 8}, spec.group = 8;
      break;  // tiles
    case 5:
      spec.k = {0, 16}, spec.v = {3, 1}, spec.group = 4;
      break;  // a closure that spans pages
    case 6:
      spec.k = {0, 8}, spec.v = {8, 1}, spec.group = 4;
      break;
  }
  spec.coded_rows = rng.Pick({8, 8, 16});
  spec.exact_rows = rng.Pick({2, 4, 4, 8});
  spec.pinned = rng.Chance(0.5) ? 0 : static_cast<int>(rng.Range(1, 3));
  spec.window = rng.Chance(0.75) ? 0 : static_cast<int>(rng.Range(20, 30));
  spec.layers = static_cast<int>(rng.Range(1, 2));
  spec.heads = static_cast<int>(rng.Range(1, 2));
  std::vector<ClassSpec> specs = {spec};
  if (pair == 6 || rng.Chance(0.2)) {  // a mixed policy: a second class of rows that are coded at once
    ClassSpec second = spec;
    second.k = second.v = rng.Chance(0.5) ? Closure{-1, 1} : Closure{0, 1};
    second.group = 0;
    second.layers = 1;
    specs.push_back(second);
  }
  schema_ = SchemaOf(specs);
  // Layers of one class whose groups differ.
  if (pair == 2 && spec.layers == 2 && rng.Chance(0.5)) schema_.layers.back().k.group = specs.size() == 1 ? 8 : 0;
  if (specs.size() == 2 && pair == 2 && schema_.layers.back().k.group == 0) schema_.layers.back() = LayerOf(spec);
  schema_.read_step = rng.Chance(0.7) ? kStepwise : rng.Chance(0.5) ? 4 : kPromptReadStep;
  LQ_CHECK(Validate(schema_).ok());
  schema_digest_ = Digest(schema_);
  max_len_ = rng.Range(60, 120);
  tight_ = rng.Chance(0.3);
  limits_.id = 77;
  limits_.max_sequences = static_cast<int>(rng.Range(3, 7));
  limits_.max_views = limits_.max_sequences * 3 + 6;
  limits_.max_len = max_len_;
  limits_.max_step_rows = rng.Chance(0.5) ? 0 : 40;
  limits_.faults = &faults_;
  const auto classes = LayerClasses(schema_);
  for (const LayerClass& c : classes)
    for (int plane = 0; plane < 4; ++plane) {
      const int rows = plane % 2 == kCoded ? c.coded_page_rows : c.exact_page_rows;
      const int64_t longest = max_len_ / rows + 2;
      limits_.pages.push_back(tight_ ? longest * 2 + 2 : longest * limits_.max_views);
    }
  limits_.receipts = static_cast<int>(rng.Range(6, 40));
  config_ = "closures {" + Text(spec.k.lag) + "," + Text(spec.k.step) + "} {" + Text(spec.v.lag) + "," +
            Text(spec.v.step) + "} group " + Text(spec.group) + ", pages of " + Text(spec.coded_rows) + " and " +
            Text(spec.exact_rows) + " rows, pinned " + Text(spec.pinned) + ", window " + Text(spec.window) +
            ", layers " + Text(static_cast<int64_t>(schema_.layers.size())) + " in " +
            Text(static_cast<int64_t>(classes.size())) + " classes, read_step " + Text(schema_.read_step) +
            ", max_len " + Text(max_len_) + ", receipts " + Text(limits_.receipts) + (tight_ ? ", tight pools" : "");
}

void OwnerSimulator::Note(std::string what) {
  trace_.push_back(std::move(what));
  if (trace_.size() > kTraceLength) trace_.erase(trace_.begin());
}

std::string OwnerSimulator::Trace() const {
  std::string out;
  for (const std::string& line : trace_) out += "  " + line + "\n";
  return out;
}

void OwnerSimulator::Fail(const std::string& what) const { throw SimulationError(what); }

bool OwnerSimulator::Went(const Status& status, const char* what) {
  if (status.ok()) return true;
  Note(std::string("  refused: ") + status.ToString());
  Demand(status.code() == Code::kOutOfPages, std::string(what) + ": " + status.ToString());
  int64_t fired = 0;
  for (int site = 0; site < kAllocationSites; ++site) fired += faults_.fired[site];
  if (fired > 0) {
    for (int site = 0; site < kAllocationSites; ++site)
      coverage_->Add(std::string("failed ") + AllocationSiteName(static_cast<AllocationSite>(site)),
                     faults_.fired[site]);
  } else {
    // Slots of sequences and views, and tables full of scars, run out in any run; pages only where the pools are tight.
    const bool pages = status.message().find(" pages: ") != std::string::npos;
    Demand(tight_ || !pages, std::string(what) + " ran dry: " + status.ToString());
    coverage_->Add("pools ran dry");
  }
  check_all_ = true;  // nothing may have changed
  return false;
}

OwnerSimulator::Live* OwnerSimulator::FindLive(SeqId id) {
  for (const auto& live : live_)
    if (live->id == id) return live.get();
  return nullptr;
}

void OwnerSimulator::Moved(Live& live, const char* cause) {
  for (Held& held : held_)
    if (held.seq == live.id && held.stale == nullptr) held.stale = cause;
}

// --- operations ---

void OwnerSimulator::OpenOne() {
  Note("open");
  const auto opened = Do(Transition::kOpen, 0, 0,
                         [this](TxnId id, bool other) { return other ? owner_->Release(1, id) : owner_->Open(id); });
  if (!Went(opened.status(), "open")) return;
  live_.push_back(std::make_unique<Live>());
  live_.back()->id = opened->seq;
  touched_.push_back(live_.back().get());
}

void OwnerSimulator::Append(int rows, Mode mode, Fate fate) {
  Live& live = AnyLive();
  // A full sequence is cut back more often than it is asked for the impossible.
  if (live.rows.len() + rows > max_len_ && choices_.Chance(80)) return Truncate();
  const AppendRequest request{live.id, rows, mode, choices_.Chance(70) ? NextId() : 0, writes_};
  TxnId id = 0;
  Note("begin seq " + Text(live.id) + " len " + Text(live.rows.len()) + " rows " + Text(rows) +
       (mode == Mode::kPrefix ? " draft" : "") + " fate " + Text(static_cast<int>(fate)));
  const int64_t used = owner_->used_bytes();
  Status status = owner_->Begin({&request, 1}, {&id, 1});
  if (live.rows.len() + rows > max_len_ || (limits_.max_step_rows > 0 && rows > limits_.max_step_rows)) {
    Demand(status.code() == Code::kOutOfRange, "begin beyond a limit: " + status.ToString());
    Demand(owner_->used_bytes() == used, "a refused begin took pages");
    coverage_->Add("beyond max_len");
    return;
  }
  if (!Went(status, "begin")) {
    Demand(owner_->used_bytes() == used && id == 0, "a failed begin took something");
    return;
  }
  if (request.id != 0 && Lost()) {
    const int64_t taken = owner_->used_bytes();
    TxnId again = 0;
    Demand(owner_->Begin({&request, 1}, {&again, 1}).ok() && again == id && owner_->used_bytes() == taken,
           "a begin that came again is another transaction");
    coverage_->Add("lost replies of begin");
  }
  Held held{
      .id = id, .seq = live.id, .mode = mode, .writes = {}, .base = live.rows, .stale = nullptr, .request = request};
  const auto txn = owner_->Get(id);
  Demand(txn.ok(), "get: " + txn.status().ToString());
  const int expected = mode == Mode::kAll ? rows : schedule_->draft_rows(live.rows.len(), rows);
  Demand(txn->count == expected, "the transaction holds " + Text(txn->count) + " rows, expected " + Text(expected));
  for (int i = 0; i < txn->count; ++i) held.writes.push_back(++writes_);
  if (fate == Fate::kMisuse) return Misuse(std::move(held));
  if (rows > 6) coverage_->Add("steps over 6 rows");
  Run(held);
  switch (fate) {
    case Fate::kPublish:
      return Finish(std::move(held), txn->count);
    case Fate::kPartial:
      return Finish(std::move(held), choices_.Range(1, txn->count));
    case Fate::kHold:
      held_.push_back(std::move(held));
      return;
    default:
      break;
  }
  owner_->Abort(held.id);
  coverage_->Add("aborts");
}

void OwnerSimulator::AppendBatch() {
  std::vector<AppendRequest> requests;
  for (const auto& live : live_)
    if (choices_.Chance(60)) {
      const int room = static_cast<int>(max_len_) - live->rows.len();
      if (room > 0)
        requests.push_back({live->id, choices_.Range(1, std::min(room, 6)),
                            choices_.Chance(70) ? Mode::kAll : Mode::kPrefix, choices_.Chance(70) ? NextId() : 0,
                            writes_ + requests.size()});
    }
  if (requests.empty()) return;
  std::string text = "batch";
  for (const AppendRequest& r : requests) text += " seq " + Text(r.seq) + " +" + Text(r.rows);
  Note(text);
  std::vector<TxnId> ids(requests.size(), 0);
  const int64_t used = owner_->used_bytes();
  if (!Went(owner_->Begin(requests, ids), "begin of a batch")) {
    Demand(owner_->used_bytes() == used, "a failed batch took pages");
    coverage_->Add("failed batches");
    return;
  }
  coverage_->Add("batches");
  std::vector<Held> batch;
  for (size_t i = 0; i < requests.size(); ++i) {
    Held held{.id = ids[i],
              .seq = requests[i].seq,
              .mode = requests[i].mode,
              .writes = {},
              .base = FindLive(requests[i].seq)->rows,
              .stale = nullptr,
              .request = requests[i]};
    const int count = owner_->Get(ids[i])->count;
    for (int k = 0; k < count; ++k) held.writes.push_back(++writes_);
    batch.push_back(std::move(held));
  }
  for (Held& held : batch) Run(held);
  for (Held& held : batch) {
    const int count = static_cast<int>(held.writes.size());
    Finish(std::move(held), held.mode == Mode::kAll ? count : choices_.Range(1, count));
  }
}

// Prepares every layer, in any order, and looks at what the queries of the step would read.
void OwnerSimulator::Run(Held& held) {
  const TxnView txn = *owner_->Get(held.id);
  CheckFresh(txn);
  std::vector<int> order;
  for (int layer = 0; layer < schedule_->layers(); ++layer) order.push_back(layer);
  if (choices_.Chance(50)) std::reverse(order.begin(), order.end());
  for (const int layer : order) {
    codec_->Prepare(txn, layer, held.writes);
    const Status s = owner_->MarkPrepared(held.id, layer);
    Demand(s.ok(), "prepare: " + s.ToString());
  }
  CheckQueries(held, txn);
}

// A page that no table names but that of this transaction is poison in every slot.
void OwnerSimulator::CheckFresh(const TxnView& txn) {
  for (const Claim& claim : txn.claims) {
    const PagePool& pool =
        owner_->pool(claim.cls, static_cast<TensorIndex>(claim.tensor), static_cast<FormIndex>(claim.form));
    bool fresh = claim.from == claim.position % pool.rows();
    // The page is new iff it is the target of a copy, or its first slot handed out is the claim's first.
    bool copied = false;
    for (const PageCopy& copy : txn.copies)
      copied |=
          copy.cls == claim.cls && copy.tensor == claim.tensor && copy.form == claim.form && copy.dst == claim.page;
    bool first_entry = false;
    CacheView view = owner_->ViewOfLayer(owner_->classes()[claim.cls].layers[0]);
    view.seq = &txn.rows[claim.cls];
    const int entries = txn.rows[claim.cls].entries[claim.tensor][claim.form];
    for (int i = entries; i-- > 0;) {
      const Entry e = view.entry(0, claim.tensor, claim.form, i);
      if (e.page != claim.page) continue;
      first_entry = static_cast<int32_t>(e.start) == claim.position;
      break;
    }
    fresh = copied || (fresh && first_entry);
    if (!fresh) continue;
    const std::byte* data = pool.data(claim.page);
    for (int64_t i = 0; i < pool.page_bytes(); ++i) Demand(data[i] == std::byte{0xFF}, "a fresh page is not poison");
  }
}

void OwnerSimulator::CheckQueries(const Held& held, const TxnView& txn) {
  OracleSequence step = held.base;
  for (const uint64_t write : held.writes) step.rows.push_back({write, {}});
  const int first = held.base.len(), end = step.len();
  Demand(txn.first == first && txn.count == end - first, "the transaction covers other rows");
  for (int layer = 0; layer < schedule_->layers(); ++layer) {
    const SeqRow& row = txn.rows[static_cast<size_t>(codec_->cls(layer))];
    Demand(row.len == end && row.count == end - first && row.first_query == 0, "the private view has another length");
    for (int t = 0; t < 2; ++t) {
      const int f = held.base.f[static_cast<size_t>(layer)][static_cast<size_t>(t)];
      int staged = std::max(f, schedule_->frontier(layer, t, end));
      if (held.mode == Mode::kPrefix && !schedule_->immediate(layer, t))
        staged = std::max(f, std::min(staged, schedule_->raw(layer, t, end - 1)));
      Demand(row.f[t] == f && row.staged[t] == staged, "layer " + Text(layer) + ": f " + Text(row.f[t]) + " staged " +
                                                           Text(row.staged[t]) + ", expected " + Text(f) + " and " +
                                                           Text(staged));
      step.Close(*schedule_, layer, t, staged);
      const int pinned = schedule_->pinned(layer), window = schedule_->window(layer);
      const int other = choices_.Range(first, end - 1);
      for (const int q : {first, other, end - 1}) {
        const int coded = std::max(f, schedule_->read(layer, t, q));
        Demand(coded <= staged, "query " + Text(q) + " reads " + Text(coded) + " coded rows, staged " + Text(staged));
        for (int j = 0; j <= q; ++j) {
          if (j >= pinned && window > 0 && j <= q - window) continue;
          const bool in_codes = j >= pinned && j < coded;
          if (!in_codes && j >= first) continue;  // from the step's own rows
          const OracleRow& r = step.rows[static_cast<size_t>(j)];
          const std::string wrong = codec_->Compare(row, layer, t, in_codes, j, RowHash(r.write, layer, t),
                                                    r.digest[static_cast<size_t>(layer)][static_cast<size_t>(t)]);
          Demand(wrong.empty(), "query " + Text(q) + " of seq " + Text(held.seq) + ": " + wrong);
        }
        if (other == first || first == end - 1) break;
      }
    }
  }
}

void OwnerSimulator::Finish(Held held, int accepted) {
  const int count = static_cast<int>(held.writes.size());
  Note("publish seq " + Text(held.seq) + " at " + Text(held.base.len()) + ": " + Text(accepted) + " of " + Text(count) +
       (held.stale != nullptr ? std::string(", stale after ") + held.stale : ""));
  if (held.mode == Mode::kPrefix || choices_.Chance(20)) {
    const TxnView txn = *owner_->Get(held.id);
    const auto due = owner_->Seal(held.id, accepted);
    Demand(due.ok(), "seal: " + due.status().ToString());
    for (const CloseJob& job : *due)
      for (const int layer : owner_->classes()[job.cls].layers) codec_->Encode(txn, layer, job, held.writes);
  }
  const uint64_t before = owner_->generation(held.seq);
  const auto receipt = owner_->Publish(held.id, accepted);
  Live* live = FindLive(held.seq);
  if (held.stale != nullptr) {
    Demand(receipt.status().code() == Code::kStale,
           std::string("publish after ") + held.stale + ": " + receipt.status().ToString());
    coverage_->Add(std::string("stale after ") + held.stale);
    check_all_ = true;
    return;
  }
  Demand(receipt.ok(), "publish: " + receipt.status().ToString());
  CheckReceipt(*receipt, Transition::kAppend, held.id, held.seq, before, held.base.len() + accepted);
  Demand(live != nullptr && receipt->first == held.base.len() && receipt->rows == accepted,
         "the receipt tells something else");
  const AppendRequest request = held.request;
  const Call again = [this, request, txn = held.id, accepted](TxnId id, bool other) -> Result<Receipt> {
    if (id == 0) return owner_->Publish(txn, accepted + other);
    AppendRequest repeated = request;
    repeated.content += other;
    TxnId begun = 0;
    const Status s = owner_->Begin({&repeated, 1}, {&begun, 1});
    if (s.code() != Code::kAccepted) return s;
    coverage_->Add("begin of an accepted id");
    return owner_->Publish(txn, accepted);
  };
  if (Lost()) {
    const auto lost = owner_->Publish(held.id, accepted);
    Demand(lost.ok() && *lost == *receipt, "a publish that came again: " + lost.status().ToString());
    coverage_->Add("lost replies");
  }
  if (held.mode == Mode::kPrefix) coverage_->Add(accepted < count ? "partial accepts" : "full accepts of drafts");
  live->rows.Append(*schedule_, held.writes, accepted);
  if (schedule_->pinned(0) > 0 && live->rows.f[0][0] > schedule_->pinned(0)) coverage_->Add("closes with pinned rows");
  Moved(*live, "publish");
  touched_.push_back(live);
  Remember(*receipt, again);
}

// Malformed calls abort the transaction and nothing else happens.
void OwnerSimulator::Misuse(Held held) {
  const int kind = choices_.Range(0, 5);
  Note("misuse " + Text(kind));
  const int layers = schedule_->layers(), count = static_cast<int>(held.writes.size());
  const TxnView txn = *owner_->Get(held.id);
  for (int layer = 0; layer < layers; ++layer) codec_->Prepare(txn, layer, held.writes);
  for (int layer = kind == 1 ? 1 : 0; layer < layers; ++layer) {
    const Status s = owner_->MarkPrepared(held.id, layer);
    Demand(s.ok(), "prepare: " + s.ToString());
  }
  const auto publish = [&](int accepted) {
    if (held.mode == Mode::kPrefix && kind != 5)
      if (const auto due = owner_->Seal(held.id, accepted); !due.ok()) return due.status().code();
    return owner_->Publish(held.id, accepted).status().code();
  };
  switch (kind) {
    case 0: {
      const int layer = choices_.Range(0, layers - 1);
      Demand(owner_->MarkPrepared(held.id, layer).code() == Code::kDuplicateLayer, "a layer may be prepared twice");
      coverage_->Add("duplicate layer");
      break;
    }
    case 1:
      Demand(publish(count) == Code::kMissingLayer, "published with a layer missing");
      coverage_->Add("missing layer");
      break;
    case 2:
      owner_->Poison(held.id);
      Demand(publish(count) == Code::kNonFinite, "published a row that is not finite");
      coverage_->Add("poisoned");
      break;
    case 3: {
      const int wrong = held.mode == Mode::kAll && choices_.Chance(50) ? count - 1
                        : choices_.Chance(50)                          ? count + 1
                                                                       : 0;
      Demand(publish(wrong) == Code::kInvalidArgument, "published " + Text(wrong) + " of " + Text(count) + " rows");
      coverage_->Add("wrong count");
      break;
    }
    case 4:
      Demand(owner_->MarkPrepared(held.id, choices_.Chance(50) ? layers : -1).code() == Code::kInvalidArgument,
             "a layer that is not there was prepared");
      break;
    default:
      if (held.mode == Mode::kAll) {
        owner_->Abort(held.id);
      } else {
        Demand(publish(count) == Code::kInvalidArgument, "published a draft that was not sealed");
        coverage_->Add("not sealed");
      }
  }
  Demand(owner_->Get(held.id).status().code() == Code::kFailedTxn, "a failed transaction lives on");
  Demand(owner_->Publish(held.id, count).status().code() == Code::kFailedTxn, "a failed transaction was published");
  Demand(owner_->FindReceipt(held.id).status().code() == Code::kNotFound, "a failed transaction has a receipt");
  owner_->Abort(held.id);  // does nothing
  check_all_ = true;
}

void OwnerSimulator::FinishHeld(bool abort) {
  if (held_.empty()) return;
  const size_t i = static_cast<size_t>(choices_.Range(0, static_cast<int>(held_.size()) - 1));
  Held held = std::move(held_[i]);
  held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(i));
  CheckHeld(held);
  if (abort) {
    Note("abort held seq " + Text(held.seq));
    owner_->Abort(held.id);
    coverage_->Add("aborts");
    check_all_ = true;
    return;
  }
  const int count = static_cast<int>(held.writes.size());
  Finish(std::move(held), held.mode == Mode::kAll ? count : choices_.Range(1, count));
}

void OwnerSimulator::Fork() {
  Live& parent = AnyLive();
  Note("fork seq " + Text(parent.id));
  const int64_t used = owner_->used_bytes();
  const auto forked = Do(Transition::kFork, 0, parent.rows.len(), [this, seq = parent.id](TxnId id, bool other) {
    return owner_->Fork(other ? seq + 1 : seq, id);
  });
  Demand(owner_->used_bytes() == used, "a fork took pages");
  if (!Went(forked.status(), "fork")) return;
  Demand(forked->parent == parent.id, "the receipt names another parent");
  coverage_->Add("forks");
  parent.only_grew = false;
  auto child = std::make_unique<Live>();
  child->id = forked->seq;
  child->rows = parent.rows;
  child->only_grew = false;
  touched_.push_back(child.get());
  touched_.push_back(&parent);
  live_.push_back(std::move(child));
}

void OwnerSimulator::Reorder() {
  std::vector<Live*> group;
  for (const auto& live : live_)
    if (choices_.Chance(60)) group.push_back(live.get());
  std::vector<SeqId> ids;
  std::vector<int> parents;
  bool duplicates = false;
  std::string text = "reorder";
  for (Live* live : group) {
    ids.push_back(live->id);
    parents.push_back(choices_.Range(0, static_cast<int>(group.size()) - 1));
    duplicates |= std::count(parents.begin(), parents.end(), parents.back()) > 1;
    text += " " + Text(live->id) + "<-#" + Text(parents.back());
  }
  Note(text);
  if (group.empty()) return;
  const auto reordered = Do(Transition::kReorder, ids[0], group[static_cast<size_t>(parents[0])]->rows.len(),
                            [this, ids, parents](TxnId id, bool other) {
                              std::vector<int> moved = parents;
                              if (other) moved.back() = (moved.back() + 1) % static_cast<int>(moved.size() + 1);
                              return owner_->Reorder(ids, moved, id);
                            });
  if (!Went(reordered.status(), "reorder")) return;
  for (size_t i = 0; i < group.size(); ++i)
    Demand(owner_->generation(ids[i]) == reordered->generation + i, "the receipt tells other generations");
  if (duplicates) coverage_->Add("reorders with duplicates");
  std::vector<OracleSequence> next;
  for (const int parent : parents) next.push_back(group[static_cast<size_t>(parent)]->rows);
  for (size_t i = 0; i < group.size(); ++i) {
    group[i]->rows = std::move(next[i]);
    group[i]->only_grew = false;
    Moved(*group[i], "reorder");
    touched_.push_back(group[i]);
  }
}

void OwnerSimulator::Truncate() {
  Live& live = AnyLive();
  const int len = live.rows.len();
  int n = choices_.Chance(66) ? len - choices_.Range(0, std::min(len, 12)) : choices_.Range(0, len);
  if (choices_.Chance(3)) n = choices_.Chance(50) ? 0 : len;
  Note("truncate seq " + Text(live.id) + " from " + Text(len) + " to " + Text(n));
  const int64_t used = owner_->used_bytes();
  const Status status = Do(Transition::kTruncate, live.id, n, [this, seq = live.id, n](TxnId id, bool other) {
                          return owner_->Truncate(seq, other ? n + 1 : n, id);
                        }).status();
  if (status.code() == Code::kOutOfRange) {
    bool window = false;
    for (int layer = 0; layer < schedule_->layers(); ++layer)
      window |= schedule_->window(layer) > 0 && n > schedule_->pinned(layer);
    Demand(window && n < len && owner_->used_bytes() == used, "truncate: " + status.ToString());
    coverage_->Add("truncate refused by a window");
    check_all_ = true;
    return;
  }
  if (!Went(status, "truncate")) return;
  for (int layer = 0; layer < schedule_->layers(); ++layer) {
    const int f = live.rows.f[static_cast<size_t>(layer)][0];
    if (n < f && n % schedule_->group(layer, 0) != 0) coverage_->Add("truncate in a group");
    if (n < schedule_->pinned(layer) && n < len) coverage_->Add("truncate below pinned");
  }
  if (n == 0) coverage_->Add("truncate to 0");
  if (n == len) coverage_->Add("truncate to len");
  live.rows.Truncate(n);
  live.only_grew = false;
  Moved(live, "truncate");
  touched_.push_back(&live);
}

void OwnerSimulator::Release() {
  const size_t i = static_cast<size_t>(choices_.Range(0, static_cast<int>(live_.size()) - 1));
  Live& live = *live_[i];
  Note("release seq " + Text(live.id));
  const Status s = Do(Transition::kRelease, live.id, live.rows.len(), [this, seq = live.id](TxnId id, bool other) {
                     return owner_->Release(other ? seq + 1 : seq, id);
                   }).status();
  Demand(s.ok(), "release: " + s.ToString());
  Demand(owner_->Release(live.id).status().code() == Code::kClosed && owner_->length(live.id) == -1,
         "a released sequence is open");
  Moved(live, "release");
  touched_.clear();
  live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(i));
  if (live_.empty()) OpenOne();
}

void OwnerSimulator::OpenReader() {
  if (readers_.size() >= 4) return;
  Live& live = AnyLive();
  auto lease = owner_->Acquire(live.id);
  Demand(lease.ok(), "acquire: " + lease.status().ToString());
  const bool hold = choices_.Chance(25);
  if (hold) coverage_->Add("long holds");
  Note("read seq " + Text(live.id));
  readers_.push_back({*std::move(lease), live.id, live.rows, operations_ + (hold ? 300 : 0)});
}

void OwnerSimulator::CloseReader() {
  if (readers_.empty()) return;
  const size_t i = static_cast<size_t>(choices_.Range(0, static_cast<int>(readers_.size()) - 1));
  if (readers_[i].until > operations_) return;
  CheckView(readers_[i].lease.rows(), readers_[i].rows, "a reader at its end");
  readers_.erase(readers_.begin() + static_cast<std::ptrdiff_t>(i));
}

void OwnerSimulator::ArmFault() {
  const int site = choices_.Range(0, kAllocationSites - 1);
  faults_.fail_at[site] = choices_.Range(1, site == static_cast<int>(AllocationSite::kView) ? 2 : 5);
  armed_ = true;
  Note(std::string("fault at ") + AllocationSiteName(static_cast<AllocationSite>(site)) + " " +
       Text(faults_.fail_at[site]));
}

void OwnerSimulator::Disarm() {
  faults_ = {};
  armed_ = false;
}

void OwnerSimulator::Step() {
  ++operations_;
  touched_.clear();
  check_all_ = false;
  if (live_.empty()) OpenOne();
  if (live_.empty()) return;
  if (choices_.Chance(8)) ArmFault();
  const int what = choices_.Range(0, 99);
  if (what < 26)
    Append(choices_.Range(1, 6), Mode::kAll, Fate::kPublish);
  else if (what < 31)
    Append(choices_.Range(7, 30), choices_.Chance(70) ? Mode::kAll : Mode::kPrefix, Fate::kPublish);
  else if (what < 43)
    Append(choices_.Range(1, 8), Mode::kPrefix, choices_.Chance(75) ? Fate::kPartial : Fate::kPublish);
  else if (what < 46)
    Append(choices_.Range(1, 10), choices_.Chance(50) ? Mode::kAll : Mode::kPrefix, Fate::kAbort);
  else if (what < 50)
    Append(choices_.Range(1, 8), choices_.Chance(50) ? Mode::kAll : Mode::kPrefix, Fate::kMisuse);
  else if (what < 56) {
    if (held_.size() < 4)
      Append(choices_.Range(1, 10), choices_.Chance(50) ? Mode::kAll : Mode::kPrefix, Fate::kHold);
    else
      FinishHeld(false);
  } else if (what < 62)
    FinishHeld(/*abort=*/choices_.Chance(25));
  else if (what < 70)
    AppendBatch();
  else if (what < 75)
    Fork();
  else if (what < 78)
    Reorder();
  else if (what < 85)
    Truncate();
  else if (what < 88)
    Release();
  else if (what < 90)
    OpenOne();
  else if (what < 94)
    OpenReader();
  else if (what < 98)
    CloseReader();
  else
    AskAgain();
  Disarm();
  for (const auto& live : live_)
    history_ = Mix64(history_ ^ Mix64(owner_->generation(live->id) * 131 + static_cast<uint64_t>(live->rows.len())));
  history_ = Mix64(history_ ^ static_cast<uint64_t>(owner_->used_bytes()));
  if (check_all_ || operations_ % kCheckAllEvery == 0)
    CheckAll();
  else
    CheckSome();
}

// --- checks ---

void OwnerSimulator::CheckView(std::span<const SeqRow> rows, const OracleSequence& oracle,
                               const std::string& name) const {
  for (int layer = 0; layer < schedule_->layers(); ++layer) {
    const SeqRow& row = rows[static_cast<size_t>(codec_->cls(layer))];
    Demand(row.len == oracle.len() && row.count == 0,
           name + ": " + Text(row.len) + " rows, expected " + Text(oracle.len()));
    const int pinned = schedule_->pinned(layer), window = schedule_->window(layer);
    for (int t = 0; t < 2; ++t) {
      const int f = oracle.f[static_cast<size_t>(layer)][static_cast<size_t>(t)];
      Demand(row.f[t] == f && row.staged[t] == f, name + " layer " + Text(layer) + (t == kK ? " K" : " V") + ": f " +
                                                      Text(row.f[t]) + " staged " + Text(row.staged[t]) +
                                                      ", expected " + Text(f));
      for (int j = 0; j < row.len; ++j) {
        if (j >= pinned && window > 0 && j < row.len - window) continue;
        const OracleRow& r = oracle.rows[static_cast<size_t>(j)];
        const std::string wrong = codec_->Compare(row, layer, t, j >= pinned && j < f, j, RowHash(r.write, layer, t),
                                                  r.digest[static_cast<size_t>(layer)][static_cast<size_t>(t)]);
        Demand(wrong.empty(), name + ": " + wrong);
      }
    }
  }
}

void OwnerSimulator::CheckHeld(const Held& held) const {
  const auto txn = owner_->Get(held.id);
  Demand(txn.ok(), "a held transaction: " + txn.status().ToString());
  const_cast<OwnerSimulator*>(this)->CheckQueries(held, *txn);
}

void OwnerSimulator::CheckSome() {
  const auto check = [&](const Live& live) {
    Demand(owner_->length(live.id) == live.rows.len(),
           "seq " + Text(live.id) + " has length " + Text(owner_->length(live.id)));
    auto lease = owner_->Acquire(live.id);
    Demand(lease.ok(), "acquire: " + lease.status().ToString());
    CheckView(lease->rows(), live.rows, "seq " + Text(live.id));
  };
  if (check_all_) {
    for (const auto& live : live_) check(*live);
    for (const Reader& reader : readers_) CheckView(reader.lease.rows(), reader.rows, "a reader");
    for (const Held& held : held_) CheckHeld(held);
  } else {
    std::sort(touched_.begin(), touched_.end());
    touched_.erase(std::unique(touched_.begin(), touched_.end()), touched_.end());
    for (const Live* live : touched_) check(*live);
    // One of the others each time, in turn.
    if (!live_.empty()) check(*live_[static_cast<size_t>(operations_) % live_.size()]);
    if (!readers_.empty()) {
      const Reader& reader = readers_[static_cast<size_t>(operations_) % readers_.size()];
      CheckView(reader.lease.rows(), reader.rows, "a reader");
    }
  }
  CheckReclaimed();
  const Status invariants = check_invariants_ ? owner_->CheckInvariants() : Status();
  Demand(invariants.ok(), invariants.ToString());
  const LedgerBytes census = owner_->Census();
  Demand(owner_->used_bytes() == census.total() + census.slack, "pools hold " + Text(owner_->used_bytes()) +
                                                                    " bytes, the census finds " + Text(census.total()) +
                                                                    " + slack " + Text(census.slack));
  Demand(census.slack >= 0 && census.pages >= 0 && census.shared <= census.total(), "a census term is out of range");
  if (live_.size() == 1 && readers_.empty() && held_.empty() && live_[0]->only_grew) {
    const LedgerBytes ledger = Ledger(schema_, live_[0]->rows.len());
    const auto same = [&](const char* term, int64_t a, int64_t b) {
      Demand(a == b, std::string("ledger of ") + Text(live_[0]->rows.len()) + " rows: " + term + " " + Text(b) +
                         ", census " + Text(a));
    };
    same("codes", census.codes, ledger.codes);
    same("qparams", census.qparams, ledger.qparams);
    same("residual", census.residual, ledger.residual);
    same("exact_prefix", census.exact_prefix, ledger.exact_prefix);
    same("pages", census.pages, ledger.pages);
    same("slack", census.slack, ledger.slack);
    same("shared", census.shared, 0);
    coverage_->Add("ledger compared");
  }
}

void OwnerSimulator::CheckAll() {
  check_all_ = true;
  CheckSome();
}

void OwnerSimulator::Drain() {
  while (!held_.empty()) FinishHeld(choices_.Chance(50));
  CheckAll();
  while (!live_.empty() || !readers_.empty()) {
    if (!live_.empty() && (readers_.empty() || choices_.Chance(50))) {
      const Status s = owner_->Release(live_.back()->id).status();
      Demand(s.ok(), "release: " + s.ToString());
      live_.pop_back();
    } else {
      CheckView(readers_.back().lease.rows(), readers_.back().rows, "a reader after release");
      readers_.pop_back();
    }
    const Status invariants = check_invariants_ ? owner_->CheckInvariants() : Status();
    Demand(invariants.ok(), invariants.ToString());
  }
  const LedgerBytes census = owner_->Census();
  Demand(owner_->used_bytes() == 0 && census == LedgerBytes{}, "after release of everything " +
                                                                   Text(owner_->used_bytes()) + " bytes of pages and " +
                                                                   Text(census.tables) + " of tables are left");
  const OwnerStats s = owner_->stats();
  coverage_->Add("closed K rows", s.closed_rows[0]);
  coverage_->Add("closed V rows", s.closed_rows[1]);
  coverage_->Add("closed groups", s.closed_groups);
  coverage_->Add("short groups", s.short_groups);
  coverage_->Add("scars", s.scars);
  coverage_->Add("pages copied", s.pages_copied);
  coverage_->Add("rows copied", s.rows_copied);
  coverage_->Add("marks returned", s.marks_returned);
  coverage_->Add("window drops", s.window_drops);
  coverage_->Add("draft cuts", s.draft_cuts);
  coverage_->Add("deferred reclaims", s.deferred_reclaims);
}

std::string Simulate(uint64_t seed, int64_t operations, Coverage* coverage, int64_t* done) {
  *done = 0;
  std::string config, trace;
  try {
    OwnerSimulator simulator(seed, Choices(seed), coverage);
    config = simulator.config();
    simulator.set_losses(seed % 2 == 0 ? 30 : 0);
    try {
      for (; *done < operations; ++*done) simulator.Step();
      simulator.Drain();
    } catch (const SimulationError&) {
      trace = simulator.Trace();
      throw;
    }
  } catch (const SimulationError& error) {
    return std::string(error.what()) + "\n  seed " + std::to_string(seed) + ", operation " + std::to_string(*done + 1) +
           ": " + config + "\n  replay: LIVEQUANT_OWNER_SEED=" + std::to_string(seed) +
           " LIVEQUANT_OWNER_OPS=" + std::to_string(operations) + " owner_test --gtest_filter=RandomOwner.*\n" + trace;
  }
  return "";
}

}  // namespace livequant
