#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pocket/cpu/kernels.h"
#include "pocket/sampling/candidates.h"
#include "pocket/sampling/logit_edits.h"

namespace pocket {

/// Temperatures up to this are greedy: dividing by less overflows.
inline constexpr float kGreedyTemperature = 1e-5F;

/// How one row of logits becomes a token. Plain data, one per sampled row of a step.
struct SamplingParams {
  float temperature = 0.0F;           ///< <= kGreedyTemperature is greedy
  std::int32_t top_k = 0;             ///< 0 = off
  float top_p = 1.0F;                 ///< 1 = off
  float min_p = 0.0F;                 ///< 0 = off
  std::uint64_t seed = 0;             ///< key of the request's Philox stream
  std::uint64_t token_index = 0;      ///< counter: index of the output token being drawn
  bool logprob = true;                ///< false: skip `SampledToken::logprob` (one exp per id)
  std::int32_t top_logprobs = 0;      ///< alternatives wanted, 0..kMaxTopLogprobs; needs `logprob`
  const LogitEdits* edits = nullptr;  ///< borrowed for the call; null: none
  std::span<const std::int32_t> allowed{};  ///< bit mask over the ids (borrowed); empty: all
};

inline constexpr std::size_t kMaxTopLogprobs = 20;

/// Throws `Error(kInvalidArgument)` naming the field if a value is out of range: temperature finite
/// and >= 0, top_k >= 0, top_p in (0, 1], min_p in [0, 1], top_logprobs as above.
void validate_sampling(const SamplingParams& params);

/// Why a row gave no token: that request fails, others go on.
inline constexpr std::int32_t kUnusableLogits = -1;  ///< a NaN or +inf, or nothing but -inf
inline constexpr std::int32_t kNothingAllowed = -2;  ///< edits and mask leave no candidate

struct SampledToken {
  std::int32_t token = kUnusableLogits;  ///< an id, or one of the two above
  float logprob = 0.0F;  ///< log-softmax of the raw logits at `token`; NaN: not asked, or no token
};

struct TokenLogprob {
  std::int32_t token = -1;  ///< -1: there are fewer ids than entries
  float logprob = 0.0F;
};

/// Draws one token from `logits` [vocab]; ids at or beyond `logits.size()` do not exist for it (the
/// caller passes a span cut to the tokenizer's size).
///
/// Candidates are ordered by logit, highest first, ties by lower id. The order of operations:
///   0. edits (bias, penalties, banned and ending ids: LogitEdits), then the allowed mask. Log
///      probabilities are those of the row before.
///   1. greedy: the first candidate; nothing below happens.
///   2. temperature: weight = exp((logit - max) / temperature), so the best weighs exactly 1.
///   3. top-k: exactly the first k candidates, even when the k-th ties with the next.
///   4. top-p: the shortest prefix that holds at least top_p of the weight left by top-k; the
///      candidate that reaches it stays.
///   5. min-p: drops weights below min_p (relative to the best, whose weight is 1).
///   6. one uniform u from Philox (key: seed, counter: token_index): the first candidate whose
///      cumulative weight exceeds u * total. Candidates are walked in the order above when top-k or
///      top-p is on, by id otherwise.
/// So at least one candidate always remains, and -inf logits are never drawn. Arithmetic is fixed
/// (own exp, sums in a fixed order): the result depends on the arguments only.
///
/// `scratch` is reused between calls and nothing is allocated in `sample`; one thread at a time.
class Sampler {
 public:
  Sampler(const KernelTable& kernels, std::size_t vocab_size);
  /// Without edits and mask. `logits.size()` is at most the vocab size given to the constructor;
  /// `params` are valid.
  [[nodiscard]] SampledToken sample(std::span<const float> logits, const SamplingParams& params);
  /// With all options: changes `row`. `top` [>= params.top_logprobs] gets the best raw logits' ids
  /// with their log probabilities, best first; the rest of it is left alone.
  [[nodiscard]] SampledToken sample_row(std::span<float> row, const SamplingParams& params,
                                        std::span<TokenLogprob> top);

 private:
  /// A token, kUnusableLogits if there is no usable maximum.
  [[nodiscard]] std::int32_t choose(std::span<const float> logits, const SamplingParams& params);
  /// Of the raw row: `token`'s log probability, and the best ids'.
  [[nodiscard]] float report(std::span<const float> raw, const SamplingParams& params,
                             std::int32_t token, std::span<TokenLogprob> top);
  [[nodiscard]] std::int32_t draw_by_id(std::span<const float> logits, float max,
                                        const SamplingParams& params);
  [[nodiscard]] std::int32_t draw_by_rank(std::span<const float> logits, float max,
                                          const SamplingParams& params);

  /// Candidates left by top-k and top-p, best first, in candidates_; returns their weights.
  [[nodiscard]] std::span<float> rank(std::span<const float> logits, float max,
                                      const SamplingParams& params);

  const KernelTable* kernels_;
  std::vector<float> weights_;  // by id
  std::vector<float> ranked_;   // of candidates_
  std::vector<float> raw_;      // a row before its edits, when log probabilities are wanted
  std::vector<Candidate> candidates_;
  MassHistogram histogram_;
};

}  // namespace pocket
