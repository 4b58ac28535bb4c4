#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace pocket {

/// What an engine can do for a scheduler. `fixed_*` hold where sampling is not per request.
struct Capabilities {
  bool paged_kv = false;
  bool continuous_batching = true;
  bool chunked_prefill = false;
  std::size_t max_slots = 1;
  bool per_request_sampling = true;
  bool per_request_top_k = true;
  float fixed_temperature = 0.0F;
  float fixed_top_p = 1.0F;
  std::int32_t fixed_top_k = 0;
  std::uint64_t fixed_seed = 0;
  bool structured_outputs = false;
  bool logprobs = false;
};

/// How a request's tokens are drawn; ranges are those of `SamplingParams`.
struct RequestSampling {
  float temperature = 0.0F;
  float top_p = 1.0F;
  std::int32_t top_k = 0;
  std::uint64_t seed = 0;
};

/// One slot's forward pass. Token counts are tokens, not bytes.
struct ForwardResult {
  std::int32_t token = -1;      ///< the last token that was computed
  std::size_t layers = 0;       ///< layers of the model
  std::size_t dim = 0;          ///< its hidden size
  std::vector<float> logits{};  ///< [vocab] after `token`; empty when only a sample was asked for
  std::int32_t top_token = -1;  ///< the next token: the best one, or drawn as asked; < 0: none
  float top_logit = 0.0F;       ///< its logit, where there are logits
  double checksum = 0.0;        ///< sum of the logits
  std::size_t position = 0;     ///< tokens that the slot now holds
};

/// A request as a scheduler and an engine pass it to and fro.
struct BatchedRequest {
  std::uint64_t request_id = 0;
  /// All tokens known when the request got its slot: the prompt, and after a preemption its output.
  std::vector<std::int32_t> prompt_tokens{};
  std::size_t seq_len = 0;  ///< tokens of it that the slot holds
  std::int32_t slot_id = -1;
  std::size_t cached_prefix_len = 0;  ///< tokens that came from the prefix cache
  std::size_t chunk = 0;  ///< prompt tokens to compute in this step; 0: as the budget allows
  bool finished = false;
  std::int32_t last_token = -1;                  ///< newest output token, not yet in the slot
  std::vector<std::int32_t> generated_tokens{};  ///< all output so far
  RequestSampling sampling{};
};

struct BatchPrefillResult {
  std::vector<ForwardResult> results;  ///< one per request, in order
  std::vector<bool> incomplete;        ///< per request: part of its prompt is still to compute
  std::size_t total_tokens = 0;        ///< computed in this call
  double seconds = 0.0;
};

struct BatchDecodeResult {
  std::vector<std::int32_t> next_tokens;  ///< one per request, in order; < 0: no token
  double seconds = 0.0;
};

struct BatchStepResult {
  BatchPrefillResult prefill;
  BatchDecodeResult decode;
};

/// What `QwenBatchScheduler` needs of an engine: slots, each with a sequence, and batched passes.
///
/// A scheduler allocates a slot per request, may attach a cached prefix, reserves room for what a
/// step computes, and runs the step. Thread contract: the implementer says; the scheduler calls
/// everything from its own thread, except the const members.
class InferenceEngine {
 public:
  InferenceEngine() = default;
  InferenceEngine(const InferenceEngine&) = delete;
  InferenceEngine& operator=(const InferenceEngine&) = delete;
  virtual ~InferenceEngine() = default;

  [[nodiscard]] virtual Capabilities caps() const = 0;
  [[nodiscard]] virtual std::size_t max_context() const = 0;  ///< tokens per slot
  [[nodiscard]] virtual std::string device() const { return "cpu"; }
  /// Ids below this are tokens; 0: not known, nothing is checked.
  [[nodiscard]] virtual std::size_t vocab_size() const { return 0; }
  [[nodiscard]] virtual std::vector<std::int32_t> eos_token_ids() const { return {}; }
  /// Prompt tokens that one step can compute.
  [[nodiscard]] virtual std::size_t max_prefill_tokens() const { return 512; }

  [[nodiscard]] virtual bool kv_paged() const { return false; }
  [[nodiscard]] virtual std::size_t kv_total_blocks() const { return 0; }
  [[nodiscard]] virtual std::size_t kv_free_blocks() const { return 0; }
  /// Blocks that only the prefix cache holds.
  [[nodiscard]] virtual std::size_t kv_cache_pinned_blocks() const { return 0; }
  /// Frees up to `count` of them; how many it were.
  virtual std::size_t kv_evict_cache_blocks(std::size_t count);
  [[nodiscard]] virtual std::size_t kv_blocks_for_tokens(std::size_t tokens) const;

  /// An empty slot for the caller, or nothing if all are taken.
  [[nodiscard]] virtual std::optional<std::int32_t> allocate_slot() = 0;
  /// `count` slots, or none of them. Throws `Error(kResourceExhausted)`.
  [[nodiscard]] std::vector<std::int32_t> allocate_batch_slots(std::size_t count);
  virtual void free_slot(std::int32_t slot) = 0;

  /// Puts the longest cached beginning of `tokens` into an empty slot; how many tokens it has.
  virtual std::size_t attach_prefix(std::int32_t slot, std::span<const std::int32_t> tokens);
  /// Room for the slot's first `tokens` positions; false, and nothing changed, if there is none.
  [[nodiscard]] virtual bool reserve(std::int32_t slot, std::size_t tokens);

  /// Computes prompts, in order, up to `token_budget` tokens together; a request whose prompt is
  /// complete gets its next token.
  virtual BatchPrefillResult batch_prefill(std::span<BatchedRequest* const> requests,
                                           std::size_t token_budget) = 0;
  /// Computes each request's `last_token` and gives the next one.
  virtual BatchDecodeResult batch_decode_step(std::span<BatchedRequest* const> requests) = 0;
  /// Both at once; here one after the other.
  virtual BatchStepResult batch_step(std::span<BatchedRequest* const> prefills,
                                     std::span<BatchedRequest* const> decodes,
                                     std::size_t token_budget);
};

}  // namespace pocket
