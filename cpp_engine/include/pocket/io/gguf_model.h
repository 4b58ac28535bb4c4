#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pocket/io/gguf.h"

namespace pocket {

/// What the name of a split model's part says: `STEM-00002-of-00003.gguf`.
struct GgufPartName {
  std::string stem;
  std::size_t number;  ///< from 1
  std::size_t count;
};

/// Nothing if `file` (a name, no folder) is not the name of a part.
[[nodiscard]] std::optional<GgufPartName> parse_gguf_part_name(std::string_view file);

/// The GGUF models of a folder by name, a split one as its first part, whether or not that is
/// there. Throws `Error(kBadFile)` if the folder cannot be read.
[[nodiscard]] std::vector<std::filesystem::path> gguf_models_in(
    const std::filesystem::path& folder);

/// A GGUF model: one file, or all parts of a split one, mapped read-only.
///
/// The metadata is the first part's; the others hold tensors. Each part says which one it is
/// (`split.no`, from 0) and of how many (`split.count`), the first also how many tensors the model
/// has (`split.tensors.count`); these keys and the names of the files must agree.
///
/// Throws what `GgufFile` throws, and `Error(kBadFile)` with the parts', tensors' and bytes' counts
/// if a part is missing, given instead of the first or in another's place, of another model, holds
/// a tensor that another part holds as well, or if tensors are missing. Const and thread-safe once
/// constructed.
class GgufModel {
 public:
  /// `path`: the file, or the first part of a split model.
  explicit GgufModel(const std::filesystem::path& path);

  /// The file with the metadata.
  [[nodiscard]] const GgufFile& first() const noexcept { return parts_.front(); }
  [[nodiscard]] std::size_t parts() const noexcept { return parts_.size(); }
  /// Of all parts, by name.
  [[nodiscard]] const std::map<std::string_view, const GgufTensor*>& tensors() const noexcept {
    return tensors_;
  }
  /// nullptr when absent.
  [[nodiscard]] const GgufTensor* find_tensor(std::string_view name) const noexcept;
  /// See `GgufFile::release_pages`.
  void release_pages() const noexcept;

 private:
  void open_parts(const GgufPartName& name);
  void check_part(const GgufFile& part, std::size_t number, std::size_t count) const;
  void index_tensors();
  void check_tensor_count() const;
  [[nodiscard]] std::string held() const;

  std::vector<GgufFile> parts_;
  std::map<std::string_view, const GgufTensor*> tensors_;
};

}  // namespace pocket
