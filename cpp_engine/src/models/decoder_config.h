#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "pocket/kv/state_store.h"
#include "pocket/models/model_info.h"
#include "pocket/models/weight_source.h"
#include "rope_config.h"

namespace pocket {

/// What multiplies a gated MLP's second branch.
enum class Activation : std::uint8_t { kSilu, kGelu };  // kGelu: its tanh form

/// Sizes of Gated DeltaNet layers (layers/gated_delta_net.h).
struct DeltaNetConfig {
  std::size_t key_heads = 0;
  std::size_t value_heads = 0;  ///< a multiple of key_heads
  std::size_t key_dim = 0;      ///< of a head
  std::size_t value_dim = 0;
  std::size_t taps = 0;  ///< of the convolution
  /// Value heads of one key head follow each other; else they are key_heads apart.
  bool grouped = true;

  [[nodiscard]] std::size_t group() const noexcept { return value_heads / key_heads; }
  [[nodiscard]] std::size_t key_width() const noexcept { return key_heads * key_dim; }
  [[nodiscard]] std::size_t value_width() const noexcept { return value_heads * value_dim; }
  /// q, k and v of a row.
  [[nodiscard]] std::size_t mixed_width() const noexcept { return 2 * key_width() + value_width(); }
  [[nodiscard]] std::size_t value_head(std::size_t key_head, std::size_t index) const noexcept {
    return grouped ? key_head * group() + index : index * key_heads + key_head;
  }
};

/// Sizes of mixture-of-experts MLPs (layers/expert_mlp.h).
struct ExpertConfig {
  std::size_t count = 0;       ///< 0: the model has none
  std::size_t used = 0;        ///< by each row, at most `count`
  std::size_t ffn = 0;         ///< of one expert
  std::size_t shared_ffn = 0;  ///< of the expert that all rows use; 0: there is none
  bool normalised = false;     ///< the weights of a row's experts are divided by their sum
  std::vector<bool> layers;    ///< [layers]: experts instead of one MLP
};

/// Hyper-parameters of a decoder-only transformer with grouped-query attention and a gated MLP.
struct DecoderConfig {
  std::size_t layers = 0;
  std::size_t hidden = 0;
  std::size_t heads = 0;
  std::size_t kv_heads = 0;
  std::size_t head_dim = 0;
  std::size_t ffn = 0;
  std::size_t vocab = 0;
  std::size_t context = 0;
  float norm_epsilon = 0.0F;
  float attention_scale = 0.0F;  ///< of q . k
  RopeConfig rope;
  /// Positions that a row of a sliding layer sees, its own included; 0: all, in every layer.
  std::size_t window = 0;
  std::vector<bool> sliding_layers;        ///< [layers]; empty: all
  std::optional<RopeConfig> sliding_rope;  ///< of sliding layers; none: `rope`
  // What the architecture adds to Llama's blocks; set by its file, not read from the source.
  bool qkv_bias = false;    ///< q, k and v have biases
  bool qk_norm = false;     ///< every head of q and k is normalised before it rotates
  bool post_norms = false;  ///< outputs of attention and MLP are normalised before they are added
  bool attention_gate = false;  ///< attention's output is multiplied by a sigmoid of q's other half
  Activation activation = Activation::kSilu;
  float embedding_scale = 1.0F;
  std::vector<bool> recurrent_layers;  ///< [layers]: Gated DeltaNet instead of attention; or empty
  DeltaNetConfig delta;
  ExpertConfig experts;
  std::size_t extra_layers = 0;  ///< of the file, behind `layers`, that are not computed

  [[nodiscard]] std::size_t query_width() const noexcept { return heads * head_dim; }
  [[nodiscard]] std::size_t kv_width() const noexcept { return kv_heads * head_dim; }
  [[nodiscard]] std::size_t group() const noexcept { return heads / kv_heads; }
  [[nodiscard]] bool recurrent(std::size_t layer) const {
    return !recurrent_layers.empty() && recurrent_layers[layer];
  }
  [[nodiscard]] std::size_t recurrent_count() const {
    return static_cast<std::size_t>(
        std::count(recurrent_layers.begin(), recurrent_layers.end(), true));
  }
  [[nodiscard]] bool sparse(std::size_t layer) const {
    return !experts.layers.empty() && experts.layers[layer];
  }
  /// Layers with a KV cache.
  [[nodiscard]] std::size_t attention_count() const { return layers - recurrent_count(); }
  /// The shape of one slot's recurrent state.
  [[nodiscard]] StateShape state_shape() const;
  [[nodiscard]] bool slides(std::size_t layer) const {
    return sliding_layers.empty() || sliding_layers[layer];
  }
  /// Positions that a row of this layer sees; 0: all.
  [[nodiscard]] std::size_t window_of(std::size_t layer) const {
    return slides(layer) ? window : 0;
  }
};

/// Reads and checks the keys that the Llama family uses. Throws `Error(kBadFile)` for missing or
/// impossible values and `Error(kUnsupported)` for a feature or a size that the kernels lack; each
/// message names file, key, value and what would do. A model with experts is refused unless
/// `experts` says that its architecture reads them itself (expert_config.h).
[[nodiscard]] DecoderConfig read_decoder_config(const WeightSource& source, bool experts = false);

/// What a model of this configuration is, as far as the file says so before its weights are packed.
[[nodiscard]] ModelInfo describe_decoder(const WeightSource& source, const DecoderConfig& config);

}  // namespace pocket
