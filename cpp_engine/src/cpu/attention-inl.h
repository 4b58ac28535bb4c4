// Attention over the paged KV. What must hold (docs/kernels.md): per query, for each split of 256
// positions, s[t] = chain over d of fma(q[d] * scale, k[d][t], s); m = max; p = exp(s - m);
// sum of p in 16 strided partials; o[d] = chain over t of fma(p[t], v[t][d], o); splits are
// combined in order. Positions that a query does not see (beyond its own, before its window) are
// not touched by its arithmetic, so its bits do not depend on the tile that it came in.

#include "attention_scratch.h"
#include "pocket/cpu/kernels.h"

namespace pocket::POCKET_ISA {
namespace {

static_assert(kKvBlockTokens == kLanes, "a K row of a block is one vector");

/// The scratch of one piece of a tile.
struct AttentionWork {
  float* query;    ///< [head_dim, kMaxAttentionQueries], scaled
  float* scores;   ///< [kMaxAttentionQueries, kAttentionSplit]: scores, then probabilities
  float* codes;    ///< int8 only: room for two byte planes beside the scores
  float* partial;  ///< [kMaxAttentionQueries, head_dim]: o of this split
  float* total;    ///< [kMaxAttentionQueries, head_dim]: o of the splits so far
  float max[kMaxAttentionQueries];
  float sum[kMaxAttentionQueries];
};

/// Queries [first, first + kQueries) of a tile; query i is head i % group of row i / group.
template <std::size_t kQueries>
struct TileQueries {
  std::size_t begin[kQueries];   ///< a query sees positions [begin, end), which
  std::size_t end[kQueries];     ///< do not fall with i
  std::size_t offset[kQueries];  ///< of its floats in tile.query and tile.out
};

/// One split as kQueries queries see it: the blocks between the first and the last visible position
/// of any query. Scores and positions count from the first of these blocks.
template <std::size_t kQueries>
struct Split {
  std::size_t first_block;
  std::size_t blocks;
  std::size_t begin[kQueries];  ///< a query sees positions [begin, end), none if they are equal
  std::size_t end[kQueries];
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

/// What the loops over keys and values multiply. A lane of a product takes kWidth neighbouring
/// elements of K (dimensions) or V (positions), and as many of a query or of probabilities.
/// PairProducts (attention_bf16-inl.h) is the other one.
template <typename T>
struct FloatProducts {
  using Element = T;
  using Factor = float;  ///< of queries and probabilities
  using Lanes = Vec;
  static constexpr std::size_t kWidth = 1;

  static Lanes elements(const Element* from) { return load(from); }
  static Lanes factor(const Factor* from) { return splat(*from); }
  static Vec multiply_add(const Vec& acc, const Lanes& elements, const Lanes& factor) {
    return fma(factor, elements, acc);
  }
};

/// Scores of kQueries queries, [head_dim / kWidth, kMaxAttentionQueries, kWidth], against kBlocks
/// blocks of 16 positions.
template <typename Products, std::size_t kQueries, std::size_t kBlocks>
void score_blocks(const KvView<typename Products::Element>& kv, std::size_t block,
                  const typename Products::Factor* query, float* scores) {
  const typename Products::Element* k[kBlocks];
#pragma GCC unroll 8
  for (std::size_t b = 0; b < kBlocks; ++b) {
    k[b] = kv.k_block(block + b);
  }
  Vec acc[kQueries][kBlocks];
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kQueries; ++i) {
#pragma GCC unroll 8
    for (std::size_t b = 0; b < kBlocks; ++b) {
      acc[i][b] = zero();
    }
  }
  for (std::size_t d = 0; d < kv.head_dim; d += Products::kWidth) {
    typename Products::Lanes key[kBlocks];
#pragma GCC unroll 8
    for (std::size_t b = 0; b < kBlocks; ++b) {
      key[b] = Products::elements(k[b] + d * kLanes);
    }
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kQueries; ++i) {
      const auto q = Products::factor(query + i * Products::kWidth);
#pragma GCC unroll 8
      for (std::size_t b = 0; b < kBlocks; ++b) {
        acc[i][b] = Products::multiply_add(acc[i][b], key[b], q);
      }
    }
    query += kMaxAttentionQueries * Products::kWidth;
  }
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kQueries; ++i) {
#pragma GCC unroll 8
    for (std::size_t b = 0; b < kBlocks; ++b) {
      store(scores + i * kAttentionSplit + b * kLanes, acc[i][b]);
    }
  }
}

/// Scores of all positions of a split's blocks.
template <typename Products, std::size_t kQueries>
void score_split(const KvView<typename Products::Element>& kv, const Split<kQueries>& split,
                 const typename Products::Factor* query, float* scores) {
  std::size_t block = 0;
  for (; block + kTileBlocks <= split.blocks; block += kTileBlocks) {
    score_blocks<Products, kQueries, kTileBlocks>(kv, split.first_block + block, query,
                                                  scores + block * kLanes);
  }
  for (; block < split.blocks; ++block) {
    score_blocks<Products, kQueries, 1>(kv, split.first_block + block, query,
                                        scores + block * kLanes);
  }
}

