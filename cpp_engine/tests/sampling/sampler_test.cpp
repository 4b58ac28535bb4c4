#include "pocket/sampling/sampler.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "pocket/base/error.h"
#include "pocket/sampling/philox.h"

namespace pocket {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

Sampler make_sampler(std::size_t vocab) {
  return {kernel_table(Isa::kScalar), vocab};
}

std::vector<float> random_logits(std::size_t n, unsigned seed, float spread) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> x(n);
  for (float& value : x) {
    value = normal(random);
  }
  return x;
}

// The documented distribution, straight from the definition: full sort, double arithmetic.
std::vector<double> exact_probabilities(const std::vector<float>& logits,
                                        const SamplingParams& params) {
  std::vector<std::size_t> order(logits.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    order[i] = i;
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return logits[a] > logits[b]; });
  std::vector<double> weight;
  for (const std::size_t id : order) {
    weight.push_back(
        std::exp((static_cast<double>(logits[id]) - logits[order[0]]) / params.temperature));
  }
  std::size_t kept = order.size();
  if (params.top_k > 0) {
    kept = std::min(kept, static_cast<std::size_t>(params.top_k));
  }
  double total = 0.0;
  for (std::size_t i = 0; i < kept; ++i) {
    total += weight[i];
  }
  if (params.top_p < 1.0F) {
    double mass = 0.0;
    for (std::size_t i = 0; i < kept; ++i) {
      mass += weight[i];
      if (mass >= static_cast<double>(params.top_p) * total) {
        kept = i + 1;
        break;
      }
    }
  }
  while (kept > 1 && weight[kept - 1] < static_cast<double>(params.min_p)) {
    --kept;
  }
  total = 0.0;
  for (std::size_t i = 0; i < kept; ++i) {
    total += weight[i];
  }
  std::vector<double> probability(logits.size(), 0.0);
  for (std::size_t i = 0; i < kept; ++i) {
    probability[order[i]] = weight[i] / total;
  }
  return probability;
}

TEST_CASE("draws follow the exact distribution (chi-square, fixed seeds)") {
  const std::vector<float> logits = random_logits(40, 3, 2.0F);
  const SamplingParams cases[] = {
      {.temperature = 1.0F},
      {.temperature = 0.5F},
      {.temperature = 2.5F, .min_p = 0.1F},
      {.temperature = 1.0F, .top_k = 5},
      {.temperature = 1.0F, .top_p = 0.7F},
      {.temperature = 1.5F, .top_k = 20, .top_p = 0.9F},
      {.temperature = 1.5F, .top_k = 20, .top_p = 0.9F, .min_p = 0.2F},
      {.temperature = 1.0F, .top_k = 1},
  };
  constexpr int kDraws = 20000;
  for (const SamplingParams& base : cases) {
    const std::vector<double> expected = exact_probabilities(logits, base);
    std::vector<int> count(logits.size(), 0);
    Sampler sampler = make_sampler(logits.size());
    for (int i = 0; i < kDraws; ++i) {
      SamplingParams params = base;
      params.seed = 1234;
      params.token_index = static_cast<std::uint64_t>(i);
      const SampledToken sampled = sampler.sample(logits, params);
      REQUIRE(sampled.token >= 0);
      ++count[static_cast<std::size_t>(sampled.token)];
    }
    double chi_square = 0.0;
    int cells = -1;  // degrees of freedom: cells - 1
    double rest_expected = 0.0;
    double rest_count = 0.0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (expected[i] == 0.0) {
        CHECK(count[i] == 0);  // cut by top-k, top-p or min-p
        continue;
      }
      if (expected[i] * kDraws < 10.0) {  // too rare for a cell of its own
        rest_expected += expected[i] * kDraws;
        rest_count += count[i];
        continue;
      }
      const double e = expected[i] * kDraws;
      chi_square += (count[i] - e) * (count[i] - e) / e;
      ++cells;
    }
    if (rest_expected > 0.0) {
      chi_square += (rest_count - rest_expected) * (rest_count - rest_expected) / rest_expected;
      ++cells;
    }
    // Mean f, standard deviation sqrt(2 f): five deviations are out of reach for a right sampler.
    CHECK(chi_square <= cells + 5.0 * std::sqrt(2.0 * cells) + 1e-9);
  }
}

