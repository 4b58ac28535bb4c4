#include "pocket/base/thread_pool.h"

#include <doctest/doctest.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "pocket/base/error.h"

namespace pocket {
namespace {

TEST_CASE("every index runs exactly once, on a valid thread") {
  for (const std::size_t threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    REQUIRE(pool.size() == threads);
    for (const std::size_t tasks : {0, 1, 2, 7, 1000}) {
      CAPTURE(threads);
      CAPTURE(tasks);
      std::vector<int> runs(tasks, 0);  // plain ints: tasks write disjoint elements
      std::atomic<bool> valid{true};
      pool.parallel_for(tasks, [&](std::size_t index, std::size_t thread) {
        if (index >= tasks || thread >= threads) valid = false;
        ++runs[index];
      });
      CHECK(valid);
      CHECK(std::all_of(runs.begin(), runs.end(), [](int n) { return n == 1; }));
    }
  }
}

TEST_CASE("per-thread scratch is never shared by two tasks at once") {
  ThreadPool pool(4);
  std::vector<std::size_t> sums(pool.size() * 16, 0);  // unsynchronised: TSan is the judge
  constexpr std::size_t kTasks = 5000;
  pool.parallel_for(kTasks,
                    [&](std::size_t index, std::size_t thread) { sums[thread * 16] += index; });
  CHECK(std::accumulate(sums.begin(), sums.end(), std::size_t{0}) == kTasks * (kTasks - 1) / 2);
}

TEST_CASE("many small loops in a row see each other's results") {
  for (const std::size_t threads : {2, 5}) {
    ThreadPool pool(threads);
    std::vector<std::size_t> values(threads * 2, 0);
    for (std::size_t round = 1; round <= 3000; ++round) {
      pool.parallel_for(values.size(), [&](std::size_t index, std::size_t) {
        if (values[index] + 1 == round) values[index] = round;
      });
    }
    CHECK(std::all_of(values.begin(), values.end(), [](std::size_t v) { return v == 3000; }));
  }
}

// Runs two tasks that each wait for the other one to begin: only two threads can finish it. False
// if the second thread did not come within 20 s, far longer than any scheduling delay.
bool needs_two_threads(ThreadPool& pool) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  std::atomic<int> arrived{0};
  std::atomic<bool> met{true};
  pool.parallel_for(2, [&](std::size_t, std::size_t) {
    ++arrived;
    while (arrived < 2 && met) {
      if (std::chrono::steady_clock::now() > deadline) met = false;
      std::this_thread::yield();
    }
  });
  return met;
}

TEST_CASE("workers take part, whether they spin or are parked") {
  ThreadPool pool(2);
  CHECK(needs_two_threads(pool));
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the worker has parked by now
    CHECK(needs_two_threads(pool));
    CHECK(needs_two_threads(pool));
  }
}

TEST_CASE("a held-up thread's share is finished by the others") {
  using std::chrono::steady_clock;
  ThreadPool pool(3);
  constexpr std::size_t kTasks = 60;
  for (const std::size_t held : {std::size_t{0}, std::size_t{20}, std::size_t{40}}) {
    std::atomic<std::size_t> others{0};
    std::atomic<bool> in_time{true};
    pool.parallel_for(kTasks, [&](std::size_t index, std::size_t) {
      if (index != held) {
        ++others;
        return;
      }
      const auto deadline = steady_clock::now() + std::chrono::seconds(30);
      while (others != kTasks - 1 && in_time) {
        std::this_thread::yield();
        if (steady_clock::now() > deadline) in_time = false;
      }
    });
    CHECK(in_time);
  }
}

TEST_CASE("the exception of the lowest index is rethrown after all tasks ran") {
  for (const std::size_t threads : {1, 2, 4}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 50; ++round) {
      std::atomic<int> ran{0};
      std::string caught;
      try {
        pool.parallel_for(40, [&](std::size_t index, std::size_t) {
          ++ran;
          if (index % 10 == 3) throw std::runtime_error(std::to_string(index));
        });
      } catch (const std::runtime_error& error) {
        caught = error.what();
      }
      REQUIRE(caught == "3");
      REQUIRE(ran == 40);
    }
    // The pool works on afterwards.
    std::atomic<int> ran{0};
    pool.parallel_for(10, [&](std::size_t, std::size_t) { ++ran; });
    CHECK(ran == 10);
  }
}

TEST_CASE("a nested loop is refused instead of deadlocking") {
  for (const std::size_t threads : {1, 2}) {
    ThreadPool pool(threads);
    try {
      pool.parallel_for(3, [&](std::size_t, std::size_t) {
        pool.parallel_for(2, [](std::size_t, std::size_t) {});
      });
      FAIL("no exception");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kInternal);
    }
    int ran = 0;
    pool.parallel_for(1, [&](std::size_t, std::size_t) { ++ran; });
    CHECK(ran == 1);
  }
}

TEST_CASE("different pools may be nested and used by different threads") {
  ThreadPool outer(2);
  std::atomic<int> total{0};
  outer.parallel_for(4, [&](std::size_t, std::size_t) {
    ThreadPool inner(2);
    inner.parallel_for(5, [&](std::size_t, std::size_t) { ++total; });
  });
  CHECK(total == 20);
}

TEST_CASE("pools come and go, used or not") {
  for (int round = 0; round < 50; ++round) {
    ThreadPool pool(3);
    if (round % 2 == 0) pool.parallel_for(3, [](std::size_t, std::size_t) {});
  }
}

TEST_CASE("size 0 follows the affinity mask") {
  cpu_set_t before;
  REQUIRE(::sched_getaffinity(0, sizeof(before), &before) == 0);
  CHECK(ThreadPool(0).size() == static_cast<std::size_t>(CPU_COUNT(&before)));

  int first = 0;
  while (!CPU_ISSET(first, &before)) ++first;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  REQUIRE(::sched_setaffinity(0, sizeof(one), &one) == 0);
  CHECK(available_cpus() == 1);
  CHECK(ThreadPool(0).size() == 1);
  {
    ThreadPool oversubscribed(4);  // no spinning here: it must still make progress
    std::atomic<int> ran{0};
    for (int i = 0; i < 100; ++i) oversubscribed.parallel_for(8, [&](auto, auto) { ++ran; });
    CHECK(ran == 800);
  }
  REQUIRE(::sched_setaffinity(0, sizeof(before), &before) == 0);
}

TEST_CASE("an absurd size is refused") {
  CHECK_THROWS_AS(ThreadPool(1'000'000), Error);
}

TEST_CASE("an idle pool uses no CPU") {
  ThreadPool pool(4);
  pool.parallel_for(8, [](std::size_t, std::size_t) {});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const auto cpu_seconds = [] {
    timespec now;
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
  };
  const double before = cpu_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  // One spinning worker alone would use 0.1 s.
  CHECK(cpu_seconds() - before < 0.03);
}

}  // namespace
}  // namespace pocket
