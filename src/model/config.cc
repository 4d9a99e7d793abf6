// model/config.cc: config.json -> LlamaConfig. Total: any text in, a config whose every field is within its limit or an
// error out.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <string>

#include "io/json.h"
#include "model/config.h"
#include "model/config_fields.h"
#include "model/config_rope.h"

namespace livequant {
namespace {

using nlohmann::json;

// Limits that keep every product of two sizes far inside int64_t; far beyond any published Llama.
constexpr int64_t kMostVocab = 1 << 22, kMostHidden = 1 << 17, kMostIntermediate = 1 << 20, kMostPositions = 1 << 20;
constexpr int64_t kMostLayers = 1024, kMostHeads = 1024, kMostHeadDim = 1024;
constexpr int64_t kMaxRopeTableBytes = int64_t{1} << 30;

// What tells the architectures apart, beyond the block that they share.
struct Family {
  const char *architecture, *model_type;
  int64_t absent_kv_heads;  // num_key_value_heads where it is absent; 0: as many as heads
  int64_t absent_head_dim;  // 0: hidden_size / num_attention_heads
  bool says_attention_bias, says_mlp_bias;
  bool qkv_bias, qk_norm;  // of every model of this architecture
  enum class Windows { kNone, kEveryLayer, kByLayer } windows;
};
constexpr std::array kFamilies{
    Family{"LlamaForCausalLM", "llama", 0, 0, true, true, false, false, Family::Windows::kNone},
    Family{"MistralForCausalLM", "mistral", 8, 0, false, false, false, false, Family::Windows::kEveryLayer},
    Family{"Qwen2ForCausalLM", "qwen2", 32, 0, false, false, true, false, Family::Windows::kByLayer},
    Family{"Qwen3ForCausalLM", "qwen3", 32, 128, true, false, false, true, Family::Windows::kByLayer},
};

// Read below, for every architecture or for some.
constexpr std::array kRead{
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
    "quantization_config",
};
// What says nothing of logits: how a model was trained, stored, loaded or sampled.
constexpr std::array kHarmless{
    "attention_dropout",
    "hidden_dropout",
    "initializer_range",
    "use_cache",
    "pretraining_tp",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "pad_token_id",
    "sep_token_id",
    "cls_token_id",
    "mask_token_id",
    "unk_token_id",
    "decoder_start_token_id",
    "tokenizer_class",
    "name_or_path",
    "task_specific_params",
    "problem_type",
    "id2label",
    "label2id",
    "num_labels",
    "finetuning_task",
    "prefix",
    "return_dict",
    "return_dict_in_generate",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_router_logits",
    "torchscript",
    "use_bfloat16",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "is_decoder",
    "chunk_size_feed_forward",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "min_length",
    "max_length",
    "max_new_tokens",
    "num_beams",
    "num_beam_groups",
    "num_return_sequences",
    "diversity_penalty",
    "length_penalty",
    "repetition_penalty",
    "encoder_no_repeat_ngram_size",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "exponential_decay_length_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "remove_invalid_values",
    "early_stopping",
    "unsloth_version",
    "unsloth_fixed",
};
// What transformers knows, this code does not do, and the value that leaves the result as it is.
struct OnlyValue {
  const char* name;
  const char* json;
};
constexpr std::array kOnly{
    OnlyValue{"hidden_act", R"("silu")"},     OnlyValue{"partial_rotary_factor", "1.0"},
    OnlyValue{"is_encoder_decoder", "false"}, OnlyValue{"add_cross_attention", "false"},
    OnlyValue{"use_mrope", "false"},          OnlyValue{"pruned_heads", "{}"},
};

Result<const Family*> FamilyOf(const ConfigFields& root) {
  std::string all;
  for (const Family& f : kFamilies) all += (all.empty() ? "" : ", ") + std::string(f.architecture);
  if (root.Absent("architectures"))
    return Status(Code::kInvalidArgument, "config.json: architectures is missing; known: " + all);
  const json& a = root.json()["architectures"];
  if (!a.is_array() || a.size() != 1 || !a[0].is_string())
    return root.Bad(Code::kInvalidArgument, "architectures", a, "a list of one name is needed");
  for (const Family& f : kFamilies) {
    if (a[0] != f.architecture) continue;
    if (!root.Absent("model_type") && root.json()["model_type"] != f.model_type)
      return root.Bad(Code::kUnsupported, "model_type", root.json()["model_type"],
                      fmt::format("only \"{}\" goes with {}", f.model_type, f.architecture));
    return &f;
  }
  return root.Bad(Code::kUnsupported, "architectures", a, "known: " + all);
}

// Every field is read, known to say nothing of the result, or refused by its name.
Status CheckFields(const ConfigFields& root, const Family& family) {
  for (const auto& [key, value] : root.json().items()) {
    const auto is_key = [&key = key](const char* name) { return key == name; };
    if (value.is_null()) continue;
    if (const auto only = std::find_if(kOnly.begin(), kOnly.end(), [&](const OnlyValue& o) { return is_key(o.name); });
        only != kOnly.end()) {
      if (value != json::parse(only->json))
        return root.Bad(Code::kUnsupported, only->name, value, fmt::format("only {} is known here", only->json));
      continue;
    }
    if (std::any_of(kRead.begin(), kRead.end(), is_key) || std::any_of(kHarmless.begin(), kHarmless.end(), is_key) ||
        key.starts_with("_"))
      continue;
    if (is_key("attention_bias") && family.says_attention_bias) continue;
    if (is_key("mlp_bias") && family.says_mlp_bias) continue;
    if (is_key("layer_types")) continue;
    if (is_key("sliding_window") && family.windows != Family::Windows::kNone) continue;
    if ((is_key("use_sliding_window") || is_key("max_window_layers")) && family.windows == Family::Windows::kByLayer)
      continue;
    if (value == false && (is_key("attention_bias") || is_key("mlp_bias") || is_key("use_sliding_window"))) continue;
    return root.Bad(Code::kUnsupported, ExcerptOfKey(key).c_str(), value,
                    fmt::format("{} has no such field here, and it may change the result", family.architecture));
  }
  return {};
}

// The layers' windows, from sliding_window and, for Qwen, use_sliding_window, max_window_layers and layer_types.
Result<std::vector<int>> ParseWindows(const ConfigFields& root, const Family& family, int layers) {
  using Windows = Family::Windows;
  int64_t window = 0;  // 0: none
  bool uses = family.windows == Windows::kEveryLayer;
  if (family.windows == Windows::kByLayer) {
    LQ_ASSIGN_OR_RETURN(uses, root.BooleanOr("use_sliding_window", false));
  }
  // A null says: no window. Absent, it has a default.
  if (uses && !(root.json().contains("sliding_window") && root.json()["sliding_window"].is_null())) {
    LQ_ASSIGN_OR_RETURN(window, root.IntegerOr("sliding_window", 4096, 1, kMaxWindowRows));
  }
  std::vector<int> windows(static_cast<size_t>(layers), static_cast<int>(window));
  if (family.windows == Windows::kByLayer) {
    LQ_ASSIGN_OR_RETURN(const int64_t first, root.IntegerOr("max_window_layers", 28, 0, kMostLayers));
    for (int l = 0; l < layers && l < first; ++l) windows[static_cast<size_t>(l)] = 0;
  }
  if (!root.Absent("layer_types")) {
    const json& types = root.json()["layer_types"];
    if (!types.is_array() || static_cast<int>(types.size()) != layers)
      return root.Bad(Code::kInvalidArgument, "layer_types", types,
                      fmt::format("a list of {} names is needed", layers));
    for (int l = 0; l < layers; ++l) {
      const json& type = types[static_cast<size_t>(l)];
      const std::string name = fmt::format("layer_types[{}]", l);
      const bool sliding = type == "sliding_attention";
      if (!sliding && type != "full_attention")
        return root.Bad(Code::kUnsupported, name.c_str(), type, "full_attention and sliding_attention are known here");
      int& implied = windows[static_cast<size_t>(l)];
      if (family.windows != Windows::kByLayer && sliding != (implied != 0))
        return root.Bad(Code::kUnsupported, name.c_str(), type,
                        fmt::format("{} has one window for all layers, here {}", family.architecture, window));
      if (sliding && window == 0)
        return root.Bad(Code::kInvalidArgument, name.c_str(), type, "sliding_window says that there is no window");
      implied = sliding ? static_cast<int>(window) : 0;
    }
  }
  if (std::all_of(windows.begin(), windows.end(), [](int w) { return w == 0; })) windows.clear();
  return windows;
}

Status ParseSpecialIds(const ConfigFields& root, LlamaConfig& c) {
  if (!root.Absent("bos_token_id")) {
    LQ_ASSIGN_OR_RETURN(const int64_t id, root.Integer("bos_token_id", 0, c.vocab_size - 1));
    c.bos_token_id = static_cast<int32_t>(id);
  }
  if (root.Absent("eos_token_id")) return {};
  const json& eos = root.json()["eos_token_id"];
  const json list = eos.is_array() ? eos : json::array({eos});
  for (const json& v : list) {
    const json one = {{"eos_token_id", v}};
    LQ_ASSIGN_OR_RETURN(const int64_t id, ConfigFields(one).Integer("eos_token_id", 0, c.vocab_size - 1));
    c.eos_token_ids.push_back(static_cast<int32_t>(id));
  }
  return {};
}

}  // namespace

Result<LlamaConfig> ParseLlamaConfig(std::string_view text) {
  LQ_ASSIGN_OR_RETURN(const json document, ParseJson(text, "config.json", {.max_depth = 32, .max_bytes = 4 << 20}));
  if (!document.is_object())
    return Status(Code::kInvalidArgument, "config.json: an object is needed, got " + ExcerptOfValue(document));
  const ConfigFields root(document);
  LQ_ASSIGN_OR_RETURN(const Family* family, FamilyOf(root));
  LQ_RETURN_IF_ERROR(CheckFields(root, *family));

  LlamaConfig c;
  c.architecture = family->architecture;
  LQ_ASSIGN_OR_RETURN(c.vocab_size, root.Integer("vocab_size", 1, kMostVocab));
  LQ_ASSIGN_OR_RETURN(c.hidden_size, root.Integer("hidden_size", 1, kMostHidden));
  LQ_ASSIGN_OR_RETURN(c.intermediate_size, root.Integer("intermediate_size", 1, kMostIntermediate));
  LQ_ASSIGN_OR_RETURN(c.max_position_embeddings, root.Integer("max_position_embeddings", 1, kMostPositions));
  LQ_ASSIGN_OR_RETURN(const int64_t layers, root.Integer("num_hidden_layers", 1, kMostLayers));
  LQ_ASSIGN_OR_RETURN(const int64_t heads, root.Integer("num_attention_heads", 1, kMostHeads));
  const bool says_kv_heads =
      root.json().contains("num_key_value_heads");  // null: as many as heads, whatever the default
  LQ_ASSIGN_OR_RETURN(
      const int64_t kv_heads,
      root.IntegerOr("num_key_value_heads",
                     says_kv_heads || family->absent_kv_heads == 0 ? heads : family->absent_kv_heads, 1, kMostHeads));
  if (heads % kv_heads != 0)
    return Status(
        Code::kInvalidArgument,
        fmt::format("config.json: num_key_value_heads is {}; it must divide num_attention_heads, {}", kv_heads, heads));
  if (root.Absent("head_dim") && family->absent_head_dim == 0 && c.hidden_size % heads != 0)
    return Status(
        Code::kInvalidArgument,
        fmt::format("config.json: hidden_size is {}; without head_dim, num_attention_heads, {}, must divide it",
                    c.hidden_size, heads));
  LQ_ASSIGN_OR_RETURN(
      const int64_t head_dim,
      root.IntegerOr("head_dim", family->absent_head_dim > 0 ? family->absent_head_dim : c.hidden_size / heads, 2,
                     kMostHeadDim));
  if (head_dim < 2 || head_dim > kMostHeadDim || head_dim % 2 != 0)
    return Status(
        Code::kInvalidArgument,
        fmt::format("config.json: head_dim is {}; an even size from 2 to {} is needed", head_dim, kMostHeadDim));
  if (c.max_position_embeddings * head_dim * int64_t{sizeof(float)} > kMaxRopeTableBytes)
    return Status(
        Code::kOutOfRange,
        fmt::format("config.json: max_position_embeddings is {}; with head_dim {} the RoPE table allows {}",
                    c.max_position_embeddings, head_dim, kMaxRopeTableBytes / (head_dim * int64_t{sizeof(float)})));
  c.num_hidden_layers = static_cast<int>(layers);
  c.num_attention_heads = static_cast<int>(heads);
  c.num_key_value_heads = static_cast<int>(kv_heads);
  c.head_dim = static_cast<int>(head_dim);
  LQ_ASSIGN_OR_RETURN(const double eps, root.Number("rms_norm_eps", 0, 1));
  c.rms_norm_eps = static_cast<float>(eps);
  if (c.rms_norm_eps < std::numeric_limits<float>::min())
    return root.Bad(Code::kOutOfRange, "rms_norm_eps", root.json()["rms_norm_eps"], "below the smallest normal f32");
  LQ_ASSIGN_OR_RETURN(c.tie_word_embeddings, root.BooleanOr("tie_word_embeddings", false));
  c.qkv_bias = family->qkv_bias;
  c.qk_norm = family->qk_norm;
  if (family->says_attention_bias) {
    LQ_ASSIGN_OR_RETURN(c.qkv_bias, root.BooleanOr("attention_bias", false));
    c.o_bias = c.qkv_bias;
  }
  if (family->says_mlp_bias) {
    LQ_ASSIGN_OR_RETURN(c.mlp_bias, root.BooleanOr("mlp_bias", false));
  }
  LQ_ASSIGN_OR_RETURN(c.windows, ParseWindows(root, *family, c.num_hidden_layers));
  LQ_ASSIGN_OR_RETURN(c.rope, ParseRope(root, c.head_dim, c.max_position_embeddings));
  LQ_RETURN_IF_ERROR(ParseSpecialIds(root, c));
  return c;
}

}  // namespace livequant
