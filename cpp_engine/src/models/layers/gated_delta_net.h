#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "../compute.h"
#include "../decoder_config.h"
#include "../weight_loader.h"
#include "pocket/kv/state_store.h"
#include "pocket/models/model.h"

namespace pocket {

/// Inputs of a channel that its convolution sees, at most.
inline constexpr std::size_t kMaxConvTaps = 8;

/// Work space of Gated DeltaNet, shared by all layers.
struct DeltaNetBuffers {
  float* mixed =
      nullptr;  ///< [tokens, mixed_width]: q, k and v before the convolution, then after it
  float* gate = nullptr;      ///< [tokens, value_width]
  float* decay = nullptr;     ///< [tokens, gate_stride]
  float* strength = nullptr;  ///< [tokens, gate_stride]
  std::size_t gate_stride = 0;
  float* out = nullptr;     ///< [tokens, value_width]
  Activations output;       ///< `out` in the forms that the projection wants; `values` is `out`
  float* window = nullptr;  ///< [threads][(taps - 1) * the larger head]
  std::size_t window_floats = 0;
};

/// Linear attention with a memory matrix per head that decays and is corrected towards each new
/// value (Gated DeltaNet, arXiv 2412.06464), added to the residual.
///
/// Rows of a sequence are computed one after the other in the order of their positions, so it does
/// not matter how a prompt is cut into steps; tasks are (sequence, key head) pairs, so it does not
/// matter who else is in the step.
struct GatedDeltaNet {
  PackedMatrix mixed;           ///< [mixed_width, hidden]: q, k, v
  PackedMatrix gate;            ///< [value_width, hidden]
  PackedMatrix alpha;           ///< [value_heads, hidden]
  PackedMatrix beta;            ///< [value_heads, hidden]
  PackedMatrix output;          ///< [hidden, value_width]
  std::span<const float> conv;  ///< [taps, mixed_width]
  std::span<const float> rate;  ///< [value_heads], negative
  std::span<const float> bias;  ///< [value_heads]
  std::span<const float> norm;  ///< [value_dim]

  /// Registers `prefix`attn_{qkv,gate}.weight and ssm_{alpha,beta,out,conv1d,norm}.weight,
  /// ssm_dt.bias and ssm_a, or ssm_a_log where the file keeps log(-a). Qwen3-Next's files may keep
  /// the first two as ssm_in.weight and the next two as ssm_ba.weight, whose rows come key head by
  /// key head: its q, k, values and gates; the betas and the alphas of its value heads.
  void load(WeightLoader& loader, const std::string& prefix, const DecoderConfig& config);

  [[nodiscard]] InputForm input(Precision precision) const;
  [[nodiscard]] InputForm inner(Precision precision) const { return input_form(output, precision); }

  /// `layer` counts layers of the store. `matmul_scratch` is [threads][matmul_scratch_floats()].
  void run(const Compute& compute, const DecoderConfig& config,
           std::span<const SequenceRows> sequences, std::size_t layer, const Activations& x,
           std::size_t rows, StateStore& states, const DeltaNetBuffers& buffers, float* residual,
           float* matmul_scratch) const;
};

}  // namespace pocket
