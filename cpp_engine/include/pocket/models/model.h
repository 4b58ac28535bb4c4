#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pocket/base/thread_pool.h"
#include "pocket/cpu/kernels.h"
#include "pocket/kv/kv_pool.h"
#include "pocket/kv/state_store.h"
#include "pocket/models/model_info.h"
#include "pocket/models/weight_source.h"

namespace pocket {

/// One sequence's rows in a packed batch: rows [first_row, first_row + rows) sit at positions
/// first_position, first_position + 1, ...; `blocks` maps position / 16 to a KV block; `slot` keeps
/// the recurrent state, if the model has one.
struct SequenceRows {
  std::size_t first_row;
  std::size_t rows;
  std::size_t first_position;
  const std::int32_t* blocks;
  std::size_t slot = 0;
};

/// The rows of one step, already validated. Sequences cover [0, token_ids.size()) in order, without
/// gaps; no block that one sequence writes is in another's table.
struct ForwardBatch {
  std::span<const std::int32_t> token_ids;
  std::span<const SequenceRows> sequences;
  /// Rows that `logits` will be asked for, in any order.
  std::span<const std::int32_t> wanted;
};

/// What a model is built for.
struct ModelOptions {
  const KernelTable* kernels;  ///< never null
  ThreadPool* pool;            ///< never null; outlives the model
  Precision precision = Precision::kInt8;
  std::size_t max_batch_tokens = 0;
  std::size_t max_sequences = 0;
  /// Format that float matrices are quantised to as they are packed; none: as stored.
  std::optional<DType> weights{};
  /// 0: the model's own limit. Throws `Error(kInvalidArgument)` when above it.
  std::size_t max_context = 0;
  /// Rows that one `logits` call may ask for.
  std::size_t max_logits_rows = 0;
};

/// A loaded model: weights and work space, no sequence state.
///
/// Batch invariance: a row's results depend on its own tokens and KV only (see KernelTable).
/// Thread contract: one call at a time; inside, the pool's threads are used. Nothing is allocated
/// after construction.
class Model {
 public:
  virtual ~Model() = default;

  [[nodiscard]] virtual const ModelInfo& info() const noexcept = 0;
  /// Positions that the model is ready for.
  [[nodiscard]] virtual std::size_t max_context() const noexcept = 0;
  /// Shape of the KV pool that `forward` needs, for any number of blocks and element type.
  [[nodiscard]] virtual KvShape kv_shape() const noexcept = 0;
  /// Shape of the state store that `forward` needs, for any number of slots and snapshots.
  [[nodiscard]] virtual StateShape state_shape() const = 0;
  [[nodiscard]] virtual std::size_t workspace_bytes() const noexcept = 0;

  /// Runs all layers: writes K and V of every row, moves the states of the sequences' slots past
  /// their rows, keeps the final hidden rows of those wanted until the next call. States are at the
  /// sequences' first positions.
  virtual void forward(const ForwardBatch& batch, KvPool& kv, StateStore& states) = 0;
  /// Logits of some wanted rows of the last `forward`, at most `max_logits_rows`:
  /// [rows, logits_stride()].
  /// The caller may change them. The pointer stays valid until the next call.
  [[nodiscard]] virtual float* logits(std::span<const std::int32_t> rows) = 0;
  /// Floats between rows of logits: the vocab size rounded up to a panel.
  [[nodiscard]] virtual std::size_t logits_stride() const noexcept = 0;
};

/// Builds the model that `source.architecture()` names. Throws `Error(kUnsupported)` for an unknown
/// one, naming it and those supported, and what `WeightLoader` and `read_decoder_config` throw.
[[nodiscard]] std::unique_ptr<Model> load_model(const WeightSource& source,
                                                const ModelOptions& options);

/// What `load_model` would load, without its weights; the same checks of the hyper-parameters.
/// `weight_bytes` and `kv_bytes_per_block` are 0.
[[nodiscard]] ModelInfo describe_model(const WeightSource& source);

/// Architectures with a model, sorted.
[[nodiscard]] std::vector<std::string> supported_architectures();

}  // namespace pocket
