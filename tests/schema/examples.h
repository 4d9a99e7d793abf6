// tests/schema/examples.h: small valid layers, one for each kind of coding.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "schema/schema.h"

namespace livequant {

inline TensorCoding IntegerCoding(int bits, ScaleAxis axis, int group, ZeroConvention zero) {
  return {.kind = CodeKind::kInteger, .bits = bits, .axis = axis, .group = group, .zero = zero};
}

inline LayerSchema NativeLayer() {
  LayerSchema layer;
  layer.num_kv_heads = 2;
  layer.head_dim = 64;
  return layer;
}

inline LayerSchema KiviLayer() {
  LayerSchema layer = NativeLayer();
  layer.k = IntegerCoding(2, ScaleAxis::kChannel, 32, ZeroConvention::kMinimum);
  layer.v = IntegerCoding(2, ScaleAxis::kRow, 32, ZeroConvention::kMinimum);
  layer.k_closure = {0, 128};
  layer.v_closure = {128, 1};
  return layer;
}

inline LayerSchema QServeLayer() {
  LayerSchema layer = NativeLayer();
  layer.k = layer.v = IntegerCoding(4, ScaleAxis::kRow, 64, ZeroConvention::kFloatOffset);
  layer.k_closure = layer.v_closure = {0, 1};
  return layer;
}

inline LayerSchema SymmetricLayer() {
  LayerSchema layer = NativeLayer();
  layer.k = layer.v = IntegerCoding(8, ScaleAxis::kRow, 64, ZeroConvention::kSymmetric);
  return layer;
}

inline LayerSchema Fp8Layer() {
  LayerSchema layer = NativeLayer();
  layer.k = layer.v = {.kind = CodeKind::kScaledFp, .dtype = DType::kFp8E4M3, .bits = 8, .axis = ScaleAxis::kTensor};
  return layer;
}

inline CacheSchema SchemaOf(std::vector<LayerSchema> layers) {
  CacheSchema schema;
  schema.layers = std::move(layers);
  return schema;
}

}  // namespace livequant
