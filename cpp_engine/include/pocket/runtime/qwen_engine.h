#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pocket/base/error.h"
#include "pocket/runtime/block_cache.h"
#include "pocket/runtime/engine.h"
#include "pocket/runtime/inference_engine.h"
#include "pocket/sampling/sampler.h"

namespace pocket {

/// An option whose feature this engine does not have.
class UnsupportedFeature : public Error {
 public:
  UnsupportedFeature(std::string feature, const std::string& detail)
      : Error(ErrorCode::kUnsupported, "unsupported: " + feature + ": " + detail),
        feature_(std::move(feature)) {}
  [[nodiscard]] const std::string& feature() const noexcept { return feature_; }

 private:
  std::string feature_;
};

enum class QwenKvCacheDType : std::uint8_t { kFp16, kFp8, kTurboQuantK8V4, kInt8PerTokenHead };

/// Options of `QwenEngine`. Those of features that do not exist here must keep their defaults:
/// anything else is refused by name.
struct QwenEngineOptions {
  std::int32_t tp_world = 1;
  std::int32_t tp_rank = 0;
  std::int32_t device = 0;
  std::size_t max_batch_size = 8;          ///< slots
  std::size_t prefill_chunk_tokens = 512;  ///< prompt tokens per step
  QwenKvCacheDType kv_cache_dtype = QwenKvCacheDType::kFp16;
  std::size_t attention_window = 0;
  std::size_t attention_sink_tokens = 0;
  bool prefix_cache = true;
  std::size_t state_snapshot_interval_tokens = 4096;
  std::size_t max_state_snapshots = 82;
  bool mtp = false;
  std::size_t mtp_speculative_tokens = 0;
  bool mtp_adaptive = false;
  std::string dspark_checkpoint;
  std::string dflash2_checkpoint;
  std::string nccl_id_path;
  float temperature = 0.0F;  ///< of `prefill`, `decode_step` and `generate`
  float top_p = 1.0F;
  std::int32_t top_k = 0;
  std::uint64_t sampling_seed = 0;
  bool kv_paged = true;
  std::size_t kv_block_size = 16;
  /// Bytes of the KV pool. 0: every slot's whole context, or 32k tokens if that is less, but at
  /// least one slot's whole context.
  std::size_t kv_cache_bytes = 0;
  std::size_t prefix_cache_bytes = 0;
  // Not in the older interface.
  std::size_t threads = 0;  ///< as EngineOptions
  Precision precision = Precision::kInt8;
};

struct QwenPrefixCacheStats {
  std::size_t reused_tokens = 0, computed_tokens = 0, prompt_tokens = 0;  ///< of the last prompt
  std::string resume_source = "none";  ///< of the last prompt: "none" or "blocks"
  std::size_t matched_tokens = 0;      ///< as reused_tokens
  std::uint64_t hits = 0, misses = 0;  ///< prompts that found something, that found nothing
  BlockCounts blocks;
  std::size_t bytes_per_block = 0;
};

/// Sequences in numbered slots on an `Engine`: prefill a slot, decode token by token, reset it.
///
/// The name is the older interface's; any architecture without recurrent state runs. KV blocks are
/// allocated as a slot grows and shared between slots whose prompts begin alike. Results are
/// bit-identical whatever the other slots do.
///
/// Errors: `Error(kInvalidArgument)` for misuse of a slot, `Error(kResourceExhausted)` when the KV
/// pool is full, `UnsupportedFeature` and what `Engine::load` throws on construction. Thread
/// contract: any thread; calls wait for each other.
class QwenEngine final : public InferenceEngine {
 public:
  /// `layer_count`: 0 or any number from the model's layers upwards means all of them.
  /// `max_context`: tokens per slot, cut to what the model can do.
  QwenEngine(const std::filesystem::path& checkpoint, QwenEngineOptions options,
             std::size_t layer_count = 0, std::size_t max_context = 8192);

  /// Computes a prompt in an empty slot. If it fails, the slot is empty again.
  ForwardResult prefill(std::span<const std::int32_t> tokens, std::int32_t slot = 0);
  /// Appends one token to a slot that has been prefilled.
  ForwardResult decode_step(std::int32_t token, std::int32_t slot = 0);
  /// Up to `max_new_tokens` tokens after `tokens`, ending with an end-of-text id, in a free slot.
  std::vector<std::int32_t> generate(std::span<const std::int32_t> tokens,
                                     std::size_t max_new_tokens);
  /// Empties a slot.
  void reset(std::int32_t slot = 0);
  /// Forgets every prefix that no slot holds.
  void clear_prefix_cache();

