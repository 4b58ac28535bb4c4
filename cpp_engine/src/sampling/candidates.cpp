#include "pocket/sampling/candidates.h"

#include <algorithm>
#include <limits>

namespace pocket {
namespace {

// Logits compared with the threshold at once; most such runs hold no candidate.
constexpr std::size_t kRun = 32;

bool any_above(const float* x, float threshold) {
  bool any = false;
  for (std::size_t i = 0; i < kRun; ++i) {
    any |= x[i] > threshold;
  }
  return any;
}

void keep_best(std::vector<Candidate>& pool, std::size_t k) {
  std::nth_element(pool.begin(), pool.begin() + static_cast<std::ptrdiff_t>(k - 1), pool.end(),
                   ranks_before);
  pool.resize(k);
}

}  // namespace

void select_top(std::span<const float> logits, std::size_t k, std::vector<Candidate>& out) {
  const std::size_t n = logits.size();
  k = std::min(k, n);
  out.clear();
  if (k == 0) {
    return;
  }
  // The pool grows to 2k before it is cut back to k, so that a cut costs O(1) per element.
  const std::size_t limit = std::min(n, 2 * k);
  float threshold = -std::numeric_limits<float>::infinity();
  bool full = false;  // k candidates are known that beat everything at or below the threshold
  const auto offer = [&](std::size_t i) {
    // Ids rise, so a later tie with the threshold ranks behind the k known candidates.
    if (full && !(logits[i] > threshold)) {
      return;
    }
    out.push_back({logits[i], static_cast<std::int32_t>(i)});
    if (out.size() == limit && limit > k) {
      keep_best(out, k);
      threshold = out[k - 1].logit;
      full = true;
    }
  };
  std::size_t i = 0;
  while (i < n) {
    if (full && i + kRun <= n && !any_above(logits.data() + i, threshold)) {
      i += kRun;
      continue;
    }
    const std::size_t end = std::min(n, i + kRun);
    for (; i < end; ++i) {
      offer(i);
    }
  }
  if (out.size() > k) {
    keep_best(out, k);
  }
  std::sort(out.begin(), out.end(), ranks_before);
}

void MassHistogram::build(std::span<const float> logits, float max,
                          std::span<const float> weights) {
  std::fill(mass_.begin(), mass_.end(), 0.0);
  for (std::size_t i = 0; i < logits.size(); ++i) {
    mass_[bucket(logits[i], max)] += static_cast<double>(weights[i]);
  }
}

std::size_t MassHistogram::bucket_reaching(double wanted) const {
  double cumulative = 0.0;
  for (std::size_t b = 0; b < kBuckets; ++b) {
    cumulative += mass_[b];
    if (cumulative >= wanted) {
      return b;
    }
  }
  return kBuckets - 1;
}

void MassHistogram::select(std::span<const float> logits, float max, std::size_t last,
                           std::vector<Candidate>& out) const {
  out.clear();
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (bucket(logits[i], max) <= last) {
      out.push_back({logits[i], static_cast<std::int32_t>(i)});
    }
  }
  std::sort(out.begin(), out.end(), ranks_before);
}

}  // namespace pocket
