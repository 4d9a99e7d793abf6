// eval/perplexity.h: perplexity of a text, and how far each cache format moves the model's distribution from the exact
// one.
//
// Protocols (both score position p with the logits of the row before it, natural logarithms, f32 logits summed in
// double):
//   windows    eval/reference.json's method. The tokens (without specials) are cut into pieces of context - 1; each
//   piece is run alone with BOS in
//              front and all its tokens are scored, the first one from BOS alone. The last piece may be shorter. No
//              token is scored twice or left out.
//   llama.cpp  llama-perplexity without --ppl-stride. BOS is put in front of the tokens; they are cut into contiguous
//   chunks of `context` tokens,
//              what is left at the end is dropped, and the first token of each chunk is REPLACED by BOS. In each chunk
//              the tokens at positions context/2 + 1 .. context - 1 are scored. At least 2 * context tokens are needed.
//              Unlike llama-perplexity, whose base logits are 16-bit, the baseline here is f32.
// The baseline of every comparison is the f32 cache on the same rows: it holds exact rows, so no contract changes it.
// Formats run under the contract that their schema names; one call takes one contract only, so no column mixes two. Row
// values of one window are summed in row order and windows in window order: results depend on neither threads nor
// prefill_chunk.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "runtime/model_bundle.h"
#include "schema/schema.h"

namespace livequant {

enum class PerplexityProtocol { kWindows, kLlamaCpp };
const char* ProtocolName(PerplexityProtocol protocol);              // "windows", "llama.cpp"
Result<PerplexityProtocol> ParseProtocol(const std::string& name);  // kInvalidArgument lists the names

// One column: a name to print and the schema that it means (ModelBundle::Schema).
struct EvalFormat {
  std::string name;
  CacheSchema schema;
};

struct PerplexityOptions {
  int64_t context = 2048;  // 2 .. max_position_embeddings (llama.cpp: 4 ..)
  PerplexityProtocol protocol = PerplexityProtocol::kWindows;
  int64_t max_tokens = 0;  // use the first max_tokens tokens of the text; 0 = all
  int64_t prefill_chunk = 512;
  int threads = 1;  // windows in parallel, one thread each
  bool allow_fallback = false;
  const std::atomic<bool>* cancel = nullptr;  // kCancelled
  std::function<void(int64_t done, int64_t total)> on_progress =
      {};  // window-formats (baseline included) done; one call at a time
};

// Per scored token, in llama.cpp's vocabulary (tools/perplexity). p is the probability of the token that follows, dp =
// p(format) - p(f32).
struct FormatQuality {
  std::string format, contract;
  int64_t tokens = 0, windows = 0;
  double nll = 0;                               // mean, nats
  double perplexity = 0, perplexity_error = 0;  // exp(nll), and its standard error
  double mean_kld = 0, kld_error = 0;           // KL(f32 || format), nats; standard error of the mean
  double median_kld = 0, p90_kld = 0, p95_kld = 0, p99_kld = 0, p999_kld = 0, max_kld = 0, min_kld = 0;
  double mean_dp = 0, rms_dp = 0;  // as fractions, not percent
  double same_top_p = 0;           // share of rows whose most probable token is the baseline's
  double seconds = 0;              // thread seconds spent on this format, scoring included
  int64_t fallback_calls = 0;
  std::optional<KeySpike> key_spike = {};  // the worst of all windows, where keys have a scale a row
  bool is_baseline =
      false;  // this schema is the baseline itself: its rows were computed once and compared with themselves
};

struct PerplexityResult {
  std::string contract;
  int64_t tokens = 0, windows = 0;  // scored
  double baseline_perplexity = 0, baseline_nll = 0, baseline_seconds = 0, wall_seconds = 0;
  std::vector<FormatQuality> formats;  // in the order asked
};

// `tokens`: the text's ids without specials. kInvalidArgument: no tokens, too few for the protocol, no BOS id in
// config.json, two contracts in one call, a schema of another shape. kOutOfRange: context, an id. kNonFinite: a NaN or
// Inf row or logit (format and window named).
Result<PerplexityResult> EvalPerplexity(const Llama& model, std::span<const int32_t> tokens,
                                        std::span<const EvalFormat> formats, const PerplexityOptions& options);

}  // namespace livequant
