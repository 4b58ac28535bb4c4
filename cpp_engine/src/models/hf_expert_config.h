#pragma once

#include "hf_config.h"
#include "hf_fields.h"

namespace pocket {

/// Adds the keys of mixture-of-experts layers (expert_config.h) of Qwen2-MoE, Qwen3-MoE,
/// Qwen3-Next, Qwen3.5-MoE or Mixtral. `block_count` is already there. Throws as `read_hf_config`
/// does.
void read_hf_experts(const Fields& fields, HfConfig& config);

}  // namespace pocket
