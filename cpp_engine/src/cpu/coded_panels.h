#pragma once

#include <cstddef>

#include "pocket/cpu/packed_matrix.h"

/// Panels of the coded layouts (block_layouts.h): size, packing and unpacking of one row. Portable.

namespace pocket {

[[nodiscard]] bool is_coded(PackedLayout layout) noexcept;

/// Bytes of a panel of `columns` columns, without the padding at its end.
[[nodiscard]] std::size_t coded_panel_bytes(PackedLayout layout, std::size_t columns) noexcept;

/// Writes a stored row of `type`, which is packed into `layout`, into lane `lane` of a panel. Every
/// byte that belongs to the lane is written.
void pack_coded_row(DType type, PackedLayout layout, const std::byte* row, std::size_t columns,
                    std::size_t lane, std::byte* panel);

/// out[0..columns) = lane `lane`'s values, with the bits of the stored format's own decoder.
void unpack_coded_row(PackedLayout layout, const std::byte* panel, std::size_t columns,
                      std::size_t lane, float* out);

}  // namespace pocket
