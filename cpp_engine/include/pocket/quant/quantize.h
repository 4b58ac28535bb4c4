#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "pocket/quant/dtype.h"

namespace pocket {

/// True for the formats that `quantize_row` can write: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K and
/// Q6_K.
[[nodiscard]] bool can_quantize(DType type) noexcept;

/// The format of a name as options spell it ("q4_k"), in lower case. Throws `Error(kUnsupported)`
/// naming `option` and what can be written, for any other.
[[nodiscard]] DType parse_quantized_format(std::string_view option, std::string_view name);

/// The format for rows that are not whole blocks of `type`: a K-quant's is of blocks of 32 and of
/// no fewer bits (Q4_K: Q5_0, Q5_K: Q5_1, Q6_K: Q8_0); others' are their own.
[[nodiscard]] DType narrow_blocks(DType type) noexcept;

/// Encodes one row: in blocks of 32 byte for byte as `gguf.quantize` does, K-quants as
/// docs/formats.md describes. `out` has `row_bytes(type, row.size())`
/// bytes. Throws `Error(kInvalidArgument)` on a size mismatch or a format it cannot write. Pure.
void quantize_row(DType type, std::span<const float> row, std::span<std::byte> out);

}  // namespace pocket
