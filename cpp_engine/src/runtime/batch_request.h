#pragma once

#include "pocket/runtime/batch_scheduler.h"

namespace pocket {

struct QwenBatchScheduler::Request {
  BatchedRequest state;
  std::size_t prompt = 0;   // tokens of the prompt itself
  std::size_t max_new = 0;  // output tokens that the request may have
  std::vector<std::int32_t> stops;
  Callback callback;
  TokenCallback on_token;
  SchedulerResult result;
  std::chrono::steady_clock::time_point arrived = std::chrono::steady_clock::now();
  std::optional<std::chrono::steady_clock::time_point> started{}, first_token{};

  [[nodiscard]] bool decoding() const {
    return state.last_token >= 0 && state.seq_len >= state.prompt_tokens.size();
  }
};

// What a callback is to be told, once the step's accounting is done.
struct QwenBatchScheduler::Event {
  Request* request;
  std::int32_t token;  // < 0: the request has finished
};

}  // namespace pocket
