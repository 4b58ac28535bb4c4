#pragma once

#include <cstddef>
#include <memory>

#include "pocket/base/function_ref.h"

namespace pocket {

/// A fixed set of threads that run one parallel loop at a time.
///
/// `parallel_for` hands out indices 0..tasks-1 from an atomic counter; the calling thread takes
/// part, so a pool of size 1 has no worker threads. Workers spin for a short while after a loop (a
/// decode step is dozens of loops a few microseconds apart) and then park on a futex, so an idle
/// engine uses no CPU. Which thread runs which task is not defined: tasks must be independent, and
/// no result may depend on it (the engine's batch invariance rests on this).
///
/// Thread contract: `parallel_for` may be called by one thread at a time and not from inside a
/// task. The first exception thrown by a task is rethrown by `parallel_for` after all tasks have
/// ended.
class ThreadPool {
 public:
  /// `threads` counts the caller; 0 means the number of CPUs in this process's affinity mask.
  explicit ThreadPool(std::size_t threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] std::size_t size() const noexcept;

  /// Runs `task(index, thread)` for every index in [0, tasks); thread is in [0, size()).
  void parallel_for(std::size_t tasks,
                    FunctionRef<void(std::size_t index, std::size_t thread)> task);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace pocket
