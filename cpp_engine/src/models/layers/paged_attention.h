#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "../compute.h"
#include "../decoder_config.h"
#include "../rope_table.h"
#include "../weight_loader.h"
#include "pocket/kv/kv_pool.h"
#include "pocket/models/model.h"

namespace pocket {

/// Query rows of one attention task. Its K and V are read once for all of them.
inline constexpr std::size_t kAttentionTileRows = 16;

/// How a step's attention is cut into tasks: made once per step, used by every layer.
class AttentionSchedule {
 public:
  AttentionSchedule(std::size_t max_batch_tokens, std::size_t max_sequences);

  struct RowTile {
    const SequenceRows* sequence;
    std::size_t row_begin;  ///< among all rows of the batch
    std::size_t rows;
    /// The sequence has no other tile, so its task may write K and V itself: nobody else reads
    /// them in this step.
    bool alone;
  };

  void plan(std::span<const SequenceRows> sequences);

  [[nodiscard]] std::span<const RowTile> tiles() const noexcept { return tiles_; }
  /// Tiles that are not alone: their K and V are written before any task attends.
  [[nodiscard]] std::span<const RowTile> shared() const noexcept { return shared_; }

 private:
  std::vector<RowTile> tiles_;
  std::vector<RowTile> shared_;
};

/// Work space of attention, shared by all layers.
struct AttentionBuffers {
  float* query;        ///< [tokens, query_width]
  float* key;          ///< [tokens, kv_width]
  float* value;        ///< [tokens, kv_width]
  float* out;          ///< [tokens, query_width]
  float* gate;         ///< [tokens, query_width], or null without `attention_gate`
  Activations output;  ///< `out` in the forms that o wants; `values` is `out`
  float* scratch;      ///< [threads][scratch_floats]
  std::size_t scratch_floats;
};

/// Causal grouped-query attention with rotate-half RoPE over the paged KV, added to the residual.
/// A row sees all positions up to its own, or the last ones, as `DecoderConfig::window_of` says;
/// the KV of positions that no row will see again stays where it is.
struct PagedAttention {
  PackedMatrix q;       ///< [query_width, hidden]
  PackedMatrix k;       ///< [kv_width, hidden]
  PackedMatrix v;       ///< [kv_width, hidden]
  PackedMatrix output;  ///< [hidden, query_width]
  PackedMatrix gate;    ///< [query_width, hidden] with `attention_gate`
  // Empty unless the configuration asks for them.
  std::span<const float> q_bias;  ///< [query_width]
  std::span<const float> k_bias;  ///< [kv_width]
  std::span<const float> v_bias;  ///< [kv_width]
  std::span<const float> q_norm;  ///< [head_dim]
  std::span<const float> k_norm;  ///< [head_dim]

  /// Registers `prefix`attn_{q,k,v,output}.weight, and as the configuration says
  /// attn_{q,k,v}.bias and attn_{q,k}_norm.weight; q and k are un-permuted if the source says so.
  /// With `attention_gate` a head of attn_q is the query's rows, then the gate's.
  void load(WeightLoader& loader, const std::string& prefix, const DecoderConfig& config,
            bool pairs_interleaved);

  [[nodiscard]] InputForm input(Precision precision) const {
    return input_form(q, precision) | input_form(k, precision) | input_form(v, precision);
  }
  [[nodiscard]] InputForm inner(Precision precision) const { return input_form(output, precision); }

  // `layer` counts layers of the pool; a row sees the last `window` positions, 0: all. x holds the
  // `rows` rows that `schedule` was planned for. `matmul_scratch` is
  // [threads][matmul_scratch_floats()].

  /// K, V, attention and projection of all rows of a step.
  void run(const Compute& compute, const DecoderConfig& config, const RopeTable& rope,
           const AttentionSchedule& schedule, std::size_t layer, std::size_t window,
           const Activations& x, std::size_t rows, KvPool& kv, const AttentionBuffers& buffers,
           float* residual, float* matmul_scratch) const;

  // The same in two halves, for a layer of which fewer rows are wanted than were computed.

  /// Writes K and V of all rows of a step.
  void store(const Compute& compute, const DecoderConfig& config, const RopeTable& rope,
             const AttentionSchedule& schedule, std::size_t layer, const Activations& x,
             std::size_t rows, KvPool& kv, const AttentionBuffers& buffers) const;
  /// Attention and projection of rows whose K and V are stored, as are those before them.
  void attend(const Compute& compute, const DecoderConfig& config, const RopeTable& rope,
              const AttentionSchedule& schedule, std::size_t layer, std::size_t window,
              const Activations& x, std::size_t rows, KvPool& kv, const AttentionBuffers& buffers,
              float* residual, float* matmul_scratch) const;
};

}  // namespace pocket
