#include "output_rows.h"

#include <doctest/doctest.h>

#include <array>
#include <vector>

namespace pocket {
namespace {

using Rows = std::vector<std::int32_t>;

// Sequences of 3, 1 and 4 rows at positions 10, 20 and 30.
constexpr std::array<std::int32_t, 8> kTokens{};
const std::array<SequenceRows, 3> kSequences{
    SequenceRows{.first_row = 0, .rows = 3, .first_position = 10, .blocks = nullptr, .slot = 5},
    SequenceRows{.first_row = 3, .rows = 1, .first_position = 20, .blocks = nullptr, .slot = 6},
    SequenceRows{.first_row = 4, .rows = 4, .first_position = 30, .blocks = nullptr, .slot = 7}};

OutputRows planned(const Rows& wanted) {
  OutputRows rows(8, 3);
  rows.plan({.token_ids = kTokens, .sequences = kSequences, .wanted = wanted});
  return rows;
}

Rows kept(const OutputRows& rows) {
  return {rows.rows().begin(), rows.rows().end()};
}

TEST_CASE("last rows of sequences") {
  const OutputRows rows = planned({7, 2, 3});
  CHECK_FALSE(rows.all());
  CHECK(kept(rows) == Rows{2, 3, 7});
  CHECK(rows.number_of(2) == 0);
  CHECK(rows.number_of(3) == 1);
  CHECK(rows.number_of(7) == 2);
  REQUIRE(rows.sequences().size() == 3);
  CHECK(rows.sequences()[0].first_position == 12);
  CHECK(rows.sequences()[2].first_position == 33);
  CHECK(rows.sequences()[2].first_row == 2);
  CHECK(rows.sequences()[2].rows == 1);
  CHECK(rows.sequences()[2].slot == 7);
}

TEST_CASE("a sequence's rows stay consecutive") {
  const OutputRows rows = planned({6, 4, 6});
  CHECK(kept(rows) == Rows{4, 5, 6});
  REQUIRE(rows.sequences().size() == 1);
  CHECK(rows.sequences()[0].rows == 3);
  CHECK(rows.sequences()[0].first_position == 30);
  CHECK(rows.number_of(6) == 2);
}

TEST_CASE("no rows, and all of them") {
  CHECK(kept(planned({})).empty());
  CHECK(planned({}).sequences().empty());
  CHECK_FALSE(planned({}).all());
  const OutputRows all = planned({0, 2, 3, 4, 7});
  CHECK(all.all());
  for (std::int32_t row = 0; row < 8; ++row) {
    CHECK(all.number_of(row) == row);
  }
}

TEST_CASE("a plan leaves nothing of the one before") {
  OutputRows rows = planned({0, 1, 2, 3, 4, 5, 6, 7});
  const Rows wanted{5};
  rows.plan({.token_ids = kTokens, .sequences = kSequences, .wanted = wanted});
  CHECK(kept(rows) == Rows{5});
  CHECK(rows.number_of(5) == 0);
}

}  // namespace
}  // namespace pocket
