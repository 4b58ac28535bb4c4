// Qwen3.5, dense and MoE, and Qwen3-Next, with experts in all or some layers: three of four layers
// are Gated DeltaNet (arXiv 2412.06464), the others attend to all positions through Qwen3's blocks,
// whose output is gated and whose heads rotate in part.

#include <string>

#include "architectures.h"
#include "config_reader.h"
#include "expert_config.h"
#include "layers/gated_delta_net.h"
#include "pocket/base/error.h"

namespace pocket {
namespace {

constexpr std::uint64_t kMaxHeads = 1 << 12;
constexpr std::uint64_t kMaxHeadDim = 1 << 12;
constexpr std::uint64_t kMaxWidth = 1 << 20;

DeltaNetConfig read_delta(const WeightSource& source, const ConfigReader& reader) {
  DeltaNetConfig delta;
  delta.key_heads = reader.size("ssm.group_count", kMaxHeads);
  delta.value_heads = reader.size("ssm.time_step_rank", kMaxHeads);
  delta.key_dim = reader.size("ssm.state_size", kMaxHeadDim);
  const std::size_t inner = reader.size("ssm.inner_size", kMaxWidth);
  delta.taps = reader.size("ssm.conv_kernel", kMaxConvTaps);
  const auto whole = [&](const char* what, std::size_t value, const char* of, std::size_t parts) {
    if (value % parts != 0) {
      reader.fail(ErrorCode::kBadFile, std::string(what) + " (" + std::to_string(value) +
                                           ") must be a multiple of " + of + " (" +
                                           std::to_string(parts) + ")");
    }
  };
  whole("ssm.time_step_rank", delta.value_heads, "ssm.group_count", delta.key_heads);
  whole("ssm.inner_size", inner, "ssm.time_step_rank", delta.value_heads);
  delta.value_dim = inner / delta.value_heads;
  reader.multiple("linear key head dimension", delta.key_dim, kPanelRows);
  reader.multiple("linear value head dimension", delta.value_dim, kPanelRows);
  reader.multiple("width of all linear value heads", inner, kQuantBlock);
  // GGUF files of Qwen3.5 order value heads so that those of one key head are key_heads apart.
  delta.grouped = source.architecture() == "qwen3next" ||
                  source.get_uint("ssm.grouped_value_heads").value_or(0) != 0;
  return delta;
}

std::vector<bool> read_recurrent_layers(const WeightSource& source, const ConfigReader& reader,
                                        std::size_t layers, std::size_t extra) {
  if (auto flags = source.get_flags("attention.recurrent_layers")) {
    if (flags->size() == layers + extra) {
      flags->resize(layers);
    }
    if (flags->size() != layers) {
      reader.fail(ErrorCode::kBadFile, "layer_types: has " + std::to_string(flags->size()) +
                                           " entries; must have one for each of the " +
                                           std::to_string(layers) + " layers");
    }
    return *std::move(flags);
  }
  const std::size_t interval = reader.size_or("full_attention_interval", kMaxWidth, 4);
  std::vector<bool> recurrent;
  for (std::size_t layer = 1; layer <= layers; ++layer) {
    recurrent.push_back(layer % interval != 0);
  }
  return recurrent;
}

DecoderConfig qwen35_config(const WeightSource& source, bool experts = false) {
  const ConfigReader reader(source);
  DecoderConfig config = read_decoder_config(source, experts);
  // A GGUF file counts the layers that predict further tokens; they are not part of this model.
  const std::size_t extra = source.get_uint("nextn_predict_layers").value_or(0);
  if (extra >= config.layers) {
    reader.fail(ErrorCode::kBadFile, "nextn_predict_layers: got " + std::to_string(extra) +
                                         "; must be below block_count (" +
                                         std::to_string(config.layers) + ")");
  }
  config.layers -= extra;
  config.extra_layers = extra;
  config.qk_norm = true;
  config.attention_gate = true;
  config.delta = read_delta(source, reader);
  config.recurrent_layers = read_recurrent_layers(source, reader, config.layers, extra);
  if (config.window != 0) {
    reader.fail(ErrorCode::kUnsupported, "attention.sliding_window: got " +
                                             std::to_string(config.window) +
                                             "; this model's attention has no window here");
  }
  if (config.attention_count() == 0) {
    reader.fail(ErrorCode::kUnsupported,
                "all layers are recurrent; at least one with attention is needed");
  }
  return config;
}

DecoderConfig qwen35moe_config(const WeightSource& source) {
  DecoderConfig config = qwen35_config(source, /*experts=*/true);
  config.experts = read_expert_config(source, config, {.normalised = true, .shared = true});
  return config;
}

DecoderConfig qwen3next_config(const WeightSource& source) {
  return qwen35moe_config(source);  // what differs is how the file keeps it (gated_delta_net.cpp)
}

}  // namespace

std::unique_ptr<Model> make_qwen35(const WeightSource& source, const ModelOptions& options) {
  return make_decoder(source, options, qwen35_config(source));
}

ModelInfo describe_qwen35(const WeightSource& source) {
  return describe_decoder(source, qwen35_config(source));
}

std::unique_ptr<Model> make_qwen35moe(const WeightSource& source, const ModelOptions& options) {
  return make_decoder(source, options, qwen35moe_config(source));
}

ModelInfo describe_qwen35moe(const WeightSource& source) {
  return describe_decoder(source, qwen35moe_config(source));
}

std::unique_ptr<Model> make_qwen3next(const WeightSource& source, const ModelOptions& options) {
  return make_decoder(source, options, qwen3next_config(source));
}

ModelInfo describe_qwen3next(const WeightSource& source) {
  return describe_decoder(source, qwen3next_config(source));
}

}  // namespace pocket
