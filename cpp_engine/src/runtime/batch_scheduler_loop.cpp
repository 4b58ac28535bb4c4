// The scheduler's thread: plan a step, run it, account for it, call back.

#include <algorithm>
#include <utility>

#include "batch_request.h"
#include "pocket/sampling/sampler.h"

namespace pocket {
namespace {

using Clock = std::chrono::steady_clock;

// How often to look whether another user of the engine has freed a slot.
constexpr std::chrono::milliseconds kBlockedWait{5};

double seconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace

void QwenBatchScheduler::loop() {
  {
    const std::lock_guard lock(mutex_);
    own_thread_ = std::this_thread::get_id();
  }
  while (wait_for_work()) {
    apply_cancels();
    try {
      blocked_ = !step();
    } catch (const std::exception& failure) {  // the engine refuses what it has to offer
      finish_all("error", failure.what());
    }
    flush();
  }
  finish_all("cancelled");
  flush();
  const std::lock_guard lock(mutex_);
  ended_ = true;
}

bool QwenBatchScheduler::wait_for_work() {
  std::unique_lock lock(mutex_);
  const auto news = [&] { return stopping_ || cancels_ || !inbox_.empty(); };
  if (blocked_) {
    work_.wait_for(lock, kBlockedWait, news);
  } else if (running_.empty() && waiting_.empty()) {
    work_.wait(lock, news);
  }
  std::move(inbox_.begin(), inbox_.end(), std::back_inserter(waiting_));
  inbox_.clear();
  if (std::exchange(cancels_, false)) {
    for (const auto& [id, is_cancelled] : open_) {
      if (is_cancelled) {
        cancelled_.insert(id);
      }
    }
  }
  return !stopping_;
}

void QwenBatchScheduler::apply_cancels() {
  if (cancelled_.empty()) {
    return;
  }
  const auto apply = [&](const auto& requests) {
    for (const RequestPtr& request : requests) {
      if (cancelled_.contains(request->state.request_id)) {
        finish(*request, "cancelled");
      }
    }
  };
  apply(waiting_);
  apply(running_);
  cancelled_.clear();
  flush();
}

bool QwenBatchScheduler::step() {
  Step step = plan();
  if (!step.prefills.empty() || !step.decodes.empty()) {
    {
      const std::lock_guard lock(mutex_);  // for who looks while the step runs
      count_requests();
    }
    execute(step);
    return true;
  }
  return waiting_.empty() || !events_.empty();
}

QwenBatchScheduler::Step QwenBatchScheduler::plan() {
  Step step;
  std::size_t budget = prefill_token_budget();
  const std::uint64_t preempted_before = stats_.preemptions;  // written by this thread only
  plan_running(step, budget);
  if (stats_.preemptions == preempted_before) {
    admit(step, budget);
  }
  return step;
}

void QwenBatchScheduler::plan_running(Step& step, std::size_t& budget) {
  for (std::size_t i = 0; i < running_.size(); ++i) {
    Request& request = *running_[i];
    const std::size_t left = request.state.prompt_tokens.size() -
                             std::min(request.state.seq_len, request.state.prompt_tokens.size());
    std::size_t count = 1;
    if (!request.decoding()) {
      const bool others = i + 1 < running_.size() || !waiting_.empty();
      count = std::min(left, others ? (budget + 1) / 2 : budget);
      if (count == 0) {
        continue;
      }
    }
    while (!engine_->reserve(request.state.slot_id, request.state.seq_len + count)) {
      Request& newest = *running_.back();
      if (&newest == &request) {
        break;
      }
      preempt(newest);
    }
    if (&request == running_.back().get() &&
        !engine_->reserve(request.state.slot_id, request.state.seq_len + count)) {
      if (i > 0) {
        preempt(request);
      } else {  // the whole pool is its own
        finish(request, "length");
      }
      break;
    }
    if (request.decoding()) {
      step.decodes.push_back(&request.state);
      step.decode_owners.push_back(&request);
    } else {
      add_prefill(step, request, count);
      budget -= count;
    }
  }
}

void QwenBatchScheduler::admit(Step& step, std::size_t& budget) {
  while (budget > 0 && running_.size() < max_batch_size_ && !waiting_.empty()) {
    Request& request = *waiting_.front();
    const std::optional<std::int32_t> slot = engine_->allocate_slot();
    if (!slot) {
      break;  // somebody else uses the engine's slots
    }
    request.state.slot_id = *slot;
    const std::size_t cached = engine_->attach_prefix(*slot, request.state.prompt_tokens);
    const std::size_t left = request.state.prompt_tokens.size() - cached;
    const std::size_t count = std::min(left, waiting_.size() > 1 ? (budget + 1) / 2 : budget);
    if (!engine_->reserve(*slot, cached + count)) {
      release(request);
      if (!running_.empty()) {
        break;
      }
      finish(request, "error", "the KV pool has no room for it: other slots hold the blocks");
      finished_.push_back(std::move(waiting_.front()));
      waiting_.pop_front();
      continue;
    }
    request.state.seq_len = cached;
    if (!request.started) {
      request.started = Clock::now();
      request.state.cached_prefix_len = request.result.cached_tokens = cached;
    }
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
    add_prefill(step, request, count);
    budget -= count;
  }
}

void QwenBatchScheduler::add_prefill(Step& step, Request& request, std::size_t chunk) {
  request.state.chunk = chunk;
  step.prefills.push_back(&request.state);
  step.prefill_owners.push_back(&request);
  step.prompt_tokens += chunk;
}

void QwenBatchScheduler::preempt(Request& request) {
  release(request);
  // An equivalent request, whose prompt includes the output so far.
  request.state.prompt_tokens.resize(request.prompt);
  request.state.prompt_tokens.insert(request.state.prompt_tokens.end(),
                                     request.state.generated_tokens.begin(),
                                     request.state.generated_tokens.end());
  request.state.last_token = -1;
  ++request.result.preemptions;
  const auto at =
      std::ranges::find_if(running_, [&](const auto& r) { return r.get() == &request; });
  waiting_.push_front(std::move(*at));
  running_.erase(at);
  const std::lock_guard lock(mutex_);
  ++stats_.preemptions;
}

void QwenBatchScheduler::execute(Step& step) {
  BatchStepResult out;
  std::string error;
  try {
    out = engine_->batch_step(step.prefills, step.decodes, step.prompt_tokens);
    if (out.prefill.results.size() != step.prefills.size() ||
        out.prefill.incomplete.size() != step.prefills.size() ||
        out.decode.next_tokens.size() != step.decodes.size()) {
      error = "the engine answered for another number of requests than it was given";
    }
  } catch (const std::exception& failure) {
    error = failure.what();
  }
  if (!error.empty()) {
    for (Request* const request : step.prefill_owners) {
      finish(*request, "error", error);
    }
    for (Request* const request : step.decode_owners) {
      finish(*request, "error", error);
    }
    return;
  }
  for (std::size_t i = 0; i < step.decodes.size(); ++i) {
    step.decodes[i]->seq_len =
        step.decode_owners[i]->prompt + step.decodes[i]->generated_tokens.size();
    take_token(*step.decode_owners[i], out.decode.next_tokens[i]);
  }
  for (std::size_t i = 0; i < step.prefills.size(); ++i) {
    BatchedRequest& state = *step.prefills[i];
    if (out.prefill.incomplete[i]) {
      state.seq_len = std::min(out.prefill.results[i].position, state.prompt_tokens.size() - 1);
    } else {
      state.seq_len = state.prompt_tokens.size();
      take_token(*step.prefill_owners[i], out.prefill.results[i].top_token);
    }
  }
}

void QwenBatchScheduler::take_token(Request& request, std::int32_t token) {
  if (is_cancelled(request)) {
    return;  // ended before the next step
  }
  if (token < 0) {
    finish(request, "error",
           token == kNothingAllowed ? "no token may come next"
                                    : "the model's logits hold no usable value (NaN or infinity)");
    return;
  }
  if (!request.first_token) {
    request.first_token = Clock::now();
  }
  request.state.last_token = token;
  request.state.generated_tokens.push_back(token);
  if (request.on_token) {
    events_.push_back({&request, token});
  }
  if (std::ranges::find(request.stops, token) != request.stops.end()) {
    finish(request, "stop");
  } else if (request.state.generated_tokens.size() >= request.max_new) {
    finish(request, "length");
  }
}

bool QwenBatchScheduler::is_cancelled(const Request& request) const {
  const std::lock_guard lock(mutex_);
  const auto found = open_.find(request.state.request_id);
  return found != open_.end() && found->second;
}

// Its slot is free for the next step; the request itself lives until its callbacks have run.
void QwenBatchScheduler::finish(Request& request, const char* reason, std::string error) {
  if (std::exchange(request.state.finished, true)) {
    return;
  }
  release(request);
  const Clock::time_point now = Clock::now();
  SchedulerResult& result = request.result;
  result.generated_tokens = request.state.generated_tokens;
  result.finish_reason = reason;
  result.error = std::move(error);
  result.total_seconds = seconds(request.arrived, now);
  result.queue_seconds = seconds(request.arrived, request.started.value_or(now));
  if (request.first_token) {
    result.ttft_seconds = seconds(request.arrived, *request.first_token);
    result.prefill_seconds = seconds(*request.started, *request.first_token);
    result.decode_seconds = seconds(*request.first_token, now);
  }
  events_.push_back({&request, -1});
}

void QwenBatchScheduler::finish_all(const char* reason, const std::string& error) {
  for (const RequestPtr& request : running_) {
    finish(*request, reason, error);
  }
  for (const RequestPtr& request : waiting_) {
    finish(*request, reason, error);
  }
}

void QwenBatchScheduler::release(Request& request) {
  if (request.state.slot_id >= 0) {
    try {
      engine_->free_slot(request.state.slot_id);
    } catch (const std::exception&) {
      // A subclass's own failure: the slot is lost to us, the request's fate is decided already.
    }
  }
  request.state.slot_id = -1;
  request.state.seq_len = 0;
}

void QwenBatchScheduler::count_requests() {
  stats_.waiting_requests = waiting_.size() + inbox_.size();
  stats_.running_requests = running_.size();
  stats_.free_slots = max_batch_size_ - std::min(max_batch_size_, running_.size());
}

// Publishes results and numbers, then calls back.
void QwenBatchScheduler::flush() {
  const auto take = [this](auto& requests) {
    const auto done =
        std::stable_partition(requests.begin(), requests.end(),
                              [](const RequestPtr& request) { return !request->state.finished; });
    std::move(done, requests.end(), std::back_inserter(finished_));
    requests.erase(done, requests.end());
  };
  take(running_);
  take(waiting_);
  std::size_t free = 0;
  std::size_t pinned = 0;
  std::size_t total = 0;
  try {
    free = engine_->kv_free_blocks();
    pinned = engine_->kv_cache_pinned_blocks();
    total = engine_->kv_total_blocks();
  } catch (const std::exception&) {
    // Numbers for `stats` only: a subclass without them shows zeros.
  }
  {
    const std::lock_guard lock(mutex_);
    for (const RequestPtr& request : finished_) {
      const std::string& reason = request->result.finish_reason;
      ++(reason == "cancelled" ? stats_.cancelled_requests
         : reason == "error"   ? stats_.failed_requests
                               : stats_.completed_requests);
      results_.insert_or_assign(request->state.request_id, request->result);
      result_order_.push_back(request->state.request_id);
      open_.erase(request->state.request_id);
    }
    while (result_order_.size() > kMaxKeptResults) {
      results_.erase(result_order_.front());
      result_order_.pop_front();
    }
    count_requests();
    stats_.total_blocks = total;
    stats_.free_blocks = free;
    stats_.cache_pinned_blocks = pinned;
    stats_.reserved_blocks = total - std::min(total, free + pinned);
    done_.notify_all();
  }
  std::uint64_t failures = 0;
  for (const Event& event : std::exchange(events_, {})) {
    Request& request = *event.request;
    try {
      if (event.token < 0 && request.callback) {
        request.callback(request.result);
      } else if (event.token >= 0 && request.on_token) {
        request.on_token(request.state.request_id, event.token);
      }
    } catch (...) {  // whatever it is, it is the caller's, and must not end the scheduler
      ++failures;
      request.on_token = nullptr;
    }
  }
  finished_.clear();
  if (failures > 0) {
    const std::lock_guard lock(mutex_);
    stats_.callback_errors += failures;
  }
}

}  // namespace pocket
