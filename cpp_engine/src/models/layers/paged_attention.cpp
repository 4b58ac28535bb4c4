#include "paged_attention.h"

#include <algorithm>
#include <array>

#include "linear.h"
#include "row_tasks.h"

namespace pocket {
namespace {

// One layer's attention for one step: what its tasks share.
struct LayerStep {
  const PagedAttention& weights;
  const Compute& compute;
  const DecoderConfig& config;
  const RopeTable& rope;
  const AttentionBuffers& buffers;
  KvPool& kv;
  std::size_t layer;
  std::size_t window;

  void rotate(float* x, std::size_t heads, std::size_t position) const {
    const std::size_t dims = rope.rotary_dims();
    if (dims == config.head_dim) {
      compute.kernels->rope(x, heads, dims, rope.cos(position), rope.sin(position));
      return;
    }
    for (std::size_t head = 0; head < heads; ++head) {
      compute.kernels->rope(x + head * config.head_dim, 1, dims, rope.cos(position),
                            rope.sin(position));
    }
  }

  // Biases and norms of the query or key heads [begin, end) of one row, at `x`.
  void prepare(float* x, std::size_t begin, std::size_t end, std::span<const float> bias,
               std::span<const float> norm) const {
    const std::size_t head_dim = config.head_dim;
    if (!bias.empty()) {
      compute.kernels->add(x, bias.data() + begin * head_dim, (end - begin) * head_dim);
    }
    for (std::size_t head = begin; head < end && !norm.empty(); ++head) {
      float* values = x + (head - begin) * head_dim;
      compute.kernels->rms_norm(values, norm.data(), head_dim, config.norm_epsilon, values);
    }
  }

  [[nodiscard]] static std::size_t position_of(const AttentionSchedule::RowTile& tile,
                                               std::size_t row) {
    return tile.sequence->first_position + row - tile.sequence->first_row;
  }

  // Finishes the queries of some KV heads (biases, norms, RoPE) for all rows of a tile.
  void finish_queries(const AttentionSchedule::RowTile& tile, std::size_t head_begin,
                      std::size_t head_end) const {
    const std::size_t begin = head_begin * config.group();
    const std::size_t end = head_end * config.group();
    for (std::size_t row = tile.row_begin; row < tile.row_begin + tile.rows; ++row) {
      float* q = buffers.query + row * config.query_width() + begin * config.head_dim;
      prepare(q, begin, end, weights.q_bias, weights.q_norm);
      rotate(q, end - begin, position_of(tile, row));
    }
  }

  // Finishes k and v likewise and stores them.
  void write_kv(const AttentionSchedule::RowTile& tile, std::size_t head_begin,
                std::size_t head_end) const {
    const std::size_t head_dim = config.head_dim;
    for (std::size_t row = tile.row_begin; row < tile.row_begin + tile.rows; ++row) {
      const std::size_t position = position_of(tile, row);
      const auto block = static_cast<std::size_t>(tile.sequence->blocks[position / kKvBlockTokens]);
      float* k = buffers.key + row * config.kv_width();
      float* v = buffers.value + row * config.kv_width();
      prepare(k + head_begin * head_dim, head_begin, head_end, weights.k_bias, weights.k_norm);
      prepare(v + head_begin * head_dim, head_begin, head_end, weights.v_bias, {});
      rotate(k + head_begin * head_dim, head_end - head_begin, position);
      for (std::size_t head = head_begin; head < head_end; ++head) {
        compute.kernels->kv_write(kv.shape().dtype, k + head * head_dim, v + head * head_dim,
                                  head_dim, position % kKvBlockTokens,
                                  kv.k_block(layer, head, block), kv.v_block(layer, head, block));
      }
    }
  }

