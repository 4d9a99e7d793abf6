// schema/schema.h: what cache bytes mean. Everything else is derived from this value: page bytes (schema/layout.h), the
// ledger (cache/ledger), which kernels may read a cache, whether two caches may share rows, what a file means.
//
// Invariants: a CacheSchema that passed Validate() determines every byte of a page and which form (coded or exact) of a
// row each query reads. No code outside method/ knows a preset by name: a branch on a name means a field is missing
// here. Spec: design.md "the schema", cache_core.md 2 and 4, methods.md 0.7.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "numeric/dtype.h"

namespace livequant {

// What one stored code is.
enum class CodeKind : uint8_t {
  kNative,    // a value of `dtype` as it is, no qparams
  kScaledFp,  // dtype(x / scale), dtype one of the fp8 formats; the scale is static
  kInteger,   // an integer of `bits` bits, decoded with qparams
};

// Which values share one set of qparams.
enum class ScaleAxis : uint8_t {
  kNone,     // native values
  kTensor,   // one static scale for the K or V tensor of the layer; lives in the schema, not in pages
  kRow,      // `group` consecutive channels of one row of one KV head; written once, with the row
  kChannel,  // one channel of `group` consecutive rows of one KV head; written once, when the group closes
};

// How integer codes become values.
enum class ZeroConvention : uint8_t {
  kNone,         // not integer codes
  kSymmetric,    // x = code * scale, code in [-(2^(b-1)-1), 2^(b-1)-1] (narrow alphabet), stored in two's complement
  kMinimum,      // x = min + code * scale, code in [0, 2^b-1]; both stored               (KIVI, methods.md 4.2)
  kFloatOffset,  // x = (code - zero) * scale, code in [0, 2^b-1]; zero is a float         (QServe, methods.md 8.2)
};

// A nonzero row or group whose stored scale would lie below the smallest normal of its dtype.
enum class SmallScale : uint8_t {
  kFloor,   // store the smallest normal: |x - x^| <= s/2 still holds
  kRefuse,  // refuse the append (the article's FTZ-safe domain)
};

// What a float-offset code beyond the alphabet becomes (methods.md 8.2).
enum class Overflow : uint8_t {
  kClamp,  // the safe mode
  kWrap,   // the released kernel's nibble wrap; a named compatibility mode
};

// The form of one stored tensor, K or V, of one layer.
struct TensorCoding {
  CodeKind kind = CodeKind::kNative;
  DType dtype = DType::kF16;  // kNative, kScaledFp
  int bits = 16;              // of one code
  ScaleAxis axis = ScaleAxis::kNone;
  int group = 0;  // kRow: channels (divides head_dim); kChannel: rows; else 0
  ZeroConvention zero = ZeroConvention::kNone;
  DType qparam = DType::kF16;  // kF16 or kF32; of scale and of minimum or offset
  SmallScale small_scale = SmallScale::kFloor;
  Overflow overflow = Overflow::kClamp;
  float static_scale = 1.0f;  // kTensor
  bool operator==(const TensorCoding&) const = default;

  bool has_qparams() const { return axis == ScaleAxis::kRow || axis == ScaleAxis::kChannel; }
  // Stored qparams of one group: scale, and minimum or offset where the convention has one.
  int qparams_per_group() const { return !has_qparams() ? 0 : zero == ZeroConvention::kSymmetric ? 1 : 2; }
};

// When rows are coded: of n committed rows the first raw(n) are coded at rest (cache_core.md 2).
struct Closure {
  int lag = -1;
  int step = 1;
  bool operator==(const Closure&) const = default;

