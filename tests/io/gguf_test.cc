// tests/io/gguf_test.cc: good files value by value, and one hostile file for every sentence of the header.
#include "io/gguf.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "support/gguf_builder.h"
#include "support/property.h"
#include "support/values.h"

namespace livequant {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using B = GgufBuilder;

Result<Gguf> Parse(const std::string& file) { return Gguf::Parse(Bytes(file), "m.gguf"); }

B Good() {
  B b;
  b.pairs = {{"general.architecture", B::String("llama")}, {"n", B::U32(7)}};
  b.tensors = {{.name = "a", .dims = {3, 2}, .type = 0, .bytes = std::string(24, 'a')},
               {.name = "b", .dims = {32}, .type = 8, .bytes = std::string(34, 'b')},
               {.name = "c", .dims = {5}, .type = 30, .bytes = std::string(10, 'c')}};
  return b;
}

TEST(Gguf, ReadsEveryTypeOfValue) {
  B b;
  const auto number = [](uint32_t type, auto v) { return LittleEndian(type) + LittleEndian(v); };
  b.pairs = {{"u8", number(0, uint8_t{200})},
             {"i8", number(1, int8_t{-3})},
             {"u16", number(2, uint16_t{60000})},
             {"i16", number(3, int16_t{-30000})},
             {"u32", B::U32(4000000000u)},
             {"i32", number(5, int32_t{-2000000000})},
             {"f32", B::F32(0.5f)},
             {"bool", B::Bool(1)},
             {"string", B::String(std::string("a\0b", 3))},
             {"u64", number(10, ~uint64_t{0})},
             {"i64", number(11, std::numeric_limits<int64_t>::min())},
             {"f64", number(12, 1e300)},
             {"integers", B::Integers({-1, 0, 7})},
             {"strings", B::Strings({"x", "", "zz"})},
             {"nested", B::Array(9, 2,
                                 LittleEndian(uint32_t{0}) + LittleEndian(uint64_t{2}) + "\x05\x06" +
                                     LittleEndian(uint32_t{8}) + LittleEndian(uint64_t{1}) + GgufString("q"))},
             {"empty", B::Array(6, 0, "")}};
  const std::string file = b.Bytes();
  const auto g = Parse(file);
  ASSERT_TRUE(g.ok()) << g.status().ToString();
  const auto get = [&]<class T>(const char* key, T) { return std::get<T>(g->Find(key)->value); };
  EXPECT_EQ(get("u8", uint64_t{}), 200u);
  EXPECT_EQ(get("i8", int64_t{}), -3);
  EXPECT_EQ(get("u16", uint64_t{}), 60000u);
  EXPECT_EQ(get("i16", int64_t{}), -30000);
  EXPECT_EQ(get("u32", uint64_t{}), 4000000000u);
  EXPECT_EQ(get("i32", int64_t{}), -2000000000);
  EXPECT_EQ(get("f32", double{}), 0.5);
  EXPECT_EQ(get("bool", bool{}), true);
  EXPECT_EQ(get("string", std::string_view{}), std::string_view("a\0b", 3));
  EXPECT_EQ(get("u64", uint64_t{}), ~uint64_t{0});
  EXPECT_EQ(get("i64", int64_t{}), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(get("f64", double{}), 1e300);
  const GgufArray integers = get("integers", GgufArray{});
  ASSERT_EQ(integers.count, 3u);
  EXPECT_EQ(GgufInteger(integers, 0), -1);
  EXPECT_EQ(GgufInteger(integers, 2), 7);
  EXPECT_THAT(get("strings", GgufArray{}).strings, ElementsAre("x", "", "zz"));
  const GgufArray nested = get("nested", GgufArray{});
  ASSERT_EQ(nested.arrays.size(), 2u);
  EXPECT_EQ(GgufInteger(nested.arrays[0], 1), 6);
  EXPECT_THAT(nested.arrays[1].strings, ElementsAre("q"));
  EXPECT_EQ(get("empty", GgufArray{}).count, 0u);
  EXPECT_EQ(g->Find("absent"), nullptr);
  EXPECT_TRUE(g->tensors().empty());
}

TEST(Gguf, ArraysOfEveryIntegerType) {
  const auto array = [](uint32_t type, auto v) {
    B b;
    b.pairs = {{"k", B::Array(type, 1, LittleEndian(v))}};
    const std::string file = b.Bytes();
    return GgufInteger(std::get<GgufArray>(Parse(file)->Find("k")->value), 0);
  };
  EXPECT_EQ(array(0, uint8_t{255}), 255);
  EXPECT_EQ(array(1, int8_t{-128}), -128);
  EXPECT_EQ(array(2, uint16_t{65535}), 65535);
  EXPECT_EQ(array(3, int16_t{-32768}), -32768);
  EXPECT_EQ(array(4, ~uint32_t{0}), 4294967295);
  EXPECT_EQ(array(10, ~uint64_t{0}), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(array(11, int64_t{-5}), -5);
}

TEST(Gguf, TensorsLieWhereTheyAreSaidTo) {
  for (const uint32_t version : {2u, 3u})
    for (const size_t alignment : {8u, 32u, 64u}) {
      B b = Good();
      b.version = version;
      b.alignment = alignment;
      b.Set("general.alignment", B::U32(static_cast<uint32_t>(alignment)));
      const std::string file = b.Bytes();
      const auto g = Parse(file);
      ASSERT_TRUE(g.ok()) << g.status().ToString();
      EXPECT_EQ(g->version(), version);
      EXPECT_EQ(g->alignment(), alignment);
      ASSERT_EQ(g->tensors().size(), 3u);
      EXPECT_THAT(g->tensors().at("a").shape, ElementsAre(2, 3));  // outermost first
      for (const auto& [name, t] : g->tensors()) {
        for (const std::byte byte : t.bytes) EXPECT_EQ(std::to_integer<char>(byte), name[0]);
        EXPECT_EQ((t.bytes.data() - Bytes(file).data()) % static_cast<std::ptrdiff_t>(alignment), 0);
      }
      EXPECT_TRUE(Parse(file + std::string((alignment - 10 % alignment) % alignment, '\0')).ok())
          << "padding at the end";
    }
}

TEST(Gguf, HostileFilesAreErrors) {
  struct Case {
    const char* name;
    std::string file;
    Code code;
    const char* says;
  };
  std::vector<Case> cases;
  const auto add = [&](const char* name, Code code, const char* says, auto edit) {
    B b = Good();
    edit(b);
    cases.push_back({name, b.Bytes(), code, says});
  };
  cases.push_back({"empty", "", Code::kDataLoss, "the magic takes 4 bytes"});
  cases.push_back({"magic alone", "GGUF", Code::kDataLoss, "the version"});
  add("other magic", Code::kInvalidArgument, "starts with \"GGML\"", [](B& b) { b.magic = "GGML"; });
  add("version 1", Code::kUnsupported, "version 1; 2 and 3 are read", [](B& b) { b.version = 1; });
  add("version 0", Code::kUnsupported, "version 0", [](B& b) { b.version = 0; });
  add("version 4", Code::kUnsupported, "version 4", [](B& b) { b.version = 4; });
  add("big endian", Code::kUnsupported, "big-endian", [](B& b) { b.version = 0x03000000; });
  add("more pairs than bytes", Code::kDataLoss, "metadata pairs of 14 bytes or more",
      [](B& b) { b.pair_count = 20000; });
  add("2^63 pairs", Code::kDataLoss, "9223372036854775807 metadata pairs",
      [](B& b) { b.pair_count = std::numeric_limits<int64_t>::max(); });
  add("2^63 tensors", Code::kOutOfRange, "9223372036854775807 tensors, limit 65536",
      [](B& b) { b.tensor_count = std::numeric_limits<int64_t>::max(); });
  add("more tensors than bytes", Code::kDataLoss, "60000 tensors of 33 bytes or more",
      [](B& b) { b.tensor_count = 60000; });
  add("empty key", Code::kOutOfRange, "key has 0 bytes", [](B& b) { b.pairs.emplace_back("", B::U32(1)); });
  add("long key", Code::kOutOfRange, "key has 65536 bytes",
      [](B& b) { b.pairs.emplace_back(std::string(65536, 'k'), B::U32(1)); });
  add("repeated key", Code::kInvalidArgument, "\"n\" is repeated", [](B& b) { b.pairs.emplace_back("n", B::U32(8)); });
  add("unknown value type", Code::kInvalidArgument, "\"x\" has type 13",
      [](B& b) { b.pairs.emplace_back("x", LittleEndian(uint32_t{13})); });
  add("bool of 2", Code::kInvalidArgument, "holds the bool 2", [](B& b) { b.Set("n", B::Bool(2)); });
  add("array of bool of 9", Code::kInvalidArgument, "holds the bool 9",
      [](B& b) { b.Set("n", B::Array(7, 2, "\1\t")); });
  add("string of 2^64 - 1 bytes", Code::kDataLoss, "takes 18446744073709551615 bytes",
      [](B& b) { b.Set("n", LittleEndian(uint32_t{8}) + LittleEndian(~uint64_t{0})); });
  add("array of 2^61 numbers", Code::kDataLoss, "2305843009213693952 elements of 8 bytes",
      [](B& b) { b.Set("n", B::Array(10, uint64_t{1} << 61, "")); });
  add("array of 2^60 strings", Code::kDataLoss, "elements of 8 bytes",
      [](B& b) { b.Set("n", B::Array(8, uint64_t{1} << 60, "")); });
  add("array of 2^60 arrays", Code::kDataLoss, "elements of 12 bytes",
      [](B& b) { b.Set("n", B::Array(9, uint64_t{1} << 60, "")); });
  add("array of 70000 arrays", Code::kOutOfRange, "holds 70000 arrays, limit 65536", [](B& b) {
    std::string bytes;
    for (int i = 0; i < 70000; ++i) bytes += LittleEndian(uint32_t{0}) + LittleEndian(uint64_t{0});
    b.Set("n", B::Array(9, 70000, bytes));
  });
  add("arrays five deep", Code::kOutOfRange, "deeper than 4", [](B& b) {
    std::string inner = LittleEndian(uint32_t{0}) + LittleEndian(uint64_t{0});
    for (int i = 0; i < 4; ++i) inner = LittleEndian(uint32_t{9}) + LittleEndian(uint64_t{1}) + inner;
    b.Set("n", LittleEndian(uint32_t{9}) + inner);
  });
  add("alignment 0", Code::kInvalidArgument, "alignment\" is 0", [](B& b) { b.Set("general.alignment", B::U32(0)); });
  add("alignment 12", Code::kInvalidArgument, "alignment\" is 12",
      [](B& b) { b.Set("general.alignment", B::U32(12)); });
  add("alignment 2^31", Code::kInvalidArgument, "at most 1048576",
      [](B& b) { b.Set("general.alignment", B::U32(1u << 31)); });
  add("alignment a string", Code::kInvalidArgument, "no unsigned number",
      [](B& b) { b.Set("general.alignment", B::String("32")); });
  add("split", Code::kUnsupported, "\"split.count\" is 3",
      [](B& b) { b.Set("split.count", LittleEndian(uint32_t{2}) + LittleEndian(uint16_t{3})); });
  add("split of no count", Code::kUnsupported, "no count", [](B& b) { b.Set("split.count", B::String("3")); });
  add("no dimensions", Code::kOutOfRange, "\"a\" has 0 dimensions", [](B& b) { b.tensors[0].dims = {}; });
  add("five dimensions", Code::kOutOfRange, "\"a\" has 5 dimensions",
      [](B& b) { b.tensors[0].dims = {1, 1, 1, 1, 6}; });
  add("a dimension of 0", Code::kInvalidArgument, "dimension of 0", [](B& b) { b.tensors[0].dims = {0, 2}; });
  add("a dimension of 2^64 - 1", Code::kOutOfRange, "18446744073709551615",
      [](B& b) { b.tensors[0].dims = {~uint64_t{0}}; });
  add("dimensions whose product wraps", Code::kOutOfRange, "more than 2^58 values",
      [](B& b) { b.tensors[0].dims = {uint64_t{1} << 32, uint64_t{1} << 32, 6}; });
  add("2^31 rows", Code::kDataLoss, "the file has", [](B& b) { b.tensors[0].dims = {3, uint64_t{1} << 31}; });
  add("2^32 + 2 columns", Code::kDataLoss, "the file has",
      [](B& b) { b.tensors[0].dims = {(uint64_t{1} << 32) + 3, 2}; });
  add("Q6_K", Code::kUnsupported, "Q6_K (14)", [](B& b) { b.tensors[0].type = 14; });
  add("type 77", Code::kUnsupported, "type 77", [](B& b) { b.tensors[0].type = 77; });
  add("part of a block", Code::kInvalidArgument, "rows of 33 values; Q8_0 needs a multiple of 32",
      [](B& b) { b.tensors[1].dims = {33}; });
  add("empty name", Code::kOutOfRange, "name has 0 bytes", [](B& b) { b.tensors[1].name = ""; });
  add("repeated tensor", Code::kInvalidArgument, "\"a\" is repeated", [](B& b) { b.tensors[2].name = "a"; });
  add("overlap", Code::kInvalidArgument, "\"b\" lies at offset 0", [](B& b) { b.tensors[1].offset = 0; });
  add("hole", Code::kInvalidArgument, "\"b\" lies at offset 64", [](B& b) { b.tensors[1].offset = 64; });
  add("offset far away", Code::kInvalidArgument, "lies at offset 9223372036854775807",
      [](B& b) { b.tensors[1].offset = std::numeric_limits<int64_t>::max(); });
  cases.push_back({"cut in the data", Good().Bytes().substr(0, Good().Bytes().size() - 1), Code::kDataLoss,
                   "\"c\" of shape [5] takes 10 bytes"});
  cases.push_back({"bytes behind the data", Good().Bytes() + std::string(64, 'x'), Code::kInvalidArgument,
                   "behind the last tensor"});
  for (const Case& c : cases) {
    const auto g = Parse(c.file);
    ASSERT_FALSE(g.ok()) << c.name;
    EXPECT_EQ(g.status().code(), c.code) << c.name << ": " << g.status().ToString();
    EXPECT_THAT(g.status().message(), AllOf(HasSubstr("m.gguf"), HasSubstr(c.says))) << c.name;
  }
}

TEST(Gguf, EveryTruncationIsRefused) {
  const std::string file = Good().Bytes();
  ASSERT_TRUE(Parse(file).ok());
  for (size_t n = 0; n < file.size(); ++n) EXPECT_FALSE(Parse(file.substr(0, n)).ok()) << n;
}

// Whatever is accepted lies inside the file and has the bytes that its shape says.
TEST(Gguf, DamagedFilesNeverReadOutside) {
  int accepted = 0;
  ForAll(4000, [&](Rng& rng) {
    std::string file = Good().Bytes();
    for (int64_t edits = rng.Range(1, 3); edits > 0; --edits)
      file[static_cast<size_t>(rng.Range(0, static_cast<int64_t>(file.size()) - 1))] =
          static_cast<char>(rng.Range(0, 255));
    const auto g = Parse(file);
    if (!g.ok()) return;
    ++accepted;
    for (const auto& [name, t] : g->tensors()) {
      int64_t rows = 1;
      for (size_t i = 0; i + 1 < t.shape.size(); ++i) rows *= t.shape[i];
      EXPECT_EQ(static_cast<int64_t>(t.bytes.size()), rows * GgufRowBytes(t.dtype, t.shape.back()));
      EXPECT_TRUE(t.bytes.data() >= Bytes(file).data() &&
                  t.bytes.data() + t.bytes.size() <= Bytes(file).data() + file.size());
    }
  });
  EXPECT_GT(accepted, 0);
}

}  // namespace
}  // namespace livequant
