// method/method.h: published methods as data. A preset is a function from a model's shape to a CacheSchema; nothing
// outside this folder knows a preset by name. The table of design.md is normative: a name means these values for ever.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "schema/schema.h"

namespace livequant {

// f32 f16 bf16 fp8_e4m3 fp8_e5m2 int8 int4 int2 kivi4 kivi2 kivi2_sync qserve8 qserve4
const std::vector<std::string>& PresetNames();
// One line on what a preset is, with its source.
std::string PresetSummary(std::string_view name);
// The layer form of a preset. kNotFound lists the names. kUnsupported: the head size does not fit (a group that does
// not divide it).
Result<LayerSchema> PresetLayer(std::string_view name, int num_kv_heads, int head_dim);
// The same for every layer, with the shape's windows. kUnsupported also: a window too short for the preset's closures.
Result<CacheSchema> PresetSchema(std::string_view name, const CacheShape& shape);

// The preset whose layers stand in for skipped ones, unless a policy file names another.
inline constexpr const char* kSkipPreset = "f16";

// `spec` is a preset name or the path of a JSON policy file (docs/formats/policy.md). Layers named in `skip_layers` (as
// vLLM's
// --kv-cache-dtype-skip-layers takes them) get the layer of kSkipPreset, or of the policy's "skip": not the model's own
// dtype, which a cache schema does not know; provenance.preset says so ("kivi2, layers 0,31 as f16"). kNotFound:
// neither a preset nor a file. Other errors name the field, the value and the limit.
Result<CacheSchema> SchemaFor(const std::string& spec, const CacheShape& shape, const std::vector<int>& skip_layers);
// The same from the text of a policy file. Strict: an unknown or repeated field is an error.
Result<CacheSchema> ParsePolicy(std::string_view json, const CacheShape& shape);
// A policy that means exactly this schema; ParsePolicy of it, with the same shape, gives a schema that is equal in all
// but the model, adapter and tokenizer identity, which a policy does not carry. REQUIRES Validate(schema).ok() and one
// geometry for all layers.
std::string PolicyJson(const CacheSchema& schema);

}  // namespace livequant
