// Qwen2 and Qwen2.5: Llama with biases on q, k and v (arXiv 2407.10671). Qwen3: no biases; every
// head of q and k goes through an RMS norm before it rotates (arXiv 2505.09388).

#include "architectures.h"

namespace pocket {
namespace {

DecoderConfig qwen2_config(const WeightSource& source) {
  DecoderConfig config = read_decoder_config(source);
  config.qkv_bias = true;
  return config;
}

DecoderConfig qwen3_config(const WeightSource& source) {
  DecoderConfig config = read_decoder_config(source);
  config.qk_norm = true;
  return config;
}

}  // namespace

std::unique_ptr<Model> make_qwen2(const WeightSource& source, const ModelOptions& options) {
  return make_decoder(source, options, qwen2_config(source));
}

ModelInfo describe_qwen2(const WeightSource& source) {
  return describe_decoder(source, qwen2_config(source));
}

std::unique_ptr<Model> make_qwen3(const WeightSource& source, const ModelOptions& options) {
  return make_decoder(source, options, qwen3_config(source));
}

ModelInfo describe_qwen3(const WeightSource& source) {
  return describe_decoder(source, qwen3_config(source));
}

}  // namespace pocket
