#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "pocket/quant/dtype.h"

namespace pocket {

/// One metadata value. Integers are widened to 64 bits and floats to double; arrays are
/// homogeneous.
using GgufArray = std::variant<std::vector<std::int64_t>, std::vector<std::uint64_t>,
                               std::vector<double>, std::vector<bool>, std::vector<std::string>>;
using GgufValue = std::variant<std::int64_t, std::uint64_t, double, bool, std::string, GgufArray>;

/// A tensor's place in the file. `shape` is in row-major order (outermost first), the reverse of
/// the file's own order, with 1 to 4 dimensions of at least 1; `data` covers exactly the tensor's
/// bytes inside the file.
struct GgufTensor {
  std::string name;
  DType type;
  std::vector<std::size_t> shape;
  std::span<const std::byte> data;
};

struct GgufContents {
  std::map<std::string, GgufValue, std::less<>> metadata;
  std::map<std::string, GgufTensor, std::less<>> tensors;
};

/// Bounds on what a file may ask for, all far above any published model. Counts are also checked
/// against the bytes that remain in the file before anything is allocated for them.
struct GgufLimits {
  static constexpr std::uint64_t kKeyBytes = 65535;  ///< the specification's own limit
  static constexpr std::uint64_t kTensorNameBytes = 256;
  static constexpr std::uint64_t kKeys = 65536;
  static constexpr std::uint64_t kTensors = 262144;
  static constexpr std::uint64_t kAlignment = std::uint64_t{1} << 20;
  /// Memory for decoded values. Arrays grow when decoded (an int8 takes 8 bytes, an empty string
  /// 32), so this bound is not the file's size.
  static constexpr std::uint64_t kMetadataBytes = std::uint64_t{256} << 20;
};

/// Parses a whole GGUF v2 or v3 file from memory; `name` is the file's name in messages. The
/// tensors' spans borrow `bytes`, and are aligned as `bytes` and the file's alignment allow.
///
/// Throws `Error(kBadFile)` for anything truncated, inconsistent or beyond `GgufLimits`, and
/// `Error(kUnsupported)` for big-endian files, other versions, nested arrays and tensor formats
/// this build cannot read. Pure.
[[nodiscard]] GgufContents parse_gguf(std::span<const std::byte> bytes, std::string_view name);

}  // namespace pocket
