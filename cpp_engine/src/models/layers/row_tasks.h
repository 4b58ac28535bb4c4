#pragma once

#include <algorithm>
#include <cstddef>

#include "../compute.h"

namespace pocket {

/// Rows of cheap per-row work (a norm, a rotation: well under a microsecond each) per task. A
/// parallel region costs about a microsecond, so fewer rows than two tasks run on the caller.
inline constexpr std::size_t kRowsPerTask = 8;

/// Calls body(row, thread) for every row, in parallel when there are many.
template <typename Body>
void for_each_row(const Compute& compute, std::size_t rows, const Body& body) {
  if (rows < 2 * kRowsPerTask || compute.pool->size() == 1) {
    for (std::size_t row = 0; row < rows; ++row) {
      body(row, std::size_t{0});
    }
    return;
  }
  const std::size_t tasks = (rows + kRowsPerTask - 1) / kRowsPerTask;
  compute.pool->parallel_for(tasks, [&](std::size_t task, std::size_t thread) {
    const std::size_t end = std::min(rows, (task + 1) * kRowsPerTask);
    for (std::size_t row = task * kRowsPerTask; row < end; ++row) {
      body(row, thread);
    }
  });
}

}  // namespace pocket
