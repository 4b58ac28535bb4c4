#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "pocket/runtime/inference_engine.h"

namespace pocket {

struct BatchSamplingParams : RequestSampling {
  std::size_t max_new_tokens = 128;  ///< fewer where the context ends first
  std::vector<std::int32_t> stop_token_ids;
  bool ignore_eos = false;
};

/// How a request ended. `finish_reason` is stop, length, cancelled or error (then `error` says
/// why). Seconds; those of a phase that was not reached are 0.
struct SchedulerResult {
  std::uint64_t request_id = 0;
  std::vector<std::int32_t> generated_tokens;  ///< with the token that ended it
  std::string finish_reason;
  std::size_t prompt_tokens = 0;
  std::size_t cached_tokens = 0;  ///< of the prompt, from the prefix cache
  std::size_t preemptions = 0;
  double total_seconds = 0.0;
  double ttft_seconds = 0.0;  ///< from submission to the first token
  double queue_seconds = 0.0;
  double prefill_seconds = 0.0;  ///< from the slot to the first token
  double decode_seconds = 0.0;   ///< from the first token to the last
  std::string error;
};

struct SchedulerStats {
  std::size_t waiting_requests = 0, running_requests = 0;
  std::uint64_t completed_requests = 0, cancelled_requests = 0, failed_requests = 0;
  std::uint64_t preemptions = 0, callback_errors = 0;
  std::size_t free_slots = 0;
  std::size_t reserved_blocks = 0;  ///< held by sequences
  std::size_t total_blocks = 0, free_blocks = 0, cache_pinned_blocks = 0;
};

/// Continuous batching on a thread of its own: every step computes one token of each running
/// request and a chunk of the prompts that are under way, together.
///
/// First come, first served. A request takes a slot when it starts and KV blocks as it grows; both
/// go back when it ends. Where blocks run out, the newest request gives its up and later computes
/// them again (its output does not change). A prompt that is followed by others gets half of what
/// is left of a step, so that short prompts are not kept waiting by a long one. Tokens do not
/// depend on what shares the steps.
///
/// Callbacks run on the scheduler's thread between two steps, with no lock held; if one throws, it
/// is not called again for that request, and the request goes on. They may call everything here;
/// `stop` from a callback does not wait, `poll` from one does not either.
///
/// Thread contract: any thread; destroyed by any but its own. The engine must outlive the
/// scheduler, and nobody else may use the slots that it allocates. Errors:
/// `Error(kInvalidArgument)`, `Error(kResourceExhausted)`.
class QwenBatchScheduler {
 public:
  using Callback = std::function<void(const SchedulerResult&)>;
  using TokenCallback = std::function<void(std::uint64_t request_id, std::int32_t token)>;

  static constexpr std::size_t kMaxOpen = 65536;        ///< requests that are not finished
  static constexpr std::size_t kMaxKeptResults = 4096;  ///< finished ones that can be polled

  /// `max_batch_size`: requests that run at once, at most the engine's slots.
  QwenBatchScheduler(InferenceEngine& engine, std::size_t max_batch_size);
  ~QwenBatchScheduler();  ///< as `stop`
  QwenBatchScheduler(const QwenBatchScheduler&) = delete;
  QwenBatchScheduler& operator=(const QwenBatchScheduler&) = delete;

  std::uint64_t submit(std::vector<std::int32_t> prompt, const BatchSamplingParams& sampling,
                       Callback callback = nullptr, TokenCallback on_token = nullptr);
  /// Ends a request in any state; false if it has ended or never was. No token of the step that is
  /// under way is reported.
  bool cancel(std::uint64_t id);
  /// The result, waiting up to `timeout` (nullopt: until there is one; 0: not at all). Polling does
  /// not consume; the oldest results are forgotten.
  [[nodiscard]] std::optional<SchedulerResult> poll(
      std::uint64_t id, std::optional<std::chrono::milliseconds> timeout);
  [[nodiscard]] SchedulerStats stats() const;
  [[nodiscard]] bool is_running() const;
  /// Whether the caller is one of its callbacks.
  [[nodiscard]] bool in_callback() const;
  /// Cancels what is open and ends the thread. Idempotent.
  void stop();

  [[nodiscard]] Capabilities engine_caps() const { return engine_->caps(); }
  [[nodiscard]] std::size_t max_batch_size() const noexcept { return max_batch_size_; }
  /// Prompt tokens per step, over all requests; by default what the engine can do.
  void set_prefill_token_budget(std::size_t tokens);
  [[nodiscard]] std::size_t prefill_token_budget() const;

 private:
  struct Request;
  struct Event;
  using RequestPtr = std::unique_ptr<Request>;
  struct Step {
    std::vector<BatchedRequest*> prefills, decodes;
    std::vector<Request*> prefill_owners, decode_owners;
    std::size_t prompt_tokens = 0;
  };

  void loop();
  bool wait_for_work();  // false: stop; fills cancelled_
  // On the scheduler's thread, without the lock.
  void apply_cancels();
  bool step();  // false: nothing could be done
  Step plan();
  void plan_running(Step& step, std::size_t& budget);
  void admit(Step& step, std::size_t& budget);
  void add_prefill(Step& step, Request& request, std::size_t chunk);
  void preempt(Request& request);
  void execute(Step& step);
  void take_token(Request& request, std::int32_t token);
  void finish(Request& request, const char* reason, std::string error = {});
  void finish_all(const char* reason, const std::string& error = {});
  void flush();
  void count_requests();  // with the lock
  void release(Request& request);
  [[nodiscard]] bool is_cancelled(const Request& request) const;
  [[nodiscard]] bool on_own_thread() const;  // with the lock

  InferenceEngine* engine_;
  std::size_t max_batch_size_;
  std::vector<std::int32_t> eos_;

  // The scheduler thread's own.
  std::deque<RequestPtr> waiting_;
  std::vector<RequestPtr> running_;  // in order of arrival
  std::vector<RequestPtr> finished_;
  std::vector<Event> events_;
  std::unordered_set<std::uint64_t> cancelled_;
  bool blocked_ = false;  // nothing runs and nothing can start: other users hold the slots

  mutable std::mutex mutex_;
  std::condition_variable work_, done_;
  std::deque<RequestPtr> inbox_;
  std::unordered_map<std::uint64_t, bool> open_;  // id -> cancelled
  std::deque<std::uint64_t> result_order_;
  std::unordered_map<std::uint64_t, SchedulerResult> results_;
  SchedulerStats stats_;
  std::uint64_t next_id_ = 1;
  std::size_t prefill_budget_;
  bool cancels_ = false;  // some entry of open_ is cancelled and not yet applied
  bool stopping_ = false;
  bool ended_ = false;
  std::thread::id own_thread_;
  std::mutex join_mutex_;
  std::thread thread_;
};

}  // namespace pocket
