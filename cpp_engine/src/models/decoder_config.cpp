#include "decoder_config.h"

#include <cmath>
#include <string>
#include <utility>

#include "config_reader.h"
#include "pocket/base/error.h"
#include "pocket/cpu/packed_matrix.h"

namespace pocket {
namespace {

// Upper bounds on what a file may claim, far above any known model: they keep products of sizes
// inside 64 bits before a tensor has confirmed them.
constexpr std::uint64_t kMaxLayers = 1024;
constexpr std::uint64_t kMaxWidth = 1 << 20;
constexpr std::uint64_t kMaxHeads = 1 << 12;
constexpr std::uint64_t kMaxContext = 1 << 24;
constexpr std::size_t kMaxHeadDim = 256;  // what the attention kernels take

// A window that holds the whole context hides nothing.
void read_window(const WeightSource& source, const ConfigReader& reader, DecoderConfig& config) {
  const std::uint64_t window = source.get_uint("attention.sliding_window").value_or(0);
  config.window = window < config.context ? static_cast<std::size_t>(window) : 0;
  if (auto flags = source.get_flags("attention.sliding_window_pattern")) {
    if (flags->size() != config.layers) {
      reader.fail(ErrorCode::kBadFile, "attention.sliding_window_pattern: has " +
                                           std::to_string(flags->size()) +
                                           " entries; must have one for each of the " +
                                           std::to_string(config.layers) + " layers");
    }
    config.sliding_layers = *std::move(flags);
  }
}

}  // namespace

DecoderConfig read_decoder_config(const WeightSource& source, bool experts) {
  const ConfigReader reader(source);
  DecoderConfig config;
  config.layers = reader.size("block_count", kMaxLayers);
  config.hidden = reader.size("embedding_length", kMaxWidth);
  // Files of models whose layers all have experts may leave the dense length out.
  config.ffn = experts ? reader.size_or("feed_forward_length", kMaxWidth, 0)
                       : reader.size("feed_forward_length", kMaxWidth);
  config.context = reader.size("context_length", kMaxContext);
  config.heads = reader.size("attention.head_count", kMaxHeads);
  config.kv_heads = reader.size_or("attention.head_count_kv", kMaxHeads, config.heads);
  config.norm_epsilon =
      static_cast<float>(reader.positive_or("attention.layer_norm_rms_epsilon", 1e-5));

  if (config.heads % config.kv_heads != 0) {
    reader.fail(ErrorCode::kBadFile, "attention.head_count (" + std::to_string(config.heads) +
                                         ") must be a multiple of attention.head_count_kv (" +
                                         std::to_string(config.kv_heads) + ")");
  }
  if (!source.get_uint("attention.key_length") && config.hidden % config.heads != 0) {
    reader.fail(ErrorCode::kBadFile, "embedding_length (" + std::to_string(config.hidden) +
                                         ") must be a multiple of attention.head_count (" +
                                         std::to_string(config.heads) +
                                         ") when attention.key_length is missing");
  }
  config.head_dim = reader.size_or("attention.key_length", kMaxWidth, config.hidden / config.heads);
  const std::size_t value_dim =
      reader.size_or("attention.value_length", kMaxWidth, config.head_dim);
  if (value_dim != config.head_dim) {
    reader.fail(ErrorCode::kUnsupported, "attention.value_length (" + std::to_string(value_dim) +
                                             ") differs from attention.key_length (" +
                                             std::to_string(config.head_dim) + ")");
  }
  if (config.head_dim > kMaxHeadDim) {
    reader.fail(ErrorCode::kUnsupported, "head dimension: got " + std::to_string(config.head_dim) +
                                             "; the kernels take at most " +
                                             std::to_string(kMaxHeadDim));
  }
  reader.multiple("head dimension", config.head_dim, 16);
  reader.multiple("embedding_length", config.hidden, kQuantBlock);
  reader.multiple("feed_forward_length", config.ffn, kQuantBlock);
  reader.multiple("width of all query heads", config.query_width(), kQuantBlock);

  const auto embedding = source.find("token_embd.weight");
  if (!embedding || embedding->shape.size() != 2) {
    reader.fail(ErrorCode::kBadFile, "the matrix token_embd.weight is missing");
  }
  config.vocab = embedding->shape[0];
  const std::size_t claimed = reader.size_or("vocab_size", kMaxContext, config.vocab);
  if (claimed != config.vocab) {
    reader.fail(ErrorCode::kBadFile, "vocab_size is " + std::to_string(claimed) +
                                         " but token_embd.weight has " +
                                         std::to_string(config.vocab) + " rows");
  }
  // Rows whose ids do not fit a token id could never be asked for.
  if (config.vocab == 0 || config.vocab > kMaxContext) {
    reader.fail(ErrorCode::kUnsupported, "token_embd.weight has " + std::to_string(config.vocab) +
                                             " rows; supported are 1 to " +
                                             std::to_string(kMaxContext));
  }
  if (const auto count = source.get_uint("expert_count"); !experts && count.value_or(0) > 0) {
    reader.fail(ErrorCode::kUnsupported, "expert_count: got " + std::to_string(*count) +
                                             "; mixtures of experts of a " + source.architecture() +
                                             " model are not supported");
  }
  config.attention_scale = 1.0F / std::sqrt(static_cast<float>(config.head_dim));
  read_window(source, reader, config);
  config.rope = read_rope_config(source, config.head_dim);
  return config;
}

StateShape DecoderConfig::state_shape() const {
  return {.layers = recurrent_count(),
          .conv_floats = delta.taps == 0 ? 0 : (delta.taps - 1) * delta.mixed_width(),
          .memory_floats = delta.value_heads * delta.key_dim * delta.value_dim};
}

ModelInfo describe_decoder(const WeightSource& source, const DecoderConfig& config) {
  ModelInfo info{.architecture = source.architecture(),
                 .layers = config.layers,
                 .hidden = config.hidden,
                 .heads = config.heads,
                 .kv_heads = config.kv_heads,
                 .head_dim = config.head_dim,
                 .ffn = config.ffn,
                 .vocab = config.vocab,
                 .context = config.context,
                 .attention_layers = config.attention_count(),
                 .experts = config.experts.count,
                 .experts_used = config.experts.used,
                 .state_bytes = state_bytes(config.state_shape()),
                 .tokenizer_tokens = source.tokenizer_tokens(),
                 .eos_token_ids = source.eos_token_ids()};
  for (const std::string& name : source.tensor_names()) {
    info.parameter_count += source.find(name)->elements();
  }
  return info;
}

}  // namespace pocket
