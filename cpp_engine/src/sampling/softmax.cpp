#include "softmax.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace pocket {
namespace {

constexpr std::size_t kLanes = 16;
constexpr std::size_t kRun = 256;  // short enough for float partial sums to lose nothing that shows

double run_sum(std::span<const float> run) {
  std::array<float, kLanes> lanes{};
  std::size_t i = 0;
  for (; i + kLanes <= run.size(); i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += run[i + lane];
    }
  }
  for (std::size_t lane = 0; i < run.size(); ++i, ++lane) {
    lanes[lane] += run[i];
  }
  double sum = 0.0;
  for (const float lane : lanes) {
    sum += lane;
  }
  return sum;
}

}  // namespace

void softmax_weights(std::span<const float> logits, float max, float temperature,
                     std::span<float> weights) {
  const float* x = logits.data();
  float* y = weights.data();
  const std::size_t n = logits.size();
  for (std::size_t i = 0; i < n; ++i) {
    y[i] = exp_nonpositive((x[i] - max) / temperature);
  }
}

double fixed_order_sum(std::span<const float> values) {
  double sum = 0.0;
  for (std::size_t i = 0; i < values.size(); i += kRun) {
    sum += run_sum(values.subspan(i, std::min(kRun, values.size() - i)));
  }
  return sum;
}

std::size_t pick_weight(std::span<const float> weights, double u) {
  const double target = u * fixed_order_sum(weights);
  double cumulative = 0.0;  // at most target
  for (std::size_t begin = 0; begin < weights.size(); begin += kRun) {
    const std::span<const float> run =
        weights.subspan(begin, std::min(kRun, weights.size() - begin));
    const double end = cumulative + run_sum(run);
    if (end <= target) {
      cumulative = end;
      continue;
    }
    // The walk's sum may be rounded below the run's: then it is the run's last positive weight.
    std::size_t last = 0;
    for (std::size_t i = 0; i < run.size() && cumulative <= target; ++i) {
      if (run[i] > 0.0F) {
        last = begin + i;
        cumulative += run[i];
      }
    }
    return last;
  }
  // u * total was rounded up to the total.
  std::size_t last = weights.size() - 1;
  while (last > 0 && !(weights[last] > 0.0F)) {
    --last;
  }
  return last;
}

double log_sum_exp(std::span<const float> logits, float max) {
  double sum = 0.0;
  std::array<float, kRun> run;
  for (std::size_t i = 0; i < logits.size(); i += kRun) {
    const std::size_t n = std::min(kRun, logits.size() - i);
    const float* x = logits.data() + i;
    for (std::size_t lane = 0; lane < n; ++lane) {
      run[lane] = exp_nonpositive(x[lane] - max);
    }
    sum += run_sum(std::span(run).first(n));
  }
  return static_cast<double>(max) + std::log(sum);
}

}  // namespace pocket
