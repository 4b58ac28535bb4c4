#include "output_rows.h"

#include <algorithm>

namespace pocket {

OutputRows::OutputRows(std::size_t max_batch_tokens, std::size_t max_sequences)
    : number_(max_batch_tokens) {
  rows_.reserve(max_batch_tokens);
  sequences_.reserve(max_sequences);
}

void OutputRows::plan(const ForwardBatch& batch) {
  constexpr std::int32_t kUnwanted = 0;
  constexpr std::int32_t kWanted = 1;
  batch_rows_ = batch.token_ids.size();
  rows_.clear();
  sequences_.clear();
  std::fill_n(number_.begin(), batch_rows_, kUnwanted);
  for (const std::int32_t row : batch.wanted) {
    number_[static_cast<std::size_t>(row)] = kWanted;
  }
  for (const SequenceRows& sequence : batch.sequences) {
    std::size_t begin = sequence.first_row;
    std::size_t end = begin + sequence.rows;
    for (; begin < end && number_[begin] == kUnwanted; ++begin) {
    }
    for (; begin < end && number_[end - 1] == kUnwanted; --end) {
    }
    if (begin == end) {
      continue;
    }
    sequences_.push_back({.first_row = rows_.size(),
                          .rows = end - begin,
                          .first_position = sequence.first_position + begin - sequence.first_row,
                          .blocks = sequence.blocks,
                          .slot = sequence.slot});
    for (; begin < end; ++begin) {
      number_[begin] = static_cast<std::int32_t>(rows_.size());
      rows_.push_back(static_cast<std::int32_t>(begin));
    }
  }
}

}  // namespace pocket
