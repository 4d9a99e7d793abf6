// schema/policy.h: policy files, the JSON text form of a schema. Normative grammar: docs/formats/policy.md
//
// Reads JSON and knows no preset: whoever has a table of presets (method/) passes a lookup. Strict: unknown and
// repeated fields, wrong types, layers out of range and scales that could change later are errors that name the place
// ("layers[1].v.group").
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "schema/schema.h"

namespace livequant {

// The layer form of a preset for the shape at hand; kNotFound lists the names.
using PresetLookup = std::function<Result<LayerSchema>(std::string_view name)>;

struct Policy {
  CacheSchema schema;  // passed Validate()
  std::string skip;    // preset for skipped layers; empty: the caller's default
};
// A layer without a window has the shape's; a window that sees more than the shape's is refused. kInvalidArgument:
// malformed or inconsistent. kUnsupported: a scale that changes after codes exist.
Result<Policy> ReadPolicy(std::string_view json, const CacheShape& shape, const PresetLookup& preset);
// The text of a policy file of at most 1 MiB. kNotFound, kIo, kOutOfRange name the path.
Result<std::string> ReadPolicyFile(const std::string& path);
// Every field written out, runs of equal layers as ranges. REQUIRES Validate(schema).ok() and one geometry for all
// layers.
std::string WritePolicy(const CacheSchema& schema);

// "0-3,7" from {0, 1, 2, 3, 7}, and back: rising, no repeats, each below num_layers.
std::string LayerListText(const std::vector<int>& layers);
Result<std::vector<int>> ParseLayerList(std::string_view text, int num_layers);

}  // namespace livequant
