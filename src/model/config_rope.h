// model/config_rope.h: the rotary fields of config.json.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "model/config_fields.h"
#include "schema/schema.h"

namespace livequant {

// From rope_theta and rope_scaling (the older spelling) and rope_parameters (the newer one, theta inside); a field that
// stands in both must be equal in both. Types default, linear, llama3 and yarn, under rope_type or type; dynamic,
// longrope and others are kUnsupported, as is a field that the type does not have. Yarn's defaults are transformers':
// original_max_position_embeddings from max_positions, factor from their ratio, beta_fast 32, beta_slow 1, truncate
// true; attention_factor g(factor, mscale) / g(factor, mscale_all_dim) where both are there and not 0, else
// g(factor, 1), with g(s, m) = 0.1 m ln(s) + 1. The result passed ValidateRope(). Source: transformers,
// modeling_rope_utils.py; arXiv 2309.00071 section 3.4.
Result<RopeConfig> ParseRope(const ConfigFields& root, int head_dim, int64_t max_positions);

}  // namespace livequant
