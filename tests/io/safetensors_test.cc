// tests/io/safetensors_test.cc: good files byte for byte, and one hostile file for every sentence of the header.
#include "io/safetensors.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <string>

#include "io/json.h"
#include "support/property.h"
#include "support/values.h"

namespace livequant {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string File(std::string_view header, std::string_view data, uint64_t length) {
  std::string file(8, '\0');
  for (size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(length >> (8 * i));
  return file.append(header).append(data);
}
std::string File(std::string_view header, std::string_view data) { return File(header, data, header.size()); }

struct Case {
  const char* name;
  std::string file;
  Code code;
  const char* says;
};

TEST(Safetensors, ReadsAHandMadeFile) {
  // The second tensor starts at an odd byte.
  const std::string file = File(
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F16","shape":[2,2],"data_offsets":[3,11]},)"
      R"("a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"s":{"dtype":"F32","shape":[],"data_offsets":[11,15]},)"
      R"("empty":{"dtype":"F32","shape":[0,5],"data_offsets":[15,15]}}  )",
      "abc01234567wxyz");
  const auto tensors = Safetensors::ParseHeader(Bytes(file), "m.safetensors");
  ASSERT_TRUE(tensors.ok()) << tensors.status().ToString();
  ASSERT_EQ(tensors->size(), 4u);
  const TensorInfo& b = tensors->at("b");
  EXPECT_EQ(b.dtype, "F16");
  EXPECT_THAT(b.shape, ElementsAre(2, 2));
  ASSERT_EQ(b.bytes.size(), 8u);
  EXPECT_EQ(std::memcmp(b.bytes.data(), "01234567", 8), 0);
  EXPECT_EQ(tensors->at("a").bytes.size(), 3u);
  EXPECT_THAT(tensors->at("s").shape, ElementsAre());
  EXPECT_EQ(tensors->at("s").bytes.size(), 4u);
  EXPECT_TRUE(tensors->at("empty").bytes.empty());
}

TEST(Safetensors, AFileWithoutTensorsIsGood) {
  const auto tensors = Safetensors::ParseHeader(Bytes(File("{}", "")), "m");
  ASSERT_TRUE(tensors.ok());
  EXPECT_TRUE(tensors->empty());
}

TEST(Safetensors, HostileFilesAreErrors) {
  const auto one = [](const char* entry, std::string_view data) {
    return File(std::string("{\"t\":") + entry + "}", data);
  };
  const std::string good = R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  const std::string deep = "{\"t\":" + std::string(5000, '[') + std::string(5000, ']') + "}";
  const Case cases[] = {
      {"empty", "", Code::kDataLoss, "0 bytes"},
      {"cut in the length", std::string("\1\0\0", 3), Code::kDataLoss, "3 bytes"},
      {"header longer than the file", File("{}", "", 3), Code::kDataLoss, "header of 3 bytes, the file has 2"},
      {"header beyond the limit", File("{}", "", (uint64_t{100} << 20) + 1), Code::kOutOfRange, "limit 104857600"},
      {"header length wraps", File("{}", "", ~uint64_t{0}), Code::kOutOfRange, "18446744073709551615"},
      {"header length wraps with its own 8 bytes", File("{}", "", ~uint64_t{0} - 7), Code::kOutOfRange, "limit"},
      {"no header", File("", ""), Code::kInvalidArgument, "does not start with '{'"},
      {"space first", File(" {}", ""), Code::kInvalidArgument, "does not start with '{'"},
      {"not JSON", File("{nonsense", ""), Code::kInvalidArgument, "at byte 2"},
      {"bytes behind the JSON", File("{}x", ""), Code::kInvalidArgument, "at byte 2"},
      {"invalid UTF-8", File("{\"\xff\":1}", ""), Code::kInvalidArgument, "UTF-8"},
      {"deep", File(deep, ""), Code::kOutOfRange, "deeper than 8"},
      {"repeated name",
       File(
           R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
           "x"),
       Code::kInvalidArgument, "\"t\" is repeated"},
      {"repeated field", one(R"({"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]})", "x"),
       Code::kInvalidArgument, "repeated"},
      {"entry no object", one("7", ""), Code::kInvalidArgument, "not an object"},
      {"no dtype", one(R"({"shape":[1],"data_offsets":[0,1]})", "x"), Code::kInvalidArgument, "no dtype"},
      {"no shape", one(R"({"dtype":"U8","data_offsets":[0,1]})", "x"), Code::kInvalidArgument, "no shape"},
      {"no offsets", one(R"({"dtype":"U8","shape":[1]})", "x"), Code::kInvalidArgument, "no data_offsets"},
      {"unknown field", one(R"({"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":1})", "x"), Code::kInvalidArgument,
       "unknown field \"more\""},
      {"unknown dtype", one(R"({"dtype":"F31","shape":[1],"data_offsets":[0,4]})", "1234"), Code::kUnsupported,
       "dtype \"F31\""},
      {"dtype no string", one(R"({"dtype":3,"shape":[1],"data_offsets":[0,4]})", "1234"), Code::kInvalidArgument,
       "dtype"},
      {"negative dimension", one(R"({"dtype":"U8","shape":[-1],"data_offsets":[0,1]})", "x"), Code::kInvalidArgument,
       "shape holds \"-1\""},
      {"fractional dimension", one(R"({"dtype":"U8","shape":[1.0],"data_offsets":[0,1]})", "x"), Code::kInvalidArgument,
       "shape holds \"1.0\""},
      {"shape no array", one(R"({"dtype":"U8","shape":1,"data_offsets":[0,1]})", "x"), Code::kInvalidArgument, "shape"},
      {"shape overflows to the right size",
       one(R"({"dtype":"F32","shape":[4294967296,4294967297],"data_offsets":[0,0]})", ""), Code::kOutOfRange,
       "4294967297"},
      {"dimension 2^63", one(R"({"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,0]})", ""),
       Code::kOutOfRange, "9223372036854775808"},
      {"dimension beyond 64 bits", one(R"({"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,0]})", ""),
       Code::kInvalidArgument, "shape holds"},
      {"zero hides an overflow", one(R"({"dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0]})", ""),
       Code::kOutOfRange, "4294967296"},
      {"half a byte", one(R"({"dtype":"F4","shape":[3],"data_offsets":[0,1]})", "x"), Code::kInvalidArgument,
       "12 bits"},
      {"three offsets", one(R"({"dtype":"U8","shape":[1],"data_offsets":[0,1,2]})", "x"), Code::kInvalidArgument,
       "data_offsets"},
      {"negative offset", one(R"({"dtype":"U8","shape":[1],"data_offsets":[-1,0]})", "x"), Code::kInvalidArgument,
       "data_offsets"},
      {"fractional offset", one(R"({"dtype":"U8","shape":[1],"data_offsets":[0,1.0]})", "x"), Code::kInvalidArgument,
       "data_offsets"},
      {"backwards", one(R"({"dtype":"U8","shape":[1],"data_offsets":[1,0]})", "x"), Code::kInvalidArgument,
       "from 1 back to 0"},
      {"size differs", one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})", "1234"), Code::kInvalidArgument,
       "span 4 bytes, shape [2] of F32 needs 8"},
      {"cut in the data", File(good, "1234567"), Code::kDataLoss, "ends at byte 8, the file has 7"},
      {"offset far away",
       one(R"({"dtype":"U8","shape":[1],"data_offsets":[18446744073709551614,18446744073709551615]})", "x"),
       Code::kDataLoss, "ends at byte 18446744073709551615"},
      {"bytes behind the data", File(good, "123456789"), Code::kInvalidArgument, "1 bytes behind"},
      {"bytes and no tensor", File("{}", "x"), Code::kInvalidArgument, "1 bytes behind"},
      {"hole at the start", one(R"({"dtype":"U8","shape":[1],"data_offsets":[1,2]})", "xx"), Code::kInvalidArgument,
       "hole"},
      {"hole",
       File(
           R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
           "xxx"),
       Code::kInvalidArgument, "\"b\" starts at byte 2, with a hole"},
      {"overlap",
       File(
           R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
           "xxx"),
       Code::kInvalidArgument, "\"b\" starts at byte 1, inside"},
      {"the same bytes twice",
       File(
           R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})",
           "xx"),
       Code::kInvalidArgument, "inside"},
      {"metadata no strings", File(R"({"__metadata__":{"a":1}})", ""), Code::kInvalidArgument, "__metadata__"},
      {"metadata no object", File(R"({"__metadata__":[]})", ""), Code::kInvalidArgument, "__metadata__"},
  };
  for (const Case& c : cases) {
    const auto tensors = Safetensors::ParseHeader(Bytes(c.file), "m.safetensors");
    ASSERT_FALSE(tensors.ok()) << c.name;
    EXPECT_EQ(tensors.status().code(), c.code) << c.name << ": " << tensors.status().ToString();
    EXPECT_THAT(tensors.status().message(), AllOf(HasSubstr("m.safetensors"), HasSubstr(c.says))) << c.name;
  }
}

