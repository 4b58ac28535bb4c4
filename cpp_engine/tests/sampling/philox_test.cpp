#include "pocket/sampling/philox.h"

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <set>

namespace pocket {
namespace {

using Words = std::array<std::uint32_t, 4>;

// Published vectors of the Random123 distribution (kat_vectors): zeros, all ones, digits of pi.
TEST_CASE("philox4x32-10 known answers") {
  CHECK(philox4x32_10({0, 0, 0, 0}, {0, 0}) ==
        Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(philox4x32_10({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}) ==
        Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
        Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("uniforms lie in [0, 1), differ by seed and index, and use all 64 bits of both") {
  std::set<double> seen;
  double sum = 0.0;
  for (std::uint64_t i = 0; i < 4096; ++i) {
    const double u = philox_uniform(7, i, RandomStream::kSampling);
    CHECK(u >= 0.0);
    CHECK(u < 1.0);
    sum += u;
    seen.insert(u);
  }
  CHECK(seen.size() == 4096);
  CHECK(sum / 4096 == doctest::Approx(0.5).epsilon(0.03));
  const std::uint64_t high = std::uint64_t{1} << 40;
  const double base = philox_uniform(7, 3, RandomStream::kSampling);
  CHECK(philox_uniform(7 + high, 3, RandomStream::kSampling) != base);
  CHECK(philox_uniform(7, 3 + high, RandomStream::kSampling) != base);
}

}  // namespace
}  // namespace pocket
