#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pocket/io/mapped_file.h"
#include "pocket/quant/dtype.h"

namespace pocket {

/// A tensor inside a safetensors file: row-major, outermost dimension first, any number of
/// dimensions; one of size 0 makes `data` empty. `data` has the alignment that the file gives it.
struct SafetensorsTensor {
  DType type = DType::kF32;
  std::vector<std::size_t> shape;
  std::span<const std::byte> data;
};

using SafetensorsMap = std::map<std::string, SafetensorsTensor, std::less<>>;

/// Bytes of JSON that a file's header may have: the format's own limit.
inline constexpr std::uint64_t kMaxSafetensorsHeader = 100'000'000;

/// Parses a whole safetensors file from memory; `name` is the file's name in messages. The tensors'
/// spans borrow `bytes`.
///
/// Throws `Error(kBadFile)` for a malformed header, a tensor whose bytes do not match its shape,
/// lie outside the file, overlap another's or leave a gap, naming file, tensor and byte counts;
/// `Error(kUnsupported)` for an element type other than F32, F16 and BF16. Pure.
[[nodiscard]] SafetensorsMap parse_safetensors(std::span<const std::byte> bytes,
                                               std::string_view name);

/// Reads an index (`model.safetensors.index.json`): the shard's file name by tensor, never empty.
///
/// Throws `Error(kBadFile)` if it is not JSON, has no weight_map, or a shard is not the name of a
/// file beside the index (a path could name any file of this machine). Pure.
[[nodiscard]] std::map<std::string, std::string, std::less<>> parse_safetensors_index(
    std::string_view text, std::string_view name);

/// The weights of a Hugging Face directory: `model.safetensors`, or the shards that
/// `model.safetensors.index.json` names, or the only *.safetensors file there. Mapped, not read.
///
/// Throws what `parse_safetensors` and `MappedFile` do, and `Error(kBadFile)` if the directory has
/// no weights, or index and shards disagree: a shard is missing (the message counts its tensors), a
/// tensor is not in the shard that the index names, or a shard holds a tensor that the index lacks.
/// Const and thread-safe.
class SafetensorsCheckpoint {
 public:
  explicit SafetensorsCheckpoint(const std::filesystem::path& directory);

  [[nodiscard]] const SafetensorsMap& tensors() const noexcept { return tensors_; }
  /// See `MappedFile::release_pages`.
  void release_pages() const noexcept;

 private:
  void add_shard(const std::filesystem::path& file);
  void add_indexed(const std::filesystem::path& directory, const std::filesystem::path& index);

  std::vector<MappedFile> files_;
  SafetensorsMap tensors_;
};

/// The contents of a small text file. Throws `Error(kBadFile)` when it cannot be read or has more
/// than `limit` bytes.
[[nodiscard]] std::string read_text_file(const std::filesystem::path& path, std::size_t limit);

}  // namespace pocket
