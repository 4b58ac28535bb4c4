#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "pocket/sampling/sampler.h"

namespace pocket {

/// Candidates' order: higher logit first, ties by lower id. Total on rows without NaN.
[[nodiscard]] inline bool ranks_before(const Candidate& a, const Candidate& b) noexcept {
  return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

/// Fills `out` with the first min(k, n) candidates in order. Needs `out.capacity() >= n` to stay
/// free of allocation. O(n) comparisons against a threshold that rises as better candidates turn
/// up, plus a sort of k.
void select_top(std::span<const float> logits, std::size_t k, std::vector<Candidate>& out);

}  // namespace pocket
