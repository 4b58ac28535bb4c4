#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace pocket {

/// A file mapped read-only and private. Throws `Error(kBadFile)` naming the path when it cannot be
/// opened, is not a regular file or is empty. The file must not shrink while it is mapped: that is
/// a SIGBUS, as for every program that maps files.
class MappedFile {
 public:
  explicit MappedFile(std::filesystem::path path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }
  void release_pages() const noexcept;

 private:
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace pocket
