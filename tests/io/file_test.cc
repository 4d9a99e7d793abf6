// tests/io/file_test.cc: files are read whole, written whole or not at all, and every refusal names the path.
#include "io/file.h"

#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "support/property.h"
#include "support/values.h"

namespace livequant {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

class FileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "livequant_file_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { fs::remove_all(root_); }
  std::string Path(const std::string& name) const { return root_ + "/" + name; }
  int64_t Files() const { return std::distance(fs::directory_iterator(root_), fs::directory_iterator()); }
  std::string root_;
};

TEST_F(FileTest, WhatIsWrittenIsRead) {
  ForAll(20, [&](Rng& rng) {
    std::string text(static_cast<size_t>(rng.Range(0, 70000)), '\0');
    for (char& c : text) c = static_cast<char>(rng.Next());
    ASSERT_TRUE(WriteFile(Path("a"), text).ok());
    const auto read = ReadFile(Path("a"));
    ASSERT_TRUE(read.ok()) << read.status().ToString();
    EXPECT_EQ(*read, text);
    const auto mapped = MappedFile::Open(Path("a"));
    ASSERT_TRUE(mapped.ok()) << mapped.status().ToString();
    ASSERT_EQ(mapped->bytes().size(), text.size());
    EXPECT_TRUE(text.empty() || std::memcmp(mapped->bytes().data(), text.data(), text.size()) == 0);
  });
  EXPECT_EQ(Files(), 1) << "a temporary file was left behind";
}

TEST_F(FileTest, AMappingMoves) {
  ASSERT_TRUE(WriteFile(Path("a"), "one").ok());
  ASSERT_TRUE(WriteFile(Path("b"), "two!").ok());
  auto a = MappedFile::Open(Path("a")), b = MappedFile::Open(Path("b"));
  ASSERT_TRUE(a.ok() && b.ok());
  const std::byte* data = b->bytes().data();
  MappedFile c(*std::move(b));
  *a = std::move(c);
  EXPECT_EQ(a->bytes().data(), data);
  EXPECT_EQ(a->bytes().size(), 4u);
  EXPECT_EQ(std::memcmp(a->bytes().data(), "two!", 4), 0);
}

TEST_F(FileTest, ReadingRefusesByName) {
  const std::string missing = Path("missing");
  EXPECT_EQ(ReadFile(missing).status().code(), Code::kNotFound);
  EXPECT_EQ(MappedFile::Open(missing).status().code(), Code::kNotFound);
  EXPECT_THAT(ReadFile(missing).status().message(), HasSubstr(missing));
  EXPECT_EQ(ReadFile(root_).status().code(), Code::kIo);
  EXPECT_EQ(MappedFile::Open(root_).status().code(), Code::kIo);
  EXPECT_EQ(MappedFile::Open("/dev/null").status().code(), Code::kIo);
  ASSERT_EQ(::mkfifo(Path("pipe").c_str(), 0600), 0);
  EXPECT_EQ(ReadFile(Path("pipe")).status().code(), Code::kIo);  // and does not wait for a writer
  ASSERT_TRUE(WriteFile(Path("a"), "12345").ok());
  EXPECT_TRUE(ReadFile(Path("a"), 5).ok());
  const auto large = ReadFile(Path("a"), 4);
  EXPECT_EQ(large.status().code(), Code::kOutOfRange);
  EXPECT_THAT(large.status().message(), AllOf(HasSubstr(Path("a")), HasSubstr("5 bytes"), HasSubstr("limit 4")));
  EXPECT_EQ(ReadFile(std::string("/tmp\0x", 6)).status().code(), Code::kIo);
}

TEST_F(FileTest, WritingRefusesByNameAndLeavesNothing) {
  const std::string places[] = {Path("no/such/folder/a"), root_, "/dev/null", "/proc/livequant"};
  for (const std::string& path : places) {
    const Status status = WriteFile(path, "text");
    EXPECT_EQ(status.code(), Code::kIo) << path;
    EXPECT_THAT(status.message(), HasSubstr(path));
  }
  EXPECT_EQ(Files(), 0);
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
}

TEST_F(FileTest, WritingKeepsModeAndFollowsLinks) {
  ASSERT_TRUE(WriteFile(Path("a"), "old").ok());
  ASSERT_EQ(::chmod(Path("a").c_str(), 0640), 0);
  fs::create_symlink("a", Path("link"));
  ASSERT_TRUE(WriteFile(Path("link"), "new").ok());
  EXPECT_TRUE(fs::is_symlink(Path("link")));
  EXPECT_EQ(*ReadFile(Path("a")), "new");
  struct stat info;
  ASSERT_EQ(::stat(Path("a").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0640u);
  fs::create_symlink("nowhere", Path("dangling"));
  EXPECT_EQ(WriteFile(Path("dangling"), "x").code(), Code::kIo);
}

// A reader that opened the old file keeps it: the new contents are another file, put in place at once.
TEST_F(FileTest, AReaderOfTheOldFileKeepsIt) {
  ASSERT_TRUE(WriteFile(Path("a"), "old").ok());
  const auto old = MappedFile::Open(Path("a"));
  ASSERT_TRUE(old.ok());
  ASSERT_TRUE(WriteFile(Path("a"), "n").ok());
  ASSERT_EQ(old->bytes().size(), 3u);
  EXPECT_EQ(std::memcmp(old->bytes().data(), "old", 3), 0);
  EXPECT_EQ(*ReadFile(Path("a")), "n");
}

// FIPS 180-4 examples.
TEST(Sha256Test, KnownDigests) {
  EXPECT_EQ(Sha256Hex({}), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Sha256Hex(Bytes("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Sha256Hex(Bytes("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
}

TEST(Sha256Test, PiecesCarryTheirLength) {
  const auto digest = [](std::initializer_list<std::string_view> pieces) {
    Sha256 sha;
    for (const std::string_view piece : pieces) sha.Add(piece);
    return sha.Hex();
  };
  EXPECT_EQ(digest({"abc"}), Sha256Hex(Bytes(std::string_view("\3\0\0\0\0\0\0\0abc", 11))));
  EXPECT_NE(digest({"ab", "c"}), digest({"a", "bc"}));
  EXPECT_NE(digest({"ab", "c"}), digest({"abc"}));
  EXPECT_NE(digest({"abc", ""}), digest({"abc"}));
  EXPECT_EQ(digest({"ab", "c"}), digest({"ab", "c"}));
}

}  // namespace
}  // namespace livequant
