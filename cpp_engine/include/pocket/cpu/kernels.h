#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pocket/cpu/isa.h"
#include "pocket/cpu/packed_matrix.h"
#include "pocket/cpu/quantised_rows.h"

namespace pocket {

/// Attention of a tile of query rows of one sequence over that sequence's paged KV, for one KV
/// head.
///
/// K blocks are [head_dim, 16] (positions innermost), V blocks [16, head_dim] (int8:
/// docs/kernels.md; both then start on a multiple of 4 bytes); a block's address is
/// `k_base + block_id * block_stride` elements. Query row r sits at position `first_position + r`
/// and sees that position and those before it, as far as `window` lets it; blocks that no row sees
/// are not read. Every row is reduced in fixed splits of `kAttentionSplit` positions, counted from
/// position 0 and combined in order, so its bits depend on its own position only.
struct AttentionTile {
  const float* query;      ///< [rows, group, head_dim] with the strides below; scaled by the kernel
  float* out;              ///< same layout
  std::size_t row_stride;  ///< floats between query rows (and output rows)
  std::size_t rows;
  std::size_t group;     ///< query heads that share the KV head
  std::size_t head_dim;  ///< a multiple of 16, at most 256
  std::size_t first_position;
  std::size_t window = 0;  ///< positions that a row sees, its own included; 0: all
  float scale;
  const void* k_base;  ///< this layer's and head's K in block 0
  const void* v_base;
  std::size_t block_stride;  ///< elements between consecutive blocks
  const std::int32_t* block_table;
  float* scratch;  ///< per thread, `attention_scratch_floats(...)` floats
};

inline constexpr std::size_t kKvBlockTokens = 16;
inline constexpr std::size_t kAttentionSplit = 256;

/// Floats of scratch that one attention call needs for a tile of `rows` x `group` queries.
[[nodiscard]] std::size_t attention_scratch_floats(std::size_t rows, std::size_t group,
                                                   std::size_t head_dim);

/// How K and V are stored. `kI8`: int8 codes with one float scale per position and head, attention
/// in integer arithmetic; an element is a byte, and a K or V block carries its 16 scales at its
/// end.
enum class KvDType : std::uint8_t { kF32, kF16, kBF16, kI8 };

/// Elements (floats, halves or bytes) of a K block, or of a V block, of one head.
[[nodiscard]] std::size_t kv_block_elements(KvDType type, std::size_t head_dim) noexcept;

/// The gated delta rule for one head of one sequence, token by token (docs/kernels.md):
/// S = decay S; u = strength (v - S^T k); S = S + k u^T; out = S^T q.
///
/// Each column of S is computed alone and in the order of its rows, so a sequence may be cut into
/// calls anywhere without changing a bit.
struct DeltaRule {
  const float* q;  ///< [tokens, key_dim], rows `qk_stride` floats apart
  const float* k;
  const float* v;  ///< [tokens, value_dim], rows `v_stride` floats apart
  float* out;      ///< [tokens, value_dim], rows `out_stride` floats apart; not inside the others
  std::size_t qk_stride;
  std::size_t v_stride;
  std::size_t out_stride;
  const float* decay;     ///< one per token, `gate_stride` floats apart, from 0 to 1
  const float* strength;  ///< likewise
  std::size_t gate_stride;
  std::size_t tokens;
  std::size_t key_dim;
  std::size_t value_dim;  ///< a multiple of 16
  float* state;           ///< S, [key_dim, value_dim]
};

/// The compute primitives of one instruction set. Models reach the hardware only through this
/// table.
///
/// Bit contract: every entry fixes the order of its floating-point operations (documented per
/// kernel in docs/kernels.md) and uses fused multiply-adds where the order says so. So an output
/// row has the same bits whatever M, the tiling or the thread count, and the same bits in every
/// table: the scalar table is the oracle and tests compare bits, not tolerances.
///
/// Thread contract: pure functions over their arguments; callers split work over disjoint outputs.
struct KernelTable {
  Isa isa;

