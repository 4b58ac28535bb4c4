#include "pocket/quant/dequantize.h"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "pocket/base/error.h"

namespace pocket {
namespace {

struct Vector {
  DType type;
  std::vector<std::uint8_t> stored;
  std::vector<std::uint32_t> expected;  // bits of float32; any NaN stands for any NaN
};

const std::vector<Vector>& vectors() {
  static const std::vector<Vector> all = {
#include "dequantize_vectors.inc"
  };
  return all;
}

bool same_bits(float got, std::uint32_t expected) {
  return std::isnan(std::bit_cast<float>(expected)) ? std::isnan(got)
                                                    : std::bit_cast<std::uint32_t>(got) == expected;
}

TEST_CASE("rows decode bit for bit as gguf.dequantize does, at any alignment") {
  for (const Vector& vector : vectors()) {
    for (std::size_t shift = 0; shift < 4; ++shift) {
      CAPTURE(dtype_info(vector.type).name);
      CAPTURE(shift);
      std::vector<std::uint8_t> shifted(shift, 0xee);
      shifted.insert(shifted.end(), vector.stored.begin(), vector.stored.end());
      std::vector<float> out(vector.expected.size(), -1.0f);
      dequantize_row(vector.type, std::as_bytes(std::span(shifted)).subspan(shift), out);
      for (std::size_t i = 0; i < out.size(); ++i) {
        CAPTURE(i);
        REQUIRE(same_bits(out[i], vector.expected[i]));
      }
    }
  }
}

TEST_CASE("there are vectors for every supported format") {
  for (std::uint32_t id = 0; id < 64; ++id) {
    if (!is_supported_dtype(id)) continue;
    CAPTURE(id);
    bool found = false;
    for (const Vector& vector : vectors()) found |= static_cast<std::uint32_t>(vector.type) == id;
    CHECK(found);
  }
}

TEST_CASE("an empty row decodes to nothing") {
  for (const Vector& vector : vectors()) dequantize_row(vector.type, {}, {});
}

TEST_CASE("sizes that do not fit are refused with both byte counts") {
  std::vector<std::byte> stored(18);
  std::vector<float> out(64);
  try {
    dequantize_row(DType::kQ4_0, stored, out);
    FAIL("no exception");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kInvalidArgument);
    const std::string message = error.what();
    CHECK(message.find("36 bytes") != std::string::npos);
    CHECK(message.find("18") != std::string::npos);
  }
  out.resize(31);
  CHECK_THROWS_AS(dequantize_row(DType::kQ4_0, stored, out), Error);
  CHECK_THROWS_AS(dequantize_row(static_cast<DType>(29), stored, out), Error);
}

}  // namespace
}  // namespace pocket
