#include <string>
#include <vector>

#include "attention_scratch.h"
#include "pocket/base/error.h"
#include "pocket/cpu/kernels.h"
#include "tables.h"

namespace pocket {

namespace {

// Zen 4 (family 19h; Zen 3 has no AVX-512) executes 512-bit operations as two halves: one dot
// product and one load per cycle, so loads cost the dot products nothing.
bool halves_wide_vectors() noexcept {
  __builtin_cpu_init();
  return __builtin_cpu_is("amdfam19h") != 0;
}

bool has_pair_instruction() noexcept {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") != 0;
}

}  // namespace

const KernelTable& kernel_table(Isa isa) {
  if (isa > detect_isa()) {
    throw Error(ErrorCode::kUnsupported,
                "this CPU lacks the instruction set " + std::string(isa_name(isa)));
  }
  switch (isa) {
    case Isa::kAvx512:
      return avx512_table(!halves_wide_vectors(), has_pair_instruction());
    case Isa::kAvx2:
      return avx2_table();
    case Isa::kScalar:
      break;
  }
  return scalar_table();
}

std::vector<const KernelTable*> kernel_tables() {
  std::vector<const KernelTable*> tables{&scalar_table()};
  if (detect_isa() >= Isa::kAvx2) {
    tables.push_back(&avx2_table());
  }
  if (detect_isa() >= Isa::kAvx512) {
    for (const bool wide : {false, true}) {
      tables.push_back(&avx512_table(wide, false));
      if (has_pair_instruction()) {
        tables.push_back(&avx512_table(wide, true));
      }
    }
  }
  return tables;
}

std::size_t kv_block_elements(KvDType type, std::size_t head_dim) noexcept {
  const std::size_t codes = kKvBlockTokens * head_dim;
  return type == KvDType::kI8 ? codes + kKvBlockTokens * sizeof(float) : codes;
}

std::size_t attention_scratch_floats(std::size_t /*rows*/, std::size_t /*group*/,
                                     std::size_t head_dim) {
  // Scores, the byte planes of their codes (half as large), queries, and two sums of values.
  return kMaxAttentionQueries * (kAttentionSplit + kAttentionSplit / 2 + 3 * head_dim);
}

}  // namespace pocket
