// schema/names.h: the one spelling of each enumerator, in messages, policy files and reports.
#pragma once

#include "schema/schema.h"

namespace livequant {

// "native", "scaled_fp", "integer"; "?" (here and below): no such enumerator, as foreign bytes may hold.
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
// "none", "tensor", "row", "channel".
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
// "none", "symmetric", "minimum", "float_offset".
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
// "floor", "refuse".
constexpr const char* Name(SmallScale v) {
  switch (v) {
    case SmallScale::kFloor:
      return "floor";
    case SmallScale::kRefuse:
      return "refuse";
  }
  return "?";
}
// "clamp", "wrap".
constexpr const char* Name(Overflow v) {
  switch (v) {
    case Overflow::kClamp:
      return "clamp";
    case Overflow::kWrap:
      return "wrap";
  }
  return "?";
}
// "post", "pre".
constexpr const char* Name(RopeStage v) {
  switch (v) {
    case RopeStage::kPost:
      return "post";
    case RopeStage::kPre:
      return "pre";
  }
  return "?";
}
// "half_split", "interleaved".
constexpr const char* Name(RopePairing v) {
  switch (v) {
    case RopePairing::kHalfSplit:
      return "half_split";
    case RopePairing::kInterleaved:
      return "interleaved";
  }
  return "?";
}
// As numeric/dtype.h spells it.
constexpr const char* Name(DType v) { return DTypeName(v); }

}  // namespace livequant
