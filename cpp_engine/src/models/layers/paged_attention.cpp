#include "paged_attention.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "linear.h"
#include "row_tasks.h"

namespace pocket {
namespace {

// One layer's attention for one step: what its tasks share.
struct LayerStep {
  const Compute& compute;
  const DecoderConfig& config;
  const RopeTable& rope;
  const AttentionBuffers& buffers;
  KvPool& kv;
  std::size_t layer;

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

  // Rotates q and k of some KV heads and stores K and V, for all rows of a tile.
  void write_kv(const AttentionSchedule::RowTile& tile, std::size_t head_begin,
                std::size_t head_end) const {
    const std::size_t head_dim = config.head_dim;
    for (std::size_t row = tile.row_begin; row < tile.row_begin + tile.rows; ++row) {
      const std::size_t position = tile.sequence->first_position + row - tile.sequence->first_row;
      const auto block = static_cast<std::size_t>(tile.sequence->blocks[position / kKvBlockTokens]);
      rotate(buffers.query + row * config.query_width() + head_begin * config.group() * head_dim,
             (head_end - head_begin) * config.group(), position);
      float* k = buffers.key + row * config.kv_width();
      const float* v = buffers.value + row * config.kv_width();
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
    compute.kernels->attention(
        kv.shape().dtype, AttentionTile{
                              .query = buffers.query + offset,
                              .out = buffers.out + offset,
                              .row_stride = config.query_width(),
                              .rows = tile.rows,
                              .group = config.group(),
                              .head_dim = config.head_dim,
                              .first_position = tile.sequence->first_position + tile.row_begin -
                                                tile.sequence->first_row,
                              .scale = 1.0F / std::sqrt(static_cast<float>(config.head_dim)),
                              .k_base = kv.k_base(layer, head),
                              .v_base = kv.v_base(layer, head),
                              .block_stride = kv.block_stride(),
                              .block_table = tile.sequence->blocks,
                              .scratch = buffers.scratch + thread * buffers.scratch_floats,
                          });
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
      pairs_interleaved ? RowOrder{config.head_dim, config.rope.dims} : RowOrder{};
  loader.matrix(prefix + "attn_q.weight", config.query_width(), config.hidden, q, order);
  loader.matrix(prefix + "attn_k.weight", config.kv_width(), config.hidden, k, order);
  loader.matrix(prefix + "attn_v.weight", config.kv_width(), config.hidden, v);
  loader.matrix(prefix + "attn_output.weight", config.hidden, config.query_width(), output);
}

void PagedAttention::run(const Compute& compute, const DecoderConfig& config, const RopeTable& rope,
                         const AttentionSchedule& schedule, std::size_t layer, const Activations& x,
                         std::size_t rows, KvPool& kv, const AttentionBuffers& buffers,
                         float* residual, float* matmul_scratch) const {
  project(compute, x, rows,
          std::array{Projection{&q, buffers.query, config.query_width()},
                     Projection{&k, buffers.key, config.kv_width()},
                     Projection{&v, buffers.value, config.kv_width()}});
  const LayerStep step{compute, config, rope, buffers, kv, layer};
  const auto shared = schedule.shared();
  compute.pool->parallel_for(shared.size(), [&](std::size_t task, std::size_t) {
    step.write_kv(shared[task], 0, config.kv_heads);
  });
  const auto tiles = schedule.tiles();
  compute.pool->parallel_for(tiles.size() * config.kv_heads,
                             [&](std::size_t task, std::size_t thread) {
                               const auto& tile = tiles[task / config.kv_heads];
                               const std::size_t head = task % config.kv_heads;
                               if (tile.alone) {
                                 step.write_kv(tile, head, head + 1);
                               }
                               step.attend(tile, head, thread);
                             });
  step.quantise_output(rows);
  project_add(compute, buffers.output, rows, output, residual, matmul_scratch);
}

}  // namespace pocket
