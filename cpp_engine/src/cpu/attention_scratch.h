#pragma once

#include <cstddef>

namespace pocket {

/// Most queries that any table's attention works on at once. A larger tile is walked in pieces, so
/// scratch does not grow with it.
inline constexpr std::size_t kMaxAttentionQueries = 8;

/// Largest head_dim of `AttentionTile`.
inline constexpr std::size_t kMaxHeadDim = 256;

}  // namespace pocket
