// tests/cache/ledger/forms.h: the forms of design.md's preset table, written out a second time by hand: the cache knows
// no preset.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "schema/schema.h"

namespace livequant {

inline const std::vector<std::string>& FormNames() {
  static const std::vector<std::string> names = {"f32",  "f16",   "bf16",  "fp8_e4m3",   "fp8_e5m2", "int8",   "int4",
                                                 "int2", "kivi4", "kivi2", "kivi2_sync", "qserve8",  "qserve4"};
  return names;
}

inline LayerSchema FormLayer(const std::string& name, int heads, int dim) {
  LayerSchema layer;
  layer.num_kv_heads = heads;
  layer.head_dim = dim;
  const auto both = [&](const TensorCoding& coding) { layer.k = layer.v = coding; };
  const auto integer = [](int bits, ScaleAxis axis, int group, ZeroConvention zero) {
    return TensorCoding{.kind = CodeKind::kInteger, .bits = bits, .axis = axis, .group = group, .zero = zero};
  };
  const int bits = name.find('8') != name.npos ? 8 : name.find('4') != name.npos ? 4 : 2;
  if (name == "f32") both({.dtype = DType::kF32, .bits = 32});
  if (name == "f16") both({.dtype = DType::kF16, .bits = 16});
  if (name == "bf16") both({.dtype = DType::kBF16, .bits = 16});
  for (const DType fp8 : {DType::kFp8E4M3, DType::kFp8E5M2})
    if (name == DTypeName(fp8))
      both({.kind = CodeKind::kScaledFp, .dtype = fp8, .bits = 8, .axis = ScaleAxis::kTensor});
  if (name.starts_with("int")) both(integer(bits, ScaleAxis::kRow, dim, ZeroConvention::kSymmetric));
  if (name.starts_with("qserve")) {
    both(integer(bits, ScaleAxis::kRow, dim, ZeroConvention::kFloatOffset));
    layer.k_closure = layer.v_closure = {0, 1};
  }
  if (name.starts_with("kivi")) {
    layer.k = integer(bits, ScaleAxis::kChannel, 32, ZeroConvention::kMinimum);
    layer.v = integer(bits, ScaleAxis::kRow, 32, ZeroConvention::kMinimum);
    layer.k_closure = {0, 128};
    layer.v_closure = {128, 1};
    if (name.ends_with("_sync")) layer.k_closure = layer.v_closure = {97, 32};
  }
  return layer;
}

inline CacheSchema Forms(const std::string& name, int layers, int heads, int dim) {
  CacheSchema schema;
  schema.layers.assign(static_cast<size_t>(layers), FormLayer(name, heads, dim));
  const Status status = Validate(schema);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return schema;
}

}  // namespace livequant
