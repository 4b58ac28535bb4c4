// Walks a tile of queries split by split; FloatSplits, Bf16Splits and Int8Splits do the work on one
// split.

#include "attention_scratch.h"
#include "pocket/cpu/kernels.h"

namespace pocket::POCKET_ISA {
namespace {

template <std::size_t kQueries, typename Splits>
void attend_queries(const AttentionTile& tile, const KvView<typename Splits::Element>& kv,
                    std::size_t first, AttentionWork& work) {
  TileQueries<kQueries> queries;
  for (std::size_t i = 0; i < kQueries; ++i) {
    const std::size_t row = (first + i) / tile.group;
    const std::size_t end = tile.first_position + row + 1;
    queries.begin[i] = tile.window > 0 && tile.window < end ? end - tile.window : 0;
    queries.end[i] = end;
    queries.offset[i] = row * tile.row_stride + (first + i) % tile.group * tile.head_dim;
  }
  Splits splits(work);
  splits.begin(tile, queries, work);

  // Splits are counted from position 0 whatever the window; the first one loses the blocks that no
  // query sees. The queries' positions overlap or touch, so every later block is seen by one.
  const std::size_t seen = queries.begin[0] / kKvBlockTokens * kKvBlockTokens;
  for (std::size_t at = seen / kAttentionSplit * kAttentionSplit; at < queries.end[kQueries - 1];
       at += kAttentionSplit) {
    const std::size_t begin = at < seen ? seen : at;
    const auto inside = [&](std::size_t position) {
      const std::size_t count = position > begin ? position - begin : 0;
      const std::size_t most = at + kAttentionSplit - begin;
      return count < most ? count : most;
    };
    Split<kQueries> split;
    split.first_block = begin / kKvBlockTokens;
    for (std::size_t i = 0; i < kQueries; ++i) {
      split.begin[i] = inside(queries.begin[i]);
      split.end[i] = inside(queries.end[i]);
    }
    split.blocks = (split.end[kQueries - 1] + kKvBlockTokens - 1) / kKvBlockTokens;

    splits.scores(kv, split, work);
    SplitSoftmax softmax[kQueries];
    for (std::size_t i = 0; i < kQueries; ++i) {
      if (split.begin[i] < split.end[i]) {
        softmax[i] = softmax_split(work.scores + i * kAttentionSplit, split.begin[i], split.end[i]);
      }
    }
    splits.values(kv, split, work);
    for (std::size_t i = 0; i < kQueries; ++i) {
      if (split.begin[i] < split.end[i]) {
        combine_split(work, i, tile.head_dim, softmax[i], at <= queries.begin[i]);
      }
    }
  }

  for (std::size_t i = 0; i < kQueries; ++i) {
    const Vec inverse = splat(1.0f / work.sum[i]);
    for (std::size_t d = 0; d < tile.head_dim; d += kLanes) {
      store(tile.out + queries.offset[i] + d,
            mul(load(work.total + i * tile.head_dim + d), inverse));
    }
  }
}

/// Calls attend_queries with `count` <= kQueries as a compile-time number.
template <std::size_t kQueries, typename Splits>
void attend_count(std::size_t count, const AttentionTile& tile,
                  const KvView<typename Splits::Element>& kv, std::size_t first,
                  AttentionWork& work) {
  if (count == kQueries) {
    attend_queries<kQueries, Splits>(tile, kv, first, work);
  } else if constexpr (kQueries > 1) {
    attend_count<kQueries - 1, Splits>(count, tile, kv, first, work);
  }
}

template <typename Splits>
void attend(const AttentionTile& tile) {
  static_assert(kTileQueries <= kMaxAttentionQueries);
  using Element = typename Splits::Element;
  const KvView<Element> kv{static_cast<const Element*>(tile.k_base),
                           static_cast<const Element*>(tile.v_base), tile.block_stride,
                           tile.block_table, tile.head_dim};
  AttentionWork work;
  work.query = tile.scratch;
  work.scores = work.query + kMaxAttentionQueries * tile.head_dim;
  work.codes = work.scores + kMaxAttentionQueries * kAttentionSplit;
  work.partial = work.codes + kMaxAttentionQueries * kAttentionSplit / 2;
  work.total = work.partial + kMaxAttentionQueries * tile.head_dim;
  const std::size_t queries = tile.rows * tile.group;
  for (std::size_t first = 0; first < queries; first += kTileQueries) {
    const std::size_t count = queries - first < kTileQueries ? queries - first : kTileQueries;
    attend_count<kTileQueries, Splits>(count, tile, kv, first, work);
  }
}

/// kPairInstruction: bfloat16 products by AVX512_BF16 (the same bits but for denormal sums).
template <bool kPairInstruction>
void attention(KvDType type, const AttentionTile& tile) {
  switch (type) {
    case KvDType::kF32:
      attend<FloatSplits<float>>(tile);
      break;
    case KvDType::kF16:
      attend<FloatSplits<std::uint16_t>>(tile);
      break;
    case KvDType::kBF16:
      attend<Bf16Splits<kPairInstruction>>(tile);
      break;
    case KvDType::kI8:
      attend<Int8Splits>(tile);
      break;
  }
}

void kv_write(KvDType type, const float* k, const float* v, std::size_t head_dim,
              std::size_t offset, void* k_block, void* v_block) {
  switch (type) {
    case KvDType::kF32: {
      auto* keys = static_cast<float*>(k_block) + offset;
      auto* values = static_cast<float*>(v_block) + offset * head_dim;
      for (std::size_t d = 0; d < head_dim; ++d) {
        keys[d * kKvBlockTokens] = k[d];
        values[d] = v[d];
      }
      break;
    }
    case KvDType::kF16: {
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
      break;
    }
    case KvDType::kBF16:
      kv_write_bf16(k, v, head_dim, offset, static_cast<std::uint16_t*>(k_block),
                    static_cast<std::uint16_t*>(v_block));
      break;
    case KvDType::kI8:
      kv_write_int8(k, v, head_dim, offset, k_block, v_block);
      break;
  }
}

}  // namespace
}  // namespace pocket::POCKET_ISA
