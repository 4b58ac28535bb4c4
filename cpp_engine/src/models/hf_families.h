#pragma once

#include <string_view>

namespace pocket {

/// What architectures (GGUF's names) share in Hugging Face's files. Names are compared as a whole:
/// other models' names end in "moe" as well.

/// Gated DeltaNet and gated attention.
[[nodiscard]] inline bool is_hybrid(std::string_view architecture) noexcept {
  return architecture == "qwen35" || architecture == "qwen35moe" || architecture == "qwen3next";
}

/// With experts in some layers at least; of "llama" only Mixtral is.
[[nodiscard]] inline bool has_experts(std::string_view architecture) noexcept {
  return architecture == "qwen2moe" || architecture == "qwen3moe" || architecture == "qwen35moe" ||
         architecture == "qwen3next";
}

}  // namespace pocket
