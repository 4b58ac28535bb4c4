// int_lanes_scalar-inl.h says what each function does.

#include <immintrin.h>

#include <cstdint>

namespace pocket::POCKET_ISA {
namespace {

struct Ints {
  __m256i low;
  __m256i high;
};
using Bytes = Ints;

inline Ints splat_int(std::int32_t value) {
  return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)};
}
inline Bytes load_bytes(const void* from) {
  const auto* at = static_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
inline Bytes splat_group(const void* from) {
  std::int32_t group;
  __builtin_memcpy(&group, from, sizeof group);
  return splat_int(group);
}
/// VPMADDUBSW would saturate at 255 * 127 * 2: even and odd bytes are widened to 16 bits instead.
inline __m256i dot_half(__m256i acc, __m256i a, __m256i b) {
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
inline Ints dot_add(const Ints& acc, const Bytes& unsigned_bytes, const Bytes& signed_bytes) {
  return {dot_half(acc.low, unsigned_bytes.low, signed_bytes.low),
          dot_half(acc.high, unsigned_bytes.high, signed_bytes.high)};
}
inline Ints sub(const Ints& a, const Ints& b) {
  return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)};
}
inline Ints times_256(const Ints& a) {
  return {_mm256_slli_epi32(a.low, 8), _mm256_slli_epi32(a.high, 8)};
}
inline Vec to_float(const Ints& a) {
  return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)};
}
inline Vec larger_magnitude(const Vec& a, const Vec& b) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  const auto larger = [&](__m256 x, __m256 y) {
    return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_and_si256(_mm256_castps_si256(x), mask),
                                                _mm256_and_si256(_mm256_castps_si256(y), mask)));
  };
  return {larger(a.low, b.low), larger(a.high, b.high)};
}
inline void store_split_codes(std::uint8_t* high, std::uint8_t* low, const Vec& v) {
  // Packing works within 128-bit halves; the permutation puts the 64-bit groups back in order.
  const __m256i packed = _mm256_packus_epi32(_mm256_cvtps_epi32(v.low), _mm256_cvtps_epi32(v.high));
  const __m256i codes = _mm256_permute4x64_epi64(packed, 0xd8);
  const auto bytes = [](__m256i words) {
    return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  };
  _mm_storeu_si128(reinterpret_cast<__m128i*>(low),
                   bytes(_mm256_and_si256(codes, _mm256_set1_epi16(255))));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(high), bytes(_mm256_srli_epi16(codes, 8)));
}
inline std::int32_t store_signed_codes(std::int8_t* to, const Vec& v) {
  const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(v.low), _mm256_cvtps_epi32(v.high));
  const __m256i words = _mm256_permute4x64_epi64(packed, 0xd8);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(to),
      _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  const __m256i eight = _mm256_madd_epi16(words, _mm256_set1_epi16(1));
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1));
  return _mm_cvtsi128_si32(four);
}

}  // namespace
}  // namespace pocket::POCKET_ISA
