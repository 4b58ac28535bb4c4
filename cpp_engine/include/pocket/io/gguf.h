#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "pocket/io/mapped_file.h"
#include "pocket/quant/dtype.h"

namespace pocket {

/// One metadata value. Integers are widened to 64 bits and floats to double; arrays are
/// homogeneous.
using GgufArray = std::variant<std::vector<std::int64_t>, std::vector<std::uint64_t>,
                               std::vector<double>, std::vector<bool>, std::vector<std::string>>;
using GgufValue = std::variant<std::int64_t, std::uint64_t, double, bool, std::string, GgufArray>;

/// A tensor's place in the file. `shape` is in row-major order (outermost first), the reverse of
/// the file's own order; `data` covers exactly the tensor's bytes inside the mapping.
struct GgufTensor {
  std::string name;
  DType type;
  std::vector<std::size_t> shape;
  std::span<const std::byte> data;
};

/// A GGUF v2/v3 file, mapped read-only.
///
/// The constructor validates everything it will ever hand out: magic, version, counts against the
/// file's size, string lengths, UTF-8-agnostic keys, alignment, duplicate names, tensor types,
/// shapes (no overflow) and that every tensor lies inside the file. Throws `Error(kBadFile)` or
/// `Error(kUnsupported)` naming the file, the tensor or key and the byte counts. After construction
/// all methods are const and thread-safe. Spans stay valid while the object lives.
class GgufFile {
 public:
  explicit GgufFile(const std::filesystem::path& path);

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return file_.path(); }
  [[nodiscard]] const std::map<std::string, GgufValue, std::less<>>& metadata() const noexcept {
    return metadata_;
  }
  [[nodiscard]] const std::map<std::string, GgufTensor, std::less<>>& tensors() const noexcept {
    return tensors_;
  }

  /// nullptr when absent.
  [[nodiscard]] const GgufTensor* find_tensor(std::string_view name) const noexcept;

  /// Typed metadata access; `nullopt` when absent, `Error(kBadFile)` when present with another type
  /// or out of the target's range.
  [[nodiscard]] std::optional<std::uint64_t> get_uint(std::string_view key) const;
  [[nodiscard]] std::optional<double> get_float(std::string_view key) const;
  [[nodiscard]] std::optional<std::string_view> get_string(std::string_view key) const;

  /// Drops the pages of the mapping from this process's resident set (they come back on access).
  /// Called once the weights have been repacked.
  void release_pages() const noexcept { file_.release_pages(); }

 private:
  MappedFile file_;
  std::map<std::string, GgufValue, std::less<>> metadata_;
  std::map<std::string, GgufTensor, std::less<>> tensors_;
};

}  // namespace pocket
