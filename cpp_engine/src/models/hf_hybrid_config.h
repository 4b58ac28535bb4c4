#pragma once

#include "hf_config.h"
#include "hf_fields.h"

namespace pocket {

/// Adds the fields of Qwen3.5's text model or of Qwen3-Next: which layers are recurrent, and the
/// sizes of their heads as GGUF's ssm.* keys. Called after the sizes of the network are read.
/// Throws as `read_hf_config`.
void read_hybrid_config(const Fields& fields, HfConfig& config);

}  // namespace pocket
