#include "pocket/sampling/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>

#include "pocket/base/error.h"
#include "pocket/sampling/philox.h"
#include "softmax.h"

namespace pocket {
namespace {

// How many candidates are tried before all are looked at for top-p.
constexpr std::size_t kNucleusGuess = 128;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

void require(bool ok, const char* field, double value, const char* remedy) {
  if (!ok) {
    throw Error(ErrorCode::kInvalidArgument,
                std::string(field) + ": got " + std::to_string(value) + "; " + remedy);
  }
}

double sum_in_order(std::span<const float> values) {
  double sum = 0.0;
  for (const float value : values) {
    sum += value;
  }
  return sum;
}

// Length of the shortest prefix that sums to `wanted` or more, if one does.
std::optional<std::size_t> prefix_reaching(std::span<const float> weights, double wanted) {
  double cumulative = 0.0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    cumulative += weights[i];
    if (cumulative >= wanted) {
      return i + 1;
    }
  }
  return std::nullopt;
}

double uniform(const SamplingParams& params) {
  return philox_uniform(params.seed, params.token_index, RandomStream::kSampling);
}

}  // namespace

void validate_sampling(const SamplingParams& params) {
  require(std::isfinite(params.temperature) && params.temperature >= 0.0F, "temperature",
          params.temperature, "must be finite and not negative");
  require(params.top_k >= 0, "top_k", params.top_k, "must be 0 (off) or positive");
  require(params.top_p > 0.0F && params.top_p <= 1.0F, "top_p", params.top_p,
          "must be above 0 and at most 1");
  require(params.min_p >= 0.0F && params.min_p <= 1.0F, "min_p", params.min_p,
          "must be from 0 to 1");
  require(
      params.top_logprobs >= 0 && static_cast<std::size_t>(params.top_logprobs) <= kMaxTopLogprobs,
      "top_logprobs", params.top_logprobs, "must be from 0 to 20");
}

Sampler::Sampler(const KernelTable& kernels, std::size_t vocab_size)
    : kernels_(&kernels), weights_(vocab_size), ranked_(vocab_size), raw_(vocab_size) {
  candidates_.reserve(vocab_size);
}

SampledToken Sampler::sample(std::span<const float> logits, const SamplingParams& params) {
  const std::int32_t token = choose(logits, params);
  return {.token = token, .logprob = report(logits, params, token, {})};
}

SampledToken Sampler::sample_row(std::span<float> row, const SamplingParams& params,
                                 std::span<TokenLogprob> top) {
  if (params.edits == nullptr && params.allowed.empty()) {
    const std::int32_t token = choose(row, params);
    return {.token = token, .logprob = report(row, params, token, top)};
  }
  std::span<const float> raw = row;
  if (params.logprob) {
    raw = std::span(raw_).first(row.size());
    std::copy(row.begin(), row.end(), raw_.begin());
  }
  bool ok = params.edits == nullptr || params.edits->apply(row, params.token_index);
  if (!params.allowed.empty()) {
    ok = apply_allowed(row, params.allowed) && ok;
  }
  std::int32_t token = ok ? choose(row, params) : kUnusableLogits;
  if (ok && token == kUnusableLogits &&
      std::ranges::all_of(row, [](float x) { return x == -kInf; })) {
    token = kNothingAllowed;
  }
  return {.token = token, .logprob = report(raw, params, token, top)};
}

std::int32_t Sampler::choose(std::span<const float> logits, const SamplingParams& params) {
  const std::size_t best = kernels_->argmax(logits.data(), logits.size());
  if (best >= logits.size() || !std::isfinite(logits[best])) {
    return kUnusableLogits;
  }
  if (params.temperature <= kGreedyTemperature) {
    return static_cast<std::int32_t>(best);
  }
  const float max = logits[best];
  const bool ranked = params.top_p < 1.0F ||
                      (params.top_k > 0 && static_cast<std::size_t>(params.top_k) < logits.size());
  return ranked ? draw_by_rank(logits, max, params) : draw_by_id(logits, max, params);
}

