#include "decoder_config.h"

#include <cmath>
#include <string>

#include "pocket/base/error.h"
#include "pocket/base/quoted.h"
#include "pocket/cpu/packed_matrix.h"
#include "pocket/quant/dequantize.h"

namespace pocket {
namespace {

// Upper bounds on what a file may claim, far above any known model: they keep products of sizes
// inside 64 bits before a tensor has confirmed them.
constexpr std::uint64_t kMaxLayers = 1024;
constexpr std::uint64_t kMaxWidth = 1 << 20;
constexpr std::uint64_t kMaxHeads = 1 << 12;
constexpr std::uint64_t kMaxContext = 1 << 24;
constexpr std::size_t kMaxHeadDim = 256;  // what the attention kernels take

class Reader {
 public:
  explicit Reader(const WeightSource& source) : source_(source) {}

  [[noreturn]] void fail(ErrorCode code, const std::string& what) const {
    throw Error(code, source_.name() + ": " + what);
  }

  std::size_t size(const char* key, std::uint64_t max) const {
    const auto value = source_.get_uint(key);
    if (!value) {
      fail(ErrorCode::kBadFile, std::string(key) + " is missing");
    }
    return check(key, *value, max);
  }

  std::size_t size_or(const char* key, std::uint64_t max, std::size_t fallback) const {
    const auto value = source_.get_uint(key);
    return value ? check(key, *value, max) : fallback;
  }

  double positive_or(const char* key, double fallback) const {
    const double value = source_.get_float(key).value_or(fallback);
    if (!std::isfinite(value) || value <= 0.0) {
      fail(ErrorCode::kBadFile, std::string(key) + ": got " + std::to_string(value) +
                                    "; must be a finite positive number");
    }
    return value;
  }

  void multiple(const char* what, std::size_t value, std::size_t of) const {
    if (value % of != 0) {
      fail(ErrorCode::kUnsupported, std::string(what) + ": got " + std::to_string(value) +
                                        "; the kernels need a multiple of " + std::to_string(of));
    }
  }

 private:
  std::size_t check(const char* key, std::uint64_t value, std::uint64_t max) const {
    if (value == 0 || value > max) {
      fail(ErrorCode::kBadFile, std::string(key) + ": got " + std::to_string(value) +
                                    "; must be from 1 to " + std::to_string(max));
    }
    return static_cast<std::size_t>(value);
  }

  const WeightSource& source_;
};

void read_rope(const WeightSource& source, const Reader& reader, DecoderConfig& config) {
  config.rotary_dims = reader.size_or("rope.dimension_count", kMaxHeadDim, config.head_dim);
  if (config.rotary_dims > config.head_dim) {
    reader.fail(ErrorCode::kBadFile, "rope.dimension_count: got " +
                                         std::to_string(config.rotary_dims) + "; a head has only " +
                                         std::to_string(config.head_dim));
  }
  reader.multiple("rope.dimension_count", config.rotary_dims, 2);
  config.rope_base = reader.positive_or("rope.freq_base", 10000.0);

  const std::string scaling = source.get_string("rope.scaling.type").value_or("none");
  if (scaling == "linear") {
    config.rope_position_scale = reader.positive_or("rope.scaling.factor", 1.0);
  } else if (scaling == "none") {
    config.rope_position_scale = reader.positive_or("rope.scale_linear", 1.0);  // the older key
  } else {
    reader.fail(ErrorCode::kUnsupported,
                "rope.scaling.type: got " + quoted(scaling) + "; supported are none and linear");
  }

  if (const auto factors = source.find("rope_freqs.weight")) {
    const std::size_t pairs = config.rotary_dims / 2;
    if (factors->shape != std::vector<std::size_t>{pairs}) {
      reader.fail(ErrorCode::kBadFile, "rope_freqs.weight must have " + std::to_string(pairs) +
                                           " elements (half of rope.dimension_count) and has " +
                                           std::to_string(factors->elements()));
    }
    config.rope_frequency_factors.resize(pairs);
    dequantize_row(factors->type, factors->data, config.rope_frequency_factors);
    for (const float factor : config.rope_frequency_factors) {
      if (!std::isfinite(factor) || factor <= 0.0F) {
        reader.fail(ErrorCode::kBadFile, "rope_freqs.weight holds " + std::to_string(factor) +
                                             "; factors must be finite and positive");
      }
    }
  }
}

}  // namespace

DecoderConfig read_decoder_config(const WeightSource& source) {
  const Reader reader(source);
  DecoderConfig config;
  config.layers = reader.size("block_count", kMaxLayers);
  config.hidden = reader.size("embedding_length", kMaxWidth);
  config.ffn = reader.size("feed_forward_length", kMaxWidth);
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
  if (const auto experts = source.get_uint("expert_count"); experts.value_or(0) > 0) {
    reader.fail(ErrorCode::kUnsupported, "expert_count: got " + std::to_string(*experts) +
                                             "; mixture-of-experts models are not supported");
  }
  if (const auto window = source.get_uint("attention.sliding_window");
      window.value_or(0) > 0 && *window < config.context) {
    reader.fail(ErrorCode::kUnsupported, "attention.sliding_window: got " +
                                             std::to_string(*window) + "; only full attention is");
  }
  read_rope(source, reader, config);
  return config;
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
                 .tokenizer_tokens = source.tokenizer_tokens(),
                 .eos_token_ids = source.eos_token_ids()};
  for (const std::string& name : source.tensor_names()) {
    info.parameter_count += source.find(name)->elements();
  }
  return info;
}

}  // namespace pocket
