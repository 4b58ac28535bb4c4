#include "rope_table.h"

#include <cmath>

namespace pocket {

RopeTable::RopeTable(const RopeConfig& config, std::size_t positions)
    : pairs_(config.dims / 2), cos_(positions * pairs_), sin_(positions * pairs_) {
  for (std::size_t pair = 0; pair < pairs_; ++pair) {
    const double exponent = -2.0 * static_cast<double>(pair) / static_cast<double>(config.dims);
    double frequency = std::pow(config.base, exponent) / config.position_scale;
    if (!config.frequency_factors.empty()) {
      frequency /= static_cast<double>(config.frequency_factors[pair]);
    }
    for (std::size_t position = 0; position < positions; ++position) {
      const double angle = static_cast<double>(position) * frequency;
      cos_[position * pairs_ + pair] = static_cast<float>(config.magnitude * std::cos(angle));
      sin_[position * pairs_ + pair] = static_cast<float>(config.magnitude * std::sin(angle));
    }
  }
}

}  // namespace pocket
