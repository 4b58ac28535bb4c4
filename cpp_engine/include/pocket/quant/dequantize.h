#pragma once

#include <cstddef>
#include <span>

#include "pocket/quant/dtype.h"

namespace pocket {

/// Decodes one stored row to float32, exactly as `gguf.dequantize` does (block layouts:
/// docs/formats.md). `row` holds `row_bytes(type, out.size())` bytes of any alignment.
/// Throws `Error(kInvalidArgument)` on a size mismatch. Pure: safe from any thread.
void dequantize_row(DType type, std::span<const std::byte> row, std::span<float> out);

}  // namespace pocket
