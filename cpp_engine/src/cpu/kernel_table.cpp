#include <string>

#include "attention_scratch.h"
#include "pocket/base/error.h"
#include "pocket/cpu/kernels.h"
#include "tables.h"

namespace pocket {

const KernelTable& kernel_table(Isa isa) {
  if (isa > detect_isa()) {
    throw Error(ErrorCode::kUnsupported,
                "this CPU lacks the instruction set " + std::string(isa_name(isa)));
  }
  switch (isa) {
    case Isa::kAvx512:
      return avx512_table();
    case Isa::kAvx2:
      return avx2_table();
    case Isa::kScalar:
      break;
  }
  return scalar_table();
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
