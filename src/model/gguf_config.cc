// model/gguf_config.cc: metadata of a GGUF file -> the text of a config.json. One parser judges both, so that whatever
// a checkpoint's directory is refused for, its GGUF file is too.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <set>

#include "io/json.h"
#include "model/gguf_source.h"

namespace livequant {
namespace {

using nlohmann::json;

// Keys of "general." and "tokenizer." that say how to read the file or the text; what else they hold are names and
// notes. Any other key outside the architecture's own is refused.
constexpr std::string_view kNotes[] = {"general.", "tokenizer.", "quantize.", "split."};
// Keys of the architecture that are read below.
constexpr std::string_view kReadFields[] = {"context_length",
                                            "embedding_length",
                                            "block_count",
                                            "feed_forward_length",
                                            "attention.head_count",
                                            "attention.head_count_kv",
                                            "attention.layer_norm_rms_epsilon",
                                            "attention.key_length",
                                            "attention.value_length",
                                            "attention.sliding_window",
                                            "rope.dimension_count",
                                            "rope.freq_base",
                                            "rope.scaling.type",
                                            "rope.scaling.factor",
                                            "rope.scaling.original_context_length",
                                            "rope.scaling.finetuned",
                                            "rope.scaling.attn_factor",
                                            "rope.scaling.yarn_beta_fast",
                                            "rope.scaling.yarn_beta_slow",
                                            "vocab_size"};

class ConfigReader {
 public:
  ConfigReader(const Gguf& gguf, std::string_view what) : gguf_(gguf), what_(what) {}

  Result<std::string> Read() {
    LQ_RETURN_IF_ERROR(ReadArchitecture());
    LQ_RETURN_IF_ERROR(CheckKeys());
    LQ_RETURN_IF_ERROR(ReadShape());
    LQ_RETURN_IF_ERROR(ReadRope());
    LQ_RETURN_IF_ERROR(ReadTokens());
    return config_.dump();
  }

 private:
  Status Bad(Code code, const std::string& key, const std::string& says) const {
    return Status(code, fmt::format("{}: metadata {} {}", what_, Excerpt(key), says));
  }
  std::string Key(std::string_view name) const { return fmt::format("{}.{}", architecture_, name); }
  const GgufValue* Find(std::string_view name) const { return gguf_.Find(Key(name)); }

  // An unsigned value below 2^31, or an array of one and the same value for every layer.
  Result<int64_t> Integer(std::string_view name) const {
    const GgufValue* v = Find(name);
    if (v == nullptr) return Bad(Code::kInvalidArgument, Key(name), "is missing");
    return Integer(Key(name), *v);
  }
  Result<int64_t> Integer(const std::string& key, const GgufValue& v) const {
    constexpr int64_t kMost = (int64_t{1} << 31) - 1;
    int64_t n = -1;
    if (const uint64_t* u = std::get_if<uint64_t>(&v.value)) {
      n = static_cast<int64_t>(std::min<uint64_t>(*u, uint64_t{1} << 62));
    } else if (const int64_t* i = std::get_if<int64_t>(&v.value)) {
      n = *i;
    } else if (const GgufArray* a = std::get_if<GgufArray>(&v.value);
               a != nullptr && a->count > 0 && !a->bytes.empty() && a->element != GgufType::kF32 &&
               a->element != GgufType::kF64 && a->element != GgufType::kBool) {
      n = GgufInteger(*a, 0);
      for (uint64_t j = 1; j < a->count; ++j)
        if (GgufInteger(*a, j) != n)
          return Bad(Code::kUnsupported, key,
                     fmt::format("is {} for layer 0 and {} for layer {}; layers of one shape are read", n,
                                 GgufInteger(*a, j), j));
    } else {
      return Bad(Code::kInvalidArgument, key, fmt::format("is of type {}; an integer is needed", GgufTypeName(v.type)));
    }
    if (n < 0 || n > kMost) return Bad(Code::kOutOfRange, key, fmt::format("is {}; it must be from 0 to {}", n, kMost));
    return n;
  }
  Result<double> Number(std::string_view name) const {
    const GgufValue* v = Find(name);
    if (v == nullptr) return Bad(Code::kInvalidArgument, Key(name), "is missing");
    const double* x = std::get_if<double>(&v->value);
    if (x == nullptr)
      return Bad(Code::kInvalidArgument, Key(name),
                 fmt::format("is of type {}; a float is needed", GgufTypeName(v->type)));
    if (!std::isfinite(*x)) return Bad(Code::kOutOfRange, Key(name), fmt::format("is {}; it must be finite", *x));
    return *x;
  }

