// fuzz/loader_fuzz.cc: a whole model, read and run for one step: it answers, or says why not.
//
// Input: 'g' and a GGUF file, or 'd' and, separated by NUL bytes, config.json and the JSON header of model.safetensors,
// then its data to the end.
#include "fuzz_main.h"
#include "kv/kv_cache.h"
#include "model/llama.h"
#include "model/model_files.h"
#include "temp_dir.h"

using namespace livequant;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string_view input = AsText(data, size);
  if (input.empty()) return 0;
  FuzzDir& dir = FuzzDir::Get();
  dir.Clear();
  std::string path = dir.path();
  const bool gguf = input[0] == 'g';
  input.remove_prefix(1);
  if (gguf) {
    dir.Write("m.gguf", input);
    path += "/m.gguf";
  } else {
    dir.Write("config.json", NextPart(&input));
    const std::string header(NextPart(&input));
    dir.Write("model.safetensors", SafetensorsFile(header, input));
  }
  // A RoPE table of up to 1 GiB is what a config may ask for: not a fault, and not what is looked for here.
  const auto config = ReadModelConfig(path);
  if (config.ok() && config->max_position_embeddings * config->head_dim > (1 << 20)) return 0;
  const auto model = Llama::Load(path);
  if (!model.ok()) {
    CheckPrintable(model.status().message());
    return 0;
  }
  const auto files = ModelFiles::Open(path);
  LQ_CHECK(files.ok());
  if ((*files)->safetensors() != nullptr) {
    const auto fp8 = (*files)->safetensors()->ReportFp8();
    LQ_CHECK(fp8.rounded <= fp8.values);
  }
  const LlamaConfig& c = (*model)->config();
  LayerSchema layer;
  layer.num_kv_heads = c.num_key_value_heads;
  layer.head_dim = c.head_dim;
  layer.k.dtype = layer.v.dtype = layer.exact_dtype = DType::kF32;
  layer.k.bits = layer.v.bits = 32;
  CacheSchema schema;
  schema.layers.assign(static_cast<size_t>(c.num_hidden_layers), layer);
  schema.rope = c.rope;
  auto cache = KvCache::Open(schema, {.max_sequences = 1,
                                      .max_len = 4,
                                      .max_step_rows = 2,
                                      .max_q_heads = c.num_attention_heads,
                                      .allow_fallback = true,
                                      .threads = 1});
  if (!cache.ok()) {
    CheckPrintable(cache.status().message());
    return 0;
  }
  const auto seq = (*cache)->owner().Open();
  LQ_CHECK(seq.ok());
  const auto workspace = (*model)->NewWorkspace(2, 1);
  std::vector<float> logits(static_cast<size_t>(c.vocab_size));
  ThreadPool pool(1);
  const int32_t ids[] = {0, static_cast<int32_t>(c.vocab_size - 1)};
  const SequenceTokens part{.seq = seq->seq, .tokens = ids, .all_logits = false};
  const Status s =
      (*model)->Step({&part, 1}, **cache, *workspace, MatrixView<float>(logits.data(), 1, c.vocab_size), pool);
  if (!s.ok()) CheckPrintable(s.message());  // weights of NaN
  return 0;
}
