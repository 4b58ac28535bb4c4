#include "pocket/runtime/batch_scheduler.h"

#include <doctest/doctest.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>

#include "pocket/base/error.h"
#include "pocket/runtime/qwen_engine.h"
#include "small_model.h"
#include "temp_file.h"

namespace pocket {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kPatience{60000};  // never reached when all is well

std::vector<std::int32_t> ids(std::size_t n, std::size_t first = 1) {
  std::vector<std::int32_t> tokens(n);
  for (std::size_t i = 0; i < n; ++i) {
    tokens[i] = static_cast<std::int32_t>((first + i * 7) % test::kVocab);
  }
  return tokens;
}

QwenEngineOptions small_options(std::size_t blocks = 0) {
  QwenEngineOptions options;
  options.max_batch_size = 4;
  options.prefill_chunk_tokens = 24;
  options.threads = 1;
  options.kv_cache_bytes = blocks * 2 * 2 * 2 * 16 * 16 * 2;
  return options;
}

BatchSamplingParams sampling_of(std::size_t index, std::size_t tokens = 12) {
  BatchSamplingParams sampling;
  sampling.max_new_tokens = tokens;
  sampling.ignore_eos = true;
  sampling.temperature = index % 2 == 0 ? 0.0F : 0.9F;
  sampling.seed = index;
  return sampling;
}

std::vector<std::int32_t> prompt_of(std::size_t index) {
  return ids(3 + 13 * (index % 5), index % 3);
}

// What each request gets when it is alone.
std::vector<std::vector<std::int32_t>> alone(QwenEngine& engine, std::size_t count) {
  std::vector<std::vector<std::int32_t>> outputs;
  QwenBatchScheduler scheduler(engine, 1);
  for (std::size_t i = 0; i < count; ++i) {
    const auto id = scheduler.submit(prompt_of(i), sampling_of(i));
    outputs.push_back(scheduler.poll(id, std::nullopt)->generated_tokens);
  }
  return outputs;
}

void check_all_free(const QwenEngine& engine) {
  CHECK(engine.kv_free_blocks() + engine.kv_cache_pinned_blocks() == engine.kv_total_blocks());
}

// One token per call, each the last one plus one; `gate` holds every step up.
class CountingEngine final : public InferenceEngine {
 public:
  Capabilities caps() const override { return {.max_slots = 2}; }
  std::size_t max_context() const override { return 1000; }
  std::optional<std::int32_t> allocate_slot() override {
    return used_ < 2 ? std::optional(used_++) : std::nullopt;
  }
  void free_slot(std::int32_t) override { --used_; }
  BatchPrefillResult batch_prefill(std::span<BatchedRequest* const> requests,
                                   std::size_t) override {
    wait();
    BatchPrefillResult out;
    for (const BatchedRequest* const r : requests) {
      out.results.push_back({.top_token = r->prompt_tokens.back() + 1});
      out.incomplete.push_back(false);
    }
    return out;
  }
  BatchDecodeResult batch_decode_step(std::span<BatchedRequest* const> requests) override {
    wait();
    BatchDecodeResult out;
    for (const BatchedRequest* const r : requests) {
      if (r->last_token == kPoison) {
        throw std::runtime_error("poison");
      }
      out.next_tokens.push_back(r->last_token + 1);
    }
    return out;
  }

  static constexpr std::int32_t kPoison = 500;
  std::atomic<bool> gate{true};
  std::atomic<int> steps{0};

