#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace pocket {

/// How activations meet the weights.
enum class Precision : std::uint8_t {
  kInt8,     ///< activations quantised per 32-block, integer dot products (serving)
  kExactF32  ///< float activations, weights decoded exactly (parity tests, debugging)
};

/// What a loaded model is. Sizes count elements, `*_bytes` bytes.
struct ModelInfo {
  std::string architecture;
  std::size_t layers = 0;
  std::size_t hidden = 0;
  std::size_t heads = 0;
  std::size_t kv_heads = 0;
  std::size_t head_dim = 0;
  std::size_t ffn = 0;
  std::size_t vocab = 0;             ///< width of the logits
  std::size_t context = 0;           ///< positions that the model was made for
  std::size_t attention_layers = 0;  ///< layers with a KV cache; the others keep a recurrent state
  std::size_t experts = 0;           ///< of a mixture-of-experts layer; 0: there is none
  std::size_t experts_used = 0;      ///< by each row
  std::size_t state_bytes = 0;       ///< recurrent state of one sequence, over all layers
  /// Tokens of the file's tokenizer, 0 if it has none. Logits at or beyond it are padding.
  std::size_t tokenizer_tokens = 0;
  /// Ids that end a text, as far as the file names them (end of sequence, of turn, of message).
  std::vector<std::int32_t> eos_token_ids;
  std::size_t parameter_count = 0;
  std::size_t weight_bytes = 0;
  std::size_t kv_bytes_per_block = 0;
};

}  // namespace pocket
