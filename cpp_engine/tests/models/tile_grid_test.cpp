#include "tile_grid.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <iterator>
#include <vector>

namespace pocket {
namespace {

TEST_CASE("tiles cover every output exactly once and stay within their bounds") {
  for (const std::size_t rows : {1U, 2U, 7U, 8U, 63U, 64U, 65U, 100U, 128U, 500U, 513U}) {
    for (const std::size_t units : {1U, 2U, 12U, 36U, 60U, 97U, 3072U}) {
      for (const std::size_t unit_columns : {16U, 64U}) {
        for (const std::size_t threads : {1U, 2U, 16U}) {
          const std::size_t granule = 3;
          const TileGrid grid(rows, units, unit_columns, threads, granule);
          std::vector<int> covered(rows * units, 0);
          for (std::size_t task = 0; task < grid.tasks(); ++task) {
            const Tile tile = grid.tile(task);
            REQUIRE(tile.row_begin < tile.row_end);
            REQUIRE(tile.row_end <= rows);
            REQUIRE(tile.unit_begin < tile.unit_end);
            REQUIRE(tile.unit_end <= units);
            REQUIRE((rows < TileGrid::kManyRows || tile.unit_begin % granule == 0));
            REQUIRE(tile.rows() <= TileGrid::kTileRows);
            REQUIRE(tile.rows() * tile.units() * unit_columns <= TileGrid::kTileFloats);
            for (std::size_t r = tile.row_begin; r < tile.row_end; ++r) {
              for (std::size_t u = tile.unit_begin; u < tile.unit_end; ++u) {
                ++covered[r * units + u];
              }
            }
          }
          REQUIRE(std::count(covered.begin(), covered.end(), 1) == std::ssize(covered));
        }
      }
    }
  }
}

TEST_CASE("one row is cut for the threads, not for the tile size") {
  CHECK(TileGrid(1, 60, 16, 2).tasks() == 8);
  CHECK(TileGrid(1, 60, 16, 1).tasks() == 1);
  CHECK(TileGrid(1, 3, 16, 8).tasks() == 3);
  const TileGrid grid(1, 36, 16, 2);
  for (std::size_t task = 0; task < grid.tasks(); ++task) {
    CHECK(grid.tile(task).units() >= 4);
    CHECK(grid.tile(task).units() <= 5);
  }
}

}  // namespace
}  // namespace pocket
