// Sixteen float lanes in plain C++: the oracle. Included by table_scalar.cpp inside its namespace's
// translation unit only; vec16_avx2-inl.h and vec16_avx512-inl.h define the same names, and every
// function here states the operation that the other two must reproduce bit for bit.

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "pocket/base/half.h"

namespace pocket::POCKET_ISA {
namespace {

constexpr std::size_t kLanes = 16;
/// Attention tile: queries in flight, blocks of 16 positions in flight, vectors of 16 dimensions.
constexpr std::size_t kTileQueries = 2;
constexpr std::size_t kTileBlocks = 1;
constexpr std::size_t kTileDims = 2;
/// Float matmul tile: rows by panels in flight.
constexpr std::size_t kFloatRows = 2;
constexpr std::size_t kFloatPanels = 1;

struct Vec {
  float lane[kLanes];
};

template <typename Function>
Vec each(Function function) {
  Vec out;
  for (std::size_t i = 0; i < kLanes; ++i) {
    out.lane[i] = function(i);
  }
  return out;
}

Vec splat(float value) {
  return each([=](std::size_t) { return value; });
}
Vec zero() {
  return splat(0.0f);
}
Vec load(const float* from) {
  return each([=](std::size_t i) { return from[i]; });
}
/// The first `count` values, then zeros.
Vec load_first(const float* from, std::size_t count) {
  return each([=](std::size_t i) { return i < count ? from[i] : 0.0f; });
}
void store(float* to, const Vec& v) {
  std::memcpy(to, v.lane, sizeof v.lane);
}
void store_first(float* to, const Vec& v, std::size_t count) {
  std::memcpy(to, v.lane, count * sizeof(float));
}

Vec load(const std::uint16_t* halves) {
  return each([=](std::size_t i) { return half_to_float(halves[i]); });
}
Vec load_bfloat16(const std::uint16_t* from) {
  return each([=](std::size_t i) { return bfloat16_to_float(from[i]); });
}
void store_half(std::uint16_t* to, const Vec& v) {
  for (std::size_t i = 0; i < kLanes; ++i) {
    to[i] = float_to_half(v.lane[i]);
  }
}

Vec add(const Vec& a, const Vec& b) {
  return each([&](std::size_t i) { return a.lane[i] + b.lane[i]; });
}
Vec sub(const Vec& a, const Vec& b) {
  return each([&](std::size_t i) { return a.lane[i] - b.lane[i]; });
}
Vec mul(const Vec& a, const Vec& b) {
  return each([&](std::size_t i) { return a.lane[i] * b.lane[i]; });
}
Vec div(const Vec& a, const Vec& b) {
  return each([&](std::size_t i) { return a.lane[i] / b.lane[i]; });
}
/// a * b + c, rounded once
Vec fma(const Vec& a, const Vec& b, const Vec& c) {
  return each([&](std::size_t i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
}
/// c - a * b, rounded once
Vec fnma(const Vec& a, const Vec& b, const Vec& c) {
  return each([&](std::size_t i) { return std::fma(-a.lane[i], b.lane[i], c.lane[i]); });
}
/// MAXPS and MINPS: b when the comparison fails, so a NaN in b survives.
Vec max(const Vec& a, const Vec& b) {
  return each([&](std::size_t i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
Vec min(const Vec& a, const Vec& b) {
  return each([&](std::size_t i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
/// To the nearest integer, ties to even.
Vec round(const Vec& a) {
  return each([&](std::size_t i) { return std::nearbyint(a.lane[i]); });
}
/// a * 2^n for integral n, |n| <= 150, rounded once (the first product is exact for a in [0.5, 2]).
Vec scale_by_power(const Vec& a, const Vec& n) {
  return each([&](std::size_t i) {
    // A NaN exponent comes with a NaN in `a`, which decides the result.
    const int power = n.lane[i] == n.lane[i] ? static_cast<int>(n.lane[i]) : 0;
    const int half = power >> 1;
    const auto factor = [](int e) { return std::bit_cast<float>((e + 127) << 23); };
    return a.lane[i] * factor(half) * factor(power - half);
  });
}
/// The first `count` lanes of v, then `fill`.
Vec keep_first(const Vec& v, std::size_t count, float fill) {
  return each([&](std::size_t i) { return i < count ? v.lane[i] : fill; });
}

/// Lanes i and i + 8, then i + 4, i + 2, i + 1.
float reduce_add(Vec v) {
  for (std::size_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::size_t i = 0; i < width; ++i) {
      v.lane[i] = v.lane[i] + v.lane[i + width];
    }
  }
  return v.lane[0];
}
float reduce_max(Vec v) {
  for (std::size_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::size_t i = 0; i < width; ++i) {
      v.lane[i] = v.lane[i] > v.lane[i + width] ? v.lane[i] : v.lane[i + width];
    }
  }
  return v.lane[0];
}
float square_root(float value) {
  return std::sqrt(value);
}

bool any_nan(const Vec& v) {
  bool found = false;
  for (const float lane : v.lane) {
    found |= lane != lane;
  }
  return found;
}
/// Largest magnitude of 32 values, as bits: NaN > infinity > every number.
std::uint32_t max_magnitude(const Vec& a, const Vec& b) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < 2 * kLanes; ++i) {
    const float lane = i < kLanes ? a.lane[i] : b.lane[i - kLanes];
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(lane) & 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}
/// Stores 32 values, rounded to nearest even, as int8, and the sums of each 16 of them.
void store_codes(std::int8_t* to, const Vec& a, const Vec& b, std::int32_t* sums) {
  sums[0] = 0;
  sums[1] = 0;
  for (std::size_t i = 0; i < kLanes; ++i) {
    to[i] = static_cast<std::int8_t>(std::nearbyint(a.lane[i]));
    to[i + kLanes] = static_cast<std::int8_t>(std::nearbyint(b.lane[i]));
    sums[0] += to[i];
    sums[1] += to[i + kLanes];
  }
}

/// Column `column` (0..31) of a block of packed codes, as floats: lane = row.
template <bool kNibbles>
Vec load_code_column(const std::uint8_t* codes, std::size_t column) {
  const std::size_t stored = kNibbles ? column % 16 : column;
  const std::uint8_t* at = codes + stored / 4 * 64 + stored % 4;
  return each([=](std::size_t i) {
    const int byte = at[4 * i];
    return static_cast<float>(!kNibbles ? byte : column < 16 ? byte & 15 : byte >> 4);
  });
}

}  // namespace
}  // namespace pocket::POCKET_ISA
