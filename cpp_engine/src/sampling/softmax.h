#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace pocket {

/// exp(x) for x <= 0, relative error below 2e-7; 0 below -87 (and for -inf).
///
/// Written out instead of `std::exp` so that the drawn token has the same bits on every CPU (libm
/// picks its code by CPU) and so that loops over it vectorise. Cephes' expf polynomial.
[[nodiscard]] inline float exp_nonpositive(float x) noexcept {
  constexpr float kLog2E = 1.44269504F;
  constexpr float kLn2High = 0.693359375F;
  constexpr float kLn2Low = -2.12194440e-4F;
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
  constexpr float kLowest = -87.0F;
  const float clamped = x > kLowest ? x : kLowest;  // this order is one max instruction
  const float n = (clamped * kLog2E + kRound) - kRound;
  const float r = (clamped - n * kLn2High) - n * kLn2Low;
  float p = 1.9875691500e-4F;
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  const float e = (p * r * r + r) + 1.0F;
  const std::int32_t exponent = static_cast<std::int32_t>(n) * (1 << 23);
  const std::int32_t keep = -static_cast<std::int32_t>(x >= kLowest);  // a mask, not a branch
  return std::bit_cast<float>((std::bit_cast<std::int32_t>(e) + exponent) & keep);
}

/// weights[i] = exp((logits[i] - max) / temperature).
void softmax_weights(std::span<const float> logits, float max, float temperature,
                     std::span<float> weights);

/// The sum in a fixed order: 16 strided partial sums per run of 256, runs added in double.
[[nodiscard]] double fixed_order_sum(std::span<const float> values);

/// The index at which the cumulative weight, in the order of the sum above, first exceeds
/// u * total, for u in [0, 1). A weight of 0 is never picked; at least one must be positive.
[[nodiscard]] std::size_t pick_weight(std::span<const float> weights, double u);

/// log(sum(exp(logits))), given their maximum.
[[nodiscard]] double log_sum_exp(std::span<const float> logits, float max);

}  // namespace pocket
