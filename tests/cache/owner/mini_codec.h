// A stand-in for kv: runs the copies and encodes of a transaction on real page memory, with codes that are hashes
// instead of numbers. It follows schema/layout.h byte for byte, so a copy that forgets qparams or a row, or an encode
// into the wrong slot, is seen.
#pragma once

#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "cache/owner/owner.h"
#include "cache/owner/row_oracle.h"

namespace livequant {

class MiniCodec {
 public:
  MiniCodec(const CacheSchema& schema, const Owner& owner) : schema_(schema) {
    for (int layer = 0; layer < static_cast<int>(schema.layers.size()); ++layer) {
      Layer l;
      l.cls = owner.class_of_layer(layer);
      l.view = owner.ViewOfLayer(layer);
      for (int t = 0; t < 2; ++t) {
        const LayerSchema& s = schema_.layers[static_cast<size_t>(layer)];
        const auto tensor = static_cast<TensorIndex>(t);
        l.block[t][kCoded] = CodedHeadBlock(s, tensor);
        l.block[t][kExact] = ExactHeadBlock(s, tensor);
        const TensorCoding& coding = t == kK ? s.k : s.v;
        l.group[t] = coding.axis == ScaleAxis::kChannel ? coding.group : 1;
        const int64_t one = DTypeBytes(coding.qparam);
        l.qparam_bytes[t] = coding.axis == ScaleAxis::kChannel ? s.head_dim * one
                            : coding.axis == ScaleAxis::kRow   ? l.block[t][kCoded].groups_per_row * one
                                                               : 0;
        l.planes[t] = coding.qparams_per_group();
      }
      l.heads = schema_.layers[static_cast<size_t>(layer)].num_kv_heads;
      layers_.push_back(l);
    }
  }

  int cls(int layer) const { return layers_[static_cast<size_t>(layer)].cls; }

  // The copies, exact rows and due codes of one layer. writes[i] is row txn.first + i.
  void Prepare(const TxnView& txn, int layer, std::span<const uint64_t> writes) const {
    const Layer& l = layers_[static_cast<size_t>(layer)];
    for (const PageCopy& copy : txn.copies)
      if (copy.cls == l.cls) Copy(l, copy);
    for (const Claim& claim : txn.claims)
      if (claim.cls == l.cls && claim.form == kExact)
        for (int slot = claim.from; slot < claim.to; ++slot) {
          const uint64_t hash =
              RowHash(writes[static_cast<size_t>(claim.position + slot - claim.from - txn.first)], layer, claim.tensor);
          for (int head = 0; head < l.heads; ++head)
            FillHash(Row(l, claim.tensor, kExact, claim.page, head, slot), l.block[claim.tensor][kExact].row_bytes,
                     hash + static_cast<uint64_t>(head));
        }
    for (const CloseJob& job : txn.jobs)
      if (job.cls == l.cls && !job.at_seal) Encode(txn, layer, job, writes);
  }

  void Encode(const TxnView& txn, int layer, const CloseJob& job, std::span<const uint64_t> writes) const {
    const Layer& l = layers_[static_cast<size_t>(layer)];
    const int t = job.tensor, group = l.group[t];
    const SeqRow& row = txn.rows[static_cast<size_t>(l.cls)];
    for (int head = 0; head < l.heads; ++head)
      for (int p = job.from; p < job.to;) {
        const int end = std::min(job.to, (p / group + 1) * group);
        uint64_t digest = kEmptyDigest;
        std::array<uint64_t, 64> hashes{};
        for (int i = p; i < end; ++i) {
          // From the step's rows, or from the exact page: never from what the oracle knows.
          const uint64_t hash = i >= txn.first ? RowHash(writes[static_cast<size_t>(i - txn.first)], layer, t)
                                               : ReadExactHash(l, row, t, head, i);
          hashes[static_cast<size_t>(i - p)] = hash;
          if (group > 1) digest = FoldDigest(digest, hash);
        }
        for (int i = p; i < end; ++i) {
          const Entry e = Find(l, row, t, kCoded, i);
          const int rows = l.block[t][kCoded].rows, slot = i % rows;
          FillHash(Row(l, t, kCoded, e.page, head, slot), l.block[t][kCoded].row_bytes,
                   Code(hashes[static_cast<size_t>(i - p)], digest, head));
          FillQparams(l, t, e.page, head, slot,
                      group > 1 ? digest : Code(hashes[static_cast<size_t>(i - p)], digest, head));
        }
        p = end;
      }
  }

  // "" if the row at `position` holds what the oracle says, else what is wrong. `coded`: which form is looked at.
  std::string Compare(const SeqRow& row, int layer, int t, bool coded, int position, uint64_t hash,
                      uint64_t digest) const {
    const Layer& l = layers_[static_cast<size_t>(layer)];
    const FormIndex form = coded ? kCoded : kExact;
    Entry e;
    if (!FindOrMiss(l, row, t, form, position, &e)) return Where(layer, t, coded, position) + " has no page";
    const HeadBlock& block = l.block[t][form];
    const int slot = position % block.rows;
    for (int head = 0; head < l.heads; ++head) {
      const uint64_t want = coded ? Code(hash, digest, head) : hash + static_cast<uint64_t>(head);
      if (!HoldsHash(Row(l, t, form, e.page, head, slot), block.row_bytes, want))
        return Where(layer, t, coded, position) + ": other bytes in page " + std::to_string(e.page) + " slot " +
               std::to_string(slot);
      if (!coded) continue;
      const uint64_t params = l.group[t] > 1 ? digest : want;
      for (int plane = 0; plane < l.planes[t]; ++plane)
        if (!HoldsHash(Qparams(l, t, e.page, head, slot, plane), l.qparam_bytes[t],
                       params + static_cast<uint64_t>(plane)))
          return Where(layer, t, coded, position) + ": other qparams in page " + std::to_string(e.page);
    }
    return "";
  }

