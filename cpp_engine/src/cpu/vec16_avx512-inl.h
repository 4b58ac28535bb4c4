// Sixteen float lanes in one 512-bit register; vec16_scalar-inl.h says what each function does.

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace pocket::POCKET_ISA {
namespace {

constexpr std::size_t kLanes = 16;
// 6 queries x 4 blocks (or 4 x 16 dimensions) keep 24 accumulators in flight, enough for two FMA
// pipes of latency 4, and load 10 vectors for 24 multiply-adds; 8 registers are left for operands.
constexpr std::size_t kTileQueries = 6;
constexpr std::size_t kTileBlocks = 4;
constexpr std::size_t kTileDims = 4;
// Likewise for the float matmul; more rows than panels, so that few streams of weights are open.
constexpr std::size_t kFloatRows = 12;
constexpr std::size_t kFloatPanels = 2;

using Vec = __m512;

constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

inline __mmask16 first_lanes(std::size_t count) {
  return static_cast<__mmask16>((1u << count) - 1u);
}

inline Vec splat(float value) {
  return _mm512_set1_ps(value);
}
inline Vec zero() {
  return _mm512_setzero_ps();
}
inline Vec load(const float* from) {
  return _mm512_loadu_ps(from);
}
inline Vec load_first(const float* from, std::size_t count) {
  return _mm512_maskz_loadu_ps(first_lanes(count), from);
}
inline void store(float* to, Vec v) {
  _mm512_storeu_ps(to, v);
}
inline void store_first(float* to, Vec v, std::size_t count) {
  _mm512_mask_storeu_ps(to, first_lanes(count), v);
}

inline Vec load(const std::uint16_t* halves) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
}
inline Vec load_bfloat16(const std::uint16_t* from) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}
inline void store_half(std::uint16_t* to, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(v, kNearest));
}

inline Vec add(Vec a, Vec b) {
  return _mm512_add_ps(a, b);
}
inline Vec sub(Vec a, Vec b) {
  return _mm512_sub_ps(a, b);
}
inline Vec mul(Vec a, Vec b) {
  return _mm512_mul_ps(a, b);
}
inline Vec div(Vec a, Vec b) {
  return _mm512_div_ps(a, b);
}
inline Vec fma(Vec a, Vec b, Vec c) {
  return _mm512_fmadd_ps(a, b, c);
}
inline Vec fnma(Vec a, Vec b, Vec c) {
  return _mm512_fnmadd_ps(a, b, c);
}
inline Vec max(Vec a, Vec b) {
  return _mm512_max_ps(a, b);
}
inline Vec min(Vec a, Vec b) {
  return _mm512_min_ps(a, b);
}
inline Vec round(Vec a) {
  return _mm512_roundscale_ps(a, kNearest);
}
inline Vec scale_by_power(Vec a, Vec n) {
  return _mm512_scalef_ps(a, n);
}
inline Vec keep_first(Vec v, std::size_t count, float fill) {
  return _mm512_mask_mov_ps(_mm512_set1_ps(fill), first_lanes(count), v);
}

inline float reduce_add(Vec v) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float reduce_max(Vec v) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline float square_root(float value) {
  return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(value)));
}

inline bool any_nan(Vec v) {
  return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q) != 0;
}

inline std::uint32_t max_magnitude(Vec a, Vec b) {
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  const __m512i both = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(a), mask),
                                        _mm512_and_si512(_mm512_castps_si512(b), mask));
  const __m256i eight =
      _mm256_max_epu32(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
  __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(four));
}

inline void store_codes(std::int8_t* to, Vec a, Vec b, std::int32_t* sums) {
  const __m128i low = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a));
  const __m128i high = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(b));
  const __m256i codes = _mm256_set_m128i(high, low);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), codes);
  const __m256i ones = _mm256_set1_epi8(1);
  const __m256i eight = _mm256_dpbusd_epi32(_mm256_setzero_si256(), ones, codes);
  const __m128i pairs_of_sums =
      _mm_hadd_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(sums), _mm_hadd_epi32(pairs_of_sums, pairs_of_sums));
}

template <bool kNibbles>
Vec load_code_column(const std::uint8_t* codes, std::size_t column) {
  const std::size_t stored = kNibbles ? column % 16 : column;
  const unsigned shift =
      static_cast<unsigned>(8 * (stored % 4) + (kNibbles && column >= 16 ? 4 : 0));
  const __m512i words = _mm512_loadu_si512(codes + stored / 4 * 64);
  const __m512i mask = _mm512_set1_epi32(kNibbles ? 15 : 255);
  const __m512i shifted = _mm512_srl_epi32(words, _mm_cvtsi32_si128(static_cast<int>(shift)));
  return _mm512_cvtepi32_ps(_mm512_and_si512(shifted, mask));
}

}  // namespace
}  // namespace pocket::POCKET_ISA
