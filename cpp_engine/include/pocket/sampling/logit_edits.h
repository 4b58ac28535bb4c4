#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "pocket/sampling/token_history.h"

namespace pocket {

struct LogitBias {
  std::int32_t token;
  float bias;
};

/// What one request does to its logits; fixed for the request's life.
struct LogitOptions {
  float repetition_penalty = 1.0F;  ///< 1 = off; over prompt and output
  float presence_penalty = 0.0F;    ///< 0 = off; over the output
  float frequency_penalty = 0.0F;   ///< 0 = off; over the output
  std::vector<LogitBias> bias{};
  std::vector<std::int32_t> banned{};  ///< never drawn
  std::vector<std::int32_t> ending{};  ///< not drawn before `min_tokens` output tokens are there
  std::uint64_t min_tokens = 0;
};

/// A request's options with the tokens that its penalties count: the sparse edits of its rows.
///
/// In this order, each step over float32:
///   1. bias:        x += bias
///   2. repetition:  x = x > 0 ? x / r : x * r     for every token of prompt or output (Keskar et
///                                                 al. 2019, section 4.1)
///   3. frequency:   x -= f * count                for tokens in the output
///   4. presence:    x -= p                        for tokens in the output
///   5. banned ids, and ending ids while token_index < min_tokens:  x = -inf
/// Finite values stay below +inf. docs/sampling.md says why this order.
///
/// The owner keeps the history complete: `reset_history` when a sequence (re)starts, `append` per
/// token. One thread at a time; a row's edits may be applied by any thread while nobody writes.
class LogitEdits {
 public:
  /// Throws `Error(kInvalidArgument)` naming the field: a penalty or bias that is not finite,
  /// repetition_penalty <= 0, a token outside the vocabulary.
  LogitEdits(LogitOptions options, std::size_t vocab);

  /// Starts over with `tokens`, the first `num_prompt` of which are the prompt. O(tokens).
  /// Throws `Error(kInvalidArgument)`, changing nothing, for tokens outside the vocabulary.
  void reset_history(std::span<const std::int32_t> tokens, std::size_t num_prompt);
  /// One more output token. Throws as `reset_history`.
  void append(std::int32_t token);
  /// Tokens known: prompt and output.
  [[nodiscard]] std::size_t length() const noexcept { return length_; }

  /// Edits `row`; ids at or beyond its size are ignored. O(distinct tokens + listed ids).
  /// False if it overwrote a NaN or +inf, which a look at the row afterwards would miss.
  [[nodiscard]] bool apply(std::span<float> row, std::uint64_t token_index) const;

 private:
  void check_token(const char* field, std::int32_t token) const;

  LogitOptions options_;
  std::size_t vocab_;
  std::size_t length_ = 0;
  std::optional<TokenHistory> history_;  // when a penalty is on
};

/// Sets ids whose bit is clear to -inf: bit t % 32 of word t / 32 is token t's. Words must cover
/// the row. False if a NaN or +inf was overwritten.
[[nodiscard]] bool apply_allowed(std::span<float> row, std::span<const std::int32_t> words);

/// Words of a bit mask over `vocab` ids.
[[nodiscard]] constexpr std::size_t mask_words(std::size_t vocab) noexcept {
  return (vocab + 31) / 32;
}

}  // namespace pocket
