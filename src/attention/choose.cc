// attention/choose.cc: which kernel reads a layer. The list is variants.inc; a refusal names the coding and the nearest
// one that is read.
#include <cstdlib>
#include <vector>

#include "attention/attention.h"
#include "schema/names.h"

namespace livequant {
namespace {

std::string Describe(const TensorCoding& c) {
  if (c.kind == CodeKind::kNative) return std::string("native ") + DTypeName(c.dtype);
  if (c.kind == CodeKind::kScaledFp) return std::string("scaled ") + DTypeName(c.dtype);
  return "integer " + std::to_string(c.bits) + " bits, " + Name(c.zero) + ", axis " + Name(c.axis) + ", group " +
         std::to_string(c.group) + ", qparams " + DTypeName(c.qparam);
}

// Fields that differ, weighted: a change of kind is further than a change of zero convention or axis, and that further
// than of width.
int Distance(const TensorCoding& a, const TensorCoding& b) {
  return 10000 * (a.kind != b.kind) + 1000 * (a.zero != b.zero) + 1000 * (a.axis != b.axis) +
         100 * (a.qparam != b.qparam) + 10 * (a.dtype != b.dtype) + 10 * (a.group != b.group) +
         2 * std::abs(a.bits - b.bits) - (b.bits > a.bits);
}

// The coding closest to `wanted` for which a vector row decoder exists; nullptr name: none at all.
std::string NearestReadable(const TensorCoding& wanted) {
  std::vector<TensorCoding> candidates;
  for (DType dtype : {DType::kF16, DType::kBF16, DType::kF32})
    candidates.push_back({.kind = CodeKind::kNative, .dtype = dtype, .bits = 8 * DTypeBytes(dtype)});
  for (DType dtype : {DType::kFp8E4M3, DType::kFp8E5M2})
    candidates.push_back({.kind = CodeKind::kScaledFp, .dtype = dtype, .bits = 8, .axis = ScaleAxis::kTensor});
  for (int bits = 2; bits <= 8; ++bits)
    for (ScaleAxis axis : {ScaleAxis::kRow, ScaleAxis::kChannel})
      for (ZeroConvention zero : {ZeroConvention::kSymmetric, ZeroConvention::kMinimum, ZeroConvention::kFloatOffset})
        for (DType qparam : {DType::kF16, DType::kF32}) {
          TensorCoding c = wanted;
          c.kind = CodeKind::kInteger, c.bits = bits, c.axis = axis, c.zero = zero, c.qparam = qparam;
          if (c.group == 0) c.group = 32;
          candidates.push_back(c);
        }
  const TensorCoding* best = nullptr;
  for (const TensorCoding& c : candidates)
    if (FindDecodeRows(c, nullptr) != nullptr && (best == nullptr || Distance(wanted, c) < Distance(wanted, *best)))
      best = &c;
  return best == nullptr ? "none" : Describe(*best);
}

struct Tensors {
  BlockFormat format[2][2];
};
Tensors FormatsOf(const LayerSchema& layer) {
  return {{{CodedFormat(layer, kK), ExactFormat(layer, kK)}, {CodedFormat(layer, kV), ExactFormat(layer, kV)}}};
}

// The generic path reads, in every phase, each coding that has a vector row decoder, coded and exact.
bool GenericReads(const LayerSchema& layer, Phase) {
  const Tensors t = FormatsOf(layer);
  for (const auto& tensor : t.format)
    for (const BlockFormat& format : tensor)
      if (FindDecodeRows(format.coding, nullptr) == nullptr) return false;
  return true;
}

struct Variant {
  const char* name;
  bool (*reads)(const LayerSchema&, Phase);
};
constexpr Variant kVariants[] = {
#define LQ_ATTENTION(name, arithmetic, reads, entry) {#name, reads},
#include "attention/variants.inc"
#undef LQ_ATTENTION
};

}  // namespace

const char* PhaseName(Phase phase) {
  switch (phase) {
    case Phase::kDecode:
      return "decode";
    case Phase::kPrefill:
      return "prefill";
    case Phase::kVerify:
      return "verify";
  }
  LQ_CHECK(false);
}

Result<KernelChoice> ChooseKernel(const LayerSchema& layer, Phase phase, bool allow_fallback) {
  for (const Variant& variant : kVariants) {
    if (!variant.reads(layer, phase)) continue;
    KernelChoice choice;
    choice.attention = variant.name;
    const char* name = "";
    FindDecodeRows(layer.k, &name);
    choice.decode_k = name;
    FindDecodeRows(layer.v, &name);
    choice.decode_v = name;
    return choice;
  }
  if (allow_fallback) return KernelChoice{"reference", "reference", "reference", true};
  const Tensors t = FormatsOf(layer);
  for (int tensor : {kK, kV})
    for (int form : {kCoded, kExact}) {
      const TensorCoding& coding = t.format[tensor][form].coding;
      if (FindDecodeRows(coding, nullptr) == nullptr)
        return Status(Code::kUnsupported, std::string("no ") + PhaseName(phase) + " kernel reads " +
                                              (tensor == kK ? "k" : "v") +
                                              (form == kExact ? " exact rows of " : " coded as ") + Describe(coding) +
                                              "; nearest readable: " + NearestReadable(coding));
    }
  return Status(Code::kUnsupported, std::string("no ") + PhaseName(phase) + " kernel reads k coded as " +
                                        Describe(layer.k) + " with v coded as " + Describe(layer.v));
}

Result<LayerPlan> PlanLayer(const LayerSchema& layer, const RopeTable* rope, bool allow_fallback) {
  if (layer.k_stage == RopeStage::kPre && rope == nullptr)
    return Status(Code::kInvalidArgument, "k_stage pre needs a RoPE table, none was given");
  for (Phase phase : {Phase::kDecode, Phase::kPrefill, Phase::kVerify})
    LQ_RETURN_IF_ERROR(ChooseKernel(layer, phase, allow_fallback).status());
  const Tensors t = FormatsOf(layer);
  LayerPlan plan;
  plan.schema = layer;
  plan.rope = rope;
  for (int tensor : {kK, kV})
    for (int form : {kCoded, kExact}) {
      plan.format[tensor][form] = t.format[tensor][form];
      const DecodeRowsFn fast = FindDecodeRows(t.format[tensor][form].coding, nullptr);
      plan.decode[tensor][form] = fast != nullptr ? fast : DecodeRowsReference;
    }
  return plan;
}

}  // namespace livequant
