#include "hf_hybrid_config.h"

#include <algorithm>
#include <string>

#include "pocket/base/error.h"
#include "pocket/base/quoted.h"

namespace pocket {
namespace {

// Transformers' defaults where published files leave fields out.
constexpr std::uint64_t kDefaultHeadDim = 256;
constexpr std::uint64_t kDefaultTaps = 4;
constexpr std::uint64_t kDefaultInterval = 4;
// An absurd number of layers is refused later, by its own name.
constexpr std::uint64_t kMostFlags = 1 << 16;

std::uint64_t required(const Fields& fields, const char* field) {
  const auto value = fields.uint(field);
  if (!value) {
    fields.fail(std::string(field) + " is missing");
  }
  return *value;
}

std::vector<bool> read_layers(const Fields& fields, const HfConfig& config) {
  std::vector<bool> recurrent;
  if (const JsonArray* const types = fields.array("layer_types")) {
    for (const JsonValue& item : *types) {
      const auto* const type = item.as<std::string>();
      if (type == nullptr || (*type != "full_attention" && *type != "linear_attention")) {
        fields.fail("layer_types: got " +
                        (type == nullptr ? std::string(item.kind()) : quoted(*type)) +
                        "; supported are full_attention and linear_attention",
                    ErrorCode::kUnsupported);
      }
      recurrent.push_back(*type == "linear_attention");
    }
    return recurrent;
  }
  const std::uint64_t interval = fields.uint("full_attention_interval").value_or(kDefaultInterval);
  if (interval == 0) {
    fields.fail("full_attention_interval: got 0; must be at least 1");
  }
  const std::uint64_t layers = std::min(config.uints.at("block_count"), kMostFlags);
  for (std::uint64_t layer = 1; layer <= layers; ++layer) {
    recurrent.push_back(layer % interval != 0);
  }
  return recurrent;
}

}  // namespace

void read_hybrid_config(const Fields& fields, HfConfig& config) {
  config.norm_weight_offset = 1.0F;
  for (const char* key : {"attention.key_length", "attention.value_length"}) {
    config.uints.try_emplace(key, kDefaultHeadDim);
  }
  const std::uint64_t value_heads = required(fields, "linear_num_value_heads");
  const std::uint64_t value_dim = required(fields, "linear_value_head_dim");
  constexpr std::uint64_t kMost = 1 << 20;  // keeps the product inside 64 bits
  if (value_heads > kMost || value_dim > kMost) {
    fields.fail("linear_num_value_heads, linear_value_head_dim: got " +
                std::to_string(value_heads) + " and " + std::to_string(value_dim) +
                "; must be at most " + std::to_string(kMost));
  }
  config.uints["ssm.group_count"] = required(fields, "linear_num_key_heads");
  config.uints["ssm.time_step_rank"] = value_heads;
  config.uints["ssm.state_size"] = required(fields, "linear_key_head_dim");
  config.uints["ssm.inner_size"] = value_heads * value_dim;
  config.uints["ssm.conv_kernel"] = fields.uint("linear_conv_kernel_dim").value_or(kDefaultTaps);
  config.uints["ssm.grouped_value_heads"] = 1;
  config.flags["attention.recurrent_layers"] = read_layers(fields, config);
  if (!fields.boolean("attn_output_gate", true)) {
    fields.fail("attn_output_gate: got false; these models' attention has a gate here",
                ErrorCode::kUnsupported);
  }
}

}  // namespace pocket
