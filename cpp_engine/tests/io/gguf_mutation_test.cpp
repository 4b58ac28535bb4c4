#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "gguf_samples.h"
#include "pocket/base/error.h"
#include "pocket/io/gguf_parser.h"

// A deterministic, small cousin of tests/fuzz: it runs wherever the unit tests run.

namespace pocket {
namespace {

// Lengths, counts and offsets that sit on a boundary of the parser's arithmetic.
constexpr std::uint64_t kInteresting[] = {
    0,          1,          2,          4,          8,          12,         31,
    32,         33,         63,         64,         255,        256,        257,
    65535,      65536,      0x7fffffff, 0x80000000, 0xffffffff, 1ull << 32, 1ull << 60,
    1ull << 61, 1ull << 63, ~0ull,      ~0ull - 31};

class Mutator {
 public:
  explicit Mutator(std::uint32_t seed) : random_(seed) {}

  std::size_t below(std::size_t bound) { return random_() % bound; }

  void mutate(std::vector<std::byte>& bytes) {
    if (bytes.empty()) return;
    const std::size_t at = below(bytes.size());
    const std::size_t length = std::min<std::size_t>(1 + below(16), bytes.size() - at);
    const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    switch (below(6)) {
      case 0:
        bytes[at] ^= std::byte{1} << below(8);
        break;
      case 1:
        bytes[at] = static_cast<std::byte>(below(256));
        break;
      case 2:
      case 3: {
        const std::uint64_t value = kInteresting[below(std::size(kInteresting))];
        const std::size_t width = std::min<std::size_t>(below(2) == 0 ? 4 : 8, bytes.size() - at);
        std::memcpy(&bytes[at], &value, width);
        break;
      }
      case 4:
        bytes.erase(begin, begin + static_cast<std::ptrdiff_t>(length));
        break;
      default: {
        const std::vector<std::byte> copy(begin, begin + static_cast<std::ptrdiff_t>(length));
        bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(below(bytes.size())), copy.begin(),
                     copy.end());
      }
    }
  }

 private:
  std::mt19937 random_;  // its sequence is the same on every platform
};

TEST_CASE("mutated files are refused with an Error or parsed consistently") {
  const std::vector<std::byte> valid = test::sample_file().bytes();
  Mutator mutator(20261129);
  int accepted = 0;
  int refused = 0;
  for (int round = 0; round < 6000; ++round) {
    std::vector<std::byte> bytes = valid;
    const std::size_t mutations = 1 + mutator.below(3);
    for (std::size_t i = 0; i < mutations; ++i) mutator.mutate(bytes);
    // An allocation of exactly this size, so that AddressSanitizer sees any read past it.
    const auto exact = std::make_unique<std::byte[]>(bytes.size());
    std::copy(bytes.begin(), bytes.end(), exact.get());
    const std::span<const std::byte> view(exact.get(), bytes.size());
    CAPTURE(round);
    try {
      test::check_contents(parse_gguf(view, "mutated"), view);
      ++accepted;
    } catch (const Error&) {
      ++refused;
    }
  }
  // Both must occur often, or the test proves nothing.
  CHECK(accepted > 500);
  CHECK(refused > 500);
}

}  // namespace
}  // namespace pocket
