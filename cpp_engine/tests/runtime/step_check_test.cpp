#include "pocket/runtime/step_check.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "pocket/base/error.h"

namespace pocket {
namespace {

constexpr StepLimits kLimits{
    .vocab = 100, .num_blocks = 10, .max_sequences = 3, .max_batch_tokens = 40, .max_context = 64};

// A valid step of two sequences: a chunk at positions 15..17 and a decode at position 3.
struct Step {
  std::vector<std::int32_t> tokens{1, 2, 3, 4};
  std::vector<std::int32_t> positions{15, 16, 17, 3};
  std::vector<std::int32_t> offsets{0, 3, 4};
  std::vector<std::int32_t> tables{0, 1, -1, -1, 2, -1, -1, -1};
  std::vector<std::int32_t> rows{0, 1};
  std::vector<std::int32_t> wanted{2, 3};
  std::vector<SamplingParams> sampling{2};
  std::vector<SampledToken> sampled{2};

  StepInput input() const {
    return {.token_ids = tokens,
            .positions = positions,
            .sequence_offsets = offsets,
            .block_tables = tables,
            .table_stride = 4,
            .table_rows = rows,
            .logits_rows = wanted,
            .sampling = sampling};
  }
  StepOutput output() { return {.sampled = sampled, .logits = {}}; }
};

std::string message_of(StepChecker& checker, Step step) {
  try {
    (void)checker.check(step.input(), step.output());
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "";
}

TEST_CASE("a valid step becomes its sequences") {
  StepChecker checker(kLimits);
  Step step;
  const auto sequences = checker.check(step.input(), step.output());
  REQUIRE(sequences.size() == 2);
  CHECK(sequences[0].first_row == 0);
  CHECK(sequences[0].rows == 3);
  CHECK(sequences[0].first_position == 15);
  CHECK(sequences[1].blocks == step.tables.data() + 4);
}

TEST_CASE("aliased blocks are refused, and a refusal leaves no trace") {
  StepChecker checker(kLimits);
  for (int repeat = 0; repeat < 3; ++repeat) {
    Step both;
    both.tables[4] = 1;  // both write block 1
    CHECK(message_of(checker, both) == "block_tables: sequences 0 and 1 both write block 1");
    Step reads;
    reads.positions[3] = 18;
    reads.tables[4] = 1;  // sequence 1 reads block 1, writes block 2
    reads.tables[5] = 2;
    CHECK(message_of(checker, reads).find("sequence 1 reads block 1") != std::string::npos);
    Step twice;
    twice.tables[1] = 0;  // positions 15 and 16 would share a block
    CHECK(message_of(checker, twice).find("both write block 0") != std::string::npos);
    Step range;
    range.tables[4] = 10;
    CHECK(message_of(checker, range) == "block_tables[1][0]: got 10; must be from 0 to 9");
    CHECK(message_of(checker, Step{}).empty());
  }
}

TEST_CASE("sharing blocks that nobody writes is fine") {
  StepChecker checker(kLimits);
  Step step;
  step.positions[0] = 16;  // both read block 0, write their own
  step.positions[1] = 17;
  step.positions[2] = 18;
  step.positions[3] = 20;
  step.tables = {0, 1, -1, -1, 0, 2, -1, -1};
  CHECK(message_of(checker, step).empty());
}

TEST_CASE("counts and sizes of outputs are checked") {
  StepChecker checker(kLimits);
  Step missing;
  missing.sampled.resize(1);
  CHECK(message_of(checker, missing).find("sampling: 2 parameter sets and room for 1") == 0);
  Step logits;
  logits.sampling.clear();
  CHECK(message_of(checker, logits).find("logits: room for 0 values; 2 rows of 100") == 0);
  Step bad;
  bad.sampling[1].top_k = -3;
  CHECK(message_of(checker, bad).find("sampling[1].top_k: got -3") == 0);
  Step many_alternatives;
  many_alternatives.sampling[0].top_logprobs = 21;
  CHECK(message_of(checker, many_alternatives).find("sampling[0].top_logprobs: got 21") == 0);
  Step no_room;
  no_room.sampling[1].top_logprobs = 1;
  CHECK(message_of(checker, no_room).find("sampling[1].top_logprobs: got 1, but") == 0);
  const std::vector<std::int32_t> words(3, -1);  // 96 of 100 ids
  Step short_mask;
  short_mask.sampling[1].allowed = words;
  CHECK(message_of(checker, short_mask) == "sampling[1].allowed: has 3 words; 100 ids need 4");
  Step many;
  many.tokens.assign(41, 1);
  CHECK(message_of(checker, many).find("token_ids: the step has 41") == 0);
}

}  // namespace
}  // namespace pocket