TEST_CASE("greedy takes the largest, the lowest id on ties, whatever else is set") {
  Sampler sampler = make_sampler(8);
  const std::vector<float> logits{1, 5, -kInf, 5, 2, 0, 0, 0};
  CHECK(sampler.sample(logits, {.temperature = 0.0F}).token == 1);
  CHECK(sampler.sample(logits, {.temperature = 1e-5F, .top_k = 3, .seed = 9}).token == 1);
}

TEST_CASE("logprob is the log-softmax of the raw logits, also after truncation") {
  Sampler sampler = make_sampler(1000);
  const std::vector<float> logits = random_logits(1000, 8, 3.0F);
  double sum = 0.0;
  for (const float x : logits) {
    sum += std::exp(static_cast<double>(x));
  }
  for (std::uint64_t i = 0; i < 50; ++i) {
    const SampledToken s = sampler.sample(
        logits, {.temperature = 1.3F, .top_k = 50, .top_p = 0.95F, .seed = 4, .token_index = i});
    const double expected = logits[static_cast<std::size_t>(s.token)] - std::log(sum);
    CHECK(s.logprob == doctest::Approx(expected).epsilon(1e-5));
  }
  CHECK(std::isnan(sampler.sample(logits, {.temperature = 0.0F, .logprob = false}).logprob));
}

TEST_CASE("tiny temperatures neither overflow nor leave the maximum") {
  Sampler sampler = make_sampler(64);
  std::vector<float> logits = random_logits(64, 2, 10.0F);
  logits[7] = -kInf;  // a banned token
  const auto best = std::max_element(logits.begin(), logits.end()) - logits.begin();
  for (const float temperature : {1e-3F, 1e-4F, 1.1e-5F, 1e-5F, 0.0F}) {
    for (std::uint64_t i = 0; i < 20; ++i) {
      const SamplingParams params{.temperature = temperature, .seed = i};
      CHECK(sampler.sample(logits, params).token == best);
    }
  }
}

TEST_CASE("a row without a usable maximum fails alone") {
  Sampler sampler = make_sampler(40);
  const std::vector<float> good = random_logits(40, 1, 1.0F);
  for (const float poison : {kNan, kInf}) {
    std::vector<float> bad = good;
    bad[33] = poison;
    for (const float temperature : {0.0F, 1.0F}) {
      const SampledToken s = sampler.sample(bad, {.temperature = temperature, .top_k = 4});
      CHECK(s.token == -1);
      CHECK(std::isnan(s.logprob));
    }
  }
  const std::vector<float> masked(40, -kInf);
  CHECK(sampler.sample(masked, {.temperature = 1.0F}).token == -1);
  CHECK(sampler.sample(good, {.temperature = 1.0F}).token >= 0);
}

TEST_CASE("masked ids are never drawn, and an only candidate always is") {
  Sampler sampler = make_sampler(32);
  std::vector<float> logits(32, -kInf);
  logits[30] = -1e30F;
  for (std::uint64_t i = 0; i < 50; ++i) {
    CHECK(sampler.sample(logits, {.temperature = 5.0F, .seed = i}).token == 30);
    CHECK(sampler.sample(logits, {.temperature = 5.0F, .top_k = 9, .top_p = 0.99F, .seed = i})
              .token == 30);
  }
}

