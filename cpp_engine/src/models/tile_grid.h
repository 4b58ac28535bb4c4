#pragma once

#include <algorithm>
#include <cstddef>

namespace pocket {

/// Half-open ranges of one task of a matmul: rows of activations and units of output columns.
struct Tile {
  std::size_t row_begin, row_end;
  std::size_t unit_begin, unit_end;

  [[nodiscard]] std::size_t rows() const noexcept { return row_end - row_begin; }
  [[nodiscard]] std::size_t units() const noexcept { return unit_end - unit_begin; }
};

/// Cuts [rows] x [units] of a matmul's output into tasks.
///
/// A unit is what one task may not split: a panel of 16 columns, or two. With many rows kernels
/// work on several panels at once, so tiles then start on multiples of `granule` units. Tiles hold
/// at most `kTileFloats` outputs, so that a task's private results stay near its core,
/// and at most `kTileRows` rows, so that its activations do. Few rows (decode) give about
/// `kTasksPerThread` tasks per thread: fewer leave a thread idle when the other is interrupted,
/// more pay the counter for nothing. Which tile a row falls into never changes its bits (kernel
/// contract).
class TileGrid {
 public:
  static constexpr std::size_t kTileRows = 64;
  static constexpr std::size_t kTileFloats = 12288;
  static constexpr std::size_t kTasksPerThread = 4;

  /// Rows from which `granule` counts.
  static constexpr std::size_t kManyRows = 12;

  TileGrid(std::size_t rows, std::size_t units, std::size_t unit_columns, std::size_t threads,
           std::size_t granule = 1)
      : rows_(rows), units_(units), granule_(rows < kManyRows ? 1 : granule) {
    row_tiles_ = std::max<std::size_t>(1, (rows + kTileRows - 1) / kTileRows);
    // Equal tiles, in multiples of 8 rows: kernels work on up to 8 rows at once.
    row_tile_ = std::max<std::size_t>(1, (rows + row_tiles_ - 1) / row_tiles_);
    if (row_tiles_ > 1) {
      row_tile_ = (row_tile_ + 7) / 8 * 8;
      row_tiles_ = (rows + row_tile_ - 1) / row_tile_;
    }
    const std::size_t granules = (units + granule_ - 1) / granule_;
    const std::size_t most =
        std::max<std::size_t>(1, kTileFloats / (row_tile_ * unit_columns * granule_));
    const std::size_t wanted = threads == 1 ? 1 : kTasksPerThread * threads;
    const std::size_t fewest = (granules + most - 1) / most;
    const std::size_t for_threads = (wanted + row_tiles_ - 1) / row_tiles_;
    groups_ = std::clamp(std::max(fewest, for_threads), std::size_t{1}, granules);
  }

  [[nodiscard]] std::size_t tasks() const noexcept { return row_tiles_ * groups_; }

  /// Neighbouring tasks share their weights.
  [[nodiscard]] Tile tile(std::size_t task) const noexcept {
    const std::size_t row = task % row_tiles_ * row_tile_;
    const std::size_t group = task / row_tiles_;
    // Groups differ by one granule at most: a short last one would leave a thread idle.
    const std::size_t granules = (units_ + granule_ - 1) / granule_;
    return {row, std::min(rows_, row + row_tile_), granules * group / groups_ * granule_,
            std::min(units_, granules * (group + 1) / groups_ * granule_)};
  }

 private:
  std::size_t rows_, units_, granule_;
  std::size_t row_tile_ = 0, row_tiles_ = 0;
  std::size_t groups_ = 0;
};

}  // namespace pocket
