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

/// Tasks [begin, end) that nobody has claimed, in one word so that both ends move atomically;
/// aligned as one, since Clang calls libatomic for less.
struct alignas(8) TaskRange {
  std::uint32_t begin;
  std::uint32_t end;
};
static_assert(std::atomic<TaskRange>::is_always_lock_free);

// How a loop is handed over, without locks. Every thread has a share of the tasks: neighbouring
// indices, which are neighbouring weights in a matmul, so that a thread reads memory in one
// ascending stream (docs/kernels.md has what that is worth). The owner claims from the front of its
// share; who has finished its own steals from the back of another's. The caller publishes `task`
// and `tasks`, then stores the shares. A thread may read `task` and `tasks` only while it holds a
// claimed task, because a loop cannot end, nor the next one start, while a claimed task has not
// been counted off `unfinished`. A worker that comes late finds nothing to claim, or claims from
// the next loop, which is as good. So the caller never waits for a worker that was not scheduled in
// time.
struct ThreadPool::State {
  struct alignas(64) Share {
    std::atomic<TaskRange> tasks{TaskRange{0, 0}};
  };

  std::vector<Share> shares;  // by thread
  // Members that different threads write often sit on their own cache lines.
  alignas(64) std::atomic<std::int64_t> unclaimed{0};  // a hint that looking at shares is worth it
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

  /// Takes one task from the front of the thread's share or, with `back`, from the other end.
  bool claim(std::size_t share, bool back, std::size_t& index) noexcept {
    std::atomic<TaskRange>& range = shares[share].tasks;
    TaskRange seen = range.load(std::memory_order_relaxed);
    while (seen.begin < seen.end) {
      const TaskRange rest =
          back ? TaskRange{seen.begin, seen.end - 1} : TaskRange{seen.begin + 1, seen.end};
      if (range.compare_exchange_weak(seen, rest, std::memory_order_acq_rel,
                                      std::memory_order_relaxed)) {
        index = back ? rest.end : seen.begin;
        unclaimed.fetch_sub(1, std::memory_order_relaxed);
        return true;
      }
    }
    return false;
  }

  bool claim_any(std::size_t thread, std::size_t& index) noexcept {
    if (claim(thread, false, index)) return true;
    for (std::size_t i = 1; i < size && unclaimed.load(std::memory_order_relaxed) > 0; ++i) {
      if (claim((thread + i) % size, true, index)) return true;
    }
    return false;
  }

  /// Runs tasks until none is left to claim.
  void drain(std::size_t thread) noexcept {
    std::uint32_t done = 0;
    for (std::size_t index; claim_any(thread, index); ++done) {
      run_one(index, thread);
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
    unclaimed.store(static_cast<std::int64_t>(tasks), std::memory_order_relaxed);
    for (std::size_t thread = 0; thread < size; ++thread) {
      shares[thread].tasks.store({static_cast<std::uint32_t>(tasks * thread / size),
                                  static_cast<std::uint32_t>(tasks * (thread + 1) / size)},
                                 std::memory_order_release);
    }
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
  state_->shares = std::vector<State::Share>(state_->size);
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
