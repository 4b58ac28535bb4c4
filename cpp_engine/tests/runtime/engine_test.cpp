#include "pocket/runtime/engine.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "allocation_count.h"
#include "pocket/base/error.h"
#include "small_model.h"
#include "temp_file.h"

namespace pocket {
namespace {

using test::kVocab;
using test::small_model;

EngineOptions options(std::size_t threads) {
  return {.num_blocks = 32,
          .max_sequences = 4,
          .max_batch_tokens = 128,
          .max_context = 128,
          .threads = threads};
}

// One sequence in blocks 0, 1, 2, ...
struct Sequence {
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> positions;
  std::vector<std::int32_t> offsets;
  std::vector<std::int32_t> table;
  std::vector<std::int32_t> row{0};
  std::vector<std::int32_t> wanted;

  Sequence(std::vector<std::int32_t> ids, std::int32_t start)
      : tokens(std::move(ids)), offsets{0, static_cast<std::int32_t>(tokens.size())}, table(8) {
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      positions.push_back(start + static_cast<std::int32_t>(i));
      wanted.push_back(static_cast<std::int32_t>(i));
    }
    for (std::size_t i = 0; i < table.size(); ++i) {
      table[i] = static_cast<std::int32_t>(i);
    }
  }

  StepInput input() const {
    return {.token_ids = tokens,
            .positions = positions,
            .sequence_offsets = offsets,
            .block_tables = table,
            .table_stride = table.size(),
            .table_rows = row,
            .logits_rows = wanted,
            .sampling = {}};
  }
};

std::vector<std::int32_t> ids(std::size_t n) {
  std::vector<std::int32_t> tokens(n);
  for (std::size_t i = 0; i < n; ++i) {
    tokens[i] = static_cast<std::int32_t>(i * 7 % kVocab);
  }
  return tokens;
}

std::vector<float> logits_of(Engine& engine, const Sequence& sequence) {
  std::vector<float> logits(sequence.tokens.size() * kVocab);
  engine.step(sequence.input(), {.sampled = {}, .logits = logits});
  return logits;
}

TEST_CASE("prefill equals token by token, bit for bit, for any number of logits rows") {
  const test::TempFile file(small_model());
  for (const std::size_t threads : {1U, 2U, 4U}) {
    const auto engine = Engine::load(file.path(), options(threads));
    const std::vector<std::int32_t> tokens = ids(100);  // more rows than one pass of the head
    const std::vector<float> together = logits_of(*engine, Sequence(tokens, 0));
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const std::vector<float> alone =
          logits_of(*engine, Sequence({tokens[i]}, static_cast<std::int32_t>(i)));
      REQUIRE(std::memcmp(alone.data(), together.data() + i * kVocab, kVocab * 4) == 0);
      REQUIRE(std::isfinite(alone[0]));
    }
  }
}

TEST_CASE("which rows are wanted changes no bit of them, nor of later steps") {
  const test::TempFile file(small_model());
  const auto engine = Engine::load(file.path(), options(2));
  const std::vector<std::int32_t> tokens = ids(40);
  const std::vector<float> all = logits_of(*engine, Sequence(tokens, 0));
  const std::vector<float> next = logits_of(*engine, Sequence({9}, 40));
  const std::vector<std::vector<std::int32_t>> choices{{39}, {0}, {7, 23, 7}, {30, 5}, {}};
  for (const std::vector<std::int32_t>& wanted : choices) {
    const auto fresh = Engine::load(file.path(), options(2));
    Sequence some(tokens, 0);
    some.wanted = wanted;
    std::vector<float> logits(wanted.size() * kVocab);
    fresh->step(some.input(), {.sampled = {}, .logits = logits});
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const auto row = static_cast<std::size_t>(wanted[i]);
      CHECK(std::memcmp(logits.data() + i * kVocab, all.data() + row * kVocab, kVocab * 4) == 0);
    }
    CHECK(logits_of(*fresh, Sequence({9}, 40)) == next);
  }
}

