// code_lanes_scalar-inl.h says what each function does.

#include <immintrin.h>

#include <cstdint>

#include "block_layouts.h"
#include "pocket/quant/coded_block.h"

namespace pocket::POCKET_ISA {
namespace {

constexpr std::size_t kCodedTileRows = 8;
constexpr unsigned kIq4DotShift = 7;
constexpr bool kIq4DotHasOffset = true;

template <unsigned kMask, int kShift>
inline Bytes field(Bytes v) {
  if constexpr (kShift > 0) {
    v = _mm512_srli_epi16(v, kShift);
  } else if constexpr (kShift < 0) {
    v = _mm512_slli_epi16(v, -kShift);
  }
  return _mm512_and_si512(v, _mm512_set1_epi8(kMask));
}
inline Bytes either(Bytes a, Bytes b) {
  return _mm512_or_si512(a, b);
}
inline Bytes iq4_bytes(Bytes codes) {
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kIq4Values));
  const __m128i offset = _mm_xor_si128(values, _mm_set1_epi8(-128));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(offset), codes);
}
inline void store_bytes(std::uint8_t* to, Bytes v) {
  _mm512_storeu_si512(to, v);
}

inline Ints add(Ints a, Ints b) {
  return _mm512_add_epi32(a, b);
}
template <unsigned kShift>
inline Ints times_power(Ints a) {
  return _mm512_slli_epi32(a, kShift);
}

template <unsigned kMaxCode>
inline Ints dot_half_block(Ints start, const Bytes* w, const std::int8_t* q, std::size_t step) {
#pragma GCC unroll 4
  for (std::size_t group = 0; group < 4; ++group) {
    start = _mm512_dpbusd_epi32(start, w[group], splat_group(q + step * group));
  }
  return start;
}
inline Ints dot_iq4(Ints start, const Bytes* w, const std::int8_t* q, std::size_t step) {
  return dot_half_block<255>(start, w, q, step);
}

inline __m128i load_16_bytes(const std::uint8_t* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
inline Vec load_unsigned(const std::uint8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_16_bytes(from)));
}
inline Vec load_signed(const std::uint8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16_bytes(from)));
}
inline Vec load_low_nibbles(const std::uint8_t* from) {
  const __m512i bytes = _mm512_cvtepu8_epi32(load_16_bytes(from));
  return _mm512_cvtepi32_ps(_mm512_and_si512(bytes, _mm512_set1_epi32(15)));
}
inline Vec load_high_nibbles(const std::uint8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_srli_epi32(_mm512_cvtepu8_epi32(load_16_bytes(from)), 4));
}

}  // namespace
}  // namespace pocket::POCKET_ISA
