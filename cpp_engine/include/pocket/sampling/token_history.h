#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace pocket {

/// Which tokens a sequence holds, for penalties: each distinct one once, with how often it is
/// output.
///
/// O(1) per token appended (amortised); holds one int32 per id of the vocabulary. Tokens must be
/// inside it. One thread at a time.
class TokenHistory {
 public:
  explicit TokenHistory(std::size_t vocab) : output_counts_(vocab, kUnseen) {}

  void add_prompt(std::int32_t token) { see(token); }
  void add_output(std::int32_t token) { ++see(token); }

  /// Forgets all. O(distinct tokens).
  void clear() {
    for (const std::int32_t token : distinct_) {
      output_counts_[static_cast<std::size_t>(token)] = kUnseen;
    }
    distinct_.clear();
  }

  /// In order of first appearance.
  [[nodiscard]] std::span<const std::int32_t> distinct() const noexcept { return distinct_; }
  /// Of a token in `distinct()`; 0: it occurs in the prompt only.
  [[nodiscard]] std::int32_t output_count(std::int32_t token) const noexcept {
    return output_counts_[static_cast<std::size_t>(token)];
  }

 private:
  static constexpr std::int32_t kUnseen = -1;

  std::int32_t& see(std::int32_t token) {
    std::int32_t& count = output_counts_[static_cast<std::size_t>(token)];
    if (count == kUnseen) {
      distinct_.push_back(token);
      count = 0;
    }
    return count;
  }

  std::vector<std::int32_t> output_counts_;
  std::vector<std::int32_t> distinct_;
};

}  // namespace pocket