  [[nodiscard]] std::size_t position(std::int32_t slot) const;
  [[nodiscard]] QwenPrefixCacheStats prefix_cache_stats() const;
  [[nodiscard]] const ModelInfo& model() const noexcept { return engine_->model(); }
  [[nodiscard]] const EngineOptions& engine_options() const noexcept { return engine_->options(); }
  [[nodiscard]] const QwenEngineOptions& options() const noexcept { return options_; }
  [[nodiscard]] std::size_t kv_cache_bytes() const noexcept { return engine_->kv_cache_bytes(); }
  [[nodiscard]] std::size_t workspace_bytes() const noexcept { return engine_->workspace_bytes(); }

  [[nodiscard]] Capabilities caps() const override;
  [[nodiscard]] std::size_t max_context() const override { return max_context_; }
  [[nodiscard]] std::size_t vocab_size() const override { return vocab_; }
  [[nodiscard]] std::vector<std::int32_t> eos_token_ids() const override;
  [[nodiscard]] std::size_t max_prefill_tokens() const override;
  [[nodiscard]] bool kv_paged() const override { return true; }
  [[nodiscard]] std::size_t kv_total_blocks() const override;
  [[nodiscard]] std::size_t kv_free_blocks() const override;
  [[nodiscard]] std::size_t kv_cache_pinned_blocks() const override;
  std::size_t kv_evict_cache_blocks(std::size_t count) override;
  [[nodiscard]] std::size_t kv_blocks_for_tokens(std::size_t tokens) const override;
  [[nodiscard]] std::optional<std::int32_t> allocate_slot() override;
  void free_slot(std::int32_t slot) override;
  std::size_t attach_prefix(std::int32_t slot, std::span<const std::int32_t> tokens) override;
  [[nodiscard]] bool reserve(std::int32_t slot, std::size_t tokens) override;
  BatchPrefillResult batch_prefill(std::span<BatchedRequest* const> requests,
                                   std::size_t token_budget) override;
  BatchDecodeResult batch_decode_step(std::span<BatchedRequest* const> requests) override;
  BatchStepResult batch_step(std::span<BatchedRequest* const> prefills,
                             std::span<BatchedRequest* const> decodes,
                             std::size_t token_budget) override;

 private:
  struct Slot {
    bool taken = false;
    std::vector<std::int32_t> tokens;  // whose keys and values are in the blocks
    std::vector<std::int32_t> blocks;
    std::size_t published = 0;  // blocks offered to the prefix cache
    BlockCache::Node node = BlockCache::kRoot;
    std::uint64_t drawn = 0;  // output tokens of this slot so far
  };
  // Tokens to append to a slot in one pass, and whether the next one is wanted.
  struct Work {
    std::int32_t slot;
    std::span<const std::int32_t> tokens;
    bool sample;
    SamplingParams sampling;
  };

  // All of these: with mutex_ held.
  [[nodiscard]] std::size_t index_of(std::int32_t slot) const;
  Slot& slot_at(std::int32_t slot) { return slots_[index_of(slot)]; }
  void check_tokens(std::span<const std::int32_t> tokens) const;
  void clear(Slot& slot);
  std::size_t attach(Slot& slot, std::span<const std::int32_t> tokens);
  bool grow(std::int32_t id, std::size_t tokens);
  void grow_or_throw(std::int32_t id, std::size_t tokens);
  StepInput pack(std::span<const Work> work);
  void commit(std::span<const Work> work);
  void run(std::span<const Work> work);  // fills sampled_, one per work that samples
  ForwardResult forward(std::int32_t id, std::span<const std::int32_t> tokens, bool last);
  Work decode_work(const BatchedRequest& request);
  Work prefill_work(const BatchedRequest& request, std::size_t chunk);

  QwenEngineOptions options_;
  std::size_t max_context_ = 0;
  std::size_t vocab_ = 0;  // ids that may be sampled
  std::unique_ptr<Engine> engine_;
  mutable std::mutex mutex_;
  std::optional<BlockCache> cache_;
  std::optional<Sampler> sampler_;
  std::vector<Slot> slots_;
  std::vector<std::int32_t> tables_;  // [slots, table_stride_]
  std::size_t table_stride_ = 0;
  QwenPrefixCacheStats prefix_stats_;
  // A step's arrays, reused.
  std::vector<std::int32_t> token_ids_, positions_, offsets_, rows_, logits_rows_;
  std::vector<SamplingParams> sampling_;
  std::vector<SampledToken> sampled_;
};

[[nodiscard]] const char* qwen_kv_cache_dtype_name(QwenKvCacheDType dtype) noexcept;
/// Throws `Error(kInvalidArgument)` naming the known ones.
[[nodiscard]] QwenKvCacheDType parse_qwen_kv_cache_dtype(const std::string& name);
/// Throws `UnsupportedFeature` or `Error(kInvalidArgument)` naming the option and its value.
void check_qwen_options(const QwenEngineOptions& options);

}  // namespace pocket
