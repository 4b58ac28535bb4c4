#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace pocket {

/// How one row of logits becomes a token. Plain data, one per sampled row of a step.
struct SamplingParams {
  float temperature = 0.0F;       ///< <= 1e-5 is greedy
  std::int32_t top_k = 0;         ///< 0 = off
  float top_p = 1.0F;             ///< 1 = off
  float min_p = 0.0F;             ///< 0 = off
  std::uint64_t seed = 0;         ///< key of the request's Philox stream
  std::uint64_t token_index = 0;  ///< counter: index of the output token being drawn
};

/// `token` is -1 when the row holds a NaN or no finite logit: that request fails, others go on.
struct SampledToken {
  std::int32_t token = -1;
  float logprob = 0.0F;  ///< log-softmax of the raw logits at `token`
};

/// Draws one token from `logits` [vocab]; ids at or beyond `logits.size()` do not exist for it (the
/// caller passes a span cut to the tokenizer's size). Order of operations: temperature, top-k,
/// top-p, min-p, then one uniform from Philox4x32-10 (Salmon et al., SC'11) keyed by seed and token
/// index. The result depends on the arguments only. `scratch` is reused between calls; not
/// thread-safe.
class Sampler {
 public:
  explicit Sampler(std::size_t vocab_size);
  [[nodiscard]] SampledToken sample(std::span<const float> logits, const SamplingParams& params);

 private:
  std::vector<std::int32_t> order_;
  std::vector<float> weight_;
};

}  // namespace pocket
