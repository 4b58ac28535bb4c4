// Sixteen lanes of bfloat16 pairs in two 256-bit registers; pair_lanes_scalar-inl.h says what each
// function does.

#include <immintrin.h>

#include <cstdint>

namespace pocket::POCKET_ISA {
namespace {

struct Pairs {
  __m256i low;   ///< lanes 0..7
  __m256i high;  ///< lanes 8..15
};

inline Pairs load_pairs(const std::uint16_t* from) {
  const auto* at = reinterpret_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
inline Pairs splat_pair(const std::uint16_t* from) {
  std::int32_t pair;
  __builtin_memcpy(&pair, from, sizeof pair);
  return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
}
template <std::uint32_t kMask>
Pairs keep_bits(const Pairs& a) {
  const __m256i kept = _mm256_set1_epi32(static_cast<int>(kMask));
  return {_mm256_and_si256(a.low, kept), _mm256_and_si256(a.high, kept)};
}

inline __m256 odd_values(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
}
inline __m256 even_values(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}
inline __m256 pair_dot_half(__m256 acc, __m256i a, __m256i b) {
  acc = _mm256_fmadd_ps(odd_values(a), odd_values(b), acc);
  return _mm256_fmadd_ps(even_values(a), even_values(b), acc);
}
template <bool kInstruction>
Vec pair_dot_add(const Vec& acc, const Pairs& a, const Pairs& b) {
  return {pair_dot_half(acc.low, a.low, b.low), pair_dot_half(acc.high, a.high, b.high)};
}

/// Eight values as bfloat16 in the low halves of 32-bit lanes.
inline __m256i to_bfloat16(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i top = _mm256_srli_epi32(bits, 16);
  const __m256i tie = _mm256_and_si256(top, _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(bits, _mm256_add_epi32(tie, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
  const __m256i exponent = _mm256_and_si256(bits, _mm256_set1_epi32(0x7f800000));
  const __m256i denormal = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
  const __m256i sign = _mm256_and_si256(top, _mm256_set1_epi32(0x8000));
  return _mm256_blendv_epi8(_mm256_blendv_epi8(rounded, quiet, nan), sign, denormal);
}
template <bool kInstruction>
void store_bfloat16(std::uint16_t* to, const Vec& v) {
  // Packing works within 128-bit halves; the permutation puts the groups of 64 bits back in order.
  const __m256i packed = _mm256_packus_epi32(to_bfloat16(v.low), to_bfloat16(v.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(packed, 0xd8));
}

}  // namespace
}  // namespace pocket::POCKET_ISA
