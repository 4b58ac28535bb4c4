#include "pocket/base/half.h"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pocket {
namespace {

constexpr std::uint32_t bits(float value) {
  return std::bit_cast<std::uint32_t>(value);
}

// From the definition of the format, in double arithmetic. Not for infinities and NaNs.
double half_value(std::uint16_t half) {
  const int exponent = (half >> 10) & 0x1f;
  const int mantissa = half & 0x3ff;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return (half & 0x8000) != 0 ? -magnitude : magnitude;
}

static_assert(half_to_float(0x3c00) == 1.0f);
static_assert(float_to_half(1.0f) == 0x3c00);
static_assert(bfloat16_to_float(0x3f80) == 1.0f);
static_assert(float_to_bfloat16(1.0f) == 0x3f80);

TEST_CASE("every half decodes to its defined value") {
  for (std::uint32_t h = 0; h < 0x10000; ++h) {
    const auto half = static_cast<std::uint16_t>(h);
    const float decoded = half_to_float(half);
    if ((half & 0x7c00) != 0x7c00) {
      REQUIRE(bits(decoded) == bits(static_cast<float>(half_value(half))));
    } else if ((half & 0x3ff) == 0) {
      REQUIRE(std::isinf(decoded));
      REQUIRE(std::signbit(decoded) == ((half & 0x8000) != 0));
    } else {
      REQUIRE(std::isnan(decoded));
      REQUIRE((bits(decoded) & 0x00400000u) != 0);
    }
  }
}

TEST_CASE("every half survives the way through float") {
  for (std::uint32_t h = 0; h < 0x10000; ++h) {
    const auto half = static_cast<std::uint16_t>(h);
    const bool nan = (half & 0x7c00) == 0x7c00 && (half & 0x3ff) != 0;
    REQUIRE(float_to_half(half_to_float(half)) == (nan ? half | 0x200 : half));
  }
}

TEST_CASE("floats round to the nearest half, ties to even, at every boundary") {
  for (std::uint16_t low = 0; low < 0x7bff; ++low) {
    const auto high = static_cast<std::uint16_t>(low + 1);
    // Exact: neighbours have 11 significant bits, the midpoint 12.
    const auto middle = static_cast<float>((half_value(low) + half_value(high)) / 2);
    const std::uint16_t even = (low & 1) == 0 ? low : high;
    const float below = std::nextafterf(middle, 0.0f);
    const float above = std::nextafterf(middle, std::numeric_limits<float>::infinity());
    REQUIRE(float_to_half(middle) == even);
    REQUIRE(float_to_half(below) == low);
    REQUIRE(float_to_half(above) == high);
    REQUIRE(float_to_half(-middle) == (even | 0x8000));
    REQUIRE(float_to_half(-below) == (low | 0x8000));
    REQUIRE(float_to_half(-above) == (high | 0x8000));
  }
}

TEST_CASE("beyond the largest half") {
  CHECK(float_to_half(65504.0f) == 0x7bff);
  CHECK(float_to_half(std::nextafterf(65520.0f, 0.0f)) == 0x7bff);
  CHECK(float_to_half(65520.0f) == 0x7c00);
  CHECK(float_to_half(-1e30f) == 0xfc00);
  CHECK(float_to_half(std::numeric_limits<float>::infinity()) == 0x7c00);
  CHECK(float_to_half(std::numeric_limits<float>::denorm_min()) == 0);
  CHECK(float_to_half(-std::numeric_limits<float>::denorm_min()) == 0x8000);
}

#if defined(__x86_64__)
__attribute__((target("f16c"))) std::uint16_t hardware_half(float value) {
  return static_cast<std::uint16_t>(
      _mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(value), _MM_FROUND_TO_NEAREST_INT)));
}
__attribute__((target("f16c"))) float hardware_float(std::uint16_t half) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
}

TEST_CASE("conversions equal F16C bit for bit, NaNs included") {
  if (!__builtin_cpu_supports("avx2")) return;  // every CPU with AVX2 has F16C
  for (std::uint32_t h = 0; h < 0x10000; ++h) {
    const auto half = static_cast<std::uint16_t>(h);
    REQUIRE(bits(half_to_float(half)) == bits(hardware_float(half)));
  }
  // A prime stride over all 2^32 patterns reaches every exponent with varied mantissas.
  for (std::uint64_t pattern = 0; pattern < (std::uint64_t{1} << 32); pattern += 4099) {
    const float value = std::bit_cast<float>(static_cast<std::uint32_t>(pattern));
    if (float_to_half(value) != hardware_half(value)) {
      CAPTURE(pattern);
      REQUIRE(float_to_half(value) == hardware_half(value));
    }
  }
}
#endif

TEST_CASE("bfloat16 is the upper half of a float") {
  for (std::uint32_t b = 0; b < 0x10000; ++b) {
    const auto value = static_cast<std::uint16_t>(b);
    REQUIRE(bits(bfloat16_to_float(value)) == b << 16);
    const bool nan = (value & 0x7fff) > 0x7f80;
    REQUIRE(float_to_bfloat16(bfloat16_to_float(value)) == (nan ? value | 0x40 : value));
  }
}

TEST_CASE("floats round to the nearest bfloat16, ties to even, at every boundary") {
  for (std::uint32_t low = 0; low < 0x7f80; ++low) {  // the last step goes to infinity
    const std::uint32_t tie = low << 16 | 0x8000;
    const std::uint32_t even = (low & 1) == 0 ? low : low + 1;
    REQUIRE(float_to_bfloat16(std::bit_cast<float>(tie)) == even);
    REQUIRE(float_to_bfloat16(std::bit_cast<float>(tie - 1)) == low);
    REQUIRE(float_to_bfloat16(std::bit_cast<float>(tie + 1)) == low + 1);
    REQUIRE(float_to_bfloat16(std::bit_cast<float>(tie | 0x80000000u)) == (even | 0x8000));
  }
  CHECK(float_to_bfloat16(std::bit_cast<float>(0x7f800001u)) == 0x7fc0);  // not infinity
}

}  // namespace
}  // namespace pocket
