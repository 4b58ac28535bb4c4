// Attention over the paged KV. What must hold (docs/kernels.md): per query, for each split of 256
// positions, s[t] = chain over d of fma(q[d] * scale, k[d][t], s); m = max; p = exp(s - m);
// sum of p in 16 strided partials; o[d] = chain over t of fma(p[t], v[t][d], o); splits are
// combined in order. Positions beyond a query's own are not touched by its arithmetic, so its bits
// do not depend on the tile that it came in.

#include "attention_scratch.h"
#include "pocket/cpu/kernels.h"

namespace pocket::POCKET_ISA {
namespace {

static_assert(kKvBlockTokens == kLanes, "a K row of a block is one vector");

/// The scratch of one piece of a tile.
struct AttentionWork {
  float* query;    ///< [head_dim, kMaxAttentionQueries], scaled
  float* scores;   ///< [kMaxAttentionQueries, kAttentionSplit]: scores, then probabilities
  float* partial;  ///< [kMaxAttentionQueries, head_dim]: o of this split
  float* total;    ///< [kMaxAttentionQueries, head_dim]: o of the splits so far
  float max[kMaxAttentionQueries];
  float sum[kMaxAttentionQueries];
};

template <typename T>
struct KvView {
  const T* k;
  const T* v;
  std::size_t stride;
  const std::int32_t* table;
  std::size_t head_dim;

