#pragma once

#include <cstddef>

#include "compute.h"
#include "decoder_config.h"
#include "layers/expert_mlp.h"
#include "layers/gated_delta_net.h"
#include "layers/paged_attention.h"
#include "pocket/base/aligned_buffer.h"
#include "pocket/models/model.h"

namespace pocket {

/// All memory that a forward pass writes besides the KV pool, sized for the largest step.
class DecoderWorkspace {
 public:
  /// Forms are the union over all layers.
  struct Forms {
    InputForm block_input{};      ///< of attention and MLP: [tokens, hidden]
    InputForm attention_inner{};  ///< [tokens, query_width]
    InputForm delta_inner{};      ///< [tokens, delta.value_width]
    InputForm mlp_inner{};        ///< [tokens, ffn]
    InputForm expert_input{};     ///< gathered: [tokens * experts.used, hidden]
    InputForm expert_inner{};     ///< [tokens * experts.used, experts.ffn]
    InputForm shared_inner{};     ///< [tokens, experts.shared_ffn]
    InputForm head_input{};       ///< [logits rows, hidden]
  };

  DecoderWorkspace(const DecoderConfig& config, const ModelOptions& options, const Forms& forms,
                   std::size_t logits_stride);

  /// Rows of the coming step, for the arrays whose layout depends on them.
  void set_rows(std::size_t rows) noexcept {
    input.set_rows(rows);
    attention.output.set_rows(rows);
    delta.output.set_rows(rows);
    mlp_inner.set_rows(rows);
    experts.shared_inner.set_rows(rows);
  }

  [[nodiscard]] std::size_t bytes() const noexcept { return arena_.size(); }

  float* residual;    ///< [tokens, hidden]
  float* branch;      ///< [tokens, hidden] with `post_norms`: the output of attention or MLP alone
  Activations input;  ///< normalised input of a block
  AttentionBuffers attention;
  DeltaNetBuffers delta;  ///< null without recurrent layers
  Activations mlp_inner;
  ExpertBuffers experts;  ///< null without expert MLPs
  Activations head_input;
  float* logits;          ///< [logits rows, logits_stride]
  float* matmul_scratch;  ///< [threads][matmul_scratch_floats()]

 private:
  AlignedBuffer arena_;
};

}  // namespace pocket
