#include "expert_routing.h"

#include <algorithm>
#include <cmath>

#include "row_tasks.h"

namespace pocket {
namespace {

void softmax(std::span<float> values) {
  const float most = *std::max_element(values.begin(), values.end());
  float sum = 0.0F;
  for (float& value : values) {
    value = std::exp(value - most);
    sum += value;
  }
  for (float& value : values) {
    value /= sum;
  }
}

}  // namespace

void choose_experts(std::span<float> logits, bool normalised, std::span<std::uint32_t> chosen,
                    std::span<float> weights) {
  softmax(logits);
  const std::span<const float> probability = logits;
  // The best so far in descending order; a later equal does not push out an earlier one.
  std::size_t held = 0;
  for (std::size_t expert = 0; expert < probability.size(); ++expert) {
    const bool full = held == chosen.size();
    if (full && !(probability[expert] > probability[chosen[held - 1]])) {
      continue;
    }
    std::size_t place = full ? held - 1 : held++;
    for (; place > 0 && probability[expert] > probability[chosen[place - 1]]; --place) {
      chosen[place] = chosen[place - 1];
    }
    chosen[place] = static_cast<std::uint32_t>(expert);
  }
  float sum = 0.0F;
  for (const std::uint32_t expert : chosen) {
    sum += probability[expert];
  }
  std::sort(chosen.begin(), chosen.end());
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    weights[i] = normalised ? probability[chosen[i]] / sum : probability[chosen[i]];
  }
}

ExpertRouting::ExpertRouting(std::size_t max_rows, const ExpertConfig& config)
    : experts_(config.count),
      used_(config.used),
      normalised_(config.normalised),
      chosen_(max_rows * config.used),
      chosen_weight_(max_rows * config.used),
      next_(config.count),
      task_ends_(config.count),
      row_(max_rows * config.used),
      group_(max_rows * config.used),
      weight_(max_rows * config.used) {
  groups_.reserve(config.count);
}

void ExpertRouting::plan(const Compute& compute, float* scores, std::size_t stride,
                         std::size_t rows) {
  for_each_row(compute, rows, [&](std::size_t row, std::size_t) {
    choose_experts({scores + row * stride, experts_}, normalised_,
                   {chosen_.data() + row * used_, used_},
                   {chosen_weight_.data() + row * used_, used_});
  });

  pairs_ = rows * used_;
  std::fill(next_.begin(), next_.end(), 0);
  for (std::size_t i = 0; i < pairs_; ++i) {
    ++next_[chosen_[i]];
  }
  groups_.clear();
  std::size_t first = 0;
  for (std::size_t expert = 0; expert < experts_; ++expert) {
    const std::size_t count = next_[expert];
    next_[expert] = first;
    if (count > 0) {
      std::fill_n(group_.begin() + static_cast<std::ptrdiff_t>(first), count,
                  static_cast<std::uint32_t>(groups_.size()));
      groups_.push_back({.expert = expert, .first = first, .rows = count});
    }
    first += count;
  }
  for (std::size_t i = 0; i < pairs_; ++i) {
    const std::size_t pair = next_[chosen_[i]]++;
    row_[pair] = static_cast<std::uint32_t>(i / used_);
    weight_[pair] = chosen_weight_[i];
  }
}

}  // namespace pocket
