#pragma once

#include <cstddef>
#include <cstdint>

#include "pocket/quant/dtype.h"

/// The table of storage formats, private to this layer. A new format is one row in formats.cpp and
/// one decoder in blocks.cpp
/// or coded_block.cpp.

namespace pocket::quant {

/// Decodes `blocks` consecutive blocks at `in` (any alignment) to float32.
using DecodeBlocks = void (*)(const std::byte* in, std::size_t blocks, float* out);

struct Format {
  DType type;
  DTypeInfo info;
  DecodeBlocks decode;
};

/// nullptr for a GGUF type id that this build cannot read.
[[nodiscard]] const Format* find_format(std::uint32_t gguf_type_id) noexcept;

/// Throws `Error(kUnsupported)`.
[[nodiscard]] const Format& format_of(DType type);

}  // namespace pocket::quant
