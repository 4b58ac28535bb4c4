#include "pocket/base/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <exception>
#include <limits>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "pocket/base/error.h"

namespace pocket {
namespace {

// How long a thread spins before it parks. The loops of one decode step are less than ten
// microseconds apart; waking a parked thread takes 5 to 50. Spinning for about the price of one
// wake-up never wastes more than that price, and between steps the core goes back to whoever else
// needs it (Triton's and Python's threads share the two cores of a small machine).
constexpr std::chrono::microseconds kSpinTime{50};
// Pauses between two looks at the clock: about a microsecond.
constexpr int kPausesPerClockRead = 16;
// Far above any machine, far below what would exhaust a process.
constexpr std::size_t kMaxThreads = 1024;

void pause_cpu() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Polls `ready` for at most kSpinTime; its last answer.
template <typename Predicate>
bool spin_until(Predicate ready) {
  const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      if (ready()) return true;
      pause_cpu();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return ready();
}

/// Blocks all signals for the threads created in its scope: handlers run on the host's threads.
class SignalBlocker {
 public:
  SignalBlocker() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &saved_);
  }
  ~SignalBlocker() { ::pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }
  SignalBlocker(const SignalBlocker&) = delete;
  SignalBlocker& operator=(const SignalBlocker&) = delete;

 private:
  sigset_t saved_;
};

}  // namespace

std::size_t available_cpus() noexcept {
  // The kernel refuses a mask that is smaller than its own.
  for (std::size_t cpus = CPU_SETSIZE; cpus <= (std::size_t{1} << 16); cpus *= 2) {
    cpu_set_t* const set = CPU_ALLOC(cpus);
    if (set == nullptr) break;
    const std::size_t bytes = CPU_ALLOC_SIZE(cpus);
    const int status = ::sched_getaffinity(0, bytes, set);
    const int error = errno;
    const int count = status == 0 ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (count > 0) return static_cast<std::size_t>(count);
    if (error != EINVAL) break;
  }
  const unsigned fallback = std::thread::hardware_concurrency();
  return fallback == 0 ? 1 : fallback;
}

// How a loop is handed over, without locks. The caller publishes `task` and `tasks`, then stores
// `unclaimed`. A thread claims a task by decrementing `unclaimed`, and holds a task only if the old
// value was positive; it may read `task` and `tasks` only then, because a loop cannot end, nor the
// next one start, while a claimed task has not been counted off `unfinished`. A worker that comes
// late finds nothing to claim, or claims from the next loop, which is as good. So the caller never
// waits for a worker that was not scheduled in time.
struct ThreadPool::State {
  // Members that different threads write often sit on their own cache lines.
  alignas(64) std::atomic<std::int64_t> unclaimed{0};
  alignas(64) std::atomic<std::uint32_t> unfinished{0};
  alignas(64) std::atomic<std::uint32_t> generation{0};  // bumped per loop; workers park on it
  std::atomic<bool> stopping{false};
  std::atomic<bool> busy{false};

  alignas(64) const FunctionRef<void(std::size_t, std::size_t)>* task = nullptr;
  std::size_t tasks = 0;
  bool spin = true;

  std::mutex failure_mutex;
  std::exception_ptr failure;  // of the lowest failed index, so that a rerun reports the same one
  std::size_t failed_index = 0;

  std::size_t size = 1;
  std::vector<std::thread> workers;

  void run_one(std::size_t index, std::size_t thread) noexcept {
    try {
      (*task)(index, thread);
    } catch (...) {
      const std::lock_guard lock(failure_mutex);
      if (!failure || index < failed_index) {
        failure = std::current_exception();
        failed_index = index;
      }
    }
  }

  /// Runs tasks until none is left to claim.
  void drain(std::size_t thread) noexcept {
    std::uint32_t done = 0;
    for (;;) {
      const std::int64_t left = unclaimed.fetch_sub(1, std::memory_order_acq_rel);
      if (left <= 0) break;
      run_one(tasks - static_cast<std::size_t>(left), thread);
      ++done;
    }
    if (done != 0 && unfinished.fetch_sub(done, std::memory_order_seq_cst) == done) {
      unfinished.notify_one();
    }
  }