  Status ReadArchitecture() {
    const GgufValue* v = gguf_.Find("general.architecture");
    const std::string_view* name = v == nullptr ? nullptr : std::get_if<std::string_view>(&v->value);
    if (name == nullptr)
      return Bad(Code::kInvalidArgument, "general.architecture", v == nullptr ? "is missing" : "is no string");
    struct Known {
      std::string_view gguf, model_type, architecture;
    };
    constexpr Known kKnown[] = {{"llama", "llama", "LlamaForCausalLM"},
                                {"mistral", "mistral", "MistralForCausalLM"},
                                {"qwen2", "qwen2", "Qwen2ForCausalLM"},
                                {"qwen3", "qwen3", "Qwen3ForCausalLM"}};
    const Known* known =
        std::find_if(std::begin(kKnown), std::end(kKnown), [&](const Known& k) { return k.gguf == *name; });
    if (known == std::end(kKnown))
      return Bad(Code::kUnsupported, "general.architecture",
                 fmt::format("is {}; llama, mistral, qwen2 and qwen3 are read", Excerpt(*name)));
    architecture_ = *name;
    std::string_view model_type = known->model_type, architecture = known->architecture;
    // A Mistral without a window is a Llama, and is written as one; only the window needs the other name.
    const bool window = Find("attention.sliding_window") != nullptr;
    if (architecture_ == "llama" && window) model_type = "mistral", architecture = "MistralForCausalLM";
    if (architecture_ == "mistral" && !window) model_type = "llama", architecture = "LlamaForCausalLM";
    config_ = {{"architectures", {std::string(architecture)}}, {"model_type", std::string(model_type)}};
    return {};
  }

  Status CheckKeys() const {
    for (const auto& [key, value] : gguf_.metadata()) {
      const bool note =
          std::any_of(std::begin(kNotes), std::end(kNotes), [&](std::string_view p) { return key.starts_with(p); });
      if (note) continue;
      if (key.starts_with(architecture_ + ".")) {
        const std::string_view name = std::string_view(key).substr(architecture_.size() + 1);
        if (std::find(std::begin(kReadFields), std::end(kReadFields), name) != std::end(kReadFields)) continue;
        // Values that switch nothing on.
        const uint64_t* n = std::get_if<uint64_t>(&value.value);
        if ((name == "expert_count" || name == "expert_used_count") && n != nullptr && *n == 0) continue;
        const double* x = std::get_if<double>(&value.value);
        if (name == "rope.scale_linear" && x != nullptr && *x == 1.0) continue;
        const bool* b = std::get_if<bool>(&value.value);
        if (name == "attention.causal" && b != nullptr && *b) continue;
      }
      return Bad(Code::kUnsupported, key, "may change results and is not known here");
    }
    const GgufValue* type = gguf_.Find("general.type");
    const std::string_view* kind = type == nullptr ? nullptr : std::get_if<std::string_view>(&type->value);
    if (type != nullptr && (kind == nullptr || *kind != "model"))
      return Bad(Code::kUnsupported, "general.type", "is not \"model\"");
    return {};
  }

