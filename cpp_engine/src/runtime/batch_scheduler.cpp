#include "pocket/runtime/batch_scheduler.h"

#include <algorithm>
#include <utility>

#include "batch_request.h"
#include "pocket/base/error.h"
#include "pocket/sampling/sampler.h"

namespace pocket {
namespace {

[[noreturn]] void invalid(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

}  // namespace

QwenBatchScheduler::QwenBatchScheduler(InferenceEngine& engine, std::size_t max_batch_size)
    : engine_(&engine), eos_(engine.eos_token_ids()), prefill_budget_(engine.max_prefill_tokens()) {
  const std::size_t slots = engine.caps().max_slots;
  if (max_batch_size == 0 || max_batch_size > slots) {
    invalid("max_batch_size: got " + std::to_string(max_batch_size) + "; must be from 1 to " +
            std::to_string(slots) + ", the engine's slots");
  }
  max_batch_size_ = max_batch_size;
  flush();  // the first numbers of the pool
  thread_ = std::thread([this] { loop(); });
}

QwenBatchScheduler::~QwenBatchScheduler() {
  stop();
}

std::uint64_t QwenBatchScheduler::submit(std::vector<std::int32_t> prompt,
                                         const BatchSamplingParams& sampling, Callback callback,
                                         TokenCallback on_token) {
  validate_sampling(
      {.temperature = sampling.temperature, .top_k = sampling.top_k, .top_p = sampling.top_p});
  if (sampling.max_new_tokens == 0) {
    invalid("max_new_tokens: got 0; must be at least 1");
  }
  if (prompt.empty()) {
    invalid("prompt_tokens: got none; give at least one");
  }
  const std::size_t context = engine_->max_context();
  if (prompt.size() >= context) {
    invalid("prompt_tokens: got " + std::to_string(prompt.size()) + "; the context holds " +
            std::to_string(context) + ", so a prompt may have at most " +
            std::to_string(context - 1));
  }
  if (engine_->kv_blocks_for_tokens(prompt.size()) > engine_->kv_total_blocks()) {
    invalid("prompt_tokens: got " + std::to_string(prompt.size()) + ", which need " +
            std::to_string(engine_->kv_blocks_for_tokens(prompt.size())) +
            " KV blocks; the pool has " + std::to_string(engine_->kv_total_blocks()));
  }
  const std::size_t vocab = engine_->vocab_size();
  for (std::size_t i = 0; i < prompt.size(); ++i) {
    if (prompt[i] < 0 || (vocab != 0 && static_cast<std::size_t>(prompt[i]) >= vocab)) {
      invalid("prompt_tokens[" + std::to_string(i) + "]: got " + std::to_string(prompt[i]) +
              "; must be a token id" +
              (vocab == 0 ? "" : " from 0 to " + std::to_string(vocab - 1)));
    }
  }

  auto request = std::make_unique<Request>();
  request->prompt = prompt.size();
  request->max_new = std::min(sampling.max_new_tokens, context - prompt.size());
  request->state.sampling = sampling;
  request->state.prompt_tokens = std::move(prompt);
  request->stops = sampling.stop_token_ids;
  if (!sampling.ignore_eos) {
    request->stops.insert(request->stops.end(), eos_.begin(), eos_.end());
  }
  request->callback = std::move(callback);
  request->on_token = std::move(on_token);
  request->result.prompt_tokens = request->prompt;

  const std::lock_guard lock(mutex_);
  if (stopping_) {
    invalid("scheduler: it has been stopped");
  }
  if (open_.size() >= kMaxOpen) {
    throw Error(ErrorCode::kResourceExhausted,
                "scheduler: " + std::to_string(kMaxOpen) + " requests are open; try again later");
  }
  const std::uint64_t id = next_id_++;
  request->state.request_id = request->result.request_id = id;
  open_.emplace(id, false);
  inbox_.push_back(std::move(request));
  ++stats_.waiting_requests;
  work_.notify_one();
  return id;
}

bool QwenBatchScheduler::cancel(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  const auto found = open_.find(id);
  if (found == open_.end() || found->second) {
    return false;
  }
  found->second = cancels_ = true;
  work_.notify_one();
  return true;
}

std::optional<SchedulerResult> QwenBatchScheduler::poll(
    std::uint64_t id, std::optional<std::chrono::milliseconds> timeout) {
  std::unique_lock lock(mutex_);
  const auto ended = [&] { return !open_.contains(id); };
  if (!ended() && on_own_thread()) {
    return std::nullopt;  // a callback that waited here would wait for itself
  }
  if (!timeout) {
    done_.wait(lock, ended);
  } else if (!done_.wait_for(lock, *timeout, ended)) {
    return std::nullopt;
  }
  const auto found = results_.find(id);
  if (found == results_.end()) {
    invalid("request_id: " + std::to_string(id) +
            (id > 0 && id < next_id_ ? " is forgotten; the newest " +
                                           std::to_string(kMaxKeptResults) + " results are kept"
                                     : " was never submitted"));
  }
  return found->second;
}

SchedulerStats QwenBatchScheduler::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

bool QwenBatchScheduler::is_running() const {
  const std::lock_guard lock(mutex_);
  return !ended_ && !stopping_;
}

bool QwenBatchScheduler::in_callback() const {
  const std::lock_guard lock(mutex_);
  return on_own_thread();
}

void QwenBatchScheduler::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    work_.notify_one();
    if (on_own_thread()) {
      return;
    }
  }
  const std::lock_guard joining(join_mutex_);
  if (thread_.joinable()) {
    thread_.join();
  }
}

void QwenBatchScheduler::set_prefill_token_budget(std::size_t tokens) {
  const std::size_t most = engine_->max_prefill_tokens();
  if (tokens == 0 || tokens > most) {
    invalid("prefill_token_budget: got " + std::to_string(tokens) + "; must be from 1 to " +
            std::to_string(most));
  }
  const std::lock_guard lock(mutex_);
  prefill_budget_ = tokens;
}

std::size_t QwenBatchScheduler::prefill_token_budget() const {
  const std::lock_guard lock(mutex_);
  return prefill_budget_;
}

bool QwenBatchScheduler::on_own_thread() const {
  return std::this_thread::get_id() == own_thread_;
}

}  // namespace pocket
