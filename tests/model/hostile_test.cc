// tests/model/hostile_test.cc: files that somebody made to hurt. Each is an error that names the thing, the value seen
// and the limit, in less than 64 MiB of memory: whatever a file says about itself is compared with the bytes that are
// there before anything of that size is made (R16, R17, R18).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <functional>

#include "io/file.h"
#include "io/json.h"
#include "model/llama.h"
#include "model/tiny_gguf.h"
#include "support/heap_peak.h"
#include "text/gguf_tokenizer.h"
#include "text/tokenizer.h"

namespace livequant {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using B = GgufBuilder;

constexpr int64_t kMostBytes = int64_t{64} << 20;

TinyLlama Tiny() {
  Rng rng(3);
  TinyLlama tiny;
  tiny.Fill(rng, "F32");
  return tiny;
}

// A directory of the tiny model, damaged by `damage`, then loaded.
struct Case {
  const char* name;
  std::function<void(const std::filesystem::path&)> damage;
  const char* says;
};

std::string Header(std::string_view json, uint64_t length) { return LittleEndian(length).append(json); }
std::string Entry(const char* name, const char* dtype, const char* shape, const char* offsets) {
  return std::string("\"") + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
         ",\"data_offsets\":" + offsets + "}";
}

void ExpectRefused(const Case& c, const std::string& where, const std::function<Status()>& load) {
  ResetHeapPeak();
  const Status s = load();
  const int64_t peak = HeapPeak();
  EXPECT_FALSE(s.ok()) << c.name;
  EXPECT_LT(peak, kMostBytes) << c.name;
  EXPECT_THAT(s.message(), AllOf(HasSubstr(where), HasSubstr(c.says))) << c.name;
  EXPECT_LT(s.message().size(), 1000u) << c.name;  // no file is echoed
}

TEST(Hostile, ModelDirectories) {
  const auto weights = [](std::string bytes) {
    return [=](const std::filesystem::path& dir) { WriteText(dir / "model.safetensors", bytes); };
  };
  const auto one = [&](const std::string& entry) { return weights(Header("{" + entry + "}", entry.size() + 2)); };
  const auto config = [](const char* from, const char* to) {
    return [=](const std::filesystem::path& dir) {
      std::string text = Tiny().ConfigJson();
      const size_t at = text.find(from);
      ASSERT_NE(at, text.npos) << from;
      WriteText(dir / "config.json", text.replace(at, std::strlen(from), to));
    };
  };
  const auto index = [](std::string text) {
    return [=](const std::filesystem::path& dir) {
      std::filesystem::remove(dir / "model.safetensors");
      WriteText(dir / "model.safetensors.index.json", text);
    };
  };
  const Case cases[] = {
      {"43 bytes that ask for 1 GiB of header", weights(Header(std::string(35, 'x'), uint64_t{1} << 30)),
       "limit 104857600"},
      {"a header of 90 MiB in a file of 20", weights(Header("{}", 90 << 20)), "the file has 2"},
      {"2^40 rows", one(Entry("a", "F32", "[1099511627776,1]", "[0,4398046511104]")),
       "ends at byte 4398046511104, the file has 0"},
      {"2^32 x 2^32", one(Entry("a", "F32", "[4294967296,4294967296]", "[0,0]")), "2^63 bits"},
      {"2^31 columns, as an int would wrap", one(Entry("a", "U8", "[2147483648]", "[0,2147483648]")),
       "ends at byte 2147483648"},
      {"deep header", weights(Header("{\"a\":" + std::string(100000, '['), 100005)), "deeper"},
      {"a million tensors of nothing",
       [](const std::filesystem::path& dir) {
         std::string json = "{";
         for (int i = 0; i < 50000; ++i)
           json += (i ? "," : "") + Entry(("t" + std::to_string(i)).c_str(), "U8", "[0]", "[0,0]");
         json += "}";
         WriteText(dir / "model.safetensors", Header(json, json.size()));
       },
       "embed_tokens"},
      {"name with bytes that end a line", one(Entry("a\\u001b[2J\\n", "Q7", "[1]", "[0,1]")), "\\x1b"},
      {"config of 2^40 layers", config("\"num_hidden_layers\":2", "\"num_hidden_layers\":1099511627776"),
       "1099511627776"},
      {"config of 1000 layers", config("\"num_hidden_layers\":2", "\"num_hidden_layers\":1000"),
       "layers.10.input_layernorm"},
      {"config of a huge vocabulary", config("\"vocab_size\":61", "\"vocab_size\":4000000"), "[4000000, 48]"},
      {"config of long positions", config("\"max_position_embeddings\":1024", "\"max_position_embeddings\":999999999"),
       "999999999"},
      {"config of negative heads", config("\"num_attention_heads\":4", "\"num_attention_heads\":-4"), "-4"},
      {"config of fractional heads", config("\"num_attention_heads\":4", "\"num_attention_heads\":4.5"), "4.5"},
      {"config as deep as it is long",
       [](const std::filesystem::path& dir) { WriteText(dir / "config.json", std::string(1 << 20, '[')); }, "deeper"},
      {"config of 5 MiB",
       [](const std::filesystem::path& dir) { WriteText(dir / "config.json", std::string(5 << 20, ' ')); }, "limit"},
      {"config a directory",
       [](const std::filesystem::path& dir) {
         std::filesystem::remove(dir / "config.json");
         std::filesystem::create_directory(dir / "config.json");
       },
       "not a regular file"},
      {"weights a pipe",
       [](const std::filesystem::path& dir) {
         std::filesystem::remove(dir / "model.safetensors");
         ASSERT_EQ(::mkfifo((dir / "model.safetensors").c_str(), 0600), 0);
       },
       "not a regular file"},
      {"shard outside", index(R"({"weight_map":{"a":"../../etc/passwd.safetensors"}})"), "no file name of a shard"},
      {"shard that is not printable", index("{\"weight_map\":{\"a\":\"b\xEF\xBB\xBF.safetensors\"}}"),
       "\\xef\\xbb\\xbf"},
      {"shard by an absolute path", index(R"({"weight_map":{"a":"/dev/zero.safetensors"}})"),
       "no file name of a shard"},
      {"shard that is not there", index(R"({"weight_map":{"a":"b.safetensors"}})"), "b.safetensors"},
      {"index repeated", index(R"({"weight_map":{"a":"b.safetensors","a":"c.safetensors"}})"), "repeated"},
      {"index no object", index("[1]"), "weight_map"},
      {"fp8 without scales",
       [](const std::filesystem::path& dir) {
         std::string text = Tiny().ConfigJson();
         WriteText(dir / "config.json",
                   text.insert(text.size() - 1, R"(,"quantization_config":{"quant_method":"fp8"})"));
       },
       "none of 20 tensors is F8_E4M3"},
  };
  for (const Case& c : cases) {
    const TempDir dir;
    Tiny().Write(dir.path());
    c.damage(dir.path());
    ExpectRefused(c, "", [&] { return Llama::Load(dir.path().string()).status(); });
  }
}

TEST(Hostile, GgufFiles) {
  struct Edit {
    const char* name;
    std::function<void(B&)> edit;
    const char* says;
  };
  const Edit edits[] = {
      {"43 bytes, 2^60 tensors",
       [](B& b) {
         b = B();
         b.tensor_count = int64_t{1} << 60;
       },
       "tensors"},
      {"2^62 pairs", [](B& b) { b.pair_count = int64_t{1} << 62; }, "metadata pairs"},
      {"string of 1 GiB",
       [](B& b) { b.Set("general.name", LittleEndian(uint32_t{8}) + LittleEndian(uint64_t{1} << 30)); },
       "takes 1073741824 bytes"},
      {"2^30 strings", [](B& b) { b.Set("general.name", B::Array(8, 1 << 30, "")); }, "1073741824 elements"},
      {"arrays that nest",
       [](B& b) {
         std::string inner;
         for (int i = 0; i < 1000; ++i) inner += LittleEndian(uint32_t{9}) + LittleEndian(uint64_t{1});
         b.Set("general.name", LittleEndian(uint32_t{9}) + inner);
       },
       "deeper than 4"},
      {"65536 empty arrays",
       [](B& b) {
         std::string inner;
         for (int i = 0; i < 65536; ++i) inner += LittleEndian(uint32_t{0}) + LittleEndian(uint64_t{0});
         b.Set("x", B::Array(9, 65536, inner));
       },
       "may change results"},
      {"9 dimensions", [](B& b) { b.tensors[0].dims = std::vector<uint64_t>(9, 1); }, "9 dimensions"},
      {"dimension 2^31", [](B& b) { b.tensors[0].dims[0] = uint64_t{1} << 31; }, "the file has"},
      {"dimension 2^32 + 1", [](B& b) { b.tensors[0].dims[0] = (uint64_t{1} << 32) + 1; }, "the file has"},
      {"dimensions that wrap", [](B& b) { b.tensors[0].dims = {uint64_t{1} << 33, uint64_t{1} << 33}; }, "2^58"},
      {"offset 2^63 - 32", [](B& b) { b.tensors[1].offset = std::numeric_limits<int64_t>::max() - 31; },
       "lies at offset"},
      {"alignment 2^31", [](B& b) { b.Set("general.alignment", B::U32(1u << 31)); }, "2147483648"},
      {"0 heads", [](B& b) { b.Set("llama.attention.head_count", B::U32(0)); }, "must be at least 1"},
      {"2^31 layers", [](B& b) { b.Set("llama.block_count", B::U32(1u << 31)); }, "2147483648"},
      {"900 layers", [](B& b) { b.Set("llama.block_count", B::U32(900)); }, "layers.10.input_layernorm"},
      {"a layer number that is none", [](B& b) { b.tensors[1].name = "blk.-1.attn_q.weight"; }, "missing"},
      {"a layer twice by another spelling", [](B& b) { b.tensors[1].name = "blk.00.attn_q.weight"; }, "missing"},
      {"tensor that nobody knows",
       [](B& b) { b.tensors.push_back({.name = "blk.0.attn_x.weight", .dims = {1}, .type = 0, .bytes = "abcd"}); },
       "left over"},
      {"split", [](B& b) { b.Set("split.count", B::U32(7)); }, "merge it first"},
  };
  for (const Edit& e : edits) {
    B b = TinyGguf(Tiny());
    e.edit(b);
    const TempDir dir;
    const std::string path = (dir.path() / "m.gguf").string();
    WriteText(path, b.Bytes());
    ExpectRefused({e.name, nullptr, e.says}, "m.gguf", [&] { return Llama::Load(path).status(); });
  }
  // Cut anywhere.
  const std::string whole = TinyGguf(Tiny()).Bytes();
  const TempDir dir;
  const std::string path = (dir.path() / "m.gguf").string();
  for (size_t n = 0; n < whole.size(); n += 97) {
    WriteText(path, whole.substr(0, n));
    ExpectRefused({"cut", nullptr, ""}, "m.gguf", [&] { return Llama::Load(path).status(); });
  }
}

TEST(Hostile, GgufTokenizers) {
  struct Edit {
    const char* name;
    std::function<void(B&)> edit;
    const char* says;
  };
  const auto good = [] {
    B b;
    b.pairs = {{"tokenizer.ggml.model", B::String("gpt2")},
               {"tokenizer.ggml.pre", B::String("gpt-2")},
               {"tokenizer.ggml.tokens", B::Strings({"a", "b", "ab", "<s>"})},
               {"tokenizer.ggml.token_type", B::Integers({1, 1, 1, 3})},
               {"tokenizer.ggml.merges", B::Strings({"a b"})},
               {"tokenizer.ggml.bos_token_id", B::U32(3)},
               {"tokenizer.ggml.add_bos_token", B::Bool(1)}};
    return b;
  };
  const Edit edits[] = {
      {"no model", [](B& b) { b.Remove("tokenizer.ggml.model"); }, "\"tokenizer.ggml.model\" is missing"},
      {"another model", [](B& b) { b.Set("tokenizer.ggml.model", B::String("rwkv")); }, "is \"rwkv\""},
      {"SentencePiece with a pre-tokenizer", [](B& b) { b.Set("tokenizer.ggml.model", B::String("llama")); },
       "with model llama"},
      {"no pre", [](B& b) { b.Remove("tokenizer.ggml.pre"); }, "\"tokenizer.ggml.pre\" is missing"},
      {"empty pre", [](B& b) { b.Set("tokenizer.ggml.pre", B::String("")); }, "gpt-2, llama-bpe and qwen2"},
      {"unknown pre", [](B& b) { b.Set("tokenizer.ggml.pre", B::String("tekken")); }, "tekken"},
      {"no tokens", [](B& b) { b.Set("tokenizer.ggml.tokens", B::Strings({})); }, "has 0 tokens"},
      {"tokens no strings", [](B& b) { b.Set("tokenizer.ggml.tokens", B::Integers({1})); }, "no array of strings"},
      {"a token twice", [](B& b) { b.Set("tokenizer.ggml.tokens", B::Strings({"a", "b", "a", "<s>"})); },
       "at index 0 and at 2"},
      {"an empty token", [](B& b) { b.Set("tokenizer.ggml.tokens", B::Strings({"a", "b", "", "<s>"})); },
       "empty at index 2"},
      {"a token that is no UTF-8", [](B& b) { b.Set("tokenizer.ggml.tokens", B::Strings({"a", "b", "\xff", "<s>"})); },
       "\\xff"},
      {"types of another count", [](B& b) { b.Set("tokenizer.ggml.token_type", B::Integers({1, 1, 1})); },
       "has 3 entries"},
      {"byte tokens", [](B& b) { b.Set("tokenizer.ggml.token_type", B::Integers({1, 1, 6, 3})); }, "is 6 at index 2"},
      {"types no integers", [](B& b) { b.Set("tokenizer.ggml.token_type", B::Strings({"1"})); }, "32-bit integers"},
      {"merge without its token", [](B& b) { b.Set("tokenizer.ggml.merges", B::Strings({"b a"})); }, "tokenizer.json"},
      {"merge that is no pair", [](B& b) { b.Set("tokenizer.ggml.merges", B::Strings({"ab"})); }, "tokenizer.json"},
      {"no merges", [](B& b) { b.Remove("tokenizer.ggml.merges"); }, "\"tokenizer.ggml.merges\" is missing"},
      {"bos beyond the tokens", [](B& b) { b.Set("tokenizer.ggml.bos_token_id", B::U32(4)); },
       "is 4; it must be one of 4"},
      {"no bos", [](B& b) { b.Remove("tokenizer.ggml.bos_token_id"); }, "is missing, but"},
      {"flag no bool", [](B& b) { b.Set("tokenizer.ggml.add_bos_token", B::U32(1)); }, "is no bool"},
      {"space prefix", [](B& b) { b.Set("tokenizer.ggml.add_space_prefix", B::Bool(1)); }, "add_space_prefix"},
  };
  const TempDir dir;
  const std::string path = (dir.path() / "m.gguf").string();
  WriteText(path, good().Bytes());
  const auto tokenizer = LoadGgufTokenizer(path);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().ToString();
  EXPECT_EQ(*tokenizer->Encode("abab", true), (std::vector<int32_t>{3, 2, 2}));
  EXPECT_EQ(*tokenizer->Decode(std::vector<int32_t>{3, 2, 0}), "aba");
  // Without a flag, only Llama 3's kind has a beginning token.
  for (const auto& [pre, count] : {std::pair("gpt2", 2u), std::pair("llama-bpe", 3u), std::pair("llama3", 3u),
                                   std::pair("qwen2", 2u), std::pair("deepseek-r1-qwen", 2u)}) {
    B b = good();
    b.Set("tokenizer.ggml.pre", B::String(pre));
    b.Remove("tokenizer.ggml.add_bos_token");
    WriteText(path, b.Bytes());
    const auto other = LoadGgufTokenizer(path);
    ASSERT_TRUE(other.ok()) << pre << ": " << other.status().ToString();
    EXPECT_EQ(other->Encode("abab", true)->size(), count) << pre;
  }
  for (const Edit& e : edits) {
    B b = good();
    e.edit(b);
    WriteText(path, b.Bytes());
    ExpectRefused({e.name, nullptr, e.says}, "m.gguf", [&] { return LoadGgufTokenizer(path).status(); });
  }
}

}  // namespace
}  // namespace livequant