  // Rows of a sequence of n that a code may exist for; may be n + 1 for lag -1 (a row is coded in its own step).
  constexpr int64_t raw(int64_t n) const { return n <= lag ? 0 : (n - lag) / step * step; }
  // Rows coded at rest when n rows are committed.
  constexpr int64_t frontier(int64_t n) const { return raw(n) < n ? raw(n) : n; }
  // A code depends on its own row and is made in the row's own step: such rows are never exact at rest.
  constexpr bool immediate() const { return step == 1 && lag <= 0; }
  // The most rows that are exact at rest.
  constexpr int max_exact_rows() const { return immediate() ? 0 : lag + step - 1; }
};

// read_step of the contracts: 1 = stepwise, C = chunk:C, kPromptReadStep = prompt.
inline constexpr int kStepwise = 1;
inline constexpr int kPromptReadStep = 1 << 30;

// Rows that the query at position q reads in coded form under read_step C, before max() with the rows that were already
// coded when the step began. cache_core.md 2: C == 1 ? min(q + 1, raw(q)) : min(b, raw(b)), b = align_down(q, C).
constexpr int64_t CodedRowsRead(const Closure& c, int read_step, int64_t q) {
  const int64_t b = read_step == 1 ? q : q / read_step * read_step;
  const int64_t limit = read_step == 1 ? q + 1 : b;
  return c.raw(b) < limit ? c.raw(b) : limit;
}

enum class RopeStage : uint8_t { kPost, kPre };
enum class RopePairing : uint8_t { kHalfSplit, kInterleaved };

// The exact rotary configuration: part of what stored keys mean. Pair i of a head turns by position * frequency(i), and
// cos and sin are multiplied by attention_factor. With base(i) = theta^(-2 i / dims) and original =
// original_max_positions, the frequencies are (kernels/rope_table.h has them as code)
//   default  base
//   linear   base / factor
//   llama3   base where its wavelength 2 pi / base is below original / high_freq_factor, base / factor where it is
//   above
//            original / low_freq_factor, between them s base + (1 - s) base / factor with
//            s = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
//   yarn     r base / factor + (1 - r) base, r rising from 0 to 1 between the pairs that turn beta_fast and beta_slow
//            times in `original` positions; `truncate` rounds those two pairs outward to whole ones
// A field that the type has no use for holds its default. Source: transformers, modeling_rope_utils.py.
struct RopeConfig {
  std::string type = "default";
  double theta = 10000.0;
  int dims = 0;  // rotated channels of a head; 0 = all
  RopePairing pairing = RopePairing::kHalfSplit;
  double factor = 1.0;                               // linear, llama3, yarn; >= 1
  int original_max_positions = 0;                    // llama3, yarn: positions of pretraining
  double low_freq_factor = 0, high_freq_factor = 0;  // llama3; 0 < low < high
  double beta_fast = 0, beta_slow = 0;               // yarn; 0 < slow <= fast
  bool truncate = true;                              // yarn
  double attention_factor = 1.0;                     // yarn
  bool operator==(const RopeConfig&) const = default;
};
// Checks type, ranges, and that fields which the type has no use for hold their defaults. kUnsupported: another type,
// with the reason; kInvalidArgument names the field, the value and the limit.
Status ValidateRope(const RopeConfig& rope);

struct LayerSchema {
  int num_kv_heads = 0;
  int head_dim = 0;
  int window = 0;  // rows that a query can see; 0 = all
  TensorCoding k, v;
  Closure k_closure, v_closure;
  RopeStage k_stage = RopeStage::kPost;
  DType exact_dtype = DType::kF16;  // exact rows are rounded once to this when they are prepared
  int pinned_rows = 0;              // leading rows that are never coded
  int coded_page_rows = 128;
  int exact_page_rows = 32;
  int packing_version = 1;  // 1 = canonical (schema/layout.h)
  bool operator==(const LayerSchema&) const = default;
};

// Who made the bytes. Identity fields must be equal for two caches to share rows; provenance is recorded only.
struct Identity {
  std::string model;        // digest of config and weights
  std::string adapter;      // empty: none
  std::string tokenizer;    // digest
  std::string calibration;  // digest of the artifacts that static scales came from; empty: none
  bool operator==(const Identity&) const = default;
};
struct Provenance {
  std::string preset;        // name or file that the schema was made from
  std::string scale_source;  // "none" | "warmup" | "dataset"; none means scales of 1.0, which is not a fit
  std::string created_by;    // version and commit
};

struct CacheSchema {
  std::vector<LayerSchema> layers;
  RopeConfig rope;
  int read_step = kStepwise;
  Identity identity;
  Provenance provenance;
};

// What a model fixes of its cache; the rest of a schema is a choice.
struct CacheShape {
  int num_layers = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  RopeConfig rope;
  std::vector<int> windows = {};  // rows that a query of each layer sees, 0 = all; empty: all in every layer

  int window(int layer) const { return windows.empty() ? 0 : windows[static_cast<size_t>(layer)]; }
};

// Bounds that Validate() keeps, so that no product of sizes leaves int64 and no position leaves int32.
inline constexpr int kMaxLayers = 4096, kMaxKvHeads = 4096, kMaxHeadDim = 8192, kMaxPageRows = 4096;
inline constexpr int64_t kMaxRowValues = int64_t{1}
                                         << 24;  // layers x KV heads x head_dim: all values of one position's K
inline constexpr int kMaxClosureRows = 1 << 16, kMaxPinnedRows = 1 << 20, kMaxWindowRows = 1 << 30;
inline constexpr double kMaxRopeFactor = 1 << 20;

// Checks every field and combination. kInvalidArgument or kUnsupported names layer, field, value and limit; a running
// maximum (a row scale axis whose scale may change later) cannot be expressed and is refused by the policy reader.
// A field that a coding has no use for must hold its default, so that two schemas that mean the same bytes are equal.
Status Validate(const CacheSchema& schema);

// ok if rows of `a` may be read as rows of `b`: equal in every field but provenance. The refusal names the first field
// that differs and both values: "layers[3].v.bits: 4 here, 2 there".
Status Compatible(const CacheSchema& a, const CacheSchema& b);

// Every field that Compatible() compares, in its order, as text: {"layers[3].v.bits", "4"}. Provenance is not among
// them.
struct SchemaField {
  std::string name, value;
  bool operator==(const SchemaField&) const = default;
};
std::vector<SchemaField> SchemaFields(const CacheSchema& schema);

// SHA-256 (lower-case hex) over SchemaFields, each name and value length-prefixed. An index key only: rows are shared
// after Compatible(), never because digests are equal.
std::string Digest(const CacheSchema& schema);

// "stepwise", "chunk:512", "prompt" from a read_step, and back. kInvalidArgument: anything else.
std::string ContractName(int read_step);
Result<int> ParseContract(const std::string& name);

// Layers that share page tables: equal closures, window, pinned rows and page rows (cache_core.md 1). Codings may
// differ.
struct LayerClass {
  std::vector<int> layers;  // rising
  Closure closure[2];       // K, V
  int window = 0, pinned_rows = 0, coded_page_rows = 128, exact_page_rows = 32;
};
std::vector<LayerClass> LayerClasses(const CacheSchema& schema);

}  // namespace livequant
