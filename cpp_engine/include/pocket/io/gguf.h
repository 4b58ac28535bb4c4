#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "pocket/io/gguf_parser.h"
#include "pocket/io/mapped_file.h"

namespace pocket {

/// A GGUF v2/v3 file, mapped read-only.
///
/// The constructor validates everything it will ever hand out: magic, version, counts against the
/// file's size, string lengths, UTF-8-agnostic keys, alignment, duplicate names, tensor types,
/// shapes (no overflow) and that every tensor lies inside the file and overlaps no other. Throws
/// `Error(kBadFile)` or `Error(kUnsupported)` naming the file, the tensor or key and the byte
/// counts (details: `parse_gguf`). After construction
/// all methods are const and thread-safe. Spans stay valid while the object lives.
class GgufFile {
 public:
  explicit GgufFile(const std::filesystem::path& path);

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return file_.path(); }
  [[nodiscard]] const std::map<std::string, GgufValue, std::less<>>& metadata() const noexcept {
    return contents_.metadata;
  }
  [[nodiscard]] const std::map<std::string, GgufTensor, std::less<>>& tensors() const noexcept {
    return contents_.tensors;
  }

  /// nullptr when absent.
  [[nodiscard]] const GgufTensor* find_tensor(std::string_view name) const noexcept;

  /// Typed metadata access; `nullopt` when absent, `Error(kBadFile)` when present with another type
  /// or out of the target's range.
  [[nodiscard]] std::optional<std::uint64_t> get_uint(std::string_view key) const;
  [[nodiscard]] std::optional<double> get_float(std::string_view key) const;
  [[nodiscard]] std::optional<std::string_view> get_string(std::string_view key) const;
  [[nodiscard]] std::optional<bool> get_bool(std::string_view key) const;

  /// Drops the pages of the mapping from this process's resident set (they come back on access).
  /// Called once the weights have been repacked.
  void release_pages() const noexcept { file_.release_pages(); }

 private:
  MappedFile file_;
  GgufContents contents_;
};

}  // namespace pocket
