#pragma once

#include <string_view>

namespace pocket {

/// What architectures (GGUF's names) share in Hugging Face's files. Names are compared as a whole:
/// other models' names end in "moe" as well.
[[nodiscard]] inline bool is_qwen35(std::string_view architecture) noexcept {
  return architecture == "qwen35" || architecture == "qwen35moe";
}

[[nodiscard]] inline bool has_experts(std::string_view architecture) noexcept {
  return architecture == "qwen2moe" || architecture == "qwen3moe" || architecture == "qwen35moe";
}

}  // namespace pocket
