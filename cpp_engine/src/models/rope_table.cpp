#include "rope_table.h"

#include <cmath>

namespace pocket {

RopeTable::RopeTable(const DecoderConfig& config, std::size_t positions)
    : pairs_(config.rotary_dims / 2), cos_(positions * pairs_), sin_(positions * pairs_) {
  for (std::size_t pair = 0; pair < pairs_; ++pair) {
    const double exponent =
        -2.0 * static_cast<double>(pair) / static_cast<double>(config.rotary_dims);
    double frequency = std::pow(config.rope_base, exponent) / config.rope_position_scale;
    if (!config.rope_frequency_factors.empty()) {
      frequency /= static_cast<double>(config.rope_frequency_factors[pair]);
    }
    for (std::size_t position = 0; position < positions; ++position) {
      const double angle = static_cast<double>(position) * frequency;
      cos_[position * pairs_ + pair] = static_cast<float>(std::cos(angle));
      sin_[position * pairs_ + pair] = static_cast<float>(std::sin(angle));
    }
  }
}

}  // namespace pocket
