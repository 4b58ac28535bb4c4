#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "pocket/cpu/kernels.h"
#include "pocket/models/model_info.h"
#include "pocket/quant/dtype.h"
#include "pocket/sampling/sampler.h"

namespace pocket {

struct EngineOptions {
  std::size_t num_blocks = 0;          ///< KV blocks of 16 tokens in the pool; must be > 0
  std::size_t max_sequences = 16;      ///< sequences in one step
  std::size_t max_batch_tokens = 512;  ///< tokens in one step
  std::size_t max_context = 0;         ///< 0 = the model's own limit, which it may not exceed
  /// Recurrent states that are kept beside those of the `max_sequences` slots; no matter for models
  /// without recurrent layers.
  std::size_t state_snapshots = 0;
  KvDType kv_dtype = KvDType::kF16;
  Precision precision = Precision::kInt8;
  /// Q8_0 or Q4_0: float matrices are quantised as they are loaded (docs/formats.md).
  std::optional<DType> weights{};
  std::size_t threads = 0;   ///< 0 = CPUs in the affinity mask
  std::optional<Isa> isa{};  ///< default: select_isa()
};

/// One mixed batch. Tokens of all sequences are concatenated; sequence s owns tokens
/// [sequence_offsets[s], sequence_offsets[s+1]), at consecutive positions. Prefill, decode, chunked
/// prefill and draft verification are all this call. Spans are borrowed for its duration.
///
/// Block j of a sequence's table row holds its positions 16j..16j+15; entries beyond its last
/// position are not looked at. Sequences use different rows, and no sequence's table may hold a
/// block that another one writes in the same step (the blocks of its new positions).
///
/// In a model with recurrent layers a sequence's table row is also the slot of its state: below
/// `max_sequences`, one sequence each. A sequence that starts at position 0 starts from a zero
/// state; any other must start where the slot's last step, or the snapshot loaded into it, ended.
struct StepInput {
  std::span<const std::int32_t> token_ids;         ///< [T]
  std::span<const std::int32_t> positions;         ///< [T]
  std::span<const std::int32_t> sequence_offsets;  ///< [S + 1]
  std::span<const std::int32_t> block_tables;      ///< [tables, table_stride], row-major
  std::size_t table_stride = 0;
  std::span<const std::int32_t> table_rows;   ///< [S]: row of block_tables of each sequence
  std::span<const std::int32_t> logits_rows;  ///< [R]: token indices whose logits are wanted
  std::span<const SamplingParams> sampling;   ///< [R], or empty: return logits, do not sample
  std::size_t sample_vocab = 0;               ///< ids >= this are masked; 0 = the model's vocab
};

/// Exactly one of the two is written: `sampled` (and `top`) when sampling parameters came, else
/// `logits`.
struct StepOutput {
  std::span<SampledToken> sampled;  ///< [R]
  std::span<float> logits;          ///< [R, vocab]
  std::span<TokenLogprob> top{};    ///< [R, kMaxTopLogprobs], or empty if no row asks for any;
                                    ///< a row's first `top_logprobs` entries are written
};

/// What `Engine::load` would load and what its KV blocks would take, without loading weights.
/// Throws as `load` does for the file's metadata; `weight_bytes` is 0.
[[nodiscard]] ModelInfo inspect_model(const std::filesystem::path& model, KvDType kv_dtype);

/// A loaded model with its KV pool: the packed entry point of the C++ engine.
///
/// Batch invariance: a token's logits are bit-identical whatever else is in the step, however its
/// prefix was chunked, and for every thread count. No allocation happens in `step`.
///
/// Thread contract: one thread at a time. Errors: `Error(kInvalidArgument)` for a malformed step
/// (nothing has been computed or written then), `Error(kBadFile | kUnsupported)` on load.
class Engine {
 public:
  static std::unique_ptr<Engine> load(const std::filesystem::path& model,
                                      const EngineOptions& options);
  virtual ~Engine() = default;

  virtual void step(const StepInput& input, const StepOutput& output) = 0;
  /// Copies whole KV blocks (copy on write of forked sequences), all layers and heads.
  virtual void copy_blocks(std::span<const std::int32_t> from,
                           std::span<const std::int32_t> to) = 0;
  /// Copies the recurrent state of slots[i] into snapshots[i]; and snapshots[i] into slots[i].
  /// Throws `Error(kInvalidArgument)` for an index out of range or a state that is not there.
  virtual void save_states(std::span<const std::int32_t> slots,
                           std::span<const std::int32_t> snapshots) = 0;
  virtual void load_states(std::span<const std::int32_t> snapshots,
                           std::span<const std::int32_t> slots) = 0;

  [[nodiscard]] virtual const ModelInfo& model() const noexcept = 0;
  /// As given, with `max_context`, `threads` and `isa` resolved.
  [[nodiscard]] virtual const EngineOptions& options() const noexcept = 0;
  [[nodiscard]] virtual std::size_t kv_cache_bytes() const noexcept = 0;
  /// Of all slots' recurrent states and snapshots; 0 without recurrent layers.
  [[nodiscard]] virtual std::size_t state_store_bytes() const noexcept = 0;
  [[nodiscard]] virtual std::size_t workspace_bytes() const noexcept = 0;
};

}  // namespace pocket
