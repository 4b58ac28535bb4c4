#define POCKET_ISA scalar
// The order matters: the kernels are written over the lanes of the first file.
// clang-format off
#include "vec16_scalar-inl.h"
#include "vector_kernels-inl.h"
#include "delta_rule-inl.h"
#include "int_lanes_scalar-inl.h"
#include "pair_lanes_scalar-inl.h"
#include "attention-inl.h"
#include "attention_bf16-inl.h"
#include "attention_int8-inl.h"
#include "attention_driver-inl.h"
#include "code_lanes_scalar-inl.h"
#include "coded_blocks-inl.h"
#include "float_matmul-inl.h"
#include "matmul_q8_scalar-inl.h"
#include "matmul_coded-inl.h"
// clang-format on

namespace pocket {

const KernelTable& scalar_table() noexcept {
  using namespace scalar;
  static constexpr KernelTable kTable{
      .isa = Isa::kScalar,
      .matmul_q8 = matmul_integer<false>,
      .matmul_f32 = matmul_f32,
      .unpack_row = unpack_packed_row,
      .quantise_row = quantise_row,
      .rms_norm = rms_norm,
      .rope = rope,
      .silu_mul = silu_mul,
      .gelu_mul = gelu_mul,
      .add = add_to,
      .kv_write = kv_write,
      .attention = attention<false>,
      .argmax = argmax,
      .rms_norm_quantise = rms_norm_quantise,
      .silu_mul_quantise = silu_mul_quantise,
      .gelu_mul_quantise = gelu_mul_quantise,
      .sigmoid_mul = sigmoid_mul,
      .causal_conv_silu = causal_conv_silu,
      .l2_normalise = l2_normalise,
      .delta_gates = delta_gates,
      .delta_rule = delta_rule,
  };
  return kTable;
}

}  // namespace pocket