 private:
  struct Layer {
    int cls = 0, heads = 1;
    CacheView view{};
    HeadBlock block[2][2];
    int group[2] = {1, 1};
    int planes[2] = {0, 0};            // of qparams: scales, and minima or offsets
    int64_t qparam_bytes[2] = {0, 0};  // of one row or group and plane
  };

  static uint64_t Code(uint64_t hash, uint64_t digest, int head) {
    return Mix64(hash ^ digest * 5) + static_cast<uint64_t>(head);
  }
  static std::string Where(int layer, int t, bool coded, int position) {
    return std::string("layer ") + std::to_string(layer) + (t == kK ? " K " : " V ") + (coded ? "coded" : "exact") +
           " row " + std::to_string(position);
  }
  static void FillHash(std::byte* at, int64_t bytes, uint64_t hash) {
    for (int64_t i = 0; i < bytes; i += 8, hash = Mix64(hash))
      std::memcpy(at + i, &hash, static_cast<size_t>(std::min<int64_t>(8, bytes - i)));
  }
  static bool HoldsHash(const std::byte* at, int64_t bytes, uint64_t hash) {
    for (int64_t i = 0; i < bytes; i += 8, hash = Mix64(hash))
      if (std::memcmp(at + i, &hash, static_cast<size_t>(std::min<int64_t>(8, bytes - i))) != 0) return false;
    return true;
  }
  static std::byte* Block(const Layer& l, int t, int form, uint32_t page, int head) {
    // The owner hands out claimed slots of pages that kernels see as const.
    return const_cast<std::byte*>(l.view.head_block(t, form, page, head));
  }
  static std::byte* Row(const Layer& l, int t, int form, uint32_t page, int head, int slot) {
    return Block(l, t, form, page, head) + slot * l.block[t][form].row_bytes;
  }
  static std::byte* Qparams(const Layer& l, int t, uint32_t page, int head, int slot, int plane) {
    const HeadBlock& block = l.block[t][kCoded];
    return Block(l, t, kCoded, page, head) + (plane == 0 ? block.scales_offset : block.zeros_offset) +
           slot / l.group[t] * l.qparam_bytes[t];
  }
  static void FillQparams(const Layer& l, int t, uint32_t page, int head, int slot, uint64_t hash) {
    for (int plane = 0; plane < l.planes[t]; ++plane)
      FillHash(Qparams(l, t, page, head, slot, plane), l.qparam_bytes[t], hash + static_cast<uint64_t>(plane));
  }
  static bool FindOrMiss(const Layer& l, const SeqRow& row, int t, int form, int position, Entry* out) {
    CacheView view = l.view;
    view.seq = &row;
    const int rows = l.block[t][form].rows;
    for (int i = row.entries[t][form]; i-- > 0;) {
      const Entry e = view.entry(0, t, form, i);
      if (static_cast<int>(e.start) > position) continue;
      *out = e;
      return position < static_cast<int>(e.start) / rows * rows + rows;
    }
    return false;
  }
  static Entry Find(const Layer& l, const SeqRow& row, int t, int form, int position) {
    Entry e{};
    LQ_CHECK(FindOrMiss(l, row, t, form, position, &e));
    return e;
  }
  static uint64_t ReadExactHash(const Layer& l, const SeqRow& row, int t, int head, int position) {
    const Entry e = Find(l, row, t, kExact, position);
    uint64_t hash = 0;
    std::memcpy(&hash, Row(l, t, kExact, e.page, head, position % l.block[t][kExact].rows), 8);
    return hash - static_cast<uint64_t>(head);
  }
  static void Copy(const Layer& l, const PageCopy& copy) {
    const int t = copy.tensor, form = copy.form;
    for (int head = 0; head < l.heads; ++head) {
      std::memcpy(Row(l, t, form, copy.dst, head, copy.from), Row(l, t, form, copy.src, head, copy.from),
                  static_cast<size_t>((copy.to - copy.from) * l.block[t][form].row_bytes));
      if (form == kExact) continue;
      for (int plane = 0; plane < l.planes[t]; ++plane)
        for (int slot = copy.from; slot < copy.to; slot = (slot / l.group[t] + 1) * l.group[t])
          std::memcpy(Qparams(l, t, copy.dst, head, slot, plane), Qparams(l, t, copy.src, head, slot, plane),
                      static_cast<size_t>(l.qparam_bytes[t]));
    }
  }

  CacheSchema schema_;
  std::vector<Layer> layers_;
};

}  // namespace livequant
