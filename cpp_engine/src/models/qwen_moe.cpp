// Qwen2-MoE: Qwen2 with mixtures of experts and a gated expert that every row uses (arXiv
// 2407.10671). Qwen3-MoE: Qwen3 with mixtures of experts, whose weights add up to one (arXiv
// 2505.09388). Some layers may have one MLP as in the dense models.

#include "architectures.h"
#include "expert_config.h"

namespace pocket {
namespace {

DecoderConfig qwen2moe_config(const WeightSource& source) {
  DecoderConfig config = read_decoder_config(source, /*experts=*/true);
  config.qkv_bias = source.find("blk.0.attn_q.bias").has_value();  // a choice of the file's
  config.experts = read_expert_config(source, config, {.normalised = false, .shared = true});
  return config;
}

DecoderConfig qwen3moe_config(const WeightSource& source) {
  DecoderConfig config = read_decoder_config(source, /*experts=*/true);
  config.qk_norm = true;
  config.experts = read_expert_config(source, config, {.normalised = true, .shared = false});
  return config;
}

}  // namespace

std::unique_ptr<Model> make_qwen2moe(const WeightSource& source, const ModelOptions& options) {
  return make_decoder(source, options, qwen2moe_config(source));
}

ModelInfo describe_qwen2moe(const WeightSource& source) {
  return describe_decoder(source, qwen2moe_config(source));
}

std::unique_ptr<Model> make_qwen3moe(const WeightSource& source, const ModelOptions& options) {
  return make_decoder(source, options, qwen3moe_config(source));
}

ModelInfo describe_qwen3moe(const WeightSource& source) {
  return describe_decoder(source, qwen3moe_config(source));
}

}  // namespace pocket
