#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pocket/models/model.h"

namespace pocket {

/// The rows of a step that its last layer has to finish: per sequence the range of those whose
/// logits are wanted, so a range may hold some that are not. All other rows only leave K, V and
/// recurrent states there. Kept rows are numbered from 0 in the order of the batch.
///
/// Thread contract: `plan` by one thread at a time. Nothing is allocated after construction.
class OutputRows {
 public:
  OutputRows(std::size_t max_batch_tokens, std::size_t max_sequences);

  void plan(const ForwardBatch& batch);

  /// Every row of the batch is kept, under its own number.
  [[nodiscard]] bool all() const noexcept { return rows_.size() == batch_rows_; }
  /// The batch's row of each kept one, ascending.
  [[nodiscard]] std::span<const std::int32_t> rows() const noexcept { return rows_; }
  /// The kept rows as sequences of their own: first_row counts kept rows, positions are the same.
  [[nodiscard]] std::span<const SequenceRows> sequences() const noexcept { return sequences_; }
  /// The number of a kept row of the batch.
  [[nodiscard]] std::int32_t number_of(std::int32_t row) const {
    return number_[static_cast<std::size_t>(row)];
  }

 private:
  std::size_t batch_rows_ = 0;
  std::vector<std::int32_t> rows_;
  std::vector<std::int32_t> number_;  // by row of the batch; holds nothing for rows not kept
  std::vector<SequenceRows> sequences_;
};

}  // namespace pocket
