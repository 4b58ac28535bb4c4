#include "hf_expert_config.h"

#include <algorithm>
#include <string>

namespace pocket {
namespace {

// An absurd number of layers is refused later, by its own name.
constexpr std::uint64_t kMostFlags = 1 << 16;

std::uint64_t required(const Fields& fields, const char* field) {
  const auto value = fields.uint(field);
  if (!value) {
    fields.fail(std::string(field) + " is missing");
  }
  return *value;
}

// Every decoder_sparse_step-th layer has experts, unless mlp_only_layers lists it.
std::vector<bool> read_layers(const Fields& fields, const HfConfig& config) {
  const std::uint64_t step = fields.uint("decoder_sparse_step").value_or(1);
  if (step == 0) {
    fields.fail("decoder_sparse_step: got 0; must be at least 1");
  }
  const std::uint64_t layers = std::min(config.uints.at("block_count"), kMostFlags);
  std::vector<bool> sparse;
  for (std::uint64_t layer = 1; layer <= layers; ++layer) {
    sparse.push_back(layer % step == 0);
  }
  const JsonArray* const dense = fields.array("mlp_only_layers");
  if (dense == nullptr) {
    return sparse;
  }
  for (const JsonValue& item : *dense) {
    const auto* const layer = item.as<std::int64_t>();
    if (layer == nullptr || *layer < 0) {
      fields.fail("mlp_only_layers: must list numbers of layers");
    }
    if (static_cast<std::uint64_t>(*layer) < layers) {
      sparse[static_cast<std::size_t>(*layer)] = false;
    }
  }
  return sparse;
}

}  // namespace

void read_hf_experts(const Fields& fields, HfConfig& config) {
  // Transformers 5 names the field of Qwen3-MoE by both words.
  const auto local = fields.uint("num_local_experts");
  config.uints["expert_count"] = local ? *local : required(fields, "num_experts");
  config.uints["expert_used_count"] = required(fields, "num_experts_per_tok");
  const bool mixtral = config.model_type == "mixtral";
  config.uints["expert_feed_forward_length"] =
      required(fields, mixtral ? "intermediate_size" : "moe_intermediate_size");
  if (!mixtral && config.architecture != "qwen3moe") {
    config.uints["expert_shared_feed_forward_length"] =
        required(fields, "shared_expert_intermediate_size");
  }
  if (mixtral || config.architecture == "qwen35moe") {  // where neither is a choice
    const std::uint64_t layers = std::min(config.uints.at("block_count"), kMostFlags);
    config.bools["expert_weights_norm"] = true;
    config.flags["expert_layers"] = std::vector<bool>(static_cast<std::size_t>(layers), true);
    return;
  }
  const bool norm = config.architecture == "qwen3next";  // Transformers' default
  config.bools["expert_weights_norm"] = fields.boolean("norm_topk_prob", norm);
  config.flags["expert_layers"] = read_layers(fields, config);
}

}  // namespace pocket
