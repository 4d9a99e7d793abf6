// apps/encode.cc: livequant encode | decode: K and V rows in a safetensors file to the bytes of cache pages and back,
// so that anybody can check them. What the coded file holds: docs/formats/rows.md.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <memory>

#include "apps/console.h"
#include "apps/context.h"
#include "apps/rows_file.h"
#include "io/file.h"
#include "io/json.h"
#include "io/safetensors.h"
#include "kv/kv_cache.h"
#include "kv/planes.h"
#include "method/method.h"
#include "model/model_files.h"
#include "model/weights.h"

namespace livequant::app {
namespace {

constexpr const char* kRowsFormat = "livequant.rows";
constexpr const char* kRowsVersion = "1";
constexpr int64_t kStepRows = 512;

struct EncodeFlags {
  std::string in, out, dtype, skip, model;
  int threads = 0;
  bool json = false;
};

// The rows of a file: layer l's K and V, all of one shape.
struct Rows {
  int layers = 0, heads = 0, head_dim = 0;
  int64_t tokens = 0;
  std::vector<const TensorInfo*> tensors[2];  // K, V by layer
};

Result<DType> RowDType(const std::string& name, const TensorInfo& t) {
  if (t.dtype == "F32") return DType::kF32;
  if (t.dtype == "F16") return DType::kF16;
  if (t.dtype == "BF16") return DType::kBF16;
  return Status(Code::kUnsupported, fmt::format("tensor {} is {}; rows of F32, F16 and BF16 are read", name, t.dtype));
}

// Tensors k.0, v.0, k.1, ... or k and v alone, each [tokens, kv_heads, head_dim].
Result<Rows> FindRows(const Safetensors& file) {
  Rows rows;
  const auto& tensors = file.tensors();
  const bool single = tensors.contains("k") || tensors.contains("v");
  rows.layers = static_cast<int>(single ? 1 : std::min<size_t>((tensors.size() + 1) / 2, kMaxLayers + 1));
  for (int layer = 0; layer < rows.layers; ++layer)
    for (const TensorIndex tensor : {kK, kV}) {
      const std::string name = single ? kTensorNames[tensor] : RowName(tensor, layer);
      const auto found = tensors.find(name);
      if (found == tensors.end())
        return Status(Code::kInvalidArgument,
                      fmt::format("tensor {} is missing; {} tensors are there: k.<layer> and v.<layer> from 0 up, or k "
                                  "and v alone, are needed",
                                  name, tensors.size()));
      rows.tensors[tensor].push_back(&found->second);
    }
  if (rows.layers == 0)
    return Status(Code::kInvalidArgument, "the file has no tensors; k.0 and v.0, or k and v, are needed");
  if (tensors.size() != 2 * static_cast<size_t>(rows.layers))
    for (const auto& [name, t] : tensors)
      if (std::find(rows.tensors[0].begin(), rows.tensors[0].end(), &t) == rows.tensors[0].end() &&
          std::find(rows.tensors[1].begin(), rows.tensors[1].end(), &t) == rows.tensors[1].end())
        return Status(Code::kInvalidArgument,
                      fmt::format("tensor {} is left over: only k and v rows are read", Excerpt(name)));
  const std::vector<int64_t>& shape = rows.tensors[kK][0]->shape;
  if (shape.size() != 3 || shape[0] < 1 || shape[1] < 1 || shape[2] < 1 || shape[1] > kMaxKvHeads ||
      shape[2] > kMaxHeadDim || shape[0] >= (int64_t{1} << 31) - kStepRows)
    return Status(Code::kInvalidArgument,
                  fmt::format("rows have shape [{}]; [tokens, kv_heads, head_dim] is needed, of at least 1, at most {} "
                              "heads of {}",
                              fmt::join(shape, ", "), kMaxKvHeads, kMaxHeadDim));
  for (const TensorIndex tensor : {kK, kV})
    for (int layer = 0; layer < rows.layers; ++layer) {
      const TensorInfo& t = *rows.tensors[tensor][static_cast<size_t>(layer)];
      if (t.shape != shape)
        return Status(Code::kInvalidArgument,
                      fmt::format("{} has shape [{}], the first tensor [{}]; all rows have one shape",
                                  RowName(tensor, layer), fmt::join(t.shape, ", "), fmt::join(shape, ", ")));
      if (auto dtype = RowDType(RowName(tensor, layer), t); !dtype.ok()) return dtype.status();
    }
  rows.tokens = shape[0];
  rows.heads = static_cast<int>(shape[1]);
  rows.head_dim = static_cast<int>(shape[2]);
  return rows;
}

Result<CacheSchema> SchemaOfFlags(const EncodeFlags& flags, const Rows& rows) {
  CacheShape shape{.num_layers = rows.layers, .num_kv_heads = rows.heads, .head_dim = rows.head_dim, .rope = {}};
  if (!flags.model.empty()) {
    LQ_ASSIGN_OR_RETURN(const LlamaConfig c, ReadModelConfig(flags.model));
    if (c.num_hidden_layers != rows.layers || c.num_key_value_heads != rows.heads || c.head_dim != rows.head_dim)
      return Status(
          Code::kInvalidArgument,
          fmt::format("the rows are of {} layers, {} KV heads of {}; {} has {} layers, {} KV heads of {}", rows.layers,
                      rows.heads, rows.head_dim, flags.model, c.num_hidden_layers, c.num_key_value_heads, c.head_dim));
    shape.rope = c.rope;
  }
  std::vector<int> skip;
  if (!flags.skip.empty()) {
    LQ_ASSIGN_OR_RETURN(skip, ParseIntList(flags.skip, "--kv-cache-dtype-skip-layers"));
  }
  LQ_ASSIGN_OR_RETURN(CacheSchema schema, SchemaFor(flags.dtype, shape, skip));
  for (size_t i = 0; i < schema.layers.size(); ++i)
    if (flags.model.empty() && schema.layers[i].k_stage == RopeStage::kPre && schema.layers[i].pinned_rows > 0)
      return Status(
          Code::kInvalidArgument,
          fmt::format("layer {}: its {} pinned keys are rotated when they are stored; name the model with -m, "
                      "whose RoPE that is",
                      i, schema.layers[i].pinned_rows));
  return schema;
}

// Appends every row as a prompt would.
Status AppendRows(const Rows& rows, KvCache& cache, SeqId seq, ThreadPool& pool) {
  const int64_t row_values = int64_t{rows.heads} * rows.head_dim, step_rows = cache.options().max_step_rows;
  std::vector<float> values[2];
  for (auto& v : values) v.resize(static_cast<size_t>(step_rows * row_values));
  for (int64_t at = 0; at < rows.tokens; at += step_rows) {
    const int64_t count = std::min(step_rows, rows.tokens - at);
    const AppendRequest request{.seq = seq, .rows = static_cast<int>(count)};
    LQ_ASSIGN_OR_RETURN(KvStep step, cache.Begin({&request, 1}));
    for (int layer = 0; layer < rows.layers; ++layer) {
      for (const TensorIndex tensor : {kK, kV}) {
        const TensorInfo& t = *rows.tensors[tensor][static_cast<size_t>(layer)];
        LQ_ASSIGN_OR_RETURN(const DType dtype, RowDType(RowName(tensor, layer), t));
        WidenValues(dtype, t.bytes.data() + at * row_values * DTypeBytes(dtype), count * row_values,
                    values[tensor].data());
      }
      LQ_RETURN_IF_ERROR(step.Prepare(layer, values[kK].data(), values[kV].data(), pool));
    }
    LQ_ASSIGN_OR_RETURN(const auto receipts, step.Publish());
    LQ_CHECK(receipts.size() == 1);
  }
  return {};
}

Status Encode(const EncodeFlags& flags) {
  LQ_ASSIGN_OR_RETURN(const Safetensors file, Safetensors::OpenFile(flags.in));
  const auto named = [&](const Status& s) { return Status(s.code(), fmt::format("{}: {}", flags.in, s.message())); };
  auto rows = FindRows(file);
  if (!rows.ok()) return named(rows.status());
  LQ_ASSIGN_OR_RETURN(const CacheSchema schema, SchemaOfFlags(flags, *rows));
  ThreadPool pool(ThreadsOrDefault(flags.threads));
  // Nothing attends, so no kernel is needed.
  LQ_ASSIGN_OR_RETURN(const std::unique_ptr<KvCache> cache,
                      KvCache::Open(schema, {.max_sequences = 1,
                                             .max_len = rows->tokens,
                                             .max_step_rows = static_cast<int>(std::min(kStepRows, rows->tokens)),
                                             .max_q_heads = rows->heads,
                                             .allow_fallback = true,
                                             .threads = pool.threads()}));
  LQ_ASSIGN_OR_RETURN(const Receipt open, cache->owner().Open());
  if (const Status s = AppendRows(*rows, *cache, open.seq, pool); !s.ok()) return named(s);
  LQ_ASSIGN_OR_RETURN(const Owner::Lease lease, cache->owner().Acquire(open.seq));

  CodedRows coded;
  nlohmann::json frontiers = {{"k", nlohmann::json::array()}, {"v", nlohmann::json::array()}};
  for (int layer = 0; layer < rows->layers; ++layer)
    for (const TensorIndex tensor : {kK, kV}) {
      LQ_RETURN_IF_ERROR(AddCodedRows(*cache, lease, layer, tensor, &coded));
      frontiers[kTensorNames[tensor]].push_back(coded.planes.back()->shape.frontier);
    }
  const nlohmann::json shape = {{"layers", rows->layers}, {"kv_heads", rows->heads}, {"head_dim", rows->head_dim}};
  const std::map<std::string, std::string> metadata = {
      {"format", kRowsFormat},           {"version", kRowsVersion},
      {"schema", PolicyJson(schema)},    {"shape", shape.dump()},
      {"rope", RopeJson(schema).dump()}, {"tokens", fmt::format("{}", rows->tokens)},
      {"frontiers", frontiers.dump()},   {"content_sha256", ContentDigest(coded.tensors)}};
  LQ_RETURN_IF_ERROR(WriteFile(flags.out, SafetensorsText(coded.tensors, metadata)));
  const int64_t* bytes = coded.bytes;
  const int64_t qparams = bytes[1] + bytes[2], total = bytes[0] + qparams + bytes[3];
  if (flags.json) {
    ContextInfo info{
        .task = "encode", .schemas = {{flags.dtype, schema}}, .threads = pool.threads(), .allow_fallback = true};
    fmt::print(
        "{}\n",
        nlohmann::json{{"tokens", rows->tokens},
                       {"shape", shape},
                       {"frontiers", frontiers},
                       {"bytes", {{"codes", bytes[0]}, {"qparams", qparams}, {"exact", bytes[3]}, {"total", total}}},
                       {"content_sha256", metadata.at("content_sha256")},
                       {"context", ContextJson(info)}}
            .dump(2));
  } else {
    fmt::print("{} rows of {} layers, {} KV heads of {}: {} codes + {} qparams + {} exact = {}\n", rows->tokens,
               rows->layers, rows->heads, rows->head_dim, HumanBytes(static_cast<double>(bytes[0])),
               HumanBytes(static_cast<double>(qparams)), HumanBytes(static_cast<double>(bytes[3])),
               HumanBytes(static_cast<double>(total)));
  }
  return {};
}

// An integer of metadata JSON within [lo, hi].
Result<int64_t> MetaInteger(const nlohmann::json& object, const char* name, int64_t lo, int64_t hi) {
  const nlohmann::json v = object.is_object() && object.contains(name) ? object[name] : nlohmann::json();
  if (!v.is_number_unsigned() || v.get<uint64_t>() > static_cast<uint64_t>(hi) || v.get<int64_t>() < lo)
    return Status(Code::kInvalidArgument,
                  fmt::format("metadata shape.{} is {}; it must be from {} to {}", name, ExcerptOfValue(v), lo, hi));
  return v.get<int64_t>();
}

Status CheckArray(const Safetensors& file, const std::string& name, const Part& part, std::span<const std::byte>* out,
                  size_t* seen) {
  const auto found = file.tensors().find(name);
  if (!part.present()) return {};  // if it is there all the same, it is left over
  if (found == file.tensors().end())
    return Status(Code::kInvalidArgument, fmt::format("tensor {} is missing; the schema implies it", name));
  if (found->second.dtype != part.dtype || found->second.shape != part.shape)
    return Status(Code::kInvalidArgument,
                  fmt::format("tensor {} is {} [{}]; the schema implies {} [{}]", name, found->second.dtype,
                              fmt::join(found->second.shape, ", "), part.dtype, fmt::join(part.shape, ", ")));
  *out = found->second.bytes;
  ++*seen;
  return {};
}

Status DecodeFile(const Safetensors& file, const EncodeFlags& flags) {
  const auto& metadata = file.metadata();
  for (const char* key : {"format", "version", "schema", "shape", "rope", "tokens", "frontiers", "content_sha256"})
    if (!metadata.contains(key))
      return Status(Code::kInvalidArgument, fmt::format("metadata {} is missing: not a file of encode", key));
  if (metadata.size() != 8)
    return Status(Code::kInvalidArgument, fmt::format("{} metadata strings; encode writes 8", metadata.size()));
  if (metadata.at("format") != kRowsFormat || metadata.at("version") != kRowsVersion)
    return Status(Code::kUnsupported,
                  fmt::format("metadata format is {} version {}; {} version {} is read", Excerpt(metadata.at("format")),
                              Excerpt(metadata.at("version")), kRowsFormat, kRowsVersion));
  LQ_ASSIGN_OR_RETURN(const nlohmann::json shape_json, ParseJson(metadata.at("shape"), "metadata shape"));
  LQ_ASSIGN_OR_RETURN(const nlohmann::json frontiers, ParseJson(metadata.at("frontiers"), "metadata frontiers"));
  CacheShape shape;
  LQ_ASSIGN_OR_RETURN(const int64_t layers, MetaInteger(shape_json, "layers", 1, kMaxLayers));
  LQ_ASSIGN_OR_RETURN(const int64_t heads, MetaInteger(shape_json, "kv_heads", 1, kMaxKvHeads));
  LQ_ASSIGN_OR_RETURN(const int64_t head_dim, MetaInteger(shape_json, "head_dim", 1, kMaxHeadDim));
  LQ_ASSIGN_OR_RETURN(const nlohmann::json tokens_json, ParseJson(metadata.at("tokens"), "metadata tokens"));
  LQ_ASSIGN_OR_RETURN(const int64_t tokens,
                      MetaInteger({{"tokens", tokens_json}}, "tokens", 1, (int64_t{1} << 31) - kStepRows - 1));
  shape.num_layers = static_cast<int>(layers);
  shape.num_kv_heads = static_cast<int>(heads);
  shape.head_dim = static_cast<int>(head_dim);
  LQ_ASSIGN_OR_RETURN(const CacheSchema schema, ParsePolicy(metadata.at("schema"), shape));
  if (const std::string digest = ContentDigest(file.tensors()); digest != metadata.at("content_sha256"))
    return Status(Code::kDataLoss, fmt::format("the tensors have SHA-256 {}; metadata content_sha256 is {}", digest,
                                               Excerpt(metadata.at("content_sha256"))));

  // Every array is checked before anything of the size that the metadata says is made.
  size_t seen = 0;
  std::vector<PlaneShape> shapes;
  std::vector<PlaneBytes> arrays;
  nlohmann::json expected = {{"k", nlohmann::json::array()}, {"v", nlohmann::json::array()}};
  for (int layer = 0; layer < shape.num_layers; ++layer)
    for (const TensorIndex tensor : {kK, kV}) {
      const LayerSchema& l = schema.layers[static_cast<size_t>(layer)];
      shapes.push_back(ShapeOfPlanes(l, tensor, tokens));
      PlaneBytes& b = arrays.emplace_back();
      expected[kTensorNames[tensor]].push_back(shapes.back().frontier);
      std::span<const std::byte>* spans[4] = {&b.codes, &b.scales, &b.zeros, &b.exact};
      const std::vector<Part> parts = PartsOf(l, tensor, shapes.back());
      for (size_t i = 0; i < parts.size(); ++i)
        LQ_RETURN_IF_ERROR(CheckArray(file, PartName(tensor, layer, parts[i].name), parts[i], spans[i], &seen));
    }
  if (seen != file.tensors().size())
    return Status(Code::kInvalidArgument,
                  fmt::format("{} tensors are there; the schema implies {}", file.tensors().size(), seen));
  if (frontiers != expected)
    return Status(Code::kInvalidArgument, fmt::format("metadata frontiers is {}; {} rows under this schema have {}",
                                                      ExcerptOfValue(frontiers), tokens, ExcerptOfValue(expected)));

  std::vector<std::unique_ptr<std::vector<float>>> values;
  std::map<std::string, TensorInfo> tensors;
  for (int layer = 0; layer < shape.num_layers; ++layer)
    for (const TensorIndex tensor : {kK, kV}) {
      const size_t index = static_cast<size_t>(2 * layer + tensor);
      auto out = std::make_unique<std::vector<float>>(static_cast<size_t>(tokens * heads * head_dim));
      for (int head = 0; head < shape.num_kv_heads; ++head)
        LQ_RETURN_IF_ERROR(DecodePlanes(schema.layers[static_cast<size_t>(layer)], tensor, shapes[index], arrays[index],
                                        head, {out->data() + head * head_dim, tokens, head_dim, heads * head_dim}));
      tensors[RowName(tensor, layer)] = {"F32", {tokens, heads, head_dim}, std::as_bytes(std::span(*out))};
      values.push_back(std::move(out));
    }
  LQ_RETURN_IF_ERROR(WriteFile(flags.out, SafetensorsText(tensors, {{"schema", metadata.at("schema")}})));
  if (flags.json) {
    ContextInfo info{.task = "decode", .schemas = {{"file", schema}}, .allow_fallback = true};
    fmt::print("{}\n",
               nlohmann::json{{"tokens", tokens}, {"shape", shape_json}, {"context", ContextJson(info)}}.dump(2));
  } else {
    fmt::print("{} rows of {} layers, {} KV heads of {} as F32\n", tokens, layers, heads, head_dim);
  }
  return {};
}

Status Decode(const EncodeFlags& flags) {
  LQ_ASSIGN_OR_RETURN(const Safetensors file, Safetensors::OpenFile(flags.in));
  const Status s = DecodeFile(file, flags);
  if (s.ok() || s.code() == Code::kIo) return s;
  return Status(s.code(), fmt::format("{}: {}", flags.in, s.message()));
}

}  // namespace

void AddEncode(CLI::App& app, int* exit_code) {
  auto e = std::make_shared<EncodeFlags>();
  CLI::App* encode = app.add_subcommand("encode", "K and V rows of a safetensors file as the bytes of cache pages");
  encode->add_option("in", e->in, "safetensors: k.<layer>, v.<layer> [tokens, kv_heads, head_dim], or k and v")
      ->required();
  encode->add_option("out", e->out, "safetensors with codes, scales, zeros and exact rows (docs/formats/rows.md)")
      ->required();
  encode->add_option("--kv-cache-dtype", e->dtype, "preset or JSON policy file")->required();
  encode->add_option("--kv-cache-dtype-skip-layers", e->skip, "layers kept in f16, as 0,1,30-31");
  encode->add_option("-m,--model", e->model,
                     "model directory or GGUF file whose RoPE the keys have (default: not said)");
  encode->add_option("-t,--threads", e->threads, "0 = every core")->check(CLI::Range(0, 1024))->capture_default_str();
  encode->add_flag("--json", e->json, "print JSON");
  encode->callback([e, exit_code] {
    const Status s = Encode(*e);
    *exit_code = s.ok() ? kExitOk : Fail(s, kExitFailed);
  });

  auto d = std::make_shared<EncodeFlags>();
  CLI::App* decode = app.add_subcommand("decode", "what encode wrote, as F32 rows");
  decode->add_option("in", d->in, "safetensors of encode")->required();
  decode->add_option("out", d->out, "safetensors: k.<layer>, v.<layer> [tokens, kv_heads, head_dim], F32")->required();
  decode->add_flag("--json", d->json, "print JSON");
  decode->callback([d, exit_code] {
    const Status s = Decode(*d);
    *exit_code = s.ok() ? kExitOk : Fail(s, kExitFailed);
  });
}

}  // namespace livequant::app
