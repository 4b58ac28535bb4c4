// Activations as the vector tables' integer tiles see them.

#include "pocket/cpu/kernels.h"

namespace pocket::POCKET_ISA {
namespace {

/// Rows of activations from some row on.
struct ActivationTile {
  const std::int8_t* q;
  const float* scale;
  const float* scaled_sum;
  const std::int32_t* sum;
  std::size_t blocks;
};

inline ActivationTile rows_from(const QuantisedRows& x, std::size_t m) {
  const std::size_t blocks = x.columns / kQuantBlock;
  return {x.q + m * x.columns, x.scale + m * blocks, x.scaled_sum + m * blocks, x.sum + m * blocks,
          blocks};
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
