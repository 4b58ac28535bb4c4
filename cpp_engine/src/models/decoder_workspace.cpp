#include "decoder_workspace.h"

#include "layers/linear.h"

namespace pocket {

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
  const std::size_t key_at = plan.add<float>(kv_floats);
  const std::size_t value_at = plan.add<float>(kv_floats);
  const std::size_t out_at = plan.add<float>(query_floats);
  const ActivationsPlan attention_plan(
      plan, tokens, config.query_width(),
      {.quantised = forms.attention_inner.quantised, .half_sums = forms.attention_inner.half_sums});
  const ActivationsPlan mlp_plan(plan, tokens, config.ffn, forms.mlp_inner);
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
  attention.key = floats(key_at);
  attention.value = floats(value_at);
  attention.out = floats(out_at);
  attention.output = attention_plan.bind(arena_);
  attention.output.values = attention.out;
  attention.scratch = floats(attention_scratch_at);
  mlp_inner = mlp_plan.bind(arena_);
  head_input = head_plan.bind(arena_);
  logits = floats(logits_at);
  matmul_scratch = floats(matmul_scratch_at);
}

}  // namespace pocket