// A file cut anywhere is an error, and so is one with a byte too many.
TEST(Safetensors, EveryTruncationIsRefused) {
  const std::string file = File(
      R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"BF16","shape":[1,2],"data_offsets":[3,7]}})",
      "abcdefg");
  ASSERT_TRUE(Safetensors::ParseHeader(Bytes(file), "m").ok());
  for (size_t n = 0; n < file.size(); ++n)
    EXPECT_FALSE(Safetensors::ParseHeader(Bytes(std::string_view(file).substr(0, n)), "m").ok()) << n;
  EXPECT_FALSE(Safetensors::ParseHeader(Bytes(file + "x"), "m").ok());
}

// Whatever is accepted covers the data exactly: spans inside the file, without a gap, of the size that shape and dtype
// say.
TEST(Safetensors, WhatIsAcceptedCoversTheData) {
  const std::string header =
      R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"I8","shape":[1,4],"data_offsets":[3,7]}})";
  int accepted = 0;
  ForAll(4000, [&](Rng& rng) {
    std::string file = File(header, "abcdefg");
    for (int64_t edits = rng.Range(1, 2); edits > 0; --edits)
      file[static_cast<size_t>(rng.Range(8, static_cast<int64_t>(file.size()) - 1))] =
          rng.Chance(0.7) ? static_cast<char>(rng.Range('0', '9')) : static_cast<char>(rng.Range(0, 255));
    const auto tensors = Safetensors::ParseHeader(Bytes(file), "m");
    if (!tensors.ok()) return;
    ++accepted;
    size_t total = 0;
    for (const auto& [name, t] : *tensors) {
      ASSERT_TRUE(t.bytes.empty() || (t.bytes.data() >= Bytes(file).data() &&
                                      t.bytes.data() + t.bytes.size() <= Bytes(file).data() + file.size()));
      total += t.bytes.size();
    }
    EXPECT_EQ(total, 7u);
  });
  EXPECT_GT(accepted, 0);
}

class DirectoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "livequant_model_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { fs::remove_all(root_); }
  void Write(const std::string& name, std::string_view bytes) {
    ASSERT_TRUE(WriteFile(root_ + "/" + name, bytes).ok());
  }
  void Index(const std::string& map) {
    Write("model.safetensors.index.json", "{\"metadata\":{\"total_size\":4},\"weight_map\":" + map + "}");
  }
  std::string Why() {
    const auto model = Safetensors::OpenDirectory(root_);
    return model.ok() ? "accepted" : model.status().ToString();
  }
  static std::string Shard(const std::string& name, std::string_view data) {
    return File("{\"" + name + R"(":{"dtype":"U8","shape":[)" + std::to_string(data.size()) +
                    R"(],"data_offsets":[0,)" + std::to_string(data.size()) + "]}}",
                data);
  }
  std::string root_;
};

TEST_F(DirectoryTest, OneFile) {
  Write("model.safetensors", Shard("a", "xy"));
  auto model = Safetensors::OpenDirectory(root_);
  ASSERT_TRUE(model.ok()) << model.status().ToString();
  const Safetensors moved = *std::move(model);
  EXPECT_THAT(moved.paths(), ElementsAre(root_ + "/model.safetensors"));
  EXPECT_EQ(std::memcmp(moved.tensors().at("a").bytes.data(), "xy", 2), 0);
}

TEST_F(DirectoryTest, Shards) {
  Write("model-1.safetensors", Shard("a", "xy"));
  Write("model-2.safetensors", Shard("b", "zw"));
  Index(R"({"a":"model-1.safetensors","b":"model-2.safetensors"})");
  const auto model = Safetensors::OpenDirectory(root_);
  ASSERT_TRUE(model.ok()) << model.status().ToString();
  EXPECT_EQ(model->paths().size(), 2u);
  EXPECT_EQ(std::memcmp(model->tensors().at("b").bytes.data(), "zw", 2), 0);
}

