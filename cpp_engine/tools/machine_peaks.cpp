#include "machine_peaks.h"

#include <immintrin.h>

#include "pocket/cpu/isa.h"

// The attributes below compile single functions for an instruction set that main() has checked.

namespace pocket::bench {
namespace {

// Inline assembly keeps the compiler from folding a loop whose results nobody needs.
#define POCKET_SIXTEEN(OP) \
  OP(0)                    \
  OP(1) OP(2) OP(3) OP(4) OP(5) OP(6) OP(7) OP(8) OP(9) OP(10) OP(11) OP(12) OP(13) OP(14) OP(15)
#define POCKET_VNNI(N) "vpdpbusd %%zmm30, %%zmm31, %%zmm" #N "\n\t"
#define POCKET_FMA512(N) "vfmadd231ps %%zmm30, %%zmm31, %%zmm" #N "\n\t"
#define POCKET_FMA256(N) "vfmadd231ps %%ymm14, %%ymm15, %%ymm" #N "\n\t"
#define POCKET_ZMM                                                                         \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", \
      "xmm11", "xmm12", "xmm13", "xmm14", "xmm15"

__attribute__((target("avx512f,avx512vnni"))) void vnni_loop(std::size_t iterations) {
  for (std::size_t i = 0; i < iterations; ++i) {
    asm volatile(POCKET_SIXTEEN(POCKET_VNNI)::: POCKET_ZMM);
  }
}

__attribute__((target("avx512f"))) void fma512_loop(std::size_t iterations) {
  asm volatile("vpxord %%zmm30, %%zmm30, %%zmm30\n\tvpxord %%zmm31, %%zmm31, %%zmm31" ::
                   : "xmm30", "xmm31");
  for (std::size_t i = 0; i < iterations; ++i) {
    asm volatile(POCKET_SIXTEEN(POCKET_FMA512)::: POCKET_ZMM);
  }
}

__attribute__((target("avx2,fma"))) void fma256_loop(std::size_t iterations) {
  for (std::size_t i = 0; i < iterations; ++i) {
    asm volatile(
        "vxorps %%ymm14, %%ymm14, %%ymm14\n\tvxorps %%ymm15, %%ymm15, %%ymm15\n\t" POCKET_FMA256(0)
            POCKET_FMA256(1) POCKET_FMA256(2) POCKET_FMA256(3) POCKET_FMA256(4) POCKET_FMA256(5)
                POCKET_FMA256(6) POCKET_FMA256(7) POCKET_FMA256(8) POCKET_FMA256(9)
                    POCKET_FMA256(10) POCKET_FMA256(11)::
                        : POCKET_ZMM);
  }
}

__attribute__((target("avx512f"))) unsigned long long read512(std::span<const std::byte> data) {
  __m512i sum[8];
  for (auto& s : sum) {
    s = _mm512_setzero_si512();
  }
  for (std::size_t i = 0; i + 512 <= data.size(); i += 512) {
    for (std::size_t j = 0; j < 8; ++j) {
      sum[j] = _mm512_xor_si512(sum[j], _mm512_loadu_si512(data.data() + i + 64 * j));
    }
  }
  for (std::size_t j = 1; j < 8; ++j) {
    sum[0] = _mm512_xor_si512(sum[0], sum[j]);
  }
  alignas(64) unsigned long long words[8];
  _mm512_store_si512(words, sum[0]);
  return words[0] ^ words[1] ^ words[2] ^ words[3] ^ words[4] ^ words[5] ^ words[6] ^ words[7];
}

unsigned long long read_words(std::span<const std::byte> data) {
  unsigned long long sum = 0;
  for (std::size_t i = 0; i + 8 <= data.size(); i += 8) {
    unsigned long long word;
    __builtin_memcpy(&word, data.data() + i, 8);
    sum ^= word;
  }
  return sum;
}

}  // namespace

unsigned long long read_all(std::span<const std::byte> data) {
  return detect_isa() == Isa::kAvx512 ? read512(data) : read_words(data);
}

double vnni_operations(std::size_t iterations) {
  if (detect_isa() != Isa::kAvx512) {
    return 0.0;
  }
  vnni_loop(iterations);
  return static_cast<double>(iterations) * 16 * 128;
}

double fma_operations(std::size_t iterations) {
  switch (detect_isa()) {
    case Isa::kAvx512:
      fma512_loop(iterations);
      return static_cast<double>(iterations) * 16 * 32;
    case Isa::kAvx2:
      fma256_loop(iterations);
      return static_cast<double>(iterations) * 12 * 16;
    case Isa::kScalar:
      break;
  }
  return 0.0;
}

}  // namespace pocket::bench
