#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace pocket {

/// GGUF's name of a Hugging Face tensor: "model.layers.3.mlp.up_proj.weight" is "blk.3.ffn_up
/// .weight". A name that is not known stays as it is, so that the loader refuses it by the name
/// that its author gave it. `nullopt`: the tensor is not part of the text model, or can be computed
/// (vision towers, RoPE's inverse frequencies).
[[nodiscard]] std::optional<std::string> gguf_tensor_name(std::string_view hf_name,
                                                          std::string_view architecture);

}  // namespace pocket
