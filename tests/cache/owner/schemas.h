// Small schemas for tests of the owner: every closure pair of the presets, with pages of a few rows.
#pragma once

#include <string>
#include <vector>

#include "schema/schema.h"

namespace livequant {

// Sizes and schedule of the layers of one class.
struct ClassSpec {
  Closure k, v;
  int group = 0;  // rows of a K group; 0: K carries its qparams in each row
  int coded_rows = 8, exact_rows = 4;
  int pinned = 0, window = 0;
  int layers = 1, heads = 1, head_dim = 8;
};

// Codes of 8 bits, so that a row of a stand-in codec holds a 64-bit hash in head_dim 8.
inline LayerSchema LayerOf(const ClassSpec& spec) {
  LayerSchema layer;
  layer.num_kv_heads = spec.heads;
  layer.head_dim = spec.head_dim;
  layer.window = spec.window;
  layer.pinned_rows = spec.pinned;
  layer.coded_page_rows = spec.coded_rows;
  layer.exact_page_rows = spec.exact_rows;
  layer.k_closure = spec.k;
  layer.v_closure = spec.v;
  TensorCoding row{.kind = CodeKind::kInteger,
                   .bits = 8,
                   .axis = ScaleAxis::kRow,
                   .group = spec.head_dim,
                   .zero = ZeroConvention::kMinimum};
  layer.v = row;
  layer.k = row;
  if (spec.group > 0) {
    layer.k.axis = ScaleAxis::kChannel;
    layer.k.group = spec.group;
  }
  return layer;
}

inline CacheSchema SchemaOf(const std::vector<ClassSpec>& specs) {
  CacheSchema schema;
  // Layers of the classes interleaved, as mixed policies have them.
  for (int i = 0, more = 1; more != 0; ++i) {
    more = 0;
    for (const ClassSpec& spec : specs)
      if (i < spec.layers) {
        schema.layers.push_back(LayerOf(spec));
        more = 1;
      }
  }
  return schema;
}

// cache_core.md 6: KIVI2 B, G 32, R 128, P 128, E 32.
inline ClassSpec KiviB() { return {.k = {0, 128}, .v = {128, 1}, .group = 32, .coded_rows = 128, .exact_rows = 32}; }

}  // namespace livequant
