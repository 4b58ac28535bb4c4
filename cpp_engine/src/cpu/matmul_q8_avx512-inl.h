// Integer matmul with VPDPBUSD: 16 outputs x 4 columns per instruction. The order of the float
// operations is the oracle's (matmul_q8_scalar-inl.h).
//
// A tile is kRows activation rows by one panel. Per block the codes are unpacked once and meet
// every row's 4-byte groups, which the dot product broadcasts from memory (free on AMD and Intel).
// A row then takes 8 dot products and 2 or 3 float operations on the same two pipes, so 8 in 11 (or
// 10) is the bound: 73 % of the VNNI peak with mins, 80 % without. Unpacking, conversions and loads
// run beside it.

#include <immintrin.h>

#include "activation_tile-inl.h"
#include "pocket/cpu/kernels.h"
#include "tables.h"

namespace pocket::POCKET_ISA {
namespace {

/// 8 float accumulators, 8 unpacked vectors and 8 rows' dot products fill 24 of 32 registers.
constexpr std::size_t kMaxTileRows = kRowGroup;

/// Code vector `group` (0..7) of a block: 16 rows x columns 4 group .. 4 group + 3, as u8.
template <PackedLayout kLayout>
inline __m512i load_codes(const std::uint8_t* codes, std::size_t group) {
  if constexpr (!kNibbleCodes<kLayout>) {
    return _mm512_loadu_si512(codes + group * 64);
  } else {
    const __m512i nibbles = _mm512_loadu_si512(codes + group % 4 * 64);
    const __m512i low = _mm512_set1_epi8(15);
    return group < 4 ? _mm512_and_si512(nibbles, low)
                     : _mm512_and_si512(_mm512_srli_epi16(nibbles, 4), low);
  }
}

inline __m512 load_halves(const std::uint8_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

/// acc += code vector . the 4-byte group at `group`, broadcast by the instruction itself: compilers
/// emit a load of its own for that, and the kernel has no issue slots to give away.
inline __m512i dot_add_broadcast(__m512i acc, __m512i codes, const std::int8_t* group) {
  using Group [[gnu::may_alias]] = std::int32_t;
  asm("vpdpbusd %2%{1to16%}, %1, %0"
      : "+v"(acc)
      : "v"(codes), "m"(*reinterpret_cast<const Group*>(group)));
  return acc;
}

/// Weights come from memory in one ascending stream, which the hardware prefetcher follows. Few
/// rows consume it at memory speed: a hint into L2 a little ahead keeps the stream alive across
/// pages. Taller tiles stay on a block for so long that the prefetcher falls back; they pull the
/// lines into L1 themselves. Distances: best of 512 to 8,192 on Zen 4. Prefetching past the end is
/// harmless.
template <PackedLayout kLayout, std::size_t kRows>
inline void prefetch_weights(const std::uint8_t* weights) {
  constexpr std::size_t kDistance = kRows <= 4 ? 512 : 2048;
  for (std::size_t line = 0; line < kBlockBytes<kLayout>; line += 64) {
    const auto* at = reinterpret_cast<const char*>(weights + kDistance + line);
    if constexpr (kRows <= 4) {
      _mm_prefetch(at, _MM_HINT_T1);
    } else {
      _mm_prefetch(at, _MM_HINT_T0);
    }
  }
}

template <PackedLayout kLayout, std::size_t kRows>
void q8_tile(const std::uint8_t* weights, const ActivationTile& x, float* y, std::size_t ldy) {
  // Rows whose chains of eight dot products advance side by side. Row by row, the waiting chains of
  // tall tiles fill Zen 4's scheduler; up to 4 rows wait for memory and are faster that way.
  constexpr std::size_t kChains = kRows <= 4 ? 1 : kRows;
  // Whole row groups: the height is kRows, and every address a constant away from four pointers.
  const std::int8_t* q = x.q;
  const float* scale = x.scale;
  const float* scaled_sum = x.scaled_sum;
  const std::int32_t* negative_sum = x.negative_sum;
  __m512 acc[kRows];
#pragma GCC unroll 16
  for (std::size_t r = 0; r < kRows; ++r) {
    acc[r] = _mm512_setzero_ps();
  }
  for (std::size_t block = 0; block < x.blocks; ++block) {
    prefetch_weights<kLayout, kRows>(weights);
    const __m512 d = load_halves(weights);
    __m512i w[8];
#pragma GCC unroll 8
    for (std::size_t group = 0; group < 8; ++group) {
      w[group] = load_codes<kLayout>(weights + kScaleBytes<kLayout>, group);
    }
#pragma GCC unroll 16
    for (std::size_t first = 0; first < kRows; first += kChains) {
      __m512i dot[kChains];
#pragma GCC unroll 16
      for (std::size_t i = 0; i < kChains; ++i) {
        dot[i] = _mm512_setzero_si512();
        if constexpr (!kHasMin<kLayout>) {
          dot[i] = _mm512_slli_epi32(_mm512_set1_epi32(negative_sum[first + i]),
                                     kNibbleCodes<kLayout> ? 3 : 7);
        }
      }
#pragma GCC unroll 8
      for (std::size_t group = 0; group < 8; ++group) {
#pragma GCC unroll 16
        for (std::size_t i = 0; i < kChains; ++i) {
          dot[i] = dot_add_broadcast(dot[i], w[group], q + 4 * (group * kRows + first + i));
        }
      }
#pragma GCC unroll 16
      for (std::size_t i = 0; i < kChains; ++i) {
        const std::size_t r = first + i;
        const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(dot[i]), d);
        acc[r] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(scale[r]), acc[r]);
        if constexpr (kHasMin<kLayout>) {
          acc[r] =
              _mm512_fmadd_ps(load_halves(weights + 32), _mm512_set1_ps(scaled_sum[r]), acc[r]);
        }
      }
    }
    weights += kBlockBytes<kLayout>;
    q += kRows * kQuantBlock;
    scale += kRows;
    scaled_sum += kRows;
    negative_sum += kRows;
  }
#pragma GCC unroll 16
  for (std::size_t r = 0; r < kRows; ++r) {
    _mm512_storeu_ps(y + r * ldy, acc[r]);
  }
}

}  // namespace
}  // namespace pocket::POCKET_ISA
