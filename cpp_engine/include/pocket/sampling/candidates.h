#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace pocket {

struct Candidate {
  float logit;
  std::int32_t token;
};

/// Candidates' order: higher logit first, ties by lower id. Total on rows without NaN.
[[nodiscard]] inline bool ranks_before(const Candidate& a, const Candidate& b) noexcept {
  return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

/// Fills `out` with the first min(k, n) candidates in order. Needs `out.capacity() >= n` to stay
/// free of allocation. O(n) comparisons against a threshold that rises as better candidates turn
/// up, plus a sort of k.
void select_top(std::span<const float> logits, std::size_t k, std::vector<Candidate>& out);

/// Weights summed by distance from the best logit, to find how far down a given mass reaches
/// without sorting everything: O(n) to build, O(buckets) to ask.
class MassHistogram {
 public:
  MassHistogram() : mass_(kBuckets) {}

  /// `weights` belong to `logits`, whose largest is `max`. O(n); no allocation.
  void build(std::span<const float> logits, float max, std::span<const float> weights);

  /// The first bucket up to which all buckets together hold `wanted` or more; the last one if none
  /// does. Sums are rounded, so a caller that needs exactly `wanted` may have to take one more.
  [[nodiscard]] std::size_t bucket_reaching(double wanted) const;

  /// Fills `out` with all candidates of buckets 0..last in order.
  void select(std::span<const float> logits, float max, std::size_t last,
              std::vector<Candidate>& out) const;

  [[nodiscard]] static constexpr std::size_t buckets() noexcept { return kBuckets; }

 private:
  // Sign-free float bits without their low 19: an exponent and 4 bits of mantissa, a bucket width
  // of 3 to 6 % of the distance. Monotone in the logit, which weights, being rounded, are not.
  static constexpr int kShift = 19;
  static constexpr std::size_t kBuckets = (std::size_t{1} << 31) >> kShift;

  [[nodiscard]] static std::size_t bucket(float logit, float max) noexcept {
    return std::bit_cast<std::uint32_t>(max - logit) >> kShift;
  }

  std::vector<double> mass_;
};

}  // namespace pocket
