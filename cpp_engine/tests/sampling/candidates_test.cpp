#include "pocket/sampling/candidates.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "softmax.h"

namespace pocket {
namespace {

std::vector<Candidate> sorted(const std::vector<float>& logits) {
  std::vector<Candidate> all;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    all.push_back({logits[i], static_cast<std::int32_t>(i)});
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const Candidate& a, const Candidate& b) { return a.logit > b.logit; });
  return all;
}

TEST_CASE("select_top equals a stable sort, ties and infinities included") {
  std::mt19937 random(11);
  for (const std::size_t n : {1U, 2U, 31U, 32U, 33U, 500U, 3000U}) {
    for (const int kind : {0, 1, 2}) {
      std::vector<float> logits(n);
      for (float& x : logits) {
        x = kind == 0   ? std::normal_distribution<float>(0, 3)(random)
            : kind == 1 ? static_cast<float>(random() % 5)  // many ties
                        : 1.0F;
      }
      if (kind == 1 && n > 2) {
        logits[n / 2] = -std::numeric_limits<float>::infinity();
      }
      const auto expected = sorted(logits);
      for (const std::size_t k :
           {std::size_t{1}, std::size_t{2}, std::size_t{7}, n / 2, n, n + 5}) {
        if (k == 0) {
          continue;
        }
        std::vector<Candidate> got;
        got.reserve(n);
        select_top(logits, k, got);
        REQUIRE(got.size() == std::min(k, n));
        for (std::size_t i = 0; i < got.size(); ++i) {
          REQUIRE(got[i].token == expected[i].token);
          REQUIRE(got[i].logit == expected[i].logit);
        }
      }
    }
  }
}

TEST_CASE("a mass histogram reaches at least what was asked, in rank order") {
  std::mt19937 random(21);
  for (const float spread : {0.0F, 0.01F, 1.0F, 8.0F, 300.0F}) {
    std::vector<float> logits(3000);
    for (float& x : logits) {
      x = std::normal_distribution<float>(0, 1)(random) * spread;
    }
    logits[17] = -std::numeric_limits<float>::infinity();
    const auto expected = sorted(logits);
    const float max = expected[0].logit;
    std::vector<float> weights(logits.size());
    softmax_weights(logits, max, 1.0F, weights);
    double total = 0.0;
    for (const float weight : weights) {
      total += weight;
    }
    MassHistogram histogram;
    histogram.build(logits, max, weights);
    std::vector<Candidate> got;
    for (const double share : {1e-9, 0.3, 0.9, 0.999}) {
      histogram.select(logits, max, histogram.bucket_reaching(share * total), got);
      REQUIRE(!got.empty());
      double mass = 0.0;
      for (std::size_t i = 0; i < got.size(); ++i) {
        REQUIRE(got[i].token == expected[i].token);
        mass += weights[static_cast<std::size_t>(got[i].token)];
      }
      CHECK(mass >= share * total * (1 - 1e-12));
    }
    histogram.select(logits, max, MassHistogram::buckets() - 1, got);
    CHECK(got.size() == logits.size());
  }
}

TEST_CASE("exp_nonpositive agrees with libm to 2e-7") {
  CHECK(exp_nonpositive(0.0F) == 1.0F);
  CHECK(exp_nonpositive(-std::numeric_limits<float>::infinity()) == 0.0F);
  CHECK(exp_nonpositive(-88.0F) == 0.0F);
  for (float x = 0.0F; x > -87.0F; x -= 0.00731F) {
    const double exact = std::exp(static_cast<double>(x));
    REQUIRE(std::abs(exp_nonpositive(x) - exact) <= 2e-7 * exact);
  }
}

TEST_CASE("pick_weight finds the weight whose share of the unit interval holds u") {
  std::mt19937 random(31);
  for (const std::size_t n : {1U, 2U, 255U, 256U, 257U, 3000U}) {
    std::vector<float> weights(n);
    for (float& weight : weights) {
      weight = random() % 3 == 0 ? 0.0F : std::uniform_real_distribution<float>(0, 1)(random);
    }
    weights[random() % n] = 1.0F;
    double total = 0.0;
    for (const float weight : weights) {
      total += weight;
    }
    for (int i = 0; i < 300; ++i) {
      const double u = i == 0 ? 0.0 : std::uniform_real_distribution<double>(0, 1)(random);
      const std::size_t picked = pick_weight(weights, u);
      REQUIRE(weights[picked] > 0.0F);
      double before = 0.0;
      for (std::size_t j = 0; j < picked; ++j) {
        before += weights[j];
      }
      CHECK(u * total >= before - 1e-5 * total);
      CHECK(u * total < before + weights[picked] + 1e-5 * total);
    }
    const std::size_t end = pick_weight(weights, std::nextafter(1.0, 0.0));
    CHECK(std::all_of(weights.begin() + static_cast<std::ptrdiff_t>(end) + 1, weights.end(),
                      [](float weight) { return weight == 0.0F; }));
    const std::size_t first = pick_weight(weights, 0.0);
    CHECK(std::all_of(weights.begin(), weights.begin() + static_cast<std::ptrdiff_t>(first),
                      [](float weight) { return weight == 0.0F; }));
  }
  // Alone at either end, and total * u rounded up to the total.
  std::vector<float> lone(1000, 0.0F);
  lone[999] = 1.0F;
  CHECK(pick_weight(lone, 0.0) == 999);
  lone[999] = 0.0F;
  lone[3] = 3.0F;
  CHECK(pick_weight(lone, std::nextafter(1.0, 0.0)) == 3);
  CHECK(pick_weight(lone, 1.0) == 3);
}

TEST_CASE("log_sum_exp agrees with double arithmetic") {
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0, 4);
  for (const std::size_t n : {1U, 5U, 255U, 256U, 257U, 5000U}) {
    std::vector<float> x(n);
    for (float& value : x) {
      value = normal(random);
    }
    const float max = *std::max_element(x.begin(), x.end());
    double sum = 0.0;
    for (const float value : x) {
      sum += std::exp(static_cast<double>(value) - max);
    }
    CHECK(log_sum_exp(x, max) == doctest::Approx(max + std::log(sum)).epsilon(1e-7));
  }
}

}  // namespace
}  // namespace pocket
