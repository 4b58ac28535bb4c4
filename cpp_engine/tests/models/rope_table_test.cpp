#include "rope_table.h"

#include <doctest/doctest.h>

#include <cmath>

namespace pocket {
namespace {

RopeConfig config() {
  RopeConfig c;
  c.dims = 64;
  c.base = 100000.0;
  return c;
}

TEST_CASE("angles follow the definition, also far out") {
  const RopeTable table(config(), 9000);
  CHECK(table.rotary_dims() == 64);
  for (const std::size_t position : {0U, 1U, 17U, 8191U}) {
    for (std::size_t pair = 0; pair < 32; ++pair) {
      const double angle =
          static_cast<double>(position) / std::pow(100000.0, static_cast<double>(pair) / 32.0);
      // Half an ulp of float, plus what double loses at 8,000 radians.
      CHECK(std::abs(table.cos(position)[pair] - std::cos(angle)) < 6e-8);
      CHECK(std::abs(table.sin(position)[pair] - std::sin(angle)) < 6e-8);
    }
  }
}

TEST_CASE("linear scaling stretches positions, factors stretch single frequencies") {
  const RopeTable plain(config(), 64);
  RopeConfig scaled = config();
  scaled.position_scale = 4.0;
  const RopeTable linear(scaled, 64);
  for (std::size_t pair = 0; pair < 32; ++pair) {
    CHECK(linear.cos(40)[pair] == plain.cos(10)[pair]);
  }
  RopeConfig with_factors = config();
  with_factors.frequency_factors.assign(32, 1.0F);
  with_factors.frequency_factors[5] = 2.0F;
  const RopeTable factors(with_factors, 64);
  CHECK(factors.sin(20)[5] == plain.sin(10)[5]);
  CHECK(factors.sin(20)[6] == plain.sin(20)[6]);
}

TEST_CASE("the magnitude scales cos and sin") {
  const RopeTable plain(config(), 8);
  RopeConfig louder = config();
  louder.magnitude = 2.0;
  const RopeTable table(louder, 8);
  CHECK(table.cos(7)[3] == 2.0F * plain.cos(7)[3]);
  CHECK(table.sin(7)[3] == 2.0F * plain.sin(7)[3]);
}

}  // namespace
}  // namespace pocket