/// out[i][d..d + 16 kDims) continued over positions [begin, end), counted from block `first_block`;
/// begin and end are multiples of kWidth.
template <typename Products, std::size_t kQueries, std::size_t kDims>
void weigh_values(const KvView<typename Products::Element>& kv, std::size_t first_block,
                  std::size_t begin, std::size_t end, std::size_t d,
                  const typename Products::Factor* weights, float* out) {
  Vec acc[kQueries][kDims];
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kQueries; ++i) {
#pragma GCC unroll 8
    for (std::size_t n = 0; n < kDims; ++n) {
      acc[i][n] = load(out + i * kv.head_dim + d + n * kLanes);
    }
  }
  for (std::size_t t = begin; t < end;) {
    const std::size_t in_block = t % kKvBlockTokens;
    std::size_t run = kKvBlockTokens - in_block;
    run = end - t < run ? end - t : run;
    const auto* v = kv.v_block(first_block + t / kKvBlockTokens) + in_block * kv.head_dim +
                    d * Products::kWidth;
    const auto* p = weights + t;
    for (std::size_t j = 0; j < run; j += Products::kWidth) {
      typename Products::Lanes value[kDims];
#pragma GCC unroll 8
      for (std::size_t n = 0; n < kDims; ++n) {
        value[n] = Products::elements(v + n * kLanes * Products::kWidth);
      }
#pragma GCC unroll 8
      for (std::size_t i = 0; i < kQueries; ++i) {
        const auto weight = Products::factor(p + i * kAttentionSplit + j);
#pragma GCC unroll 8
        for (std::size_t n = 0; n < kDims; ++n) {
          acc[i][n] = Products::multiply_add(acc[i][n], value[n], weight);
        }
      }
      v += kv.head_dim * Products::kWidth;
    }
    t += run;
  }
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kQueries; ++i) {
#pragma GCC unroll 8
    for (std::size_t n = 0; n < kDims; ++n) {
      store(out + i * kv.head_dim + d + n * kLanes, acc[i][n]);
    }
  }
}

template <typename Products, std::size_t kQueries>
void weigh_all_dims(const KvView<typename Products::Element>& kv, std::size_t first_block,
                    std::size_t begin, std::size_t end, const typename Products::Factor* weights,
                    float* out) {
  std::size_t d = 0;
  for (; d + kTileDims * kLanes <= kv.head_dim; d += kTileDims * kLanes) {
    weigh_values<Products, kQueries, kTileDims>(kv, first_block, begin, end, d, weights, out);
  }
  for (; d < kv.head_dim; d += kLanes) {
    weigh_values<Products, kQueries, 1>(kv, first_block, begin, end, d, weights, out);
  }
}

struct SplitSoftmax {
  float max;
  float sum;
};

/// Scores of one query over positions [begin, end), not none, of a split become exp(s - max).
/// Positions of the first block before `begin` become 0.
SplitSoftmax softmax_split(float* scores, std::size_t begin, std::size_t end) {
  const float lowest = -__builtin_inff();
  const std::size_t hidden = begin % kLanes;
  scores += begin - hidden;
  for (std::size_t t = 0; t < hidden; ++t) {
    scores[t] = lowest;
  }
  const std::size_t count = end - (begin - hidden);
  Vec largest = splat(lowest);
  for_lanes(
      count, [&](std::size_t t) { largest = max(largest, load(scores + t)); },
      [&](std::size_t t, std::size_t rest) {
        largest = max(largest, keep_first(load(scores + t), rest, lowest));
      });
  const float top = reduce_max(largest);
  const Vec shift = splat(top);
  Vec sum = zero();
  const auto visit = [&](std::size_t t, const Vec& p) {
    store(scores + t, p);
    sum = add(sum, p);
  };
  for_lanes(
      count, [&](std::size_t t) { visit(t, exp(sub(load(scores + t), shift))); },
      [&](std::size_t t, std::size_t rest) {
        visit(t, keep_first(exp(sub(load(scores + t), shift)), rest, 0.0f));
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

/// How float and half KV turn a split into scores and weighted values.
template <typename T>
struct FloatSplits {
  using Element = T;
  using Products = FloatProducts<T>;

  FloatSplits(AttentionWork&) {}

  template <std::size_t kQueries>
  void begin(const AttentionTile& tile, const TileQueries<kQueries>& queries, AttentionWork& work) {
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kQueries; ++i) {
      for (std::size_t d = 0; d < tile.head_dim; ++d) {
        work.query[d * kMaxAttentionQueries + i] = tile.query[queries.offset[i] + d] * tile.scale;
      }
    }
  }

  template <std::size_t kQueries>
  void scores(const KvView<T>& kv, const Split<kQueries>& split, AttentionWork& work) {
    score_split<Products>(kv, split, work.query, work.scores);
  }

  /// Positions that all queries see go through together, a query's first and last ones alone.
  template <std::size_t kQueries>
  void values(const KvView<T>& kv, const Split<kQueries>& split, AttentionWork& work) {
    for (std::size_t at = 0; at < kQueries * kv.head_dim; at += kLanes) {
      store(work.partial + at, zero());
    }
    const auto alone = [&](std::size_t i, std::size_t begin, std::size_t end) {
      if (begin < end) {
        weigh_all_dims<Products, 1>(kv, split.first_block, begin, end,
                                    work.scores + i * kAttentionSplit,
                                    work.partial + i * kv.head_dim);
      }
    };
    const std::size_t common = split.begin[kQueries - 1];
    const std::size_t common_end = split.end[0] > common ? split.end[0] : common;
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kQueries; ++i) {
      alone(i, split.begin[i], split.end[i] < common ? split.end[i] : common);
    }
    weigh_all_dims<Products, kQueries>(kv, split.first_block, common, common_end, work.scores,
                                       work.partial);
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kQueries; ++i) {
      alone(i, common_end, split.end[i]);
    }
  }
};

}  // namespace
}  // namespace pocket::POCKET_ISA