TEST_CASE("a step allocates nothing") {
  const test::TempFile file(small_model());
  for (const Precision precision : {Precision::kInt8, Precision::kExactF32}) {
    EngineOptions wanted = options(2);
    wanted.precision = precision;
    const auto engine = Engine::load(file.path(), wanted);
    const Sequence prefill(ids(70), 0);
    const Sequence decode({5}, 70);
    std::vector<float> logits(70 * kVocab);
    Sequence chunk(ids(40), 0);
    chunk.wanted = {39};
    std::vector<SamplingParams> sampling{
        {.temperature = 1.0F, .top_k = 20, .top_p = 0.9F, .min_p = 0.01F}};
    std::vector<SampledToken> sampled(1);
    StepInput sampling_step = decode.input();
    sampling_step.sampling = sampling;

    const std::size_t before = test::allocation_count();
    engine->step(chunk.input(), {.sampled = {}, .logits = std::span(logits).first(kVocab)});
    engine->step(prefill.input(), {.sampled = {}, .logits = logits});
    engine->step(sampling_step, {.sampled = sampled, .logits = {}});
    CHECK(test::allocation_count() == before);
    CHECK(sampled[0].token >= 0);
  }
}

TEST_CASE("sample_vocab hides the ids above it") {
  const test::TempFile file(small_model());
  const auto engine = Engine::load(file.path(), options(1));
  Sequence one({3}, 0);
  std::vector<SamplingParams> sampling{{.temperature = 100.0F}};
  std::vector<SampledToken> sampled(1);
  bool high = false;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    sampling[0].seed = seed;
    StepInput input = one.input();
    input.sampling = sampling;
    engine->step(input, {.sampled = sampled, .logits = {}});
    high = high || sampled[0].token >= 10;
    input.sample_vocab = 10;
    engine->step(input, {.sampled = sampled, .logits = {}});
    REQUIRE(sampled[0].token >= 0);
    REQUIRE(sampled[0].token < 10);
  }
  CHECK(high);
}

TEST_CASE("copied blocks continue as the original does") {
  const test::TempFile file(small_model());
  const auto engine = Engine::load(file.path(), options(2));
  logits_of(*engine, Sequence(ids(20), 0));
  const std::vector<float> expected = logits_of(*engine, Sequence({9}, 20));
  const std::vector<std::int32_t> from{0, 1};
  const std::vector<std::int32_t> to{30, 17};
  engine->copy_blocks(from, to);
  Sequence fork({9}, 20);
  fork.table = {30, 17};
  CHECK(logits_of(*engine, fork) == expected);
}

TEST_CASE("sizes are reported and options resolved") {
  const test::TempFile file(small_model());
  EngineOptions wanted = options(2);
  wanted.max_context = 0;
  const auto engine = Engine::load(file.path(), wanted);
  CHECK(engine->options().max_context == 256);
  CHECK(engine->options().threads == 2);
  CHECK(engine->options().isa.has_value());
  CHECK(engine->kv_cache_bytes() == 32 * engine->model().kv_bytes_per_block);
  CHECK(engine->model().kv_bytes_per_block == 2 * 2 * 2 * 16 * 16 * 2);
  CHECK(engine->workspace_bytes() > 0);
  CHECK(inspect_model(file.path(), KvDType::kF16).parameter_count ==
        engine->model().parameter_count);
}

TEST_CASE("options out of range are refused") {
  const test::TempFile file(small_model());
  const auto code = [&](auto change) {
    EngineOptions wanted = options(1);
    change(wanted);
    try {
      (void)Engine::load(file.path(), wanted);
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kInternal;
  };
  CHECK(code([](EngineOptions& o) { o.num_blocks = 0; }) == ErrorCode::kInvalidArgument);
  CHECK(code([](EngineOptions& o) { o.max_sequences = 0; }) == ErrorCode::kInvalidArgument);
  CHECK(code([](EngineOptions& o) { o.max_batch_tokens = std::size_t{1} << 40; }) ==
        ErrorCode::kInvalidArgument);
  CHECK(code([](EngineOptions& o) { o.max_context = 257; }) == ErrorCode::kInvalidArgument);
  CHECK(code([](EngineOptions& o) { o.threads = 100000; }) == ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace pocket
