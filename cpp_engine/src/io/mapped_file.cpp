#include "pocket/io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "pocket/base/error.h"

namespace pocket {
namespace {

[[noreturn]] void throw_bad(const std::filesystem::path& path, const std::string& what) {
  throw Error(ErrorCode::kBadFile, path.string() + ": " + what);
}

std::string errno_text() {
  return std::generic_category().message(errno);
}

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  [[nodiscard]] int get() const noexcept { return fd_; }

 private:
  int fd_;
};

}  // namespace

MappedFile::MappedFile(std::filesystem::path path) : path_(std::move(path)) {
  // Non-blocking: opening a FIFO must not hang until a writer comes.
  const FileDescriptor fd(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) throw_bad(path_, "cannot open the file: " + errno_text());
  struct stat status{};
  if (::fstat(fd.get(), &status) != 0) throw_bad(path_, "cannot read its size: " + errno_text());
  if (S_ISDIR(status.st_mode)) throw_bad(path_, "is a directory, not a file");
  if (!S_ISREG(status.st_mode)) throw_bad(path_, "is not a regular file");
  if (status.st_size == 0) throw_bad(path_, "is empty (0 bytes)");
  const auto size = static_cast<std::size_t>(status.st_size);
  void* const mapped = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (mapped == MAP_FAILED) {
    throw_bad(path_, "cannot map " + std::to_string(size) + " bytes: " + errno_text());
  }
  data_ = static_cast<const std::byte*>(mapped);
  size_ = size;
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  MappedFile taken(std::move(other));  // unmaps what this one held
  path_.swap(taken.path_);
  std::swap(data_, taken.data_);
  std::swap(size_, taken.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

void MappedFile::release_pages() const noexcept {
  if (data_ != nullptr) ::madvise(const_cast<std::byte*>(data_), size_, MADV_DONTNEED);
}

}  // namespace pocket