  Status ReadShape() {
    LQ_ASSIGN_OR_RETURN(const int64_t hidden, Integer("embedding_length"));
    LQ_ASSIGN_OR_RETURN(const int64_t heads, Integer("attention.head_count"));
    LQ_ASSIGN_OR_RETURN(config_["intermediate_size"], Integer("feed_forward_length"));
    LQ_ASSIGN_OR_RETURN(config_["max_position_embeddings"], Integer("context_length"));
    LQ_ASSIGN_OR_RETURN(config_["num_hidden_layers"], Integer("block_count"));
    LQ_ASSIGN_OR_RETURN(config_["rms_norm_eps"], Number("attention.layer_norm_rms_epsilon"));
    config_["hidden_size"] = hidden;
    config_["num_attention_heads"] = heads;
    config_["num_key_value_heads"] = heads;
    if (heads < 1) return Bad(Code::kOutOfRange, Key("attention.head_count"), "is 0; it must be at least 1");
    if (Find("attention.head_count_kv") != nullptr) {
      LQ_ASSIGN_OR_RETURN(const int64_t kv_heads, Integer("attention.head_count_kv"));
      if (kv_heads < 1) return Bad(Code::kOutOfRange, Key("attention.head_count_kv"), "is 0; it must be at least 1");
      config_["num_key_value_heads"] = kv_heads;
    }
    head_dim_ = hidden / heads;
    if (Find("attention.key_length") != nullptr) {
      LQ_ASSIGN_OR_RETURN(head_dim_, Integer("attention.key_length"));
    } else if (hidden % heads != 0) {
      return Bad(Code::kInvalidArgument, Key("attention.head_count"),
                 fmt::format("is {}; without {} it must divide {}", heads, Key("attention.key_length"), hidden));
    }
    config_["head_dim"] = head_dim_;
    for (const char* name : {"attention.value_length", "rope.dimension_count"}) {
      if (Find(name) == nullptr) continue;
      LQ_ASSIGN_OR_RETURN(const int64_t n, Integer(name));
      if (n != head_dim_)
        return Bad(Code::kUnsupported, Key(name), fmt::format("is {}; only the head size, {}, is read", n, head_dim_));
    }
    if (Find("attention.sliding_window") != nullptr) {
      if (architecture_ == "qwen2" || architecture_ == "qwen3")
        return Bad(Code::kUnsupported, Key("attention.sliding_window"), "does not say which layers have the window");
      LQ_ASSIGN_OR_RETURN(config_["sliding_window"], Integer("attention.sliding_window"));
    }

    const auto embedding = gguf_.tensors().find("token_embd.weight");
    if (embedding == gguf_.tensors().end() || embedding->second.shape.size() != 2)
      return Status(Code::kInvalidArgument, fmt::format("{}: no matrix token_embd.weight", what_));
    const int64_t vocab = embedding->second.shape[0];
    if (Find("vocab_size") != nullptr) {
      LQ_ASSIGN_OR_RETURN(const int64_t said, Integer("vocab_size"));
      if (said != vocab)
        return Bad(Code::kInvalidArgument, Key("vocab_size"),
                   fmt::format("is {}; token_embd.weight has {} rows", said, vocab));
    }
    config_["vocab_size"] = vocab;
    config_["tie_word_embeddings"] = !gguf_.tensors().contains("output.weight");
    // What config.json says of biases, the tensors say here; Qwen2 always has those of Q, K and V.
    if (architecture_ != "qwen2") config_["attention_bias"] = gguf_.tensors().contains("blk.0.attn_q.bias");
    if (architecture_ == "llama" || architecture_ == "mistral")
      config_["mlp_bias"] = gguf_.tensors().contains("blk.0.ffn_gate.bias");
    return {};
  }

  Status ReadRope() {
    config_["rope_theta"] = 10000.0;  // the format's default
    if (Find("rope.freq_base") != nullptr) {
      LQ_ASSIGN_OR_RETURN(config_["rope_theta"], Number("rope.freq_base"));
    }
    const GgufValue* type = Find("rope.scaling.type");
    std::string_view name = "none";
    if (type != nullptr) {
      const std::string_view* s = std::get_if<std::string_view>(&type->value);
      if (s == nullptr) return Bad(Code::kInvalidArgument, Key("rope.scaling.type"), "is no string");
      name = *s;
    }
    const auto factors = gguf_.tensors().find("rope_freqs.weight");
    if (factors != gguf_.tensors().end()) {
      if (name != "none")
        return Bad(Code::kUnsupported, Key("rope.scaling.type"),
                   fmt::format("is {} beside rope_freqs.weight; only one of them is read", Excerpt(name)));
      return ReadLlama3(factors->second);
    }
    // It multiplies YaRN's own factor in some programs and stands for it in others.
    if (Find("rope.scaling.attn_factor") != nullptr) {
      LQ_ASSIGN_OR_RETURN(const double factor, Number("rope.scaling.attn_factor"));
      if (factor != 1.0)
        return Bad(Code::kUnsupported, Key("rope.scaling.attn_factor"), fmt::format("is {}; only 1 is read", factor));
    }
    if (name == "none") {
      if (Find("rope.scaling.factor") == nullptr) return {};
      LQ_ASSIGN_OR_RETURN(const double factor, Number("rope.scaling.factor"));
      if (factor != 1.0)
        return Bad(Code::kInvalidArgument, Key("rope.scaling.factor"),
                   fmt::format("is {} without a scaling type", factor));
      return {};
    }
    if (name != "linear" && name != "yarn")
      return Bad(Code::kUnsupported, Key("rope.scaling.type"),
                 fmt::format("is {}; none, linear and yarn are read", Excerpt(name)));
    json scaling = {{"rope_type", std::string(name)}};
    LQ_ASSIGN_OR_RETURN(scaling["factor"], Number("rope.scaling.factor"));
    if (name == "yarn") {
      LQ_ASSIGN_OR_RETURN(scaling["original_max_position_embeddings"], Integer("rope.scaling.original_context_length"));
      for (const auto& [key, field] : {std::pair("rope.scaling.yarn_beta_fast", "beta_fast"),
                                       std::pair("rope.scaling.yarn_beta_slow", "beta_slow")})
        if (Find(key) != nullptr) {
          LQ_ASSIGN_OR_RETURN(scaling[field], Number(key));
        }
    }
    config_["rope_scaling"] = std::move(scaling);
    return {};
  }

