#include "pocket/base/aligned_buffer.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "pocket/base/error.h"

namespace pocket {
namespace {

bool all_zero(const AlignedBuffer& buffer) {
  return std::all_of(buffer.data(), buffer.data() + buffer.size(),
                     [](std::byte b) { return b == std::byte{0}; });
}

TEST_CASE("buffers of any size are zeroed, aligned to 2 MiB and writable to the last byte") {
  const std::size_t huge = AlignedBuffer::kAlignment;
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{4095}, std::size_t{4096},
                                  std::size_t{4097}, huge - 1, huge, huge + 1, 3 * huge}) {
    CAPTURE(bytes);
    AlignedBuffer buffer(bytes);
    CHECK(buffer.size() == bytes);
    CHECK(reinterpret_cast<std::uintptr_t>(buffer.data()) % huge == 0);
    CHECK(all_zero(buffer));
    std::fill_n(buffer.data(), bytes, std::byte{0xa5});
    CHECK(buffer.data()[bytes - 1] == std::byte{0xa5});
  }
}

TEST_CASE("an empty buffer maps nothing") {
  const AlignedBuffer defaulted;
  const AlignedBuffer sized(0);
  CHECK(defaulted.data() == nullptr);
  CHECK(sized.data() == nullptr);
  CHECK(sized.size() == 0);
}

TEST_CASE("moving hands the mapping over") {
  AlignedBuffer first(100);
  std::byte* const address = first.data();
  address[7] = std::byte{7};
  AlignedBuffer second(std::move(first));
  CHECK(second.data() == address);
  AlignedBuffer third(5);
  third = std::move(second);
  CHECK(third.data() == address);
  CHECK(third.size() == 100);
  CHECK(third.data()[7] == std::byte{7});
  CHECK(second.data() == nullptr);  // NOLINT(bugprone-use-after-move): moved-from means empty
  AlignedBuffer& self = third;
  third = std::move(self);
  CHECK(third.data() == address);
}

TEST_CASE("a size that the machine cannot have is refused, not mapped") {
  for (const std::size_t bytes : {std::size_t{1} << 60, std::numeric_limits<std::size_t>::max(),
                                  std::numeric_limits<std::size_t>::max() / 2}) {
    CAPTURE(bytes);
    try {
      const AlignedBuffer buffer(bytes);
      FAIL("no exception");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kResourceExhausted);
    }
  }
}

TEST_CASE("views check bounds and alignment without overflow") {
  AlignedBuffer buffer(64);
  CHECK(buffer.view<float>(0, 16).size() == 16);
  CHECK(buffer.view<float>(60, 1).size() == 1);
  CHECK(buffer.view<double>(64, 0).empty());
  CHECK_THROWS_AS((void)buffer.view<float>(0, 17), Error);
  CHECK_THROWS_AS((void)buffer.view<float>(64, 1), Error);
  CHECK_THROWS_AS((void)buffer.view<float>(65, 0), Error);
  CHECK_THROWS_AS((void)buffer.view<float>(2, 1), Error);
  CHECK_THROWS_AS((void)buffer.view<double>(8, std::numeric_limits<std::size_t>::max() / 8 + 2),
                  Error);
}

}  // namespace
}  // namespace pocket