  void attend(const AttentionSchedule::RowTile& tile, std::size_t head, std::size_t thread) const {
    const std::size_t width = config.group() * config.head_dim;
    const std::size_t column = head * width;
    const std::size_t offset = tile.row_begin * config.query_width() + column;
    compute.kernels->attention(kv.shape().dtype,
                               AttentionTile{
                                   .query = buffers.query + offset,
                                   .out = buffers.out + offset,
                                   .row_stride = config.query_width(),
                                   .rows = tile.rows,
                                   .group = config.group(),
                                   .head_dim = config.head_dim,
                                   .first_position = position_of(tile, tile.row_begin),
                                   .window = window,
                                   .scale = config.attention_scale,
                                   .k_base = kv.k_base(layer, head),
                                   .v_base = kv.v_base(layer, head),
                                   .block_stride = kv.block_stride(),
                                   .block_table = tile.sequence->blocks,
                                   .scratch = buffers.scratch + thread * buffers.scratch_floats,
                               });
    for (std::size_t row = tile.row_begin;
         config.attention_gate && row < tile.row_begin + tile.rows; ++row) {
      const std::size_t at = row * config.query_width() + column;
      compute.kernels->sigmoid_mul(buffers.gate + at, buffers.out + at, width, buffers.out + at);
    }
    if (buffers.output.quantised.q != nullptr && width % kQuantBlock == 0) {
      for (std::size_t row = tile.row_begin; row < tile.row_begin + tile.rows; ++row) {
        compute.kernels->quantise_row(buffers.out + row * config.query_width() + column,
                                      quantised_row(buffers.output.quantised, row, column, width));
      }
    }
  }

