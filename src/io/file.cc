// io/file.cc: POSIX files and OpenSSL's SHA-256.
#include "io/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <openssl/evp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <utility>

#include "io/json.h"

namespace livequant {
namespace {

// An open descriptor that closes itself.
class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

Status SystemError(std::string_view doing, const std::string& path, int error) {
  const Code code = error == ENOENT || error == ENOTDIR ? Code::kNotFound : Code::kIo;
  return Status(code, fmt::format("{} {}: {}", doing, path, std::generic_category().message(error)));
}

// A path with a NUL byte would name another file than it says.
Status CheckPath(const std::string& path) {
  if (path.find('\0') != path.npos) return Status(Code::kIo, "a NUL byte in the path " + Excerpt(path));
  return {};
}

// Opens a regular file for reading; O_NONBLOCK so that a pipe in its place is refused instead of waited for.
Result<int> OpenRegular(const std::string& path, struct stat* info) {
  LQ_RETURN_IF_ERROR(CheckPath(path));
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return SystemError("open", path, errno);
  if (::fstat(fd, info) != 0) {
    const int error = errno;
    ::close(fd);
    return SystemError("stat", path, error);
  }
  if (!S_ISREG(info->st_mode)) {
    ::close(fd);
    return Status(Code::kIo, fmt::format("open {}: not a regular file", path));
  }
  return fd;
}

Status WriteAll(int fd, std::string_view contents, const std::string& path) {
  while (!contents.empty()) {
    const ssize_t n = ::write(fd, contents.data(), contents.size());
    if (n < 0) {
      if (errno == EINTR) continue;
      return Status(Code::kIo, fmt::format("write {}: {}", path, std::generic_category().message(errno)));
    }
    contents.remove_prefix(static_cast<size_t>(n));
  }
  return {};
}

}  // namespace

Result<MappedFile> MappedFile::Open(const std::string& path) {
  struct stat info;
  LQ_ASSIGN_OR_RETURN(const int raw, OpenRegular(path, &info));
  const Fd fd(raw);
  MappedFile file;
  if (info.st_size == 0) return file;  // mmap refuses length 0
  void* data = ::mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (data == MAP_FAILED)
    return Status(Code::kIo, fmt::format("map {}: {}", path, std::generic_category().message(errno)));
  file.data_ = static_cast<const std::byte*>(data);
  file.size_ = static_cast<size_t>(info.st_size);
  return file;
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

Result<std::string> ReadFile(const std::string& path, int64_t max_bytes) {
  struct stat info;
  LQ_ASSIGN_OR_RETURN(const int raw, OpenRegular(path, &info));
  const Fd fd(raw);
  if (info.st_size > max_bytes)
    return Status(Code::kOutOfRange, fmt::format("{}: {} bytes, limit {}", path, info.st_size, max_bytes));
  std::string text(static_cast<size_t>(info.st_size), '\0');
  size_t have = 0;
  while (have < text.size()) {
    const ssize_t n = ::read(fd.get(), text.data() + have, text.size() - have);
    if (n < 0) {
      if (errno == EINTR) continue;
      return SystemError("read", path, errno);
    }
    if (n == 0) return Status(Code::kDataLoss, fmt::format("read {}: ends at {} of {} bytes", path, have, text.size()));
    have += static_cast<size_t>(n);
  }
  return text;
}

Status WriteFile(const std::string& path, std::string_view contents) {
  LQ_RETURN_IF_ERROR(CheckPath(path));
  const auto refuse = [&](std::string_view doing, int error) {
    return Status(Code::kIo, fmt::format("{} {}: {}", doing, path, std::generic_category().message(error)));
  };
  std::string target = path;
  mode_t mode = 0666;  // less the umask
  bool replaces = false;
  struct stat info;
  if (::lstat(path.c_str(), &info) == 0) {
    if (S_ISLNK(info.st_mode)) {  // write where it points, as open() would
      char* real = ::realpath(path.c_str(), nullptr);
      if (real == nullptr) return refuse("follow", errno);
      target = real;
      ::free(real);
      if (::stat(target.c_str(), &info) != 0) return refuse("stat", errno);
    }
    if (!S_ISREG(info.st_mode)) return Status(Code::kIo, fmt::format("write {}: not a regular file", path));
    if (::access(target.c_str(), W_OK) != 0) return refuse("write", errno);
    mode = info.st_mode & 07777;
    replaces = true;
  } else if (errno != ENOENT) {
    return refuse("write", errno);
  }
  static std::atomic<uint64_t> serial{0};
  std::string temp;
  int raw = -1;
  do {  // a leftover of a killed process may hold the name
    temp = fmt::format("{}.{}.{}.tmp", target, ::getpid(), serial.fetch_add(1));
    raw = ::open(temp.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
  } while (raw < 0 && errno == EEXIST);
  if (raw < 0) return refuse("write", errno);
  Status status;
  {
    const Fd fd(raw);
    status = WriteAll(fd.get(), contents, path);
    if (status.ok() && replaces && ::fchmod(fd.get(), mode) != 0) status = refuse("chmod", errno);
    if (status.ok() && ::fsync(fd.get()) != 0) status = refuse("sync", errno);
  }
  if (status.ok() && ::rename(temp.c_str(), target.c_str()) != 0) status = refuse("rename", errno);
  if (!status.ok()) {
    ::unlink(temp.c_str());
    return status;
  }
  // The new name is on disk once the directory is. A directory that may be written but not read can't be synced: the
  // file is in place then, and only a power loss could undo the rename.
  const size_t slash = target.rfind('/');
  const std::string parent = slash == target.npos ? "." : target.substr(0, slash + 1);
  const Fd directory(::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.get() >= 0 && ::fsync(directory.get()) != 0 && errno != EINVAL)
    return refuse("sync the directory of", errno);
  return {};
}

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  LQ_CHECK(context_ != nullptr);
  LQ_CHECK(EVP_DigestInit_ex(static_cast<EVP_MD_CTX*>(context_), EVP_sha256(), nullptr) == 1);
}

Sha256::~Sha256() { EVP_MD_CTX_free(static_cast<EVP_MD_CTX*>(context_)); }

void Sha256::Add(std::span<const std::byte> piece) {
  std::array<unsigned char, 8> length;
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<unsigned char>(static_cast<uint64_t>(piece.size()) >> (8 * i));
  auto* context = static_cast<EVP_MD_CTX*>(context_);
  LQ_CHECK(EVP_DigestUpdate(context, length.data(), length.size()) == 1);
  LQ_CHECK(EVP_DigestUpdate(context, piece.data(), piece.size()) == 1);
}

void Sha256::Add(std::string_view piece) { Add(std::as_bytes(std::span(piece.data(), piece.size()))); }

namespace {
std::string FinishHex(EVP_MD_CTX* context) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest;
  unsigned int size = 0;
  LQ_CHECK(EVP_DigestFinal_ex(context, digest.data(), &size) == 1);
  std::string hex;
  for (unsigned int i = 0; i < size; ++i) hex += fmt::format("{:02x}", digest[i]);
  return hex;
}
}  // namespace

std::string Sha256::Hex() { return FinishHex(static_cast<EVP_MD_CTX*>(context_)); }

std::string Sha256Hex(std::span<const std::byte> bytes) {
  const std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> context(EVP_MD_CTX_new(), EVP_MD_CTX_free);
  LQ_CHECK(context != nullptr);
  LQ_CHECK(EVP_DigestInit_ex(context.get(), EVP_sha256(), nullptr) == 1);
  LQ_CHECK(EVP_DigestUpdate(context.get(), bytes.data(), bytes.size()) == 1);
  return FinishHex(context.get());
}

}  // namespace livequant
