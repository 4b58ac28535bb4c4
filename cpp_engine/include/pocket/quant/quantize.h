#pragma once

#include <cstddef>
#include <span>

#include "pocket/quant/dtype.h"

namespace pocket {

/// True for the formats that `quantize_row` can write: Q8_0 and Q4_0.
[[nodiscard]] bool can_quantize(DType type) noexcept;

/// Encodes one row, byte for byte as `gguf.quantize` does. `out` has `row_bytes(type, row.size())`
/// bytes. Throws `Error(kInvalidArgument)` on a size mismatch or a format it cannot write. Pure.
void quantize_row(DType type, std::span<const float> row, std::span<std::byte> out);

}  // namespace pocket
