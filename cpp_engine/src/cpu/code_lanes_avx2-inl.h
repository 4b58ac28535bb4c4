// code_lanes_scalar-inl.h says what each function does.

#include <immintrin.h>

#include <cstdint>

#include "block_layouts.h"
#include "pocket/quant/coded_block.h"

namespace pocket::POCKET_ISA {
namespace {

constexpr std::size_t kCodedTileRows = 4;
// `dot_iq4` takes the offset off its bytes first: with signs moved to q, 127 * 127 * 2 fits 16
// bits.
constexpr unsigned kIq4DotShift = 0;
constexpr bool kIq4DotHasOffset = false;

template <unsigned kMask, int kShift>
inline Bytes field(const Bytes& v) {
  const auto half = [](__m256i x) {
    if constexpr (kShift > 0) {
      x = _mm256_srli_epi16(x, kShift);
    } else if constexpr (kShift < 0) {
      x = _mm256_slli_epi16(x, -kShift);
    }
    return _mm256_and_si256(x, _mm256_set1_epi8(kMask));
  };
  return {half(v.low), half(v.high)};
}
inline Bytes either(const Bytes& a, const Bytes& b) {
  return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
}
inline Bytes iq4_bytes(const Bytes& codes) {
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kIq4Values));
  const __m256i table = _mm256_broadcastsi128_si256(_mm_xor_si128(values, _mm_set1_epi8(-128)));
  return {_mm256_shuffle_epi8(table, codes.low), _mm256_shuffle_epi8(table, codes.high)};
}
inline void store_bytes(std::uint8_t* to, const Bytes& v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), v.low);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + 1, v.high);
}

inline Ints add(const Ints& a, const Ints& b) {
  return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
template <unsigned kShift>
inline Ints times_power(const Ints& a) {
  return {_mm256_slli_epi32(a.low, kShift), _mm256_slli_epi32(a.high, kShift)};
}

/// Sums of 16-bit lanes before they are widened: as many column groups as cannot overflow.
template <unsigned kMaxCode>
inline __m256i half_block_sums(const __m256i* w, const __m256i* q) {
  static_assert(2 * 2 * kMaxCode * 127 <= 32767, "two groups' products must fit 16 bits");
  const auto products = [&](std::size_t group) { return _mm256_maddubs_epi16(w[group], q[group]); };
  const __m256i ones = _mm256_set1_epi16(1);
  const __m256i first = _mm256_add_epi16(products(0), products(1));
  const __m256i second = _mm256_add_epi16(products(2), products(3));
  if constexpr (4 * 2 * kMaxCode * 127 <= 32767) {
    return _mm256_madd_epi16(_mm256_add_epi16(first, second), ones);
  } else {
    return _mm256_add_epi32(_mm256_madd_epi16(first, ones), _mm256_madd_epi16(second, ones));
  }
}
template <unsigned kMaxCode>
inline Ints dot_half_block(const Ints& start, const Bytes* w, const std::int8_t* q,
                           std::size_t step) {
  __m256i groups[4];
#pragma GCC unroll 4
  for (std::size_t group = 0; group < 4; ++group) {
    groups[group] = splat_group(q + step * group).low;
  }
  const __m256i low[4] = {w[0].low, w[1].low, w[2].low, w[3].low};
  const __m256i high[4] = {w[0].high, w[1].high, w[2].high, w[3].high};
  return {_mm256_add_epi32(start.low, half_block_sums<kMaxCode>(low, groups)),
          _mm256_add_epi32(start.high, half_block_sums<kMaxCode>(high, groups))};
}
inline Ints dot_iq4(const Ints& start, const Bytes* w, const std::int8_t* q, std::size_t step) {
  const auto dot = [](__m256i bytes, __m256i group) {
    const __m256i values = _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));
    const __m256i pairs =
        _mm256_maddubs_epi16(_mm256_abs_epi8(values), _mm256_sign_epi8(group, values));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  };
  Ints sum = start;
#pragma GCC unroll 4
  for (std::size_t group = 0; group < 4; ++group) {
    const __m256i at = splat_group(q + step * group).low;
    sum = add(sum, Ints{dot(w[group].low, at), dot(w[group].high, at)});
  }
  return sum;
}

inline __m256i eight_unsigned(const std::uint8_t* from) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
inline __m256i eight_signed(const std::uint8_t* from) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
inline Vec load_unsigned(const std::uint8_t* from) {
  return {_mm256_cvtepi32_ps(eight_unsigned(from)), _mm256_cvtepi32_ps(eight_unsigned(from + 8))};
}
inline Vec load_signed(const std::uint8_t* from) {
  return {_mm256_cvtepi32_ps(eight_signed(from)), _mm256_cvtepi32_ps(eight_signed(from + 8))};
}
inline Vec load_low_nibbles(const std::uint8_t* from) {
  const auto half = [](const std::uint8_t* at) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(eight_unsigned(at), _mm256_set1_epi32(15)));
  };
  return {half(from), half(from + 8)};
}
inline Vec load_high_nibbles(const std::uint8_t* from) {
  const auto half = [](const std::uint8_t* at) {
    return _mm256_cvtepi32_ps(_mm256_srli_epi32(eight_unsigned(at), 4));
  };
  return {half(from), half(from + 8)};
}

}  // namespace
}  // namespace pocket::POCKET_ISA
