// Measures what choosing one token costs: microseconds per row of logits for each sampling option.
//
//   bench_sampling [--vocab N] [--rounds N] [--isa NAME]
//
// One thread, one row at a time. Rounds go over all cases, so that a neighbour who takes the CPU
// for a while hits all of them; the table shows the best and the median round. Edits change the
// row, so every call works on a fresh copy; copying is not timed.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "pocket/base/error.h"
#include "pocket/cpu/kernels.h"
#include "pocket/sampling/sampler.h"

namespace pocket::bench {
namespace {

constexpr std::size_t kRows = 32;  // different rows per round

struct Case {
  std::string name;
  SamplingParams params;
  std::vector<double> samples{};  // us per row, one per round
};

// A language model's kind of row: a normal bulk with a few tokens far above it.
std::vector<float> row_of_logits(std::size_t vocab, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> bulk(0, 2.5F);
  std::vector<float> row(vocab);
  for (float& x : row) {
    x = bulk(random);
  }
  for (int i = 0; i < 40; ++i) {
    row[random() % vocab] = 8.0F + std::abs(bulk(random)) * 1.5F;
  }
  return row;
}

LogitEdits penalties(std::size_t vocab, std::size_t distinct) {
  LogitEdits edits(
      {.repetition_penalty = 1.1F, .presence_penalty = 0.2F, .frequency_penalty = 0.1F}, vocab);
  std::mt19937 random(static_cast<unsigned>(distinct));
  std::vector<std::int32_t> ids(vocab);
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), random);
  edits.reset_history(std::span(ids).first(distinct), distinct / 2);
  return edits;
}

void measure(std::vector<Case>& cases, Sampler& sampler,
             const std::vector<std::vector<float>>& rows, std::uint64_t round) {
  std::vector<float> row(rows[0].size());
  std::vector<TokenLogprob> top(kMaxTopLogprobs);
  for (Case& c : cases) {
    double seconds = 0.0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      std::copy(rows[i].begin(), rows[i].end(), row.begin());
      SamplingParams params = c.params;
      params.token_index = round * rows.size() + i;
      const auto start = std::chrono::steady_clock::now();
      const SampledToken sampled = sampler.sample_row(row, params, top);
      seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      if (sampled.token < 0) {
        throw Error(ErrorCode::kInternal, c.name + ": no token");
      }
    }
    c.samples.push_back(seconds * 1e6 / static_cast<double>(rows.size()));
  }
}

void run(std::size_t vocab, std::size_t rounds, Isa isa) {
  std::vector<std::vector<float>> rows;
  for (unsigned i = 0; i < kRows; ++i) {
    rows.push_back(row_of_logits(vocab, i));
  }
  const LogitEdits seen64 = penalties(vocab, std::min<std::size_t>(vocab, 64));
  const LogitEdits seen1000 = penalties(vocab, std::min<std::size_t>(vocab, 1000));
  const LogitEdits seen8000 = penalties(vocab, std::min<std::size_t>(vocab, 8000));
  LogitOptions listed{};
  for (std::int32_t i = 0; i < 100; ++i) {
    listed.bias.push_back({i * 3, 0.5F});
    listed.banned.push_back(i * 3 + 1);
  }
  const LogitEdits lists(listed, vocab);
  std::mt19937 random(3);
  std::vector<std::int32_t> half(mask_words(vocab));
  std::generate(half.begin(), half.end(), [&] { return static_cast<std::int32_t>(random()); });
  std::vector<std::int32_t> few(mask_words(vocab), 0);
  few[few.size() / 2] = 0x11;

  std::vector<Case> cases{
      {"greedy", {.logprob = false}},
      {"greedy, chosen logprob", {}},
      {"greedy, top 20 logprobs", {.top_logprobs = 20}},
      {"greedy, penalties, 64 distinct tokens", {.logprob = false, .edits = &seen64}},
      {"greedy, penalties, 1000 distinct tokens", {.logprob = false, .edits = &seen1000}},
      {"greedy, penalties, 8000 distinct tokens", {.logprob = false, .edits = &seen8000}},
      {"greedy, 100 biased and 100 bad ids", {.logprob = false, .edits = &lists}},
      {"greedy, mask that allows half", {.logprob = false, .allowed = half}},
      {"greedy, mask that allows two", {.logprob = false, .allowed = few}},
      {"temperature", {.temperature = 0.8F, .logprob = false}},
      {"temperature, min_p 0.05", {.temperature = 0.8F, .min_p = 0.05F, .logprob = false}},
      {"temperature, top_k 40", {.temperature = 0.8F, .top_k = 40, .logprob = false}},
      {"temperature, top_p 0.9", {.temperature = 0.8F, .top_p = 0.9F, .logprob = false}},
      {"temperature 2, top_p 0.95 (a large nucleus)",
       {.temperature = 2.0F, .top_p = 0.95F, .logprob = false}},
      {"top_k 40, top_p 0.9, 1000 penalties, top 20 logprobs",
       {.temperature = 0.8F, .top_k = 40, .top_p = 0.9F, .top_logprobs = 20, .edits = &seen1000}},
  };
  Sampler sampler(kernel_table(isa), vocab);
  for (std::size_t round = 0; round < rounds; ++round) {
    measure(cases, sampler, rows, round);
  }
  std::printf("vocab %zu, %s, us per row, %zu rounds of %zu rows\n\n", vocab, isa_name(isa).data(),
              rounds, kRows);
  std::printf("| Options | best | median |\n|---|---|---|\n");
  for (Case& c : cases) {
    std::sort(c.samples.begin(), c.samples.end());
    std::printf("| %s | %.1f | %.1f |\n", c.name.c_str(), c.samples.front(),
                c.samples[c.samples.size() / 2]);
  }
}

}  // namespace
}  // namespace pocket::bench

int main(int argc, char** argv) {
  try {
    std::size_t vocab = 49152;
    std::size_t rounds = 40;
    pocket::Isa isa = pocket::select_isa();
    for (int i = 1; i + 1 < argc; i += 2) {
      const std::string_view name = argv[i];
      if (name == "--vocab") {
        vocab = std::stoul(argv[i + 1]);
      } else if (name == "--rounds") {
        rounds = std::stoul(argv[i + 1]);
      } else if (name == "--isa") {
        isa = pocket::parse_isa(argv[i + 1]);
      } else {
        std::fprintf(stderr, "unknown option %s\n", argv[i]);
        return EXIT_FAILURE;
      }
    }
    pocket::bench::run(std::max<std::size_t>(vocab, 512), std::max<std::size_t>(rounds, 1), isa);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}
