// Gemma 3 (arXiv 2503.19786), its text model: Llama's blocks with a second norm behind attention
// and MLP, norms of query and key heads, GELU, and scaled embeddings. Five of six layers slide and
// rotate with a base of their own.

#include <cmath>
#include <string>

#include "architectures.h"
#include "config_reader.h"

namespace pocket {
namespace {

constexpr std::size_t kPatternLayers = 6;  // the last of as many layers sees all positions
constexpr std::size_t kLayersOf27B = 62;

DecoderConfig gemma3_config(const WeightSource& source) {
  const ConfigReader reader(source);
  for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping"}) {
    if (const double cap = source.get_float(key).value_or(0.0); cap != 0.0) {
      reader.fail(ErrorCode::kUnsupported, std::string(key) + ": got " + std::to_string(cap) +
                                               "; Gemma 3 is computed without soft caps");
    }
  }
  DecoderConfig config = read_decoder_config(source);
  config.qk_norm = true;
  config.post_norms = true;
  config.activation = Activation::kGelu;
  config.embedding_scale = static_cast<float>(std::sqrt(static_cast<double>(config.hidden)));
  // GGUF files do not say that the 27B model scales by its width per head.
  const std::size_t scaled_by =
      config.layers == kLayersOf27B ? config.hidden / config.heads : config.head_dim;
  config.attention_scale = static_cast<float>(
      reader.positive_or("attention.scale", 1.0 / std::sqrt(static_cast<double>(scaled_by))));
  if (config.sliding_layers.empty()) {
    for (std::size_t layer = 1; layer <= config.layers; ++layer) {
      config.sliding_layers.push_back(layer % kPatternLayers != 0);
    }
  }
  config.sliding_rope = RopeConfig{.dims = config.rope.dims,
                                   .base = reader.positive_or("rope.freq_base_swa", 10000.0)};
  return config;
}

}  // namespace

std::unique_ptr<Model> make_gemma3(const WeightSource& source, const ModelOptions& options) {
  return make_decoder(source, options, gemma3_config(source));
}

ModelInfo describe_gemma3(const WeightSource& source) {
  return describe_decoder(source, gemma3_config(source));
}

}  // namespace pocket
