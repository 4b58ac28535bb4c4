#include <doctest/doctest.h>

#include <vector>

#include "layers/paged_attention.h"

namespace pocket {
namespace {

TEST_CASE("tiles cover all rows; only sequences of one tile write their own KV") {
  const std::vector<SequenceRows> sequences{
      {.first_row = 0, .rows = 1, .first_position = 900, .blocks = nullptr},
      {.first_row = 1, .rows = kAttentionTileRows, .first_position = 0, .blocks = nullptr},
      {.first_row = 1 + kAttentionTileRows,
       .rows = 2 * kAttentionTileRows + 3,
       .first_position = 32,
       .blocks = nullptr}};
  const std::size_t rows = 1 + 3 * kAttentionTileRows + 3;
  AttentionSchedule schedule(rows, sequences.size());
  for (int repeat = 0; repeat < 2; ++repeat) {
    schedule.plan(sequences);
    std::vector<int> covered(rows, 0);
    for (const auto& tile : schedule.tiles()) {
      CHECK(tile.rows <= kAttentionTileRows);
      CHECK(tile.alone == (tile.sequence != &sequences[2]));
      for (std::size_t row = tile.row_begin; row < tile.row_begin + tile.rows; ++row) {
        CHECK(row >= tile.sequence->first_row);
        CHECK(row < tile.sequence->first_row + tile.sequence->rows);
        ++covered[row];
      }
    }
    for (const int count : covered) {
      CHECK(count == 1);
    }
    CHECK(schedule.tiles().size() == 5);
    REQUIRE(schedule.shared().size() == 3);
    for (const auto& tile : schedule.shared()) {
      CHECK(tile.sequence == &sequences[2]);
    }
  }
}

TEST_CASE("the longest tile comes first") {
  const std::vector<SequenceRows> sequences{
      {.first_row = 0, .rows = 1, .first_position = 3, .blocks = nullptr},
      {.first_row = 1, .rows = 1, .first_position = 4000, .blocks = nullptr},
      {.first_row = 2, .rows = 1, .first_position = 100, .blocks = nullptr}};
  AttentionSchedule schedule(3, 3);
  schedule.plan(sequences);
  REQUIRE(schedule.tiles().size() == 3);
  CHECK(schedule.tiles()[0].row_begin == 1);
  CHECK(schedule.tiles()[1].row_begin == 2);
  CHECK(schedule.tiles()[2].row_begin == 0);
}

}  // namespace
}  // namespace pocket
