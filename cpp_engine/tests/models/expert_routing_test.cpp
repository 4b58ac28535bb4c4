#include "layers/expert_routing.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <set>
#include <vector>

namespace pocket {
namespace {

struct Choice {
  std::vector<std::uint32_t> experts;
  std::vector<float> weights;
};

Choice choose(std::vector<float> logits, std::size_t used, bool normalised = false) {
  Choice choice{std::vector<std::uint32_t>(used), std::vector<float>(used)};
  choose_experts(logits, normalised, choice.experts, choice.weights);
  return choice;
}

using Indices = std::vector<std::uint32_t>;

TEST_CASE("the most probable experts, in ascending order of their indices") {
  const Choice choice = choose({0.0F, 3.0F, -1.0F, 2.0F, 5.0F}, 3);
  CHECK(choice.experts == Indices{1, 3, 4});
  double sum = 0.0;
  for (const double logit : {0.0, 3.0, -1.0, 2.0, 5.0}) sum += std::exp(logit);
  // A float's exp, sum of five and quotient: each within one unit in the last place.
  CHECK(choice.weights[0] == doctest::Approx(std::exp(3.0) / sum).epsilon(1e-6));
  CHECK(choice.weights[1] == doctest::Approx(std::exp(2.0) / sum).epsilon(1e-6));
  CHECK(choice.weights[2] == doctest::Approx(std::exp(5.0) / sum).epsilon(1e-6));
}

TEST_CASE("normalised weights add up to one") {
  const Choice choice = choose({1.0F, 3.0F, 2.0F, 0.0F}, 2, true);
  CHECK(choice.experts == Indices{1, 2});
  CHECK(choice.weights[0] + choice.weights[1] == doctest::Approx(1.0).epsilon(1e-6));
  CHECK(choice.weights[0] / choice.weights[1] == doctest::Approx(std::exp(1.0)).epsilon(1e-6));
}

TEST_CASE("of equals the lower indices") {
  CHECK(choose({2.0F, 2.0F, 2.0F, 2.0F}, 2).experts == Indices{0, 1});
  CHECK(choose({0.0F, 2.0F, 3.0F, 2.0F, 2.0F}, 3).experts == Indices{1, 2, 3});
  CHECK(choose({3.0F, 2.0F, 0.0F, 2.0F, 3.0F}, 3).experts == Indices{0, 1, 4});
  CHECK(choose({-1.0F, 1.0F}, 2).experts == Indices{0, 1});
}

TEST_CASE("a NaN or an infinity is one row's misfortune, not a crash") {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    for (std::size_t place = 0; place < 5; ++place) {
      std::vector<float> logits{0.5F, 1.0F, -2.0F, 0.0F, 3.0F};
      logits[place] = bad;
      const Choice choice = choose(logits, 3, true);
      const std::set<std::uint32_t> distinct(choice.experts.begin(), choice.experts.end());
      CHECK(distinct.size() == 3);
      CHECK(*distinct.rbegin() < 5);
      if (std::isnan(bad)) {
        CHECK(std::isnan(choice.weights[0]));
      }
    }
  }
}

TEST_CASE("a plan sorts the rows by expert and keeps their weights") {
  constexpr std::size_t kExperts = 6, kUsed = 2, kRows = 50, kStride = 16;
  ExpertConfig config;
  config.count = kExperts;
  config.used = kUsed;
  ExpertRouting routing(kRows, config);
  for (const std::size_t threads : {1U, 3U}) {
    ThreadPool pool(threads);
    const Compute compute{&kernel_table(Isa::kScalar), &pool, Precision::kInt8};
    for (const std::size_t rows : {kRows, std::size_t{1}, std::size_t{17}}) {
      std::vector<float> scores(kRows * kStride, 1e9F);  // what lies behind the logits never counts
      std::vector<Choice> expected;
      for (std::size_t row = 0; row < rows; ++row) {
        std::vector<float> logits;
        for (std::size_t e = 0; e < kExperts; ++e) {
          // Expert 4 is never among the best two.
          logits.push_back(e == 4 ? -9.0F : std::sin(static_cast<float>(row * 7 + e * e)));
          scores[row * kStride + e] = logits.back();
        }
        expected.push_back(choose(logits, kUsed));
      }
      routing.plan(compute, scores.data(), kStride, rows);
      CHECK(routing.pairs() == rows * kUsed);
      std::size_t pair = 0, last = 0;
      for (const ExpertRouting::Group& group : routing.groups()) {
        CHECK(group.first == pair);
        CHECK(group.expert != 4);
        CHECK((pair == 0 || group.expert > last));
        last = group.expert;
        for (std::size_t i = 0; i < group.rows; ++i, ++pair) {
          CHECK(&routing.group_of(pair) == &group);
          CHECK((i == 0 || routing.row_of(pair) > routing.row_of(pair - 1)));
          const Choice& choice = expected[routing.row_of(pair)];
          const std::size_t rank = choice.experts[0] == group.expert ? 0 : 1;
          CHECK(choice.experts[rank] == group.expert);
          CHECK(choice.weights[rank] == routing.weight_of(pair));
        }
      }
      CHECK(pair == routing.pairs());
    }
  }
}

}  // namespace
}  // namespace pocket