TEST_CASE("top-k keeps exactly k at a tie: the lower ids") {
  Sampler sampler = make_sampler(10);
  const std::vector<float> logits(10, 1.0F);
  std::vector<int> seen(10, 0);
  for (std::uint64_t i = 0; i < 300; ++i) {
    ++seen[static_cast<std::size_t>(
        sampler.sample(logits, {.temperature = 1.0F, .top_k = 3, .token_index = i}).token)];
  }
  for (std::size_t id = 0; id < 10; ++id) {
    CHECK((seen[id] > 0) == (id < 3));
  }
}

TEST_CASE("top-p keeps the candidate that reaches it, and one when p is tiny") {
  Sampler sampler = make_sampler(4);
  const std::vector<float> logits{std::log(0.5F), std::log(0.25F), std::log(0.15F), std::log(0.1F)};
  const auto seen = [&](float top_p) {
    std::vector<bool> ids(4, false);
    for (std::uint64_t i = 0; i < 500; ++i) {
      ids[static_cast<std::size_t>(
          sampler.sample(logits, {.temperature = 1.0F, .top_p = top_p, .token_index = i}).token)] =
          true;
    }
    return std::count(ids.begin(), ids.end(), true);
  };
  CHECK(seen(1e-6F) == 1);
  CHECK(seen(0.4F) == 1);
  CHECK(seen(0.6F) == 2);
  CHECK(seen(0.8F) == 3);
  CHECK(seen(0.95F) == 4);
}

TEST_CASE("a nucleus larger than the first guess is found") {
  Sampler sampler = make_sampler(5000);
  const std::vector<float> flat(5000, 0.25F);
  std::int32_t largest = 0;
  for (std::uint64_t i = 0; i < 400; ++i) {
    const std::int32_t token =
        sampler.sample(flat, {.temperature = 1.0F, .top_p = 0.8F, .token_index = i}).token;
    REQUIRE(token < 4001);  // 0.8 of 5000 equal weights, give or take a rounding
    largest = std::max(largest, token);
  }
  CHECK(largest > 3900);
}

TEST_CASE("nuclei of every size equal the definition, draw by draw") {
  // The distribution's support and each token's share of the unit interval, from a full sort.
  for (const float spread : {0.05F, 0.5F, 1.5F, 4.0F}) {
    const std::vector<float> logits = random_logits(3000, 77, spread);
    Sampler sampler = make_sampler(logits.size());
    for (const float top_p : {0.1F, 0.5F, 0.9F, 0.995F}) {
      SamplingParams params{.temperature = 0.8F, .top_p = top_p, .seed = 6};
      const std::vector<double> probability = exact_probabilities(logits, params);
      for (std::uint64_t i = 0; i < 40; ++i) {
        params.token_index = i;
        const std::int32_t token = sampler.sample(logits, params).token;
        CHECK(probability[static_cast<std::size_t>(token)] > 0.0);
        // u falls into the token's interval of the cumulative distribution in rank order.
        const double u = philox_uniform(6, i, RandomStream::kSampling);
        double before = 0.0;
        for (std::size_t other = 0; other < logits.size(); ++other) {
          const auto chosen = static_cast<std::size_t>(token);
          if (logits[other] > logits[chosen] ||
              (logits[other] == logits[chosen] && other < chosen)) {
            before += probability[other];
          }
        }
        CHECK(u >= before - 1e-5);
        CHECK(u < before + probability[static_cast<std::size_t>(token)] + 1e-5);
      }
    }
  }
}

TEST_CASE("parameters out of range are named") {
  const auto message = [](const SamplingParams& params) -> std::string {
    try {
      validate_sampling(params);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "";
  };
  CHECK(message({.temperature = kNan}).starts_with("temperature"));
  CHECK(message({.temperature = -1.0F}).starts_with("temperature"));
  CHECK(message({.top_k = -1}).starts_with("top_k"));
  CHECK(message({.top_p = 0.0F}).starts_with("top_p"));
  CHECK(message({.top_p = kNan}).starts_with("top_p"));
  CHECK(message({.min_p = 1.5F}).starts_with("min_p"));
  CHECK(message({}).empty());
}

}  // namespace
}  // namespace pocket
