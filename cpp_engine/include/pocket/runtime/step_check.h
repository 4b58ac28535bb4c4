#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pocket/models/model.h"
#include "pocket/runtime/engine.h"

namespace pocket {

/// What a step is checked against.
struct StepLimits {
  std::size_t vocab = 0;
  std::size_t num_blocks = 0;
  std::size_t max_sequences = 0;
  std::size_t max_batch_tokens = 0;
  std::size_t max_context = 0;
  const StateStore* states = nullptr;  ///< of a model with recurrent layers; outlives the checker
};

/// Checks a step completely before anything is computed or written.
///
/// Cost: O(tokens + blocks in use by the step's sequences); no allocation after construction.
/// Thread contract: one call at a time.
class StepChecker {
 public:
  explicit StepChecker(const StepLimits& limits);

  /// The step's sequences, valid until the next call. Throws `Error(kInvalidArgument)` naming the
  /// field, the index, the value and the limit.
  [[nodiscard]] std::span<const SequenceRows> check(const StepInput& input,
                                                    const StepOutput& output);

 private:
  void check_sequences(const StepInput& input);
  void check_blocks(const StepInput& input);
  void check_states(const StepInput& input);
  void check_rows(const StepInput& input, const StepOutput& output) const;

  StepLimits limits_;
  std::vector<SequenceRows> sequences_;
  // Per block: 1 + the sequence that writes it in this step. Cleared by walking the step's blocks
  // again, so a check costs nothing for blocks that it does not touch.
  std::vector<std::int32_t> writer_;
  std::vector<bool> slot_used_;  // per slot, in this step
};

}  // namespace pocket
