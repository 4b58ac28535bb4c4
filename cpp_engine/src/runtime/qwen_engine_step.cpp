// What QwenEngine computes: single slots and batched steps, as packed steps of the Engine.

#include <algorithm>
#include <chrono>

#include "pocket/runtime/qwen_engine.h"
#include "slot_errors.h"

namespace pocket {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

BatchPrefillResult QwenEngine::batch_prefill(std::span<BatchedRequest* const> requests,
                                             std::size_t token_budget) {
  return batch_step(requests, {}, token_budget).prefill;
}

BatchDecodeResult QwenEngine::batch_decode_step(std::span<BatchedRequest* const> requests) {
  return batch_step({}, requests, 0).decode;
}

BatchStepResult QwenEngine::batch_step(std::span<BatchedRequest* const> prefills,
                                       std::span<BatchedRequest* const> decodes,
                                       std::size_t token_budget) {
  const Clock::time_point start = Clock::now();
  const std::lock_guard lock(mutex_);
  std::vector<Work> work;
  for (const BatchedRequest* const request : decodes) {
    work.push_back(decode_work(*request));
  }
  BatchStepResult out;
  std::size_t budget = std::min(token_budget, options_.prefill_chunk_tokens);
  for (const BatchedRequest* const request : prefills) {
    const std::size_t left =
        request->prompt_tokens.size() - std::min(request->seq_len, request->prompt_tokens.size());
    const std::size_t wanted = request->chunk == 0 ? left : std::min(request->chunk, left);
    const std::size_t chunk = std::min(wanted, budget);
    budget -= chunk;
    out.prefill.total_tokens += chunk;
    out.prefill.incomplete.push_back(chunk < left);
    if (chunk > 0) {
      work.push_back(prefill_work(*request, chunk));
    }
  }
  run(work);

  std::size_t index = 0;
  std::size_t row = 0;
  for (BatchedRequest* const request : decodes) {
    request->seq_len = slot_at(work[index++].slot).tokens.size();
    out.decode.next_tokens.push_back(sampled_[row++].token);
  }
  for (BatchedRequest* const request : prefills) {
    ForwardResult result{.layers = model().layers, .dim = model().hidden};
    if (index < work.size() && work[index].slot == request->slot_id) {
      Slot& slot = slot_at(request->slot_id);
      result.token = slot.tokens.back();
      request->seq_len = slot.tokens.size();
      if (work[index++].sample) {
        result.top_token = sampled_[row++].token;
      }
    }
    result.position = request->seq_len;
    out.prefill.results.push_back(std::move(result));
  }
  out.prefill.seconds = out.decode.seconds = seconds_since(start);
  return out;
}

StepInput QwenEngine::pack(std::span<const Work> work) {
  for (auto* const array : {&token_ids_, &positions_, &offsets_, &rows_, &logits_rows_}) {
    array->clear();
  }
  sampling_.clear();
  offsets_.push_back(0);
  for (const Work& item : work) {
    const std::size_t start = slot_at(item.slot).tokens.size();
    for (std::size_t i = 0; i < item.tokens.size(); ++i) {
      token_ids_.push_back(item.tokens[i]);
      positions_.push_back(static_cast<std::int32_t>(start + i));
    }
    offsets_.push_back(static_cast<std::int32_t>(token_ids_.size()));
    rows_.push_back(item.slot);
    if (item.sample) {
      logits_rows_.push_back(offsets_.back() - 1);
      sampling_.push_back(item.sampling);
    }
  }
  return {.token_ids = token_ids_,
          .positions = positions_,
          .sequence_offsets = offsets_,
          .block_tables = tables_,
          .table_stride = table_stride_,
          .table_rows = rows_,
          .logits_rows = logits_rows_,
          .sampling = sampling_,
          .sample_vocab = vocab_};
}

void QwenEngine::commit(std::span<const Work> work) {
  for (const Work& item : work) {
    Slot& slot = slot_at(item.slot);
    slot.tokens.insert(slot.tokens.end(), item.tokens.begin(), item.tokens.end());
    // Only fully written blocks can be found.
    for (; (slot.published + 1) * kKvBlockTokens <= slot.tokens.size(); ++slot.published) {
      slot.node = cache_->publish(
          slot.blocks[slot.published], slot.node,
          std::span(slot.tokens).subspan(slot.published * kKvBlockTokens, kKvBlockTokens));
    }
  }
}

void QwenEngine::run(std::span<const Work> work) {
  if (work.empty()) {
    return;
  }
  const StepInput input = pack(work);
  sampled_.resize(input.logits_rows.size());
  engine_->step(input, {.sampled = sampled_, .logits = {}});
  commit(work);
}

ForwardResult QwenEngine::forward(std::int32_t id, std::span<const std::int32_t> tokens,
                                  bool last) {
  Slot& slot = slot_at(id);
  const Work work[] = {{.slot = id, .tokens = tokens, .sample = last, .sampling = {}}};
  StepInput input = pack(work);
  input.sampling = {};
  ForwardResult result{.token = tokens.back(), .layers = model().layers, .dim = model().hidden};
  result.logits.resize(last ? model().vocab : 0);
  engine_->step(input, {.sampled = {}, .logits = result.logits});
  commit(work);
  result.position = slot.tokens.size();
  if (last) {
    const std::span<const float> usable = std::span(result.logits).first(vocab_);
    result.top_token = sampler_
                           ->sample(usable, {.temperature = options_.temperature,
                                             .top_k = options_.top_k,
                                             .top_p = options_.top_p,
                                             .seed = options_.sampling_seed,
                                             .token_index = slot.drawn++,
                                             .logprob = false})
                           .token;
    if (result.top_token >= 0) {
      result.top_logit = usable[static_cast<std::size_t>(result.top_token)];
    }
    for (const float logit : result.logits) {
      result.checksum += logit;
    }
  }
  return result;
}

QwenEngine::Work QwenEngine::decode_work(const BatchedRequest& request) {
  const Slot& slot = slot_at(request.slot_id);
  if (slot.tokens.empty()) {
    misuse("request " + std::to_string(request.request_id) + ": " + slot_name(request.slot_id) +
           " holds no tokens; prefill it first");
  }
  const std::span<const std::int32_t> token(&request.last_token, 1);
  check_tokens(token);
  grow_or_throw(request.slot_id, slot.tokens.size() + 1);
  return {.slot = request.slot_id,
          .tokens = token,
          .sample = true,
          .sampling = {.temperature = request.sampling.temperature,
                       .top_k = request.sampling.top_k,
                       .top_p = request.sampling.top_p,
                       .seed = request.sampling.seed,
                       .token_index = request.generated_tokens.size(),
                       .logprob = false}};
}

QwenEngine::Work QwenEngine::prefill_work(const BatchedRequest& request, std::size_t chunk) {
  const Slot& slot = slot_at(request.slot_id);
  if (slot.tokens.size() != request.seq_len) {
    misuse("request " + std::to_string(request.request_id) + ": seq_len is " +
           std::to_string(request.seq_len) + ", but " + slot_name(request.slot_id) + " holds " +
           std::to_string(slot.tokens.size()) + " tokens");
  }
  const auto tokens = std::span(request.prompt_tokens).subspan(request.seq_len, chunk);
  check_tokens(tokens);
  grow_or_throw(request.slot_id, request.seq_len + chunk);
  return {.slot = request.slot_id,
          .tokens = tokens,
          .sample = request.seq_len + chunk == request.prompt_tokens.size(),
          .sampling = {.temperature = request.sampling.temperature,
                       .top_k = request.sampling.top_k,
                       .top_p = request.sampling.top_p,
                       .seed = request.sampling.seed,
                       .token_index = request.generated_tokens.size(),
                       .logprob = false}};
}

}  // namespace pocket
