// apps/run_speculate.cc: livequant run --speculate: the drafter that the flags ask for, and how often it was right.
#include <fmt/format.h>

#include <cstdio>
#include <utility>

#include "apps/run.h"

namespace livequant::app {

Result<Speculation> OpenSpeculation(const RunFlags& flags, const RunSetup& setup, int64_t context, ThreadPool& pool) {
  Speculation out;
  if (flags.speculate.empty()) return out;
  if (setup.schema.read_step != kStepwise)
    return Status(
        Code::kUnsupported,
        fmt::format("--speculate verifies several rows in one step, which the contract stepwise alone reads as "
                    "single steps would; the contract is {}",
                    ContractName(setup.schema.read_step)));
  out.method = flags.speculate == "ngram" ? "ngram" : "draft_model";
  if (flags.speculate == "ngram") {
    if (flags.prompt_lookup_min > flags.prompt_lookup_max)
      return Status(Code::kInvalidArgument, fmt::format("--prompt-lookup-min {} is above --prompt-lookup-max {}",
                                                        flags.prompt_lookup_min, flags.prompt_lookup_max));
    out.drafter = std::make_unique<NgramDrafter>(flags.prompt_lookup_min, flags.prompt_lookup_max);
    return out;
  }
  auto draft = ModelBundle::Load(flags.speculate);
  if (!draft.ok()) return Status(draft.status().code(), "--speculate: " + draft.status().message());
  // One text must be one list of ids to both.
  if (draft->identity.tokenizer != setup.bundle.identity.tokenizer)
    return Status(
        Code::kInvalidArgument,
        fmt::format("--speculate: the tokenizer of {} (sha256 {:.12}) is not that of {} (sha256 {:.12})",
                    flags.speculate, draft->identity.tokenizer, flags.model, setup.bundle.identity.tokenizer));
  out.dtype = flags.draft_dtype.empty() ? flags.dtype : flags.draft_dtype;
  LQ_ASSIGN_OR_RETURN(const CacheSchema schema, draft->Schema(out.dtype));
  LQ_ASSIGN_OR_RETURN(auto drafter, ModelDrafter::Open(draft->model, schema,
                                                       {.max_tokens = static_cast<int>(flags.speculative_tokens),
                                                        .context = context,
                                                        .prefill_chunk = flags.prefill_chunk,
                                                        .allow_fallback = flags.allow_fallback},
                                                       pool));
  out.model_digest = draft->identity.model;
  out.model = drafter.get();
  out.drafter = std::move(drafter);
  return out;
}

nlohmann::json Speculation::Json(const RunFlags& flags, const Generation& g) const {
  if (drafter == nullptr) return nullptr;
  nlohmann::json json = {{"method", method},
                         {"num_speculative_tokens", flags.speculative_tokens},
                         {"draft_tokens", g.drafted_tokens},
                         {"accepted_tokens", g.accepted_tokens},
                         {"acceptance_rate", g.acceptance_rate()},
                         {"mean_acceptance_length", g.mean_acceptance_length()},
                         {"steps_by_accepted_tokens", g.accepted_steps}};
  if (model == nullptr) {
    json["prompt_lookup_min"] = flags.prompt_lookup_min;
    json["prompt_lookup_max"] = flags.prompt_lookup_max;
  } else {
    json["draft_model"] = flags.speculate;
    json["draft_model_digest"] = model_digest;
    json["draft_kv_cache_dtype"] = dtype;
    json["draft_steps"] = model->forwards();
    json["draft_cache_bytes"] = model->cache().owner().used_bytes();
  }
  return json;
}

void Speculation::Print(const RunFlags& flags, const Generation& g) const {
  if (drafter == nullptr) return;
  fmt::print(stderr, "drafts   {} of {} tokens accepted ({:.1f} %), {:.2f} tokens a step; {}\n", g.accepted_tokens,
             g.drafted_tokens, 100 * g.acceptance_rate(), g.mean_acceptance_length(),
             model == nullptr
                 ? fmt::format("prompt lookup of {} to {} tokens", flags.prompt_lookup_min, flags.prompt_lookup_max)
                 : fmt::format("{} steps of {} under {}", model->forwards(), flags.speculate, dtype));
}

}  // namespace livequant::app
