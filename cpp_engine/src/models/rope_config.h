#pragma once

#include <cstddef>
#include <vector>

#include "pocket/models/weight_source.h"

namespace pocket {

/// How heads rotate: pair i of `dims / 2` turns by position / position_scale * base^(-2i / dims) /
/// frequency_factors[i] (RoFormer, Su et al. 2021). All scaling methods are cases of it.
struct RopeConfig {
  std::size_t dims = 0;  ///< leading dimensions of a head that rotate; even
  double base = 10000.0;
  double position_scale = 1.0;             ///< linear scaling: positions are divided by it
  std::vector<float> frequency_factors{};  ///< empty, or [dims / 2]: Llama 3.1's, YaRN's
  double magnitude = 1.0;                  ///< factor of cos and sin: YaRN's attention factor
};

/// Reads the rope.* keys and `rope_freqs.weight`. `rope.scaling.type`: none, linear, yarn (Peng et
/// al. 2023), and llama3, GGUF's name for which is the tensor: the keys
/// rope.scaling.{factor, low_freq_factor, high_freq_factor, original_context_length} say the same.
/// Throws `Error(kBadFile)` and `Error(kUnsupported)` naming file, key and value.
[[nodiscard]] RopeConfig read_rope_config(const WeightSource& source, std::size_t head_dim);

}  // namespace pocket
