// Activations as the vector tables' integer tiles see them.

#include "pocket/cpu/kernels.h"

namespace pocket::POCKET_ISA {
namespace {

/// Some rows of one row group (pocket/cpu/quantised_rows.h), from the first of them on.
struct ActivationTile {
  const std::int8_t* q;
  const float* scale;
  const float* scaled_sum;
  const std::int32_t* negative_sum;
  std::size_t blocks;
  std::size_t height;  ///< rows of the group: the distance of 4-byte groups, and of blocks' scales
};

/// From lane `lane` of the group that starts at row `first` on.
inline ActivationTile tile_at(const QuantisedRows& x, std::size_t first, std::size_t height,
                              std::size_t lane) {
  const std::size_t blocks = x.columns / kQuantBlock;
  const std::size_t at = first * blocks + lane;
  return {x.q + first * x.columns + 4 * lane,
          x.scale + at,
          x.scaled_sum + at,
          x.negative_sum + at,
          blocks,
          height};
}

/// The group's rows from lane `lane` on.
inline ActivationTile lanes_from(ActivationTile x, std::size_t lane) {
  x.q += 4 * lane;
  x.scale += lane;
  x.scaled_sum += lane;
  x.negative_sum += lane;
  return x;
}

/// The same rows from block `block` on.
inline ActivationTile tile_from_block(ActivationTile x, std::size_t block) {
  x.q += block * kQuantBlock * x.height;
  x.scale += block * x.height;
  x.scaled_sum += block * x.height;
  x.negative_sum += block * x.height;
  x.blocks -= block;
  return x;
}

template <PackedLayout kLayout>
inline constexpr bool kHasMin = kLayout == PackedLayout::kU4ScaleMin;
template <PackedLayout kLayout>
inline constexpr bool kNibbleCodes = kLayout != PackedLayout::kU8Scale;
/// A block of a panel: 16 scales (and mins) in half precision, then the codes.
template <PackedLayout kLayout>
inline constexpr std::size_t kScaleBytes = kHasMin<kLayout> ? 64 : 32;
template <PackedLayout kLayout>
inline constexpr std::size_t kBlockBytes =
    kScaleBytes<kLayout> + (kNibbleCodes<kLayout> ? 256 : 512);

}  // namespace
}  // namespace pocket::POCKET_ISA
