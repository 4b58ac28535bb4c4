#include "pocket/cpu/quantised_rows.h"

#include <algorithm>

#include "pocket/cpu/packed_matrix.h"

namespace pocket {

QuantisedRow quantised_row(const QuantisedRows& x, std::size_t row, std::size_t column,
                           std::size_t count) noexcept {
  const std::size_t lane = row % kRowGroup;
  const std::size_t first = row - lane;
  const std::size_t height = std::min(kRowGroup, x.rows - first);
  const std::size_t block =
      first * (x.columns / kQuantBlock) + column / kQuantBlock * height + lane;
  const std::size_t half = 2 * (block - lane) + lane;
  return {.q = x.q + first * x.columns + column * height + 4 * lane,
          .scale = x.scale + block,
          .scaled_sum = x.scaled_sum + block,
          .negative_sum = x.negative_sum + block,
          .half_bias = x.half_bias == nullptr ? nullptr : x.half_bias + half,
          .columns = count,
          .stride = height};
}

QuantisedRows quantised_range(const QuantisedRows& x, std::size_t begin,
                              std::size_t count) noexcept {
  const std::size_t block = begin * (x.columns / kQuantBlock);
  return {.q = x.q + begin * x.columns,
          .scale = x.scale + block,
          .scaled_sum = x.scaled_sum + block,
          .negative_sum = x.negative_sum + block,
          .half_bias = x.half_bias == nullptr ? nullptr : x.half_bias + 2 * block,
          .columns = x.columns,
          .rows = count};
}

}  // namespace pocket