float Sampler::report(std::span<const float> raw, const SamplingParams& params, std::int32_t token,
                      std::span<TokenLogprob> top) {
  if (!params.logprob || token < 0) {
    return kNan;
  }
  const float max = raw[kernels_->argmax(raw.data(), raw.size())];
  const double normaliser = log_sum_exp(raw, max);
  const auto logprob = [&](float logit) {
    return static_cast<float>(static_cast<double>(logit) - normaliser);
  };
  if (const auto wanted = static_cast<std::size_t>(params.top_logprobs); wanted > 0) {
    select_top(raw, wanted, candidates_);
    for (std::size_t i = 0; i < wanted; ++i) {
      top[i] = i < candidates_.size()
                   ? TokenLogprob{candidates_[i].token, logprob(candidates_[i].logit)}
                   : TokenLogprob{-1, kNan};
    }
  }
  return logprob(raw[static_cast<std::size_t>(token)]);
}

std::int32_t Sampler::draw_by_id(std::span<const float> logits, float max,
                                 const SamplingParams& params) {
  const std::span<float> weights = std::span(weights_).first(logits.size());
  softmax_weights(logits, max, params.temperature, weights);
  if (params.min_p > 0.0F) {
    for (float& weight : weights) {
      weight = weight < params.min_p ? 0.0F : weight;
    }
  }
  return static_cast<std::int32_t>(pick_weight(weights, uniform(params)));
}

std::int32_t Sampler::draw_by_rank(std::span<const float> logits, float max,
                                   const SamplingParams& params) {
  std::span<float> weights = rank(logits, max, params);
  // Weights fall along the candidates, so min-p cuts a suffix; the first weighs 1 and stays.
  while (weights.size() > 1 && weights.back() < params.min_p) {
    weights = weights.first(weights.size() - 1);
  }
  const double target = uniform(params) * sum_in_order(weights);
  double cumulative = 0.0;
  std::size_t chosen = 0;
  for (std::size_t i = 0; i < weights.size() && weights[i] > 0.0F; ++i) {
    chosen = i;
    cumulative += weights[i];
    if (cumulative > target) {
      break;
    }
  }
  return candidates_[chosen].token;
}

std::span<float> Sampler::rank(std::span<const float> logits, float max,
                               const SamplingParams& params) {
  const std::size_t n = logits.size();
  const auto weigh_candidates = [&] {
    for (std::size_t i = 0; i < candidates_.size(); ++i) {
      ranked_[i] = exp_nonpositive((candidates_[i].logit - max) / params.temperature);
    }
    return std::span(ranked_).first(candidates_.size());
  };
  if (params.top_k > 0 && static_cast<std::size_t>(params.top_k) < n) {
    select_top(logits, static_cast<std::size_t>(params.top_k), candidates_);
    const std::span<float> weights = weigh_candidates();
    const double wanted = params.top_p * sum_in_order(weights);
    return params.top_p < 1.0F
               ? weights.first(prefix_reaching(weights, wanted).value_or(weights.size()))
               : weights;
  }
  const std::span<float> all = std::span(weights_).first(n);
  softmax_weights(logits, max, params.temperature, all);
  const double wanted = params.top_p * fixed_order_sum(all);
  // Most nuclei are small: try the few best first, which needs no histogram.
  select_top(logits, kNucleusGuess, candidates_);
  std::span<float> weights = weigh_candidates();
  std::optional<std::size_t> kept = prefix_reaching(weights, wanted);
  if (!kept && weights.size() < n) {
    histogram_.build(logits, max, all);
    std::size_t bucket = histogram_.bucket_reaching(wanted);
    do {
      histogram_.select(logits, max, bucket, candidates_);
      weights = weigh_candidates();
      kept = prefix_reaching(weights, wanted);
    } while (!kept && ++bucket < MassHistogram::buckets());
  }
  return weights.first(kept.value_or(weights.size()));
}

}  // namespace pocket
