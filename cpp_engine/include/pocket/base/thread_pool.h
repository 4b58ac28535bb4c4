#pragma once

#include <cstddef>
#include <memory>

#include "pocket/base/function_ref.h"

namespace pocket {

/// CPUs in this process's affinity mask (at least 1). A container's CPU quota is not a mask and is
/// not seen here: pass `threads` explicitly under one.
[[nodiscard]] std::size_t available_cpus() noexcept;

/// A fixed set of threads that run one parallel loop at a time.
///
/// `parallel_for` gives every thread an equal share of neighbouring indices, and one that has
/// finished its own takes over from the others'; the calling thread takes part, so a pool of size 1
/// has no worker threads. Workers spin for a short while after a loop (a
/// decode step is dozens of loops a few microseconds apart) and then park on a futex, so an idle
/// engine uses no CPU. Which thread runs which task is not defined: tasks must be independent, and
/// no result may depend on it (the engine's batch invariance rests on this).
///
/// Thread contract: `parallel_for` may be called by one thread at a time and not from inside a
/// task (`Error(kInternal)` otherwise, never a deadlock). Every task runs even if another one
/// throws; then `parallel_for` rethrows the exception of the lowest index.
class ThreadPool {
 public:
  /// `threads` counts the caller; 0 means `available_cpus()`. Throws `Error(kInvalidArgument)`
  /// above 1024 and `Error(kResourceExhausted)` when the system refuses a thread.
  explicit ThreadPool(std::size_t threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] std::size_t size() const noexcept;

  /// Runs `task(index, thread)` for every index in [0, tasks); thread is in [0, size()), and the
  /// caller is thread 0. At most 2^32 - 1 tasks. What the tasks wrote is visible on return.
  void parallel_for(std::size_t tasks,
                    FunctionRef<void(std::size_t index, std::size_t thread)> task);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace pocket