  const T* k_block(std::size_t i) const { return k + static_cast<std::size_t>(table[i]) * stride; }
  const T* v_block(std::size_t i) const { return v + static_cast<std::size_t>(table[i]) * stride; }
};

/// Scores of kQueries queries against kBlocks blocks of 16 positions.
template <std::size_t kQueries, std::size_t kBlocks, typename T>
void score_blocks(const KvView<T>& kv, std::size_t block, const float* query, float* scores) {
  const T* k[kBlocks];
  for (std::size_t b = 0; b < kBlocks; ++b) {
    k[b] = kv.k_block(block + b);
  }
  Vec acc[kQueries][kBlocks];
  for (std::size_t i = 0; i < kQueries; ++i) {
    for (std::size_t b = 0; b < kBlocks; ++b) {
      acc[i][b] = zero();
    }
  }
  for (std::size_t d = 0; d < kv.head_dim; ++d) {
    Vec key[kBlocks];
#pragma GCC unroll 8
    for (std::size_t b = 0; b < kBlocks; ++b) {
      key[b] = load(k[b] + d * kLanes);
    }
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kQueries; ++i) {
      const Vec q = splat(query[d * kMaxAttentionQueries + i]);
#pragma GCC unroll 8
      for (std::size_t b = 0; b < kBlocks; ++b) {
        acc[i][b] = fma(q, key[b], acc[i][b]);
      }
    }
  }
  for (std::size_t i = 0; i < kQueries; ++i) {
    for (std::size_t b = 0; b < kBlocks; ++b) {
      store(scores + i * kAttentionSplit + b * kLanes, acc[i][b]);
    }
  }
}

/// o[i][d..d + 16 kDims) continued over positions [begin, end) of a split that starts at block
/// `first_block`.
template <std::size_t kQueries, std::size_t kDims, typename T>
void weigh_values(const KvView<T>& kv, std::size_t first_block, std::size_t begin, std::size_t end,
                  std::size_t d, const float* probabilities, float* out) {
  Vec acc[kQueries][kDims];
  for (std::size_t i = 0; i < kQueries; ++i) {
    for (std::size_t n = 0; n < kDims; ++n) {
      acc[i][n] = load(out + i * kv.head_dim + d + n * kLanes);
    }
  }
  for (std::size_t t = begin; t < end;) {
    const std::size_t in_block = t % kKvBlockTokens;
    std::size_t run = kKvBlockTokens - in_block;
    run = end - t < run ? end - t : run;
    const T* v = kv.v_block(first_block + t / kKvBlockTokens) + in_block * kv.head_dim + d;
    const float* p = probabilities + t;
    for (std::size_t j = 0; j < run; ++j) {
      Vec value[kDims];
#pragma GCC unroll 8
      for (std::size_t n = 0; n < kDims; ++n) {
        value[n] = load(v + n * kLanes);
      }
#pragma GCC unroll 8
      for (std::size_t i = 0; i < kQueries; ++i) {
        const Vec weight = splat(p[i * kAttentionSplit + j]);
#pragma GCC unroll 8
        for (std::size_t n = 0; n < kDims; ++n) {
          acc[i][n] = fma(weight, value[n], acc[i][n]);
        }
      }
      v += kv.head_dim;
    }
    t += run;
  }
  for (std::size_t i = 0; i < kQueries; ++i) {
    for (std::size_t n = 0; n < kDims; ++n) {
      store(out + i * kv.head_dim + d + n * kLanes, acc[i][n]);
    }
  }
}

template <std::size_t kQueries, typename T>
void weigh_all_dims(const KvView<T>& kv, std::size_t first_block, std::size_t begin,
                    std::size_t end, const float* probabilities, float* out) {
  std::size_t d = 0;
  for (; d + kTileDims * kLanes <= kv.head_dim; d += kTileDims * kLanes) {
    weigh_values<kQueries, kTileDims>(kv, first_block, begin, end, d, probabilities, out);
  }
  for (; d < kv.head_dim; d += kLanes) {
    weigh_values<kQueries, 1>(kv, first_block, begin, end, d, probabilities, out);
  }
}

struct SplitSoftmax {
  float max;
  float sum;
};

/// Scores of one query over the `visible` > 0 positions of a split become exp(s - max).
SplitSoftmax softmax_split(float* scores, std::size_t visible) {
  const float lowest = -__builtin_inff();
  Vec largest = splat(lowest);
  for_lanes(
      visible, [&](std::size_t t) { largest = max(largest, load(scores + t)); },
      [&](std::size_t t, std::size_t count) {
        largest = max(largest, keep_first(load(scores + t), count, lowest));
      });
  const float top = reduce_max(largest);
  const Vec shift = splat(top);
  Vec sum = zero();
  const auto visit = [&](std::size_t t, const Vec& p) {
    store(scores + t, p);
    sum = add(sum, p);
  };
  for_lanes(
      visible, [&](std::size_t t) { visit(t, exp(sub(load(scores + t), shift))); },
      [&](std::size_t t, std::size_t count) {
        visit(t, keep_first(exp(sub(load(scores + t), shift)), count, 0.0f));
      });
  return {top, reduce_add(sum)};
}

/// total = total * a + partial * b, with both maxima brought to the larger one.
void combine_split(AttentionWork& work, std::size_t i, std::size_t head_dim, SplitSoftmax split,
                   bool first) {
  float* total = work.total + i * head_dim;
  const float* partial = work.partial + i * head_dim;
  if (first) {
    for (std::size_t d = 0; d < head_dim; d += kLanes) {
      store(total + d, load(partial + d));
    }
    work.max[i] = split.max;
    work.sum[i] = split.sum;
    return;
  }
  const float top = work.max[i] > split.max ? work.max[i] : split.max;
  const Vec a = exp(splat(work.max[i] - top));
  const Vec b = exp(splat(split.max - top));
  for (std::size_t d = 0; d < head_dim; d += kLanes) {
    store(total + d, fma(load(total + d), a, mul(load(partial + d), b)));
  }
  float sums[kLanes];
  store(sums, fma(splat(work.sum[i]), a, mul(splat(split.sum), b)));
  work.sum[i] = sums[0];
  work.max[i] = top;
}

/// Queries [first, first + kQueries) of a tile; query i is head i % group of row i / group.
template <std::size_t kQueries, typename T>
void attend_queries(const AttentionTile& tile, const KvView<T>& kv, std::size_t first,
                    AttentionWork& work) {
  const std::size_t head_dim = kv.head_dim;
  std::size_t limit[kQueries];  // positions that a query sees; does not fall with i
  std::size_t offset[kQueries];
  for (std::size_t i = 0; i < kQueries; ++i) {
    const std::size_t row = (first + i) / tile.group;
    limit[i] = tile.first_position + row + 1;
    offset[i] = row * tile.row_stride + (first + i) % tile.group * head_dim;
    for (std::size_t d = 0; d < head_dim; ++d) {
      work.query[d * kMaxAttentionQueries + i] = tile.query[offset[i] + d] * tile.scale;
    }
  }

  for (std::size_t begin = 0; begin < limit[kQueries - 1]; begin += kAttentionSplit) {
    const auto visible_in_split = [&](std::size_t i) {
      const std::size_t left = limit[i] > begin ? limit[i] - begin : 0;
      return left < kAttentionSplit ? left : kAttentionSplit;
    };
    const std::size_t first_block = begin / kKvBlockTokens;
    const std::size_t blocks =
        (visible_in_split(kQueries - 1) + kKvBlockTokens - 1) / kKvBlockTokens;
    std::size_t block = 0;
    for (; block + kTileBlocks <= blocks; block += kTileBlocks) {
      score_blocks<kQueries, kTileBlocks>(kv, first_block + block, work.query,
                                          work.scores + block * kLanes);
    }
    for (; block < blocks; ++block) {
      score_blocks<kQueries, 1>(kv, first_block + block, work.query, work.scores + block * kLanes);
    }

    SplitSoftmax split[kQueries];
    for (std::size_t i = 0; i < kQueries; ++i) {
      if (visible_in_split(i) > 0) {
        split[i] = softmax_split(work.scores + i * kAttentionSplit, visible_in_split(i));
      }
    }

    for (std::size_t at = 0; at < kQueries * head_dim; at += kLanes) {
      store(work.partial + at, zero());
    }
    const std::size_t common = visible_in_split(0);
    weigh_all_dims<kQueries>(kv, first_block, 0, common, work.scores, work.partial);
    for (std::size_t i = 0; i < kQueries; ++i) {
      if (visible_in_split(i) > common) {
        weigh_all_dims<1>(kv, first_block, common, visible_in_split(i),
                          work.scores + i * kAttentionSplit, work.partial + i * head_dim);
      }
      if (visible_in_split(i) > 0) {
        combine_split(work, i, head_dim, split[i], begin == 0);
      }
    }
  }

  for (std::size_t i = 0; i < kQueries; ++i) {
    const Vec inverse = splat(1.0f / work.sum[i]);
    for (std::size_t d = 0; d < head_dim; d += kLanes) {
      store(tile.out + offset[i] + d, mul(load(work.total + i * head_dim + d), inverse));
    }
  }
}

/// Calls attend_queries with `count` <= kQueries as a compile-time number.
template <std::size_t kQueries, typename T>
void attend_rest(std::size_t count, const AttentionTile& tile, const KvView<T>& kv,
                 std::size_t first, AttentionWork& work) {
  if (count == kQueries) {
    attend_queries<kQueries>(tile, kv, first, work);
  } else if constexpr (kQueries > 1) {
    attend_rest<kQueries - 1>(count, tile, kv, first, work);
  }
}

template <typename T>
void attend(const AttentionTile& tile) {
  const KvView<T> kv{static_cast<const T*>(tile.k_base), static_cast<const T*>(tile.v_base),
                     tile.block_stride, tile.block_table, tile.head_dim};
  AttentionWork work;
  work.query = tile.scratch;
  work.scores = work.query + kMaxAttentionQueries * tile.head_dim;
  work.partial = work.scores + kMaxAttentionQueries * kAttentionSplit;
  work.total = work.partial + kMaxAttentionQueries * tile.head_dim;
  static_assert(kTileQueries <= kMaxAttentionQueries);
  const std::size_t queries = tile.rows * tile.group;
  for (std::size_t first = 0; first < queries; first += kTileQueries) {
    const std::size_t count = queries - first < kTileQueries ? queries - first : kTileQueries;
    attend_rest<kTileQueries>(count, tile, kv, first, work);
  }
}

void attention(KvDType type, const AttentionTile& tile) {
  switch (type) {
    case KvDType::kF32:
      attend<float>(tile);
      break;
    case KvDType::kF16:
      attend<std::uint16_t>(tile);
      break;
  }
}

void kv_write(KvDType type, const float* k, const float* v, std::size_t head_dim,
              std::size_t offset, void* k_block, void* v_block) {
  if (type == KvDType::kF32) {
    auto* keys = static_cast<float*>(k_block) + offset;
    auto* values = static_cast<float*>(v_block) + offset * head_dim;
    for (std::size_t d = 0; d < head_dim; ++d) {
      keys[d * kKvBlockTokens] = k[d];
      values[d] = v[d];
    }
    return;
  }
  auto* keys = static_cast<std::uint16_t*>(k_block) + offset;
  auto* values = static_cast<std::uint16_t*>(v_block) + offset * head_dim;
  for (std::size_t d = 0; d < head_dim; d += kLanes) {
    std::uint16_t halves[kLanes];
    store_half(halves, load(k + d));
    for (std::size_t i = 0; i < kLanes; ++i) {
      keys[(d + i) * kKvBlockTokens] = halves[i];
    }
    store_half(values + d, load(v + d));
  }
}

}  // namespace
}  // namespace pocket::POCKET_ISA
