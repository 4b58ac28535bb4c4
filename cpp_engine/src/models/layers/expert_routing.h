#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "../compute.h"
#include "../decoder_config.h"

namespace pocket {

/// Chooses one row's experts: the `used` most probable under softmax(logits), ties to the lower
/// index, written in ascending order of their indices.
///
/// Args:
///   logits: [experts], overwritten with the probabilities, in float32. NaNs are chosen like any
///     other value, so that a row that holds one ends in NaN and not in a crash.
///   normalised: weights are the probabilities divided by the sum of those chosen.
///   chosen, weights: [used].
void choose_experts(std::span<float> logits, bool normalised, std::span<std::uint32_t> chosen,
                    std::span<float> weights);

/// Which rows of a step go to which expert, and with what weight: made once per layer and step. A
/// pair is one row at one of its experts; pairs are sorted by expert, then by row.
///
/// Thread contract: `plan` by one thread at a time; it uses the pool's threads. Nothing is
/// allocated after construction.
class ExpertRouting {
 public:
  ExpertRouting(std::size_t max_rows, const ExpertConfig& config);

  /// An expert that rows go to: pairs [first, first + rows).
  struct Group {
    std::size_t expert;
    std::size_t first;
    std::size_t rows;
  };

  /// `scores`: the router's logits [rows, stride], overwritten.
  void plan(const Compute& compute, float* scores, std::size_t stride, std::size_t rows);

  /// Ascending by expert.
  [[nodiscard]] std::span<const Group> groups() const noexcept { return groups_; }
  [[nodiscard]] std::size_t pairs() const noexcept { return pairs_; }
  [[nodiscard]] std::size_t row_of(std::size_t pair) const { return row_[pair]; }
  [[nodiscard]] float weight_of(std::size_t pair) const { return weight_[pair]; }
  /// Room for one number per group, for whoever cuts the groups into tasks.
  [[nodiscard]] std::span<std::size_t> task_ends() noexcept {
    return std::span(task_ends_).first(groups_.size());
  }
  [[nodiscard]] const Group& group_of(std::size_t pair) const { return groups_[group_[pair]]; }

 private:
  std::size_t experts_;
  std::size_t used_;
  bool normalised_;
  std::size_t pairs_ = 0;
  std::vector<std::uint32_t> chosen_;  // [rows, used]
  std::vector<float> chosen_weight_;
  std::vector<std::size_t> next_;  // [experts]: where the next pair of an expert goes
  std::vector<Group> groups_;
  std::vector<std::size_t> task_ends_;  // [experts]
  std::vector<std::uint32_t> row_;      // [pairs]
  std::vector<std::uint32_t> group_;    // [pairs]
  std::vector<float> weight_;           // [pairs]
};

}  // namespace pocket
