#pragma once

#include <cstddef>
#include <cstdint>

namespace pocket {

/// Rows of activations that the integer kernels take together.
inline constexpr std::size_t kRowGroup = 8;

/// Minus the offset of 6-bit codes; what kernels of other offsets make of it: coded_blocks-inl.h.
inline constexpr std::int32_t kHalfBiasFactor = -32;

/// Rows of activations quantised to int8 per block of 32 columns: x = scale * q.
///
/// Rows stand in groups of `kRowGroup`; the last group has the `height` = 1..kRowGroup rows that
/// are left. Within a group rows are interleaved, so that a kernel finds all that one step of its
/// inner loop needs at constant distances from one pointer:
///
///   q                                [columns / 4][height][4]
///   scale, scaled_sum, negative_sum  [columns / 32][height]
///   half_bias                        [columns / 16][height]
///
/// Groups follow each other without gaps, so one row alone is stored plainly. `negative_sum` is
/// minus the integer sum of a block's codes (where an unsigned weight code's offset starts the dot
/// product), `scaled_sum` = scale * sum. `half_bias` is `kHalfBiasFactor` times the sum of 16
/// codes: where the dot product of half a block starts for weights that are stored offset by 32;
/// null if no coded layout (PackedMatrix::coded) will read it. Non-owning.
struct QuantisedRows {
  std::int8_t* q;
  float* scale;
  float* scaled_sum;
  std::int32_t* negative_sum;
  std::int32_t* half_bias;
  std::size_t columns;  ///< a multiple of 32
  std::size_t rows;
};

/// Where (a part of) one row is written.
struct QuantisedRow {
  std::int8_t* q;
  float* scale;
  float* scaled_sum;
  std::int32_t* negative_sum;
  std::int32_t* half_bias;
  std::size_t columns;  ///< a multiple of 32
  std::size_t stride;   ///< the group's height: distance of 4-byte groups of q, and of scales
};

/// Columns [column, column + count) of a row; both are multiples of 32.
[[nodiscard]] QuantisedRow quantised_row(const QuantisedRows& x, std::size_t row,
                                         std::size_t column, std::size_t count) noexcept;

/// Rows [begin, begin + count): `begin` is a multiple of `kRowGroup`, and so is `count` unless the
/// range ends with the last row.
[[nodiscard]] QuantisedRows quantised_range(const QuantisedRows& x, std::size_t begin,
                                            std::size_t count) noexcept;

}  // namespace pocket