 private:
  void wait() {
    ++steps;
    steps.notify_all();
    gate.wait(false);
  }
  std::int32_t used_ = 0;
};

TEST_CASE("requests together get what they get alone, whatever is preempted or shared") {
  const test::TempFile file(test::small_model());
  constexpr std::size_t kCount = 12;
  QwenEngineOptions separate = small_options();
  separate.prefix_cache = false;
  QwenEngine reference(file.path(), separate);
  const auto expected = alone(reference, kCount);
  for (const std::size_t blocks : {0U, 7U}) {
    CAPTURE(blocks);
    QwenEngine engine(file.path(), small_options(blocks));
    QwenBatchScheduler scheduler(engine, 4);
    std::vector<std::uint64_t> requests;
    for (std::size_t i = 0; i < kCount; ++i) {
      requests.push_back(scheduler.submit(prompt_of(i), sampling_of(i)));
    }
    for (std::size_t i = 0; i < kCount; ++i) {
      const auto result = scheduler.poll(requests[i], kPatience);
      REQUIRE(result.has_value());
      CAPTURE(result->error);
      CHECK(result->finish_reason == "length");
      CHECK(result->generated_tokens == expected[i]);
      CHECK(result->ttft_seconds <= result->total_seconds);
    }
    scheduler.stop();
    const SchedulerStats stats = scheduler.stats();
    CHECK(stats.completed_requests == kCount);
    CHECK(stats.running_requests == 0);
    CHECK(stats.waiting_requests == 0);
    CHECK(stats.reserved_blocks == 0);
    CHECK(stats.free_slots == 4);
    CHECK((stats.preemptions > 0) == (blocks == 7));
    CHECK(engine.prefix_cache_stats().hits > 0);
    check_all_free(engine);
  }
}

TEST_CASE("tokens and result reach the callbacks in order; a raising one is isolated") {
  CountingEngine engine;
  QwenBatchScheduler scheduler(engine, 2);
  std::vector<std::int32_t> seen;
  std::atomic<int> ended{0};
  std::atomic<int> raised{0};
  BatchSamplingParams sampling;
  sampling.max_new_tokens = 5;
  const auto bad = scheduler.submit(
      {10}, sampling, [](const SchedulerResult&) { throw std::runtime_error("mine"); },
      [&](std::uint64_t, std::int32_t) {
        ++raised;
        throw 7;
      });
  const auto good = scheduler.submit(
      {100}, sampling,
      [&](const SchedulerResult& result) {
        CHECK(result.generated_tokens == seen);
        CHECK_FALSE(scheduler.poll(result.request_id + 1000 * 0, std::nullopt)->error.size() > 0);
        ended = 1;
        ended.notify_all();
      },
      [&](std::uint64_t, std::int32_t token) { seen.push_back(token); });
  ended.wait(0);
  CHECK(seen == std::vector<std::int32_t>{101, 102, 103, 104, 105});
  CHECK(scheduler.poll(bad, kPatience)->generated_tokens.size() == 5);
  CHECK(scheduler.poll(good, milliseconds(0)).has_value());
  scheduler.stop();
  CHECK(raised == 1);
  CHECK(scheduler.stats().callback_errors == 2);
}

TEST_CASE("cancelled while waiting, while running, and too late") {
  CountingEngine engine;
  engine.gate = false;
  QwenBatchScheduler scheduler(engine, 1);
  std::atomic<int> tokens{0};
  BatchSamplingParams sampling;
  sampling.max_new_tokens = 50;
  const auto running =
      scheduler.submit({1}, sampling, nullptr, [&](std::uint64_t, std::int32_t) { ++tokens; });
  engine.steps.wait(0);
  const auto waiting = scheduler.submit({2}, sampling);
  CHECK_FALSE(scheduler.poll(running, milliseconds(0)).has_value());
  CHECK_FALSE(scheduler.poll(waiting, milliseconds(5)).has_value());
  CHECK(scheduler.cancel(running));  // inside its first step
  CHECK(scheduler.cancel(waiting));
  CHECK_FALSE(scheduler.cancel(waiting));
  engine.gate = true;
  engine.gate.notify_all();
  CHECK(scheduler.poll(running, kPatience)->finish_reason == "cancelled");
  CHECK(scheduler.poll(waiting, kPatience)->finish_reason == "cancelled");
  CHECK(tokens == 0);
  CHECK_FALSE(scheduler.cancel(running));
  CHECK_FALSE(scheduler.cancel(12345));
  CHECK_THROWS_AS((void)scheduler.poll(12345, milliseconds(0)), Error);
  CHECK(scheduler.stats().cancelled_requests == 2);
}

TEST_CASE("a failing step fails its requests and no others") {
  CountingEngine engine;
  QwenBatchScheduler scheduler(engine, 1);
  BatchSamplingParams sampling;
  sampling.max_new_tokens = 5;
  const auto poisoned = scheduler.submit({498}, sampling);
  const auto next = scheduler.submit({1}, sampling);
  const auto failed = scheduler.poll(poisoned, kPatience);
  CHECK(failed->finish_reason == "error");
  CHECK(failed->error == "poison");
  CHECK(failed->generated_tokens == std::vector<std::int32_t>{499, 500});
  CHECK(scheduler.poll(next, kPatience)->finish_reason == "length");
  CHECK(scheduler.stats().failed_requests == 1);
}

TEST_CASE("stop ends what is open, may come from a callback, and is final") {
  CountingEngine engine;
  QwenBatchScheduler scheduler(engine, 1);
  BatchSamplingParams sampling;
  sampling.max_new_tokens = 1;
  sampling.stop_token_ids = {2};
  std::optional<SchedulerResult> inside;
  const auto first =
      scheduler.submit({1}, sampling, [&](const SchedulerResult&) { scheduler.stop(); });
  CHECK(scheduler.poll(first, kPatience)->finish_reason == "stop");
  scheduler.stop();
  CHECK_FALSE(scheduler.is_running());
  CHECK_THROWS_AS(scheduler.submit({1}, sampling), Error);
  scheduler.stop();
}

TEST_CASE("bad requests are refused at once") {
  const test::TempFile file(test::small_model());
  QwenEngine engine(file.path(), small_options(6), 0, 128);
  CHECK_THROWS_AS(QwenBatchScheduler(engine, 5), Error);
  CHECK_THROWS_AS(QwenBatchScheduler(engine, 0), Error);
  QwenBatchScheduler scheduler(engine, 2);
  const auto refused = [&](const std::vector<std::int32_t>& prompt, auto change, const char* part) {
    BatchSamplingParams sampling;
    change(sampling);
    std::string message;
    try {
      scheduler.submit(prompt, sampling);
    } catch (const Error& error) {
      message = error.what();
    }
    CAPTURE(message);
    CHECK(message.find(part) != std::string::npos);
  };
  const auto same = [](BatchSamplingParams&) {};
  refused({}, same, "prompt_tokens: got none");
  refused({3, 75}, same, "prompt_tokens[1]: got 75");
  refused(ids(128), same, "the context holds 128");
  refused(ids(100), same, "which need 7 KV blocks; the pool has 6");
  refused({1}, [](auto& s) { s.max_new_tokens = 0; }, "max_new_tokens: got 0");
  refused({1}, [](auto& s) { s.temperature = -1.0F; }, "temperature");
  refused({1}, [](auto& s) { s.top_p = 0.0F; }, "top_p");
  CHECK_THROWS_AS(scheduler.set_prefill_token_budget(25), Error);
  scheduler.set_prefill_token_budget(8);
  CHECK(scheduler.prefill_token_budget() == 8);
  // The pool's end is a request's end, not an error.
  BatchSamplingParams all;
  all.max_new_tokens = 120;
  all.ignore_eos = true;
  const auto result = scheduler.poll(scheduler.submit(ids(5), all), kPatience);
  CHECK(result->finish_reason == "length");
  CHECK(result->generated_tokens.size() == 6 * 16 - 5 + 1);
}

TEST_CASE("stress: threads submit, poll, cancel and look, and every request ends once") {
  const test::TempFile file(test::small_model());
  QwenEngine engine(file.path(), small_options(9));
  std::atomic<std::size_t> called{0};
  std::atomic<std::size_t> tokens{0};
  std::atomic<std::size_t> counted{0};
  constexpr std::size_t kThreads = 4;
  constexpr std::size_t kEach = 12;
  {
    QwenBatchScheduler scheduler(engine, 3);
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (std::size_t i = 0; i < kEach; ++i) {
          const auto id = scheduler.submit(
              prompt_of(i + t), sampling_of(i, 6),
              [&](const SchedulerResult& result) {
                counted += result.generated_tokens.size();
                ++called;
              },
              [&](std::uint64_t, std::int32_t) { ++tokens; });
          if (i % 4 == 1) {
            scheduler.cancel(id);
          }
          (void)scheduler.stats();
          if (i % 3 == 0) {
            const auto result = scheduler.poll(id, kPatience);
            if (!result || !result->error.empty()) {
              std::abort();  // doctest's checks are for one thread
            }
          }
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    const auto last = scheduler.submit(ids(3), sampling_of(0, 2));
    CHECK(scheduler.poll(last, kPatience)->finish_reason == "length");
  }
  CHECK(called == kThreads * kEach);
  CHECK(tokens == counted);
  check_all_free(engine);
}

}  // namespace
}  // namespace pocket
