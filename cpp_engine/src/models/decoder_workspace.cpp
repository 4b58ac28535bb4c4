#include "decoder_workspace.h"

#include <algorithm>

#include "layers/linear.h"

namespace pocket {
namespace {

// Arrays of Gated DeltaNet layers, before and after allocation; nothing without such layers.
class DeltaNetPlan {
 public:
  DeltaNetPlan(BufferPlan& plan, const DecoderConfig& config, std::size_t tokens,
               std::size_t threads, InputForm inner)
      : used_(config.recurrent_count() > 0) {
    if (!used_) {
      return;
    }
    const DeltaNetConfig& delta = config.delta;
    gate_stride_ = (delta.value_heads + kPanelRows - 1) / kPanelRows * kPanelRows;
    window_floats_ = (delta.taps - 1) * std::max(delta.key_dim, delta.value_dim);
    mixed_ = plan.add<float>(tokens * delta.mixed_width());
    gate_ = plan.add<float>(tokens * delta.value_width());
    decay_ = plan.add<float>(tokens * gate_stride_);
    strength_ = plan.add<float>(tokens * gate_stride_);
    out_ = plan.add<float>(tokens * delta.value_width());
    output_ = ActivationsPlan(plan, tokens, delta.value_width(),
                              {.quantised = inner.quantised, .half_sums = inner.half_sums});
    window_ = plan.add<float>(threads * window_floats_);
  }

  [[nodiscard]] DeltaNetBuffers bind(AlignedBuffer& arena) const {
    DeltaNetBuffers buffers;
    if (!used_) {
      return buffers;
    }
    const auto floats = [&arena](std::size_t offset) {
      return arena.view<float>(offset, 1).data();
    };
    buffers.mixed = floats(mixed_);
    buffers.gate = floats(gate_);
    buffers.decay = floats(decay_);
    buffers.strength = floats(strength_);
    buffers.gate_stride = gate_stride_;
    buffers.out = floats(out_);
    buffers.output = output_.bind(arena);
    buffers.output.values = buffers.out;
    buffers.window = window_floats_ > 0 ? floats(window_) : nullptr;
    buffers.window_floats = window_floats_;
    return buffers;
  }

 private:
  bool used_;
  std::size_t mixed_ = 0, gate_ = 0, decay_ = 0, strength_ = 0, out_ = 0, window_ = 0;
  std::size_t gate_stride_ = 0;
  std::size_t window_floats_ = 0;
  ActivationsPlan output_;
};

// Arrays of expert MLPs; nothing without such layers.
class ExpertPlan {
 public:
  ExpertPlan(BufferPlan& plan, const DecoderConfig& config, std::size_t tokens,
             const DecoderWorkspace::Forms& forms)
      : experts_(config.experts) {
    if (experts_.count == 0) {
      return;
    }
    const std::size_t pairs = tokens * experts_.used;
    score_stride_ = (experts_.count + kPanelRows - 1) / kPanelRows * kPanelRows;
    scores_ = plan.add<float>(tokens * score_stride_);
    shared_gate_ = plan.add<float>(experts_.shared_ffn > 0 ? tokens * kPanelRows : 0);
    gathered_ = ActivationsPlan(plan, pairs, config.hidden, forms.expert_input);
    inner_ = ActivationsPlan(plan, pairs, experts_.ffn, forms.expert_inner);
    shared_inner_ = ActivationsPlan(plan, tokens, experts_.shared_ffn, forms.shared_inner);
  }

  [[nodiscard]] ExpertBuffers bind(AlignedBuffer& arena) const {
    ExpertBuffers buffers;
    if (experts_.count == 0) {
      return buffers;
    }
    buffers.scores = arena.view<float>(scores_, 1).data();
    buffers.score_stride = score_stride_;
    if (experts_.shared_ffn > 0) {
      buffers.shared_gate = arena.view<float>(shared_gate_, 1).data();
    }
    buffers.gathered = gathered_.bind(arena);
    buffers.inner = inner_.bind(arena);
    buffers.shared_inner = shared_inner_.bind(arena);
    return buffers;
  }

 private:
  const ExpertConfig& experts_;
  std::size_t score_stride_ = 0, scores_ = 0, shared_gate_ = 0;
  ActivationsPlan gathered_, inner_, shared_inner_;
};

}  // namespace

DecoderWorkspace::DecoderWorkspace(const DecoderConfig& config, const ModelOptions& options,
                                   const Forms& forms, std::size_t logits_stride) {
  const std::size_t tokens = options.max_batch_tokens;
  const std::size_t threads = options.pool->size();
  const std::size_t query_floats = tokens * config.query_width();
  const std::size_t kv_floats = tokens * config.kv_width();
  attention.scratch_floats =
      attention_scratch_floats(kAttentionTileRows, config.group(), config.head_dim);

  BufferPlan plan;
  const std::size_t residual_at = plan.add<float>(tokens * config.hidden);
  const std::size_t branch_at = plan.add<float>(config.post_norms ? tokens * config.hidden : 0);
  const ActivationsPlan input_plan(plan, tokens, config.hidden, forms.block_input);
  const std::size_t query_at = plan.add<float>(query_floats);
  const std::size_t query_gate_at = plan.add<float>(config.attention_gate ? query_floats : 0);
  const std::size_t key_at = plan.add<float>(kv_floats);
  const std::size_t value_at = plan.add<float>(kv_floats);
  const std::size_t out_at = plan.add<float>(query_floats);
  const ActivationsPlan attention_plan(
      plan, tokens, config.query_width(),
      {.quantised = forms.attention_inner.quantised, .half_sums = forms.attention_inner.half_sums});
  const DeltaNetPlan delta_plan(plan, config, tokens, threads, forms.delta_inner);
  const ActivationsPlan mlp_plan(plan, tokens, config.ffn, forms.mlp_inner);
  const ExpertPlan expert_plan(plan, config, tokens, forms);
  const ActivationsPlan head_plan(plan, options.max_logits_rows, config.hidden, forms.head_input);
  const std::size_t logits_at = plan.add<float>(options.max_logits_rows * logits_stride);
  const std::size_t attention_scratch_at = plan.add<float>(threads * attention.scratch_floats);
  const std::size_t matmul_scratch_at = plan.add<float>(threads * matmul_scratch_floats());

  arena_ = AlignedBuffer(plan.bytes());
  const auto floats = [this](std::size_t offset) { return arena_.view<float>(offset, 1).data(); };
  residual = floats(residual_at);
  branch = config.post_norms ? floats(branch_at) : nullptr;
  input = input_plan.bind(arena_);
  attention.query = floats(query_at);
  attention.gate = config.attention_gate ? floats(query_gate_at) : nullptr;
  attention.key = floats(key_at);
  attention.value = floats(value_at);
  attention.out = floats(out_at);
  attention.output = attention_plan.bind(arena_);
  attention.output.values = attention.out;
  attention.scratch = floats(attention_scratch_at);
  delta = delta_plan.bind(arena_);
  mlp_inner = mlp_plan.bind(arena_);
  experts = expert_plan.bind(arena_);
  head_input = head_plan.bind(arena_);
  logits = floats(logits_at);
  matmul_scratch = floats(matmul_scratch_at);
}

}  // namespace pocket
