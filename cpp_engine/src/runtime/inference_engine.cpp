#include "pocket/runtime/inference_engine.h"

#include "pocket/base/error.h"

namespace pocket {

std::size_t InferenceEngine::kv_evict_cache_blocks(std::size_t /*count*/) {
  return 0;
}

std::size_t InferenceEngine::kv_blocks_for_tokens(std::size_t /*tokens*/) const {
  return 0;
}

std::vector<std::int32_t> InferenceEngine::allocate_batch_slots(std::size_t count) {
  std::vector<std::int32_t> slots;
  while (slots.size() < count) {
    const std::optional<std::int32_t> slot = allocate_slot();
    if (!slot) {
      for (const std::int32_t taken : slots) {
        free_slot(taken);
      }
      throw Error(ErrorCode::kResourceExhausted,
                  "allocate_batch_slots: " + std::to_string(slots.size()) + " of " +
                      std::to_string(count) + " slots are free; free some first");
    }
    slots.push_back(*slot);
  }
  return slots;
}

std::size_t InferenceEngine::attach_prefix(std::int32_t /*slot*/,
                                           std::span<const std::int32_t> /*tokens*/) {
  return 0;
}

bool InferenceEngine::reserve(std::int32_t /*slot*/, std::size_t /*tokens*/) {
  return true;
}

BatchStepResult InferenceEngine::batch_step(std::span<BatchedRequest* const> prefills,
                                            std::span<BatchedRequest* const> decodes,
                                            std::size_t token_budget) {
  BatchStepResult result;
  if (!prefills.empty()) {
    result.prefill = batch_prefill(prefills, token_budget);
  }
  if (!decodes.empty()) {
    result.decode = batch_decode_step(decodes);
  }
  return result;
}

}  // namespace pocket
