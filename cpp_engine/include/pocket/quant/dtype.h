#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace pocket {

/// Element formats of stored tensors. Values are GGUF's type ids (ggml-org/ggml, gguf.md).
enum class DType : std::uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIQ4_NL = 20,
  kIQ4_XS = 23,
  kBF16 = 30,
};

/// Geometry of a format: `block_size` consecutive elements of a row take `block_bytes` bytes.
struct DTypeInfo {
  std::string_view name;
  std::size_t block_size;
  std::size_t block_bytes;
};

/// True if this build can read tensors of the given GGUF type id.
[[nodiscard]] bool is_supported_dtype(std::uint32_t gguf_type_id) noexcept;

/// The name of any GGUF type id, also of formats that this build cannot read ("IQ1_M"); "unknown"
/// for ids that ggml has not assigned. For messages.
[[nodiscard]] std::string_view gguf_type_name(std::uint32_t gguf_type_id) noexcept;

/// Throws `Error(kUnsupported)` for an id that `is_supported_dtype` rejects.
[[nodiscard]] const DTypeInfo& dtype_info(DType type);

/// Bytes of one row of `columns` elements. Throws `Error(kInvalidArgument)` when `columns` is not a
/// multiple of the block size or the product overflows.
[[nodiscard]] std::size_t row_bytes(DType type, std::size_t columns);

}  // namespace pocket
