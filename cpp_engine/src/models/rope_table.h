#pragma once

#include <cstddef>
#include <vector>

#include "rope_config.h"

namespace pocket {

/// cos and sin of every position below `positions`, [positions, rotary_dims / 2] each, as
/// `RopeConfig` defines them. Angles are computed in double: in float32 they are off by 5e-4 at
/// position 8,000.
class RopeTable {
 public:
  RopeTable() = default;
  RopeTable(const RopeConfig& config, std::size_t positions);

  [[nodiscard]] std::size_t rotary_dims() const noexcept { return 2 * pairs_; }
  [[nodiscard]] const float* cos(std::size_t position) const noexcept {
    return cos_.data() + position * pairs_;
  }
  [[nodiscard]] const float* sin(std::size_t position) const noexcept {
    return sin_.data() + position * pairs_;
  }
  [[nodiscard]] std::size_t bytes() const noexcept {
    return (cos_.size() + sin_.size()) * sizeof(float);
  }

 private:
  std::size_t pairs_ = 0;
  std::vector<float> cos_;
  std::vector<float> sin_;
};

}  // namespace pocket
