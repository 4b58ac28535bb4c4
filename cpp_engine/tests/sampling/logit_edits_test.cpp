#include "pocket/sampling/logit_edits.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "pocket/base/error.h"
#include "pocket/sampling/sampler.h"

namespace pocket {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> random_row(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> row(n);
  for (float& x : row) {
    x = normal(random);
  }
  return row;
}

// The definition, token by token over the whole vocabulary, from the plain list of tokens.
std::vector<float> reference(std::vector<float> row, const LogitOptions& options,
                             const std::vector<std::int32_t>& tokens, std::size_t num_prompt,
                             std::uint64_t token_index) {
  for (std::size_t id = 0; id < row.size(); ++id) {
    const auto is = [&](std::int32_t token) { return static_cast<std::size_t>(token) == id; };
    float x = row[id];
    for (const LogitBias& entry : options.bias) {
      x = is(entry.token) ? x + entry.bias : x;
    }
    const auto output = tokens.begin() + static_cast<std::ptrdiff_t>(num_prompt);
    if (std::any_of(tokens.begin(), tokens.end(), is)) {
      x = x > 0.0F ? x / options.repetition_penalty : x * options.repetition_penalty;
    }
    const auto count = std::count_if(output, tokens.end(), is);
    x -= options.frequency_penalty * static_cast<float>(count);
    x -= count > 0 ? options.presence_penalty : 0.0F;
    if (std::any_of(options.banned.begin(), options.banned.end(), is) ||
        (token_index < options.min_tokens &&
         std::any_of(options.ending.begin(), options.ending.end(), is))) {
      x = -kInf;
    }
    row[id] = x;
  }
  return row;
}

TEST_CASE("edits equal the definition, every option alone and all together") {
  const LogitOptions all{.repetition_penalty = 1.3F,
                         .presence_penalty = 0.7F,
                         .frequency_penalty = 0.4F,
                         .bias = {{3, 2.5F}, {7, -4.0F}, {49, 100.0F}},
                         .banned = {5, 11},
                         .ending = {0, 2},
                         .min_tokens = 6};
  const LogitOptions cases[] = {{.repetition_penalty = 1.3F},
                                {.repetition_penalty = 0.6F},
                                {.presence_penalty = -1.5F},
                                {.frequency_penalty = 0.4F},
                                {.presence_penalty = 0.7F, .frequency_penalty = -0.4F},
                                {.bias = all.bias},
                                {.banned = all.banned},
                                {.ending = all.ending, .min_tokens = 6},
                                all};
  std::mt19937 random(9);
  for (const LogitOptions& options : cases) {
    LogitEdits edits(options, 50);
    std::vector<std::int32_t> tokens;
    for (int i = 0; i < 20; ++i) {
      tokens.push_back(static_cast<std::int32_t>(random() % 30));
    }
    edits.reset_history(tokens, 20);
    for (std::uint64_t index = 0; index < 12; ++index) {
      const std::vector<float> raw = random_row(50, static_cast<unsigned>(index));
      std::vector<float> row = raw;
      REQUIRE(edits.apply(row, index));
      REQUIRE(row == reference(raw, options, tokens, 20, index));
      // The same history in one piece: a sequence that was preempted and starts again.
      LogitEdits resumed(options, 50);
      resumed.reset_history(tokens, 20);
      std::vector<float> again = raw;
      REQUIRE(resumed.apply(again, index));
      REQUIRE(again == row);
      CHECK(edits.length() == tokens.size());
      tokens.push_back(static_cast<std::int32_t>(random() % 40));
      edits.append(tokens.back());
    }
  }
}

TEST_CASE("a history starts over without traces of the last sequence") {
  LogitEdits edits({.repetition_penalty = 2.0F, .frequency_penalty = 1.0F}, 8);
  const std::vector<std::int32_t> first{1, 2, 3, 3};
  const std::vector<std::int32_t> second{4};
  edits.reset_history(first, 2);
  edits.reset_history(second, 1);
  std::vector<float> row(8, 1.0F);
  CHECK(edits.apply(row, 0));
  CHECK(row == std::vector<float>{1, 1, 1, 1, 0.5F, 1, 1, 1});
}

TEST_CASE("ids beyond a row cut to the tokenizer are ignored") {
  LogitEdits edits({.repetition_penalty = 2.0F,
                    .bias = {{9, 1.0F}},
                    .banned = {8},
                    .ending = {7},
                    .min_tokens = 1},
                   10);
  const std::vector<std::int32_t> tokens{9, 6, 1};
  edits.reset_history(tokens, 3);
  std::vector<float> row(6, 1.0F);
  CHECK(edits.apply(row, 0));
  CHECK(row == std::vector<float>{1, 0.5F, 1, 1, 1, 1});
}

TEST_CASE("extreme values stay finite or -inf, and a broken row is noticed under a ban") {
  LogitEdits edits({.repetition_penalty = 1e-38F, .bias = {{2, 3e38F}}, .banned = {4}}, 6);
  const std::vector<std::int32_t> tokens{0, 1, 2, 3};
  edits.reset_history(tokens, 4);
  std::vector<float> row{5.0F, -5.0F, 3e38F, -kInf, 0.0F, 0.0F};
  CHECK(edits.apply(row, 0));
  CHECK(row[0] == std::numeric_limits<float>::max());
  CHECK(std::isfinite(row[1]));
  CHECK(row[2] == std::numeric_limits<float>::max());
  CHECK(row[3] == -kInf);
  for (const float poison : {kNan, kInf}) {
    row.assign(6, 1.0F);
    row[4] = poison;
    CHECK_FALSE(edits.apply(row, 0));
  }
}

TEST_CASE("bit t % 32 of word t / 32 allows token t") {
  for (const std::size_t n : {1U, 31U, 32U, 33U, 70U, 96U, 1000U}) {
    std::mt19937 random(static_cast<unsigned>(n));
    std::vector<std::int32_t> words(mask_words(n));
    for (std::int32_t& word : words) {
      word = static_cast<std::int32_t>(random());
    }
    words[0] |= 1 << 30;
    words[words.size() - 1] = -1;
    const std::vector<float> raw = random_row(n, 4);
    std::vector<float> row = raw;
    CHECK(apply_allowed(row, words));
    for (std::size_t t = 0; t < n; ++t) {
      const bool allowed = (static_cast<std::uint32_t>(words[t / 32]) >> (t % 32) & 1U) != 0;
      REQUIRE(row[t] == (allowed ? raw[t] : -kInf));
    }
  }
  const std::vector<std::int32_t> low{0b100, 0};
  std::vector<float> row(64, 1.0F);
  row[2] = kNan;  // allowed: for the sampler to find
  CHECK(apply_allowed(row, low));
  row[40] = kNan;
  CHECK_FALSE(apply_allowed(row, low));
  row[3] = kInf;
  CHECK_FALSE(apply_allowed(row, low));
}

TEST_CASE("wrong options are named") {
  const auto message = [](const LogitOptions& options) -> std::string {
    try {
      const LogitEdits edits(options, 10);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "";
  };
  CHECK(message({.repetition_penalty = 0.0F}).starts_with("repetition_penalty: got 0"));
  CHECK(message({.repetition_penalty = kNan}).starts_with("repetition_penalty"));
  CHECK(message({.presence_penalty = kInf}).starts_with("presence_penalty"));
  CHECK(message({.frequency_penalty = kNan}).starts_with("frequency_penalty"));
  CHECK(message({.bias = {{10, 1.0F}}}).starts_with("bias: got token 10; must be from 0 to 9"));
  CHECK(message({.bias = {{1, kNan}}}).starts_with("bias"));
  CHECK(message({.banned = {-1}}).starts_with("banned: got token -1"));
  CHECK(message({.ending = {1000000000}}).starts_with("ending: got token 1000000000"));
  CHECK(message({}).empty());
  LogitEdits edits({.repetition_penalty = 1.1F}, 10);
  const std::vector<std::int32_t> bad{1, 10};
  CHECK_THROWS_AS(edits.reset_history(bad, 1), Error);
  CHECK_THROWS_AS(edits.reset_history(std::span(bad).first(1), 2), Error);
  CHECK_THROWS_AS(edits.append(-1), Error);
  CHECK(edits.length() == 0);
}

// --- with the sampler -------------------------------------------------------------------------

TEST_CASE("edits come before temperature and truncation; log probabilities are the raw row's") {
  const std::vector<float> raw = random_row(200, 6);
  Sampler sampler(kernel_table(Isa::kScalar), 200);
  LogitEdits edits({.repetition_penalty = 1.5F, .bias = {{17, 60.0F}}}, 200);
  const std::vector<std::int32_t> tokens{3, 4, 5};
  edits.reset_history(tokens, 3);
  double sum = 0.0;
  for (const float x : raw) {
    sum += std::exp(static_cast<double>(x));
  }
  for (const float temperature : {0.0F, 0.8F}) {
    std::vector<float> row = raw;
    std::vector<TokenLogprob> top(kMaxTopLogprobs, TokenLogprob{-7, 0.0F});
    const SampledToken s = sampler.sample_row(
        row, {.temperature = temperature, .top_k = 9, .top_logprobs = 5, .edits = &edits}, top);
    CHECK(s.token == 17);
    CHECK(s.logprob == doctest::Approx(raw[17] - std::log(sum)).epsilon(1e-5));
    std::vector<std::int32_t> order(200);
    for (std::size_t i = 0; i < order.size(); ++i) {
      order[i] = static_cast<std::int32_t>(i);
    }
    std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      return raw[static_cast<std::size_t>(a)] > raw[static_cast<std::size_t>(b)];
    });
    for (std::size_t i = 0; i < 5; ++i) {
      CHECK(top[i].token == order[i]);
      CHECK(top[i].logprob ==
            doctest::Approx(raw[static_cast<std::size_t>(order[i])] - std::log(sum)).epsilon(1e-5));
    }
    CHECK(top[5].token == -7);  // not asked for
  }
}