TEST_F(DirectoryTest, RefusesByName) {
  EXPECT_THAT(Why(), AllOf(HasSubstr("not_found"), HasSubstr(root_)));
  Write("model-1.safetensors", Shard("a", "xy"));
  Write("model-2.safetensors", Shard("b", "zw"));
  Index(R"({"a":"model-1.safetensors","a":"model-2.safetensors"})");
  EXPECT_THAT(Why(), HasSubstr("\"a\" is repeated"));
  Index(R"({"a":"model-1.safetensors","b":"model-1.safetensors"})");
  EXPECT_THAT(Why(), HasSubstr("tensor \"b\" is not in \"model-1.safetensors\""));
  Index(R"({"a":"model-1.safetensors","b":"model-2.safetensors","c":"model-2.safetensors"})");
  EXPECT_THAT(Why(), HasSubstr("tensor \"c\" is not in"));
  Index(R"({"a":"model-2.safetensors","b":"model-1.safetensors"})");
  EXPECT_THAT(Why(), HasSubstr("belongs to"));
  Index(R"({"a":"model-1.safetensors","c":"model-2.safetensors"})");
  EXPECT_THAT(Why(), HasSubstr("tensor \"b\" is not listed"));
  Index(R"({"a":"model-3.safetensors"})");
  EXPECT_THAT(Why(), AllOf(HasSubstr("not_found"), HasSubstr("model-3.safetensors")));
  for (const char* name : {"../model-1.safetensors", "/model-1.safetensors", "x/../model-1.safetensors", "",
                           ".safetensors", "..", "model-1.bin", "a\\\\b.safetensors", "a\\u0000.safetensors"}) {
    Index("{\"a\":\"" + std::string(name) + "\"}");
    EXPECT_THAT(Why(), HasSubstr("no file name of a shard")) << name;
  }
  Index("[]");
  EXPECT_THAT(Why(), HasSubstr("weight_map"));
  Index(R"({"a":1})");
  EXPECT_THAT(Why(), HasSubstr("no string"));
  Index(R"({"a":"model-1.safetensors","b":"model-2.safetensors"})");
  EXPECT_EQ(Why(), "accepted");
  const std::string both = R"("weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors"}})";
  for (const auto& [metadata, says] : {std::pair("7", "metadata is"), std::pair(R"({"total_size":5})", "total_size is"),
                                       std::pair(R"({"total_size":"4"})", "4 bytes")}) {
    Write("model.safetensors.index.json", std::string("{\"metadata\":") + metadata + "," + both);
    EXPECT_THAT(Why(), HasSubstr(says));
  }
  for (const char* metadata : {"{}", R"({"total_size":4.0,"total_parameters":4})"}) {  // as some writers give it
    Write("model.safetensors.index.json", std::string("{\"metadata\":") + metadata + "," + both);
    EXPECT_EQ(Why(), "accepted");
  }
  Write("model.safetensors.index.json", "{\"more\":1," + both);
  EXPECT_THAT(Why(), HasSubstr("unknown field \"more\""));
  Index(R"({"a":"model-1.safetensors","b":"model-2.safetensors"})");
  Write("model-2.safetensors", Shard("b", "zw").substr(0, 40));
  EXPECT_THAT(Why(), AllOf(HasSubstr("data_loss"), HasSubstr("model-2.safetensors")));
}

TEST_F(DirectoryTest, WhatIsWrittenIsReadBack) {
  const std::string a = "xyz", b(8, '\1');
  const std::map<std::string, TensorInfo> tensors = {{"a", {"U8", {3}, Bytes(a)}}, {"b", {"F32", {1, 2}, Bytes(b)}}};
  Write("t.safetensors", SafetensorsText(tensors, {{"format", "test"}, {"odd", "\"\n"}}));
  const auto file = Safetensors::OpenFile(root_ + "/t.safetensors");
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  EXPECT_THAT(file->metadata(), ElementsAre(std::pair("format", "test"), std::pair("odd", "\"\n")));
  ASSERT_EQ(file->tensors().size(), 2u);
  EXPECT_EQ(file->tensors().at("b").shape, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(std::memcmp(file->tensors().at("a").bytes.data(), "xyz", 3), 0);
  EXPECT_THAT(Safetensors::OpenFile(root_ + "/none").status().ToString(), HasSubstr("not_found"));
}

TEST(SafetensorsModel, TheEmbeddedModelOpens) {
  const auto model = Safetensors::OpenDirectory(LIVEQUANT_SOURCE_DIR "/models/books-7m");
  ASSERT_TRUE(model.ok()) << model.status().ToString();
  ASSERT_TRUE(model->tensors().contains("model.embed_tokens.weight"));
  EXPECT_EQ(model->tensors().at("model.embed_tokens.weight").shape[0], 4096);
}

}  // namespace
}  // namespace livequant
