#include "pocket/runtime/step_check.h"

#include <string>

#include "pocket/base/error.h"

namespace pocket {
namespace {

[[noreturn]] void fail(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

std::string at(const char* field, std::size_t index) {
  return std::string(field) + "[" + std::to_string(index) + "]";
}

[[noreturn]] void out_of_range(const char* field, std::size_t index, std::int64_t value,
                               std::size_t limit) {
  fail(at(field, index) + ": got " + std::to_string(value) + "; must be from 0 to " +
       std::to_string(limit - 1));
}

bool below(std::int32_t value, std::size_t limit) {
  return value >= 0 && static_cast<std::size_t>(value) < limit;
}

void check_count(const char* what, std::size_t count, std::size_t limit, const char* option) {
  if (count == 0 || count > limit) {
    fail(std::string(what) + ": the step has " + std::to_string(count) + "; must be from 1 to " +
         option + " (" + std::to_string(limit) + ")");
  }
}

std::size_t blocks_for(std::size_t positions) {
  return (positions + kKvBlockTokens - 1) / kKvBlockTokens;
}

}  // namespace

StepChecker::StepChecker(const StepLimits& limits)
    : limits_(limits),
      writer_(limits.num_blocks, 0),
      slot_used_(limits.states == nullptr ? 0 : limits.max_sequences) {
  sequences_.reserve(limits.max_sequences);
}

std::span<const SequenceRows> StepChecker::check(const StepInput& input, const StepOutput& output) {
  check_sequences(input);
  check_rows(input, output);
  if (limits_.states != nullptr) {
    check_states(input);
  }
  check_blocks(input);
  return sequences_;
}

void StepChecker::check_sequences(const StepInput& input) {
  const std::size_t tokens = input.token_ids.size();
  const std::size_t count = input.table_rows.size();
  check_count("token_ids", tokens, limits_.max_batch_tokens, "max_batch_tokens");
  check_count("table_rows", count, limits_.max_sequences, "max_sequences");
  if (input.positions.size() != tokens) {
    fail("positions: has " + std::to_string(input.positions.size()) + " entries for " +
         std::to_string(tokens) + " tokens");
  }
  if (input.sequence_offsets.size() != count + 1) {
    fail("sequence_offsets: has " + std::to_string(input.sequence_offsets.size()) +
         " entries; must have one more than table_rows (" + std::to_string(count) + ")");
  }
  if (input.table_stride == 0 || input.block_tables.size() % input.table_stride != 0) {
    fail("block_tables: " + std::to_string(input.block_tables.size()) +
         " entries are no whole number of rows of " + std::to_string(input.table_stride));
  }
  for (std::size_t i = 0; i < tokens; ++i) {
    if (!below(input.token_ids[i], limits_.vocab)) {
      out_of_range("token_ids", i, input.token_ids[i], limits_.vocab);
    }
  }
  if (input.sequence_offsets[0] != 0 ||
      input.sequence_offsets[count] != static_cast<std::int64_t>(tokens)) {
    fail("sequence_offsets: runs from " + std::to_string(input.sequence_offsets[0]) + " to " +
         std::to_string(input.sequence_offsets[count]) + "; must run from 0 to the number of " +
         "tokens (" + std::to_string(tokens) + ")");
  }
  const std::size_t tables = input.block_tables.size() / input.table_stride;
  sequences_.clear();
  for (std::size_t s = 0; s < count; ++s) {
    const std::int32_t begin = input.sequence_offsets[s];
    const std::int32_t end = input.sequence_offsets[s + 1];
    if (begin >= end || end > static_cast<std::int64_t>(tokens)) {
      fail(at("sequence_offsets", s + 1) + ": got " + std::to_string(end) + " after " +
           std::to_string(begin) + "; every sequence needs at least one token");
    }
    const auto first_row = static_cast<std::size_t>(begin);
    const auto rows = static_cast<std::size_t>(end - begin);
    const std::int32_t first = input.positions[first_row];
    for (std::size_t i = 0; i < rows; ++i) {
      const std::int32_t position = input.positions[first_row + i];
      if (!below(position, limits_.max_context)) {
        out_of_range("positions", first_row + i, position, limits_.max_context);
      }
      if (position - first != static_cast<std::int64_t>(i)) {
        fail(at("positions", first_row + i) + ": got " + std::to_string(position) +
             "; a sequence's positions are consecutive and this one's start at " +
             std::to_string(first));
      }
    }
    if (!below(input.table_rows[s], tables)) {
      out_of_range("table_rows", s, input.table_rows[s], tables);
    }
    const std::size_t needed = blocks_for(static_cast<std::size_t>(first) + rows);
    if (needed > input.table_stride) {
      fail("block_tables: sequence " + std::to_string(s) + " reaches position " +
           std::to_string(static_cast<std::size_t>(first) + rows - 1) + " and needs " +
           std::to_string(needed) + " blocks; rows have " + std::to_string(input.table_stride));
    }
    sequences_.push_back(
        {.first_row = first_row,
         .rows = rows,
         .first_position = static_cast<std::size_t>(first),
         .blocks = input.block_tables.data() +
                   static_cast<std::size_t>(input.table_rows[s]) * input.table_stride,
         .slot = static_cast<std::size_t>(input.table_rows[s])});
  }
}

void StepChecker::check_states(const StepInput& input) {
  slot_used_.assign(limits_.max_sequences, false);
  for (std::size_t s = 0; s < sequences_.size(); ++s) {
    const SequenceRows& sequence = sequences_[s];
    if (sequence.slot >= limits_.max_sequences) {
      out_of_range("table_rows", s, input.table_rows[s], limits_.max_sequences);
    }
    if (slot_used_[sequence.slot]) {
      fail(at("table_rows", s) + ": got " + std::to_string(sequence.slot) +
           " again; a slot's recurrent state belongs to one sequence");
    }
    slot_used_[sequence.slot] = true;
    if (!limits_.states->continues(sequence.slot, sequence.first_position)) {
      const std::size_t held = limits_.states->position(sequence.slot);
      fail(at("table_rows", s) + ": slot " + std::to_string(sequence.slot) + " holds " +
           (held == StateStore::kNothing
                ? std::string("no recurrent state")
                : "the recurrent state after " + std::to_string(held) + " tokens") +
           " and the sequence continues at position " + std::to_string(sequence.first_position) +
           "; load a snapshot of that position or start at 0");
    }
  }
}

void StepChecker::check_rows(const StepInput& input, const StepOutput& output) const {
  const std::size_t rows = input.logits_rows.size();
  for (std::size_t i = 0; i < rows; ++i) {
    if (!below(input.logits_rows[i], input.token_ids.size())) {
      out_of_range("logits_rows", i, input.logits_rows[i], input.token_ids.size());
    }
  }
  if (rows > input.token_ids.size()) {
    fail("logits_rows: has " + std::to_string(rows) + " entries for " +
         std::to_string(input.token_ids.size()) + " tokens");
  }
  if (input.sample_vocab > limits_.vocab) {
    fail("sample_vocab: got " + std::to_string(input.sample_vocab) + "; the model has " +
         std::to_string(limits_.vocab) + " logits");
  }
  if (input.sampling.empty()) {
    if (output.logits.size() != rows * limits_.vocab) {
      fail("logits: room for " + std::to_string(output.logits.size()) + " values; " +
           std::to_string(rows) + " rows of " + std::to_string(limits_.vocab) + " are wanted");
    }
    return;
  }
  if (input.sampling.size() != rows || output.sampled.size() != rows) {
    fail("sampling: " + std::to_string(input.sampling.size()) + " parameter sets and room for " +
         std::to_string(output.sampled.size()) + " tokens; logits_rows has " +
         std::to_string(rows));
  }
  if (!output.top.empty() && output.top.size() != rows * kMaxTopLogprobs) {
    fail("top: room for " + std::to_string(output.top.size()) + " entries; " +
         std::to_string(rows) + " rows of " + std::to_string(kMaxTopLogprobs) + " are wanted");
  }
  const std::size_t sampled = input.sample_vocab == 0 ? limits_.vocab : input.sample_vocab;
  for (std::size_t i = 0; i < rows; ++i) {
    const SamplingParams& params = input.sampling[i];
    try {
      validate_sampling(params);
    } catch (const Error& error) {
      throw Error(error.code(), at("sampling", i) + "." + error.what());
    }
    if (params.top_logprobs > 0 && output.top.empty()) {
      fail(at("sampling", i) + ".top_logprobs: got " + std::to_string(params.top_logprobs) +
           ", but there is no room for them");
    }
    if (!params.allowed.empty() && params.allowed.size() < mask_words(sampled)) {
      fail(at("sampling", i) + ".allowed: has " + std::to_string(params.allowed.size()) +
           " words; " + std::to_string(sampled) + " ids need " +
           std::to_string(mask_words(sampled)));
    }
  }
}

void StepChecker::check_blocks(const StepInput& input) {
  const auto written = [](const SequenceRows& sequence) {
    return std::pair{sequence.first_position / kKvBlockTokens,
                     blocks_for(sequence.first_position + sequence.rows)};
  };
  const auto clear = [&] {
    for (const SequenceRows& sequence : sequences_) {
      const auto [begin, end] = written(sequence);
      for (std::size_t j = begin; j < end; ++j) {
        if (below(sequence.blocks[j], limits_.num_blocks)) {
          writer_[static_cast<std::size_t>(sequence.blocks[j])] = 0;
        }
      }
    }
  };
  try {
    for (std::size_t s = 0; s < sequences_.size(); ++s) {
      const SequenceRows& sequence = sequences_[s];
      const auto [begin, end] = written(sequence);
      for (std::size_t j = 0; j < end; ++j) {
        if (!below(sequence.blocks[j], limits_.num_blocks)) {
          fail("block_tables[" + std::to_string(input.table_rows[s]) + "][" + std::to_string(j) +
               "]: got " + std::to_string(sequence.blocks[j]) + "; must be from 0 to " +
               std::to_string(limits_.num_blocks - 1));
        }
      }
      for (std::size_t j = begin; j < end; ++j) {
        std::int32_t& writer = writer_[static_cast<std::size_t>(sequence.blocks[j])];
        if (writer != 0) {
          fail("block_tables: sequences " + std::to_string(writer - 1) + " and " +
               std::to_string(s) + " both write block " + std::to_string(sequence.blocks[j]));
        }
        writer = static_cast<std::int32_t>(s + 1);
      }
    }
    for (std::size_t s = 0; s < sequences_.size(); ++s) {
      const SequenceRows& sequence = sequences_[s];
      const std::size_t end = written(sequence).second;
      for (std::size_t j = 0; j < end; ++j) {
        const std::int32_t writer = writer_[static_cast<std::size_t>(sequence.blocks[j])];
        if (writer != 0 && writer != static_cast<std::int32_t>(s + 1)) {
          fail("block_tables: sequence " + std::to_string(s) + " reads block " +
               std::to_string(sequence.blocks[j]) + ", which sequence " +
               std::to_string(writer - 1) + " writes in this step");
        }
      }
    }
  } catch (...) {
    clear();
    throw;
  }
  clear();
}

}  // namespace pocket