TEST_CASE("fewer ids than top log probabilities") {
  Sampler sampler(kernel_table(Isa::kScalar), 3);
  std::vector<float> row{1.0F, 2.0F, 0.0F};
  std::vector<TokenLogprob> top(kMaxTopLogprobs);
  CHECK(sampler.sample_row(row, {.top_logprobs = 20}, top).token == 1);
  CHECK(top[2].token == 2);
  CHECK(top[3].token == -1);
  CHECK(std::isnan(top[19].logprob));
}

TEST_CASE("a row fails alone: broken logits, or nothing allowed, told apart") {
  Sampler sampler(kernel_table(Isa::kScalar), 40);
  const std::vector<std::int32_t> none{0, 0};
  const std::vector<std::int32_t> one{0, 4};  // token 34
  LogitEdits ban({.banned = {34}}, 40);
  const std::vector<float> good = random_row(40, 1);
  const auto sample = [&](std::vector<float> row, SamplingParams params) {
    return sampler.sample_row(row, params, {});
  };
  CHECK(sample(good, {.allowed = one}).token == 34);
  CHECK(sample(good, {.temperature = 3.0F, .top_p = 0.9F, .allowed = one}).token == 34);
  CHECK(sample(good, {.allowed = none}).token == kNothingAllowed);
  CHECK(sample(good, {.edits = &ban, .allowed = one}).token == kNothingAllowed);
  CHECK(std::isnan(sample(good, {.allowed = none}).logprob));
  for (const float poison : {kNan, kInf}) {
    std::vector<float> bad = good;
    bad[3] = poison;
    CHECK(sample(bad, {.allowed = one}).token == kUnusableLogits);
    CHECK(sample(bad, {.allowed = none}).token == kUnusableLogits);
    bad = good;
    bad[34] = poison;
    CHECK(sample(bad, {.edits = &ban}).token == kUnusableLogits);
    CHECK(sample(bad, {.allowed = one}).token == kUnusableLogits);
  }
}

}  // namespace
}  // namespace pocket
