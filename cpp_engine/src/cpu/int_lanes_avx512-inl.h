// int_lanes_scalar-inl.h says what each function does.

#include <immintrin.h>

#include <cstdint>

namespace pocket::POCKET_ISA {
namespace {

// Both are one register; distinct types would add nothing but conversions.
using Ints = __m512i;
using Bytes = __m512i;

inline Ints splat_int(std::int32_t value) {
  return _mm512_set1_epi32(value);
}
inline Bytes load_bytes(const void* from) {
  return _mm512_loadu_si512(from);
}
inline Bytes splat_group(const void* from) {
  std::int32_t group;
  __builtin_memcpy(&group, from, sizeof group);
  return _mm512_set1_epi32(group);
}
inline Ints dot_add(Ints acc, Bytes unsigned_bytes, Bytes signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(unsigned_bytes), "v"(signed_bytes));
  return acc;
}
inline Ints sub(Ints a, Ints b) {
  return _mm512_sub_epi32(a, b);
}
inline Ints times_256(Ints a) {
  return _mm512_slli_epi32(a, 8);
}
inline Vec to_float(Ints a) {
  return _mm512_cvtepi32_ps(a);
}
inline Vec larger_magnitude(Vec a, Vec b) {
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(a), mask),
                                              _mm512_and_si512(_mm512_castps_si512(b), mask)));
}
inline void store_split_codes(std::uint8_t* high, std::uint8_t* low, Vec v) {
  const __m512i codes = _mm512_cvtps_epi32(v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm512_cvtepi32_epi8(codes));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(high),
                   _mm512_cvtepi32_epi8(_mm512_srli_epi32(codes, 8)));
}
inline std::int32_t store_signed_codes(std::int8_t* to, Vec v) {
  const __m128i codes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), codes);
  __m128i four = _mm_dpbusd_epi32(_mm_setzero_si128(), _mm_set1_epi8(1), codes);
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1));
  return _mm_cvtsi128_si32(four);
}

}  // namespace
}  // namespace pocket::POCKET_ISA
