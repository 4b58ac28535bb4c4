#pragma once

#include <cstddef>
#include <cstdint>

#include "pocket/cpu/packed_matrix.h"

/// Geometry of the coded layouts (docs/kernels.md, "Packed weights"), private to this layer. Data
/// only: nothing here may be an inline function (see tables.h).

namespace pocket {

/// A panel is a sequence of runs: `halves` vectors of 16 halves, then `blocks` blocks of 32
/// columns, each of `scales` vectors of 16 bytes and the planes of its codes.
///
/// A plane of b bits is b vectors of 64 bytes; column group g (columns 4g..4g+3) lies in vector
/// g % b at bit b * (g / b), as in the 4-bit layouts. A code is the low plane's field plus the high
/// plane's field above it.
struct BlockLayout {
  std::uint8_t halves;     ///< d, then m (Q5_1) or dmin
  std::uint8_t blocks;     ///< blocks of 32 columns that share them
  std::uint8_t scales;     ///< bytes per row in front of a block: its scales and mins
  std::uint8_t low_bits;   ///< 2 or 4
  std::uint8_t high_bits;  ///< 0, 1 or 2

  std::size_t header_bytes = halves * kPanelRows * 2u;
  std::size_t scale_bytes = scales * kPanelRows * 1u;
  std::size_t block_bytes = scale_bytes + 64u * (low_bits + high_bits);
  std::size_t run_bytes = header_bytes + blocks * block_bytes;
};

inline constexpr std::size_t kFirstCoded = static_cast<std::size_t>(PackedLayout::kU5Scale);

/// By layout, from `kU5Scale` on.
inline constexpr BlockLayout kBlockLayouts[] = {
    /* kU5Scale    */ {1, 1, 0, 4, 1},
    /* kU5ScaleMin */ {2, 1, 0, 4, 1},
    /* kT4Scale    */ {1, 1, 0, 4, 0},
    /* kT4Sub32    */ {1, 8, 1, 4, 0},
    /* kU4Sub32Min */ {2, 8, 2, 4, 0},
    /* kU5Sub32Min */ {2, 8, 2, 4, 1},
    /* kU2Sub16Min */ {2, 8, 2, 2, 0},
    /* kU3Sub16    */ {1, 8, 2, 2, 1},
    /* kU6Sub16    */ {1, 8, 2, 4, 2},
};

}  // namespace pocket