  // rope_freqs.weight holds the divisor of each frequency and not the parameters that gave it. Llama 3's are looked
  // for: low and high frequency factors of 1 and 4 over 8192 positions, the largest divisor being the factor.
  Status ReadLlama3(const GgufTensor& t) {
    constexpr double kLow = 1, kHigh = 4;
    int64_t original = 8192;
    if (Find("rope.scaling.original_context_length") != nullptr) {
      LQ_ASSIGN_OR_RETURN(original, Integer("rope.scaling.original_context_length"));
    }
    const auto positions = static_cast<double>(original);
    const std::string of = fmt::format("{}: tensor rope_freqs.weight", what_);
    if (t.dtype != GgufDType::kF32 || t.shape != std::vector<int64_t>{head_dim_ / 2})
      return Status(Code::kInvalidArgument, fmt::format("{} is no vector of {} F32 values", of, head_dim_ / 2));
    const GgufArray factors{.element = GgufType::kF32,
                            .count = static_cast<uint64_t>(t.shape[0]),
                            .bytes = t.bytes,
                            .strings = {},
                            .arrays = {}};
    double factor = 1;
    for (uint64_t i = 0; i < factors.count; ++i) factor = std::max(factor, double{GgufFloat(factors, i)});
    const double theta = config_["rope_theta"].get<double>();
    for (uint64_t i = 0; i < factors.count; ++i) {
      const double wavelength =
          2 * std::numbers::pi * std::pow(theta, 2.0 * static_cast<double>(i) / static_cast<double>(head_dim_));
      double want = 1;
      if (wavelength > positions / kLow) {
        want = factor;
      } else if (wavelength >= positions / kHigh) {
        const double smooth = (positions / wavelength - kLow) / (kHigh - kLow);
        want = 1 / ((1 - smooth) / factor + smooth);
      }
      const double got = double{GgufFloat(factors, i)};
      if (!(std::fabs(got - want) <= 1e-4 * want))
        return Status(Code::kUnsupported,
                      fmt::format("{} holds {} at index {}; Llama 3's scaling by {} over {} positions gives {}, and no "
                                  "other scaling is read from factors",
                                  of, got, i, factor, original, want));
    }
    config_["rope_scaling"] = {{"rope_type", "llama3"},
                               {"factor", factor},
                               {"low_freq_factor", kLow},
                               {"high_freq_factor", kHigh},
                               {"original_max_position_embeddings", original}};
    return {};
  }

  Status ReadTokens() {
    if (const GgufValue* bos = gguf_.Find("tokenizer.ggml.bos_token_id")) {
      LQ_ASSIGN_OR_RETURN(config_["bos_token_id"], Integer("tokenizer.ggml.bos_token_id", *bos));
    }
    std::set<int64_t> eos;  // end of text, of turn, of message: each ends a reply
    for (const char* key :
         {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"})
      if (const GgufValue* id = gguf_.Find(key)) {
        LQ_ASSIGN_OR_RETURN(const int64_t n, Integer(key, *id));
        eos.insert(n);
      }
    if (!eos.empty()) config_["eos_token_id"] = eos;
    return {};
  }

  const Gguf& gguf_;
  std::string_view what_;
  std::string architecture_;
  int64_t head_dim_ = 0;
  json config_;
};

}  // namespace

Result<std::string> GgufConfigJson(const Gguf& gguf, std::string_view what) { return ConfigReader(gguf, what).Read(); }

}  // namespace livequant