  // For heads whose width is not a whole number of quantisation blocks.
  void quantise_output(std::size_t rows) const {
    if (buffers.output.quantised.q != nullptr &&
        config.group() * config.head_dim % kQuantBlock != 0) {
      const std::size_t width = config.query_width();
      for_each_row(compute, rows, [&](std::size_t row, std::size_t) {
        compute.kernels->quantise_row(buffers.out + row * width,
                                      quantised_row(buffers.output.quantised, row, 0, width));
      });
    }
  }
};

}  // namespace

AttentionSchedule::AttentionSchedule(std::size_t max_batch_tokens, std::size_t max_sequences) {
  const std::size_t most = max_batch_tokens / kAttentionTileRows + max_sequences;
  tiles_.reserve(most);
  shared_.reserve(most);
}

void AttentionSchedule::plan(std::span<const SequenceRows> sequences) {
  tiles_.clear();
  shared_.clear();
  for (const SequenceRows& sequence : sequences) {
    const bool alone = sequence.rows <= kAttentionTileRows;
    for (std::size_t row = 0; row < sequence.rows; row += kAttentionTileRows) {
      tiles_.push_back({.sequence = &sequence,
                        .row_begin = sequence.first_row + row,
                        .rows = std::min(kAttentionTileRows, sequence.rows - row),
                        .alone = alone});
      if (!alone) {
        shared_.push_back(tiles_.back());
      }
    }
  }
  // Longest first: a long task that starts last leaves the other threads idle.
  std::sort(tiles_.begin(), tiles_.end(), [](const RowTile& a, const RowTile& b) {
    const auto work = [](const RowTile& tile) {
      return tile.rows * (tile.sequence->first_position + tile.row_begin -
                          tile.sequence->first_row + tile.rows);
    };
    const std::size_t work_a = work(a);
    const std::size_t work_b = work(b);
    return work_a != work_b ? work_a > work_b : a.row_begin < b.row_begin;
  });
}

void PagedAttention::load(WeightLoader& loader, const std::string& prefix,
                          const DecoderConfig& config, bool pairs_interleaved) {
  const RowOrder order =
      pairs_interleaved ? RowOrder{.head_dim = config.head_dim, .rotary_dims = config.rope.dims}
                        : RowOrder{};
  if (config.attention_gate) {
    RowOrder half{.head_dim = config.head_dim, .stored_rows = 2 * config.head_dim};
    loader.matrix(prefix + "attn_q.weight", config.query_width(), config.hidden, q, half);
    half.first_row = config.head_dim;
    loader.matrix(prefix + "attn_q.weight", config.query_width(), config.hidden, gate, half);
  } else {
    loader.matrix(prefix + "attn_q.weight", config.query_width(), config.hidden, q, order);
  }
  loader.matrix(prefix + "attn_k.weight", config.kv_width(), config.hidden, k, order);
  loader.matrix(prefix + "attn_v.weight", config.kv_width(), config.hidden, v);
  loader.matrix(prefix + "attn_output.weight", config.hidden, config.query_width(), output);
  if (config.qkv_bias) {
    loader.vector(prefix + "attn_q.bias", config.query_width(), q_bias);
    loader.vector(prefix + "attn_k.bias", config.kv_width(), k_bias);
    loader.vector(prefix + "attn_v.bias", config.kv_width(), v_bias);
  }
  if (config.qk_norm) {
    loader.norm(prefix + "attn_q_norm.weight", config.head_dim, q_norm);
    loader.norm(prefix + "attn_k_norm.weight", config.head_dim, k_norm);
  }
}

void PagedAttention::run(const Compute& compute, const DecoderConfig& config, const RopeTable& rope,
                         const AttentionSchedule& schedule, std::size_t layer, std::size_t window,
                         const Activations& x, std::size_t rows, KvPool& kv,
                         const AttentionBuffers& buffers, float* residual,
                         float* matmul_scratch) const {
  const std::array projections{Projection{&q, buffers.query, config.query_width()},
                               Projection{&k, buffers.key, config.kv_width()},
                               Projection{&v, buffers.value, config.kv_width()},
                               Projection{&gate, buffers.gate, config.query_width()}};
  project(compute, x, rows, std::span(projections).first(config.attention_gate ? 4 : 3));
  const LayerStep step{*this, compute, config, rope, buffers, kv, layer, window};
  const auto shared = schedule.shared();
  compute.pool->parallel_for(shared.size(), [&](std::size_t task, std::size_t) {
    step.finish_queries(shared[task], 0, config.kv_heads);
    step.write_kv(shared[task], 0, config.kv_heads);
  });
  const auto tiles = schedule.tiles();
  compute.pool->parallel_for(tiles.size() * config.kv_heads,
                             [&](std::size_t task, std::size_t thread) {
                               const auto& tile = tiles[task / config.kv_heads];
                               const std::size_t head = task % config.kv_heads;
                               if (tile.alone) {
                                 step.finish_queries(tile, head, head + 1);
                                 step.write_kv(tile, head, head + 1);
                               }
                               step.attend(tile, head, thread);
                             });
  step.quantise_output(rows);
  project_add(compute, buffers.output, rows, output, residual, matmul_scratch);
}

void PagedAttention::store(const Compute& compute, const DecoderConfig& config,
                           const RopeTable& rope, const AttentionSchedule& schedule,
                           std::size_t layer, const Activations& x, std::size_t rows, KvPool& kv,
                           const AttentionBuffers& buffers) const {
  project(compute, x, rows,
          std::array{Projection{&k, buffers.key, config.kv_width()},
                     Projection{&v, buffers.value, config.kv_width()}});
  const LayerStep step{*this, compute, config, rope, buffers, kv, layer, 0};
  const auto tiles = schedule.tiles();
  compute.pool->parallel_for(tiles.size(), [&](std::size_t task, std::size_t) {
    step.write_kv(tiles[task], 0, config.kv_heads);
  });
}

void PagedAttention::attend(const Compute& compute, const DecoderConfig& config,
                            const RopeTable& rope, const AttentionSchedule& schedule,
                            std::size_t layer, std::size_t window, const Activations& x,
                            std::size_t rows, KvPool& kv, const AttentionBuffers& buffers,
                            float* residual, float* matmul_scratch) const {
  const std::array projections{Projection{&q, buffers.query, config.query_width()},
                               Projection{&gate, buffers.gate, config.query_width()}};
  project(compute, x, rows, std::span(projections).first(config.attention_gate ? 2 : 1));
  const LayerStep step{*this, compute, config, rope, buffers, kv, layer, window};
  const auto tiles = schedule.tiles();
  compute.pool->parallel_for(tiles.size() * config.kv_heads,
                             [&](std::size_t task, std::size_t thread) {
                               const auto& tile = tiles[task / config.kv_heads];
                               const std::size_t head = task % config.kv_heads;
                               step.finish_queries(tile, head, head + 1);
                               step.attend(tile, head, thread);
                             });
  step.quantise_output(rows);
  project_add(compute, buffers.output, rows, output, residual, matmul_scratch);
}

}  // namespace pocket