  /// y[m][16p..16p+16) = x[m] . W for panels p in [panel_begin, panel_end), m in [0, x.rows).
  /// `ldy` is floats between rows of y, which holds at least `panels() * 16` floats a row.
  void (*matmul_q8)(const PackedMatrix& w, const QuantisedRows& x, std::size_t panel_begin,
                    std::size_t panel_end, float* y, std::size_t ldy);
  /// The exact path: float activations against any layout (quantised weights are decoded exactly),
  /// one fused chain over K in column order.
  void (*matmul_f32)(const PackedMatrix& w, const float* x, std::size_t ldx, std::size_t m_rows,
                     std::size_t panel_begin, std::size_t panel_end, float* y, std::size_t ldy);
  /// out[0..columns) = row `row` of W in float32: embedding lookup from the packed matrix.
  void (*unpack_row)(const PackedMatrix& w, std::size_t row, float* out);

  /// Quantises `out.columns` values: scale = amax / 127, q = round-half-even(x / scale); an
  /// all-zero block gets scale 0. A NaN or infinity in a block makes its scale NaN.
  void (*quantise_row)(const float* x, const QuantisedRow& out);

  /// y = x / sqrt(mean(x^2) + eps) * weight. The sum of squares uses 16 strided partial sums.
  void (*rms_norm)(const float* x, const float* weight, std::size_t n, float eps, float* y);
  /// Rotate-half RoPE in place on `heads` heads of `head_dim`; cos and sin hold head_dim / 2
  /// floats.
  void (*rope)(float* x, std::size_t heads, std::size_t head_dim, const float* cos,
               const float* sin);
  /// out = silu(gate) * up; out may alias either.
  void (*silu_mul)(const float* gate, const float* up, std::size_t n, float* out);
  /// out = gelu(gate) * up, gelu in its tanh form; out may alias either.
  void (*gelu_mul)(const float* gate, const float* up, std::size_t n, float* out);
  /// x += y
  void (*add)(float* x, const float* y, std::size_t n);

  /// Writes one position of K and V [head_dim] into slot `offset` (0..15) of a block.
  void (*kv_write)(KvDType type, const float* k, const float* v, std::size_t head_dim,
                   std::size_t offset, void* k_block, void* v_block);
  void (*attention)(KvDType type, const AttentionTile& tile);

  /// Index of the largest value, lowest index on ties; `n` (no winner) if any value is NaN.
  std::size_t (*argmax)(const float* x, std::size_t n);

  // Fused forms: the same bits as their parts one after the other, without the trips to memory.
  // They work on one row, of `out.columns` values.

  /// rms_norm, quantised.
  void (*rms_norm_quantise)(const float* x, const float* weight, float eps,
                            const QuantisedRow& out);
  /// silu_mul, quantised.
  void (*silu_mul_quantise)(const float* gate, const float* up, const QuantisedRow& out);
  /// gelu_mul, quantised.
  void (*gelu_mul_quantise)(const float* gate, const float* up, const QuantisedRow& out);

  // Gated attention and Gated DeltaNet.

  /// out = x / (1 + e^-gate); out may alias either.
  void (*sigmoid_mul)(const float* gate, const float* x, std::size_t n, float* out);
  /// out[c] = silu(sum over j of taps[j][c] * weight[j * weight_stride + c]) for c in [0, n): a
  /// causal convolution of each channel with its `count` last values, oldest first. out may be one
  /// of the taps.
  void (*causal_conv_silu)(const float* const* taps, std::size_t count, const float* weight,
                           std::size_t weight_stride, std::size_t n, float* out);
  /// x *= scale / sqrt(sum(x^2) + eps); the sum as in rms_norm.
  void (*l2_normalise)(float* x, std::size_t n, float eps, float scale);
  /// decay = e^(rate * log(1 + e^(alpha + bias))), strength = 1 / (1 + e^-beta), for n heads.
  /// decay may be alpha, and strength beta.
  void (*delta_gates)(const float* alpha, const float* beta, const float* rate, const float* bias,
                      std::size_t n, float* decay, float* strength);
  void (*delta_rule)(const DeltaRule& rule);
};

/// The table of `isa` that suits this CPU best. Throws `Error(kUnsupported)` if it lacks the set.
[[nodiscard]] const KernelTable& kernel_table(Isa isa);

/// Every table that runs on this CPU, the scalar one first; an instruction set may have several.
[[nodiscard]] std::vector<const KernelTable*> kernel_tables();

}  // namespace pocket
