// Sixteen float lanes in two 256-bit registers; vec16_scalar-inl.h says what each function does.

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace pocket::POCKET_ISA {
namespace {

constexpr std::size_t kLanes = 16;
// 6 queries x 1 block are 12 accumulators; 4 of the 16 registers are left for operands.
constexpr std::size_t kTileQueries = 6;
constexpr std::size_t kTileBlocks = 1;
constexpr std::size_t kTileDims = 1;
constexpr std::size_t kFloatRows = 6;
constexpr std::size_t kFloatPanels = 1;

struct Vec {
  __m256 low;   ///< lanes 0..7
  __m256 high;  ///< lanes 8..15
};

constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

/// All-ones in the lanes begin..begin + 7 that are below `count`.
inline __m256i lane_mask(std::size_t count, int begin) {
  const __m256i index =
      _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(begin));
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), index);
}

inline Vec splat(float value) {
  return {_mm256_set1_ps(value), _mm256_set1_ps(value)};
}
inline Vec zero() {
  return {_mm256_setzero_ps(), _mm256_setzero_ps()};
}
inline Vec load(const float* from) {
  return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
}
inline Vec load_first(const float* from, std::size_t count) {
  // The second address may lie past the array: a masked load touches only the lanes it returns.
  return {_mm256_maskload_ps(from, lane_mask(count, 0)),
          _mm256_maskload_ps(from + 8, lane_mask(count, 8))};
}
inline void store(float* to, const Vec& v) {
  _mm256_storeu_ps(to, v.low);
  _mm256_storeu_ps(to + 8, v.high);
}
inline void store_first(float* to, const Vec& v, std::size_t count) {
  _mm256_maskstore_ps(to, lane_mask(count, 0), v.low);
  _mm256_maskstore_ps(to + 8, lane_mask(count, 8), v.high);
}

inline __m128i load_words(const std::uint16_t* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
inline Vec load(const std::uint16_t* halves) {
  return {_mm256_cvtph_ps(load_words(halves)), _mm256_cvtph_ps(load_words(halves + 8))};
}
inline __m256 widen_bfloat16(__m128i words) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}
inline Vec load_bfloat16(const std::uint16_t* from) {
  return {widen_bfloat16(load_words(from)), widen_bfloat16(load_words(from + 8))};
}
inline void store_half(std::uint16_t* to, const Vec& v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(v.low, kNearest));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 8), _mm256_cvtps_ph(v.high, kNearest));
}

inline Vec add(const Vec& a, const Vec& b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
inline Vec sub(const Vec& a, const Vec& b) {
  return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
inline Vec mul(const Vec& a, const Vec& b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
inline Vec div(const Vec& a, const Vec& b) {
  return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
inline Vec fma(const Vec& a, const Vec& b, const Vec& c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Vec fnma(const Vec& a, const Vec& b, const Vec& c) {
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
inline Vec max(const Vec& a, const Vec& b) {
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
inline Vec min(const Vec& a, const Vec& b) {
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
inline Vec round(const Vec& a) {
  return {_mm256_round_ps(a.low, kNearest), _mm256_round_ps(a.high, kNearest)};
}
inline __m256 scale_half(__m256 a, __m256 n) {
  const __m256i power = _mm256_cvtps_epi32(n);
  const __m256i part = _mm256_srai_epi32(power, 1);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(part, bias), 23);
  const __m256i second =
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(power, part), bias), 23);
  return _mm256_mul_ps(_mm256_mul_ps(a, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second));
}
inline Vec scale_by_power(const Vec& a, const Vec& n) {
  return {scale_half(a.low, n.low), scale_half(a.high, n.high)};
}
inline Vec keep_first(const Vec& v, std::size_t count, float fill) {
  const __m256 other = _mm256_set1_ps(fill);
  return {_mm256_blendv_ps(other, v.low, _mm256_castsi256_ps(lane_mask(count, 0))),
          _mm256_blendv_ps(other, v.high, _mm256_castsi256_ps(lane_mask(count, 8)))};
}

inline float reduce_add(const Vec& v) {
  const __m256 eight = _mm256_add_ps(v.low, v.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float reduce_max(const Vec& v) {
  const __m256 eight = _mm256_max_ps(v.low, v.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline float square_root(float value) {
  return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(value)));
}

inline bool any_nan(const Vec& v) {
  const __m256 low = _mm256_cmp_ps(v.low, v.low, _CMP_UNORD_Q);
  const __m256 high = _mm256_cmp_ps(v.high, v.high, _CMP_UNORD_Q);
  return _mm256_movemask_ps(_mm256_or_ps(low, high)) != 0;
}

inline std::uint32_t max_magnitude(const Vec& a, const Vec& b) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  const auto bits = [&](__m256 v) { return _mm256_and_si256(_mm256_castps_si256(v), mask); };
  const __m256i eight = _mm256_max_epu32(_mm256_max_epu32(bits(a.low), bits(a.high)),
                                         _mm256_max_epu32(bits(b.low), bits(b.high)));
  __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(four));
}

inline void store_codes(std::int8_t* to, const Vec& a, const Vec& b, std::int32_t* sums) {
  // Packing works within 128-bit halves; the permutation puts the 32-bit groups back in order.
  const __m256i first = _mm256_packs_epi32(_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high));
  const __m256i second = _mm256_packs_epi32(_mm256_cvtps_epi32(b.low), _mm256_cvtps_epi32(b.high));
  const __m256i codes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second),
                                                    _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), codes);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), codes);
  const __m256i eight = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  const __m128i pairs_of_sums =
      _mm_hadd_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(sums), _mm_hadd_epi32(pairs_of_sums, pairs_of_sums));
}

template <bool kNibbles>
Vec load_code_column(const std::uint8_t* codes, std::size_t column) {
  const std::size_t stored = kNibbles ? column % 16 : column;
  const int shift = static_cast<int>(8 * (stored % 4) + (kNibbles && column >= 16 ? 4 : 0));
  const auto* words = reinterpret_cast<const __m256i*>(codes + stored / 4 * 64);
  const __m256i mask = _mm256_set1_epi32(kNibbles ? 15 : 255);
  const auto decode = [&](__m256i v) {
    return _mm256_cvtepi32_ps(
        _mm256_and_si256(_mm256_srl_epi32(v, _mm_cvtsi32_si128(shift)), mask));
  };
  return {decode(_mm256_loadu_si256(words)), decode(_mm256_loadu_si256(words + 1))};
}

}  // namespace
}  // namespace pocket::POCKET_ISA
