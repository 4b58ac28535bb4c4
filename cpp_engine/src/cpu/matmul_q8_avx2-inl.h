// Integer matmul with VPMADDUBSW. The order of the float operations is the oracle's
// (matmul_q8_scalar-inl.h); the integer part is exact in any order:
//
// 4-bit codes: a 16-bit lane collects 2 products of 15 * 127 per column group, 8 groups: 30,480,
// which still fits, so one VPMADDWD per block widens the sum.
// 8-bit codes: 255 * 127 * 2 would saturate, so codes lose their offset (|w| <= 128) and the sign
// moves to the activations: 128 * 127 * 2 = 32,512 fits; each group is widened at once.

#include <immintrin.h>

#include "activation_tile-inl.h"
#include "pocket/cpu/kernels.h"
#include "tables.h"

namespace pocket::POCKET_ISA {
namespace {

/// Half a panel (8 outputs) by 4 rows: 4 integer and 4 float accumulators, of 16 registers.
constexpr std::size_t kMaxTileRows = 4;
constexpr std::size_t kHalfPanel = 8;

inline __m256i broadcast_group(const std::int8_t* q) {
  std::int32_t group;
  __builtin_memcpy(&group, q, sizeof group);
  return _mm256_set1_epi32(group);
}

inline __m256i load_vector(const std::uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

/// dot[r] = 8 outputs' exact products of one block. `codes` points to the half panel.
template <std::size_t kRows>
inline void nibble_dots(const std::uint8_t* codes, const std::int8_t* q, std::size_t height,
                        __m256i* dot) {
  const __m256i low = _mm256_set1_epi8(15);
#pragma GCC unroll 4
  for (std::size_t group = 0; group < 4; ++group) {
    const __m256i nibbles = load_vector(codes + group * 64);
    const __m256i first = _mm256_and_si256(nibbles, low);
    const __m256i second = _mm256_and_si256(_mm256_srli_epi16(nibbles, 4), low);
#pragma GCC unroll 4
    for (std::size_t r = 0; r < kRows; ++r) {
      const std::int8_t* at = q + 4 * (group * height + r);
      const __m256i sum =
          _mm256_add_epi16(_mm256_maddubs_epi16(first, broadcast_group(at)),
                           _mm256_maddubs_epi16(second, broadcast_group(at + 16 * height)));
      dot[r] = group == 0 ? sum : _mm256_add_epi16(dot[r], sum);
    }
  }
#pragma GCC unroll 16
  for (std::size_t r = 0; r < kRows; ++r) {
    dot[r] = _mm256_madd_epi16(dot[r], _mm256_set1_epi16(1));
  }
}

template <std::size_t kRows>
inline void byte_dots(const std::uint8_t* codes, const std::int8_t* q, std::size_t height,
                      __m256i* dot) {
  const __m256i flip = _mm256_set1_epi8(-128);
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
  for (std::size_t group = 0; group < 8; ++group) {
    const __m256i w = _mm256_xor_si256(load_vector(codes + group * 64), flip);
    const __m256i magnitude = _mm256_abs_epi8(w);
#pragma GCC unroll 4
    for (std::size_t r = 0; r < kRows; ++r) {
      const __m256i a = broadcast_group(q + 4 * (group * height + r));
      const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(a, w));
      const __m256i sum = _mm256_madd_epi16(pairs, ones);
      dot[r] = group == 0 ? sum : _mm256_add_epi32(dot[r], sum);
    }
  }
}

/// kRows rows by the 8 outputs from lane `half` * 8 on.
template <PackedLayout kLayout, std::size_t kRows>
void q8_half_tile(const std::uint8_t* weights, std::size_t half, const ActivationTile& x, float* y,
                  std::size_t ldy) {
  const std::uint8_t* scales = weights + half * kHalfPanel * 2;
  const std::uint8_t* codes = weights + kScaleBytes<kLayout> + half * kHalfPanel * 4;
  __m256 acc[kRows];
#pragma GCC unroll 16
  for (std::size_t r = 0; r < kRows; ++r) {
    acc[r] = _mm256_setzero_ps();
  }
  for (std::size_t block = 0; block < x.blocks; ++block) {
    __m256i dot[kRows];
    if constexpr (kNibbleCodes<kLayout>) {
      nibble_dots<kRows>(codes, x.q + block * kQuantBlock * x.height, x.height, dot);
    } else {
      byte_dots<kRows>(codes, x.q + block * kQuantBlock * x.height, x.height, dot);
    }
    const auto halves_at = [&](std::size_t offset) {
      return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + offset)));
    };
    const __m256 d = halves_at(0);
#pragma GCC unroll 4
    for (std::size_t r = 0; r < kRows; ++r) {
      const std::size_t at = block * x.height + r;
      if constexpr (kLayout == PackedLayout::kU4Scale) {
        dot[r] = _mm256_add_epi32(dot[r], _mm256_set1_epi32(8 * x.negative_sum[at]));
      }
      const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(dot[r]), d);
      acc[r] = _mm256_fmadd_ps(scaled, _mm256_set1_ps(x.scale[at]), acc[r]);
      if constexpr (kHasMin<kLayout>) {
        acc[r] = _mm256_fmadd_ps(halves_at(32), _mm256_set1_ps(x.scaled_sum[at]), acc[r]);
      }
    }
    scales += kBlockBytes<kLayout>;
    codes += kBlockBytes<kLayout>;
  }
#pragma GCC unroll 16
  for (std::size_t r = 0; r < kRows; ++r) {
    _mm256_storeu_ps(y + r * ldy + half * kHalfPanel, acc[r]);
  }
}

template <PackedLayout kLayout, std::size_t kRows>
void q8_tile(const std::uint8_t* weights, const ActivationTile& x, float* y, std::size_t ldy) {
  q8_half_tile<kLayout, kRows>(weights, 0, x, y, ldy);
  q8_half_tile<kLayout, kRows>(weights, 1, x, y, ldy);
}

}  // namespace
}  // namespace pocket::POCKET_ISA
