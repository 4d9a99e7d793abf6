// apps/run_record.cc: livequant run --record: what went into and came out of the attention of a run, and its cache
// bytes at the end, so that another runtime can do the same and compare. The file: docs/formats/record.md.
#include <fmt/format.h>

#include "apps/rows_file.h"
#include "apps/run.h"
#include "io/file.h"
#include "method/method.h"

namespace livequant::app {
namespace {

constexpr const char* kRecordFormat = "livequant.record";
constexpr const char* kRecordVersion = "1";
constexpr int64_t kMaxRecordBytes = int64_t{2} << 30;  // it is held in memory, and once more as the file's text

}  // namespace

Status CheckRecord(const LlamaConfig& config, int64_t rows) {
  const int64_t bytes = AttentionRecord::BytesFor(config, rows);
  if (bytes <= kMaxRecordBytes) return {};
  return Status(Code::kOutOfRange,
                fmt::format("--record: {} rows of this model's K, V, queries and outputs are {} bytes; "
                            "a record holds at most {}",
                            rows, bytes, kMaxRecordBytes));
}

Status WriteRecord(const std::string& path, const LlamaConfig& config, const KvCache& cache,
                   const AttentionRecord& record) {
  const CacheSchema& schema = cache.schema();
  const int64_t rows = record.lease.length(), d = config.head_dim;
  CodedRows file;
  for (int layer = 0; layer < config.num_hidden_layers; ++layer) {
    const size_t l = static_cast<size_t>(layer);
    const int64_t kv_heads = config.num_key_value_heads, q_heads = config.num_attention_heads;
    const auto add = [&](const std::string& name, const std::vector<float>& values, int64_t heads) {
      LQ_CHECK(static_cast<int64_t>(values.size()) == rows * heads * d);
      file.tensors[name] = {"F32", {rows, heads, d}, std::as_bytes(std::span(values))};
    };
    add(RowName(kK, layer), record.k[l], kv_heads);
    add(RowName(kV, layer), record.v[l], kv_heads);
    add(fmt::format("q.{}", layer), record.q[l], q_heads);
    add(fmt::format("attention.{}", layer), record.out[l], q_heads);
    if (schema.layers[l].window != 0) continue;  // rows that a window dropped are in no page
    for (const TensorIndex tensor : {kK, kV})
      LQ_RETURN_IF_ERROR(AddCodedRows(cache, record.lease, layer, tensor, &file));
  }
  const std::vector<std::byte> state = cache.StateBytes(record.lease);
  file.tensors["state"] = {"U8", {static_cast<int64_t>(state.size())}, state};
  const nlohmann::json shape = {{"layers", config.num_hidden_layers},
                                {"kv_heads", config.num_key_value_heads},
                                {"q_heads", config.num_attention_heads},
                                {"head_dim", config.head_dim}};
  return WriteFile(path, SafetensorsText(file.tensors, {{"format", kRecordFormat},
                                                        {"version", kRecordVersion},
                                                        {"schema", PolicyJson(schema)},
                                                        {"shape", shape.dump()},
                                                        {"rope", RopeJson(schema).dump()},
                                                        {"scale", fmt::format("{:.9g}", AttentionScale(config))},
                                                        {"steps", nlohmann::json(record.steps).dump()},
                                                        {"content_sha256", ContentDigest(file.tensors)}}));
}

}  // namespace livequant::app
