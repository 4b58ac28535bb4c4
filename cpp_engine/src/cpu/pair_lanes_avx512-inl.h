// Sixteen lanes of bfloat16 pairs in one 512-bit register; pair_lanes_scalar-inl.h says what each
// function does. The instructions of AVX512_BF16 stand in inline assembly, since this translation
// unit is compiled for CPUs that lack them as well; whoever asks for them has checked.

#include <immintrin.h>

#include <cstdint>

namespace pocket::POCKET_ISA {
namespace {

struct Pairs {
  __m512i lanes;
};

inline Pairs load_pairs(const std::uint16_t* from) {
  return {_mm512_loadu_si512(from)};
}
inline Pairs splat_pair(const std::uint16_t* from) {
  std::int32_t pair;
  __builtin_memcpy(&pair, from, sizeof pair);
  return {_mm512_set1_epi32(pair)};
}
template <std::uint32_t kMask>
Pairs keep_bits(Pairs a) {
  return {_mm512_and_si512(a.lanes, _mm512_set1_epi32(static_cast<int>(kMask)))};
}

inline __m512 odd_values(Pairs a) {
  return _mm512_castsi512_ps(_mm512_and_si512(a.lanes, _mm512_set1_epi32(-65536)));
}
inline __m512 even_values(Pairs a) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(a.lanes, 16));
}
template <bool kInstruction>
Vec pair_dot_add(Vec acc, Pairs a, Pairs b) {
  if constexpr (kInstruction) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a.lanes), "v"(b.lanes));
    return acc;
  } else {
    acc = _mm512_fmadd_ps(odd_values(a), odd_values(b), acc);
    return _mm512_fmadd_ps(even_values(a), even_values(b), acc);
  }
}

template <bool kInstruction>
void store_bfloat16(std::uint16_t* to, Vec v) {
  __m256i words;
  if constexpr (kInstruction) {
    asm("vcvtneps2bf16 %1, %0" : "=v"(words) : "v"(v));
  } else {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i top = _mm512_srli_epi32(bits, 16);
    const __m512i tie = _mm512_and_si512(top, _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(
        _mm512_add_epi32(bits, _mm512_add_epi32(tie, _mm512_set1_epi32(0x7fff))), 16);
    rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), top,
                                   _mm512_set1_epi32(0x40));
    const __mmask16 denormal = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
    rounded = _mm512_mask_and_epi32(rounded, denormal, top, _mm512_set1_epi32(0x8000));
    words = _mm512_cvtepi32_epi16(rounded);
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words);
}

}  // namespace
}  // namespace pocket::POCKET_ISA
