// schema/names.h: the one spelling of each enumerator, in messages, policy files and reports.
#pragma once

#include "schema/schema.h"

namespace livequant {

constexpr const char* Name(CodeKind v) {
  switch (v) {
    case CodeKind::kNative:
      return "native";
    case CodeKind::kScaledFp:
      return "scaled_fp";
    case CodeKind::kInteger:
      return "integer";
  }
  return "?";
}
constexpr const char* Name(ScaleAxis v) {
  switch (v) {
    case ScaleAxis::kNone:
      return "none";
    case ScaleAxis::kTensor:
      return "tensor";
    case ScaleAxis::kRow:
      return "row";
    case ScaleAxis::kChannel:
      return "channel";
  }
  return "?";
}
constexpr const char* Name(ZeroConvention v) {
  switch (v) {
    case ZeroConvention::kNone:
      return "none";
    case ZeroConvention::kSymmetric:
      return "symmetric";
    case ZeroConvention::kMinimum:
      return "minimum";
    case ZeroConvention::kFloatOffset:
      return "float_offset";
  }
  return "?";
}
constexpr const char* Name(SmallScale v) {
  switch (v) {
    case SmallScale::kFloor:
      return "floor";
    case SmallScale::kRefuse:
      return "refuse";
  }
  return "?";
}
constexpr const char* Name(Overflow v) {
  switch (v) {
    case Overflow::kClamp:
      return "clamp";
    case Overflow::kWrap:
      return "wrap";
  }
  return "?";
}
constexpr const char* Name(RopeStage v) {
  switch (v) {
    case RopeStage::kPost:
      return "post";
    case RopeStage::kPre:
      return "pre";
  }
  return "?";
}
constexpr const char* Name(RopePairing v) {
  switch (v) {
    case RopePairing::kHalfSplit:
      return "half_split";
    case RopePairing::kInterleaved:
      return "interleaved";
  }
  return "?";
}
constexpr const char* Name(DType v) { return DTypeName(v); }

}  // namespace livequant