  void work(std::size_t thread) noexcept {
    std::uint32_t seen = 0;
    for (;;) {
      const auto changed = [&] { return generation.load(std::memory_order_acquire) != seen; };
      if (!(spin && spin_until(changed))) generation.wait(seen, std::memory_order_acquire);
      seen = generation.load(std::memory_order_acquire);
      if (stopping.load(std::memory_order_acquire)) return;
      drain(thread);
    }
  }

  /// Runs the loop on the calling thread and the workers. No exception leaves it.
  void run_shared() noexcept {
    unfinished.store(static_cast<std::uint32_t>(tasks), std::memory_order_relaxed);
    unclaimed.store(static_cast<std::int64_t>(tasks), std::memory_order_release);
    generation.fetch_add(1, std::memory_order_seq_cst);
    generation.notify_all();
    drain(0);
    const auto finished = [&] { return unfinished.load(std::memory_order_acquire) == 0; };
    if (spin && spin_until(finished)) return;
    for (std::uint32_t left; (left = unfinished.load(std::memory_order_acquire)) != 0;) {
      unfinished.wait(left, std::memory_order_acquire);
    }
  }

  void stop() noexcept {
    stopping.store(true, std::memory_order_release);
    generation.fetch_add(1, std::memory_order_seq_cst);
    generation.notify_all();
    for (std::thread& worker : workers) worker.join();
    workers.clear();
  }
};

ThreadPool::ThreadPool(std::size_t threads) : state_(std::make_unique<State>()) {
  if (threads > kMaxThreads) {
    throw Error(ErrorCode::kInvalidArgument, "threads = " + std::to_string(threads) +
                                                 " is more than " + std::to_string(kMaxThreads) +
                                                 "; use 0 for one thread per CPU");
  }
  const std::size_t cpus = available_cpus();
  state_->size = threads == 0 ? cpus : threads;
  // With more threads than CPUs a spinning thread keeps the one it waits for off the core.
  state_->spin = state_->size <= cpus;
  const SignalBlocker blocker;
  try {
    state_->workers.reserve(state_->size - 1);
    for (std::size_t i = 1; i < state_->size; ++i) {
      state_->workers.emplace_back([state = state_.get(), i] { state->work(i); });
      ::pthread_setname_np(state_->workers.back().native_handle(),
                           ("pocket-" + std::to_string(i)).c_str());
    }
  } catch (const std::system_error& error) {
    state_->stop();
    throw Error(ErrorCode::kResourceExhausted, "cannot start " + std::to_string(state_->size - 1) +
                                                   " worker threads: " + error.code().message() +
                                                   "; use fewer threads");
  }
}

ThreadPool::~ThreadPool() {
  state_->stop();
}

std::size_t ThreadPool::size() const noexcept {
  return state_->size;
}

void ThreadPool::parallel_for(std::size_t tasks,
                              FunctionRef<void(std::size_t index, std::size_t thread)> task) {
  if (tasks == 0) return;
  if (tasks > std::numeric_limits<std::uint32_t>::max()) {
    throw Error(ErrorCode::kInvalidArgument,
                "parallel_for of " + std::to_string(tasks) + " tasks; at most 2^32 - 1 per loop");
  }
  State& state = *state_;
  if (state.busy.exchange(true, std::memory_order_acquire)) {
    throw Error(ErrorCode::kInternal,
                "ThreadPool::parallel_for called from inside a task or by two threads at once");
  }
  state.task = &task;
  state.tasks = tasks;
  if (state.size == 1 || tasks == 1) {
    for (std::size_t index = 0; index < tasks; ++index) state.run_one(index, 0);
  } else {
    state.run_shared();
  }
  const std::exception_ptr failure = std::exchange(state.failure, nullptr);
  state.busy.store(false, std::memory_order_release);
  if (failure) std::rethrow_exception(failure);
}

}  // namespace pocket
