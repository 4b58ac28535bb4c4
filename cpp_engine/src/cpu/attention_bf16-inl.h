// Attention over bfloat16 KV: queries, probabilities, keys and values in bfloat16, sums in float
// (docs/kernels.md has the formulas). On CPUs with AVX512_BF16 two multiply-adds are one lane of
// one instruction.
//
// A K block is [head_dim / 2, 16 positions, 2 dims], a V block [8 pairs, head_dim, 2 positions], so
// that a vector of pairs gives 16 positions of K, or 16 dimensions of V. Which positions make a
// pair is counted from position 0 whatever the tile; the half of a pair that a query does not see
// is masked out, since the cache may hold a NaN there.

#include "attention_scratch.h"
#include "pocket/cpu/kernels.h"

namespace pocket::POCKET_ISA {
namespace {

constexpr std::uint32_t kEvenHalf = 0x0000ffffu;
constexpr std::uint32_t kOddHalf = 0xffff0000u;
constexpr std::uint32_t kWholePair = 0xffffffffu;

void kv_write_bf16(const float* k, const float* v, std::size_t head_dim, std::size_t offset,
                   std::uint16_t* keys, std::uint16_t* values) {
  std::uint16_t key[kLanes];
  std::uint16_t value[kLanes];
  for (std::size_t d = 0; d < head_dim; d += kLanes) {
    store_bfloat16<false>(key, load(k + d));
    store_bfloat16<false>(value, load(v + d));
    for (std::size_t i = 0; i < kLanes; ++i) {
      keys[((d + i) / 2 * kKvBlockTokens + offset) * 2 + i % 2] = key[i];
      values[(offset / 2 * head_dim + d + i) * 2 + offset % 2] = value[i];
    }
  }
}

/// Two products a lane; kMask hides one half of every pair. The counterpart of FloatProducts.
template <bool kInstruction, std::uint32_t kMask>
struct PairProducts {
  using Element = std::uint16_t;
  using Factor = std::uint16_t;
  using Lanes = Pairs;
  static constexpr std::size_t kWidth = 2;

  static Lanes elements(const Element* from) { return keep_bits<kMask>(load_pairs(from)); }
  static Lanes factor(const Factor* from) { return keep_bits<kMask>(splat_pair(from)); }
  static Vec multiply_add(const Vec& acc, const Lanes& elements, const Lanes& factor) {
    return pair_dot_add<kInstruction>(acc, elements, factor);
  }
};

/// The bfloat16 counterpart of FloatSplits (attention-inl.h).
template <bool kInstruction>
struct Bf16Splits {
  using Element = std::uint16_t;
  using WholePairs = PairProducts<kInstruction, kWholePair>;

  std::uint16_t* query;    ///< [head_dim / 2, kMaxAttentionQueries, 2], scaled
  std::uint16_t* weights;  ///< [kMaxAttentionQueries, kAttentionSplit]: probabilities

  Bf16Splits(AttentionWork& shared)
      : query(reinterpret_cast<std::uint16_t*>(shared.query)),
        weights(reinterpret_cast<std::uint16_t*>(shared.codes)) {}

  template <std::size_t kQueries>
  void begin(const AttentionTile& tile, const TileQueries<kQueries>& queries, AttentionWork&) {
    const Vec scale = splat(tile.scale);
    std::uint16_t values[kLanes];
    for (std::size_t i = 0; i < kQueries; ++i) {
      for (std::size_t d = 0; d < tile.head_dim; d += kLanes) {
        store_bfloat16<kInstruction>(values, mul(load(tile.query + queries.offset[i] + d), scale));
        for (std::size_t j = 0; j < kLanes; ++j) {
          query[((d + j) / 2 * kMaxAttentionQueries + i) * 2 + j % 2] = values[j];
        }
      }
    }
  }

  template <std::size_t kQueries>
  void scores(const KvView<Element>& kv, const Split<kQueries>& split, AttentionWork& work) {
    score_split<WholePairs>(kv, split, query, work.scores);
  }

  /// As in FloatSplits, what all queries see goes through together, in whole pairs.
  template <std::size_t kQueries>
  void values(const KvView<Element>& kv, const Split<kQueries>& split, AttentionWork& work) {
    for (std::size_t at = 0; at < kQueries * kv.head_dim; at += kLanes) {
      store(work.partial + at, zero());
    }
    for (std::size_t i = 0; i < kQueries; ++i) {
      const float* p = work.scores + i * kAttentionSplit;
      for (std::size_t t = split.begin[i] / kLanes * kLanes; t < split.end[i]; t += kLanes) {
        store_bfloat16<kInstruction>(weights + i * kAttentionSplit + t, load(p + t));
      }
    }
    const std::size_t common = (split.begin[kQueries - 1] + 1) / 2 * 2;
    const std::size_t even_end = split.end[0] / 2 * 2;
    const std::size_t common_end = even_end > common ? even_end : common;
    for (std::size_t i = 0; i < kQueries; ++i) {
      alone(kv, split.first_block, i, split.begin[i], split.end[i] < common ? split.end[i] : common,
            work);
    }
    weigh_all_dims<WholePairs, kQueries>(kv, split.first_block, common, common_end, weights,
                                         work.partial);
    for (std::size_t i = 0; i < kQueries; ++i) {
      alone(kv, split.first_block, i, common_end, split.end[i], work);
    }
  }

 private:
  template <std::uint32_t kMask>
  void weigh(const KvView<Element>& kv, std::size_t first_block, std::size_t i, std::size_t begin,
             std::size_t end, AttentionWork& work) {
    weigh_all_dims<PairProducts<kInstruction, kMask>, 1>(
        kv, first_block, begin, end, weights + i * kAttentionSplit, work.partial + i * kv.head_dim);
  }

  /// Positions [begin, end) of query i: a lone odd one, whole pairs, a lone even one.
  void alone(const KvView<Element>& kv, std::size_t first_block, std::size_t i, std::size_t begin,
             std::size_t end, AttentionWork& work) {
    if (begin >= end) {
      return;
    }
    if (begin % 2 == 1) {
      weigh<kOddHalf>(kv, first_block, i, begin - 1, begin + 1, work);
      ++begin;
    }
    const std::size_t whole = end / 2 * 2;
    if (begin < whole) {
      weigh<kWholePair>(kv, first_block, i, begin, whole, work);
    }
    if (end % 2 == 1 && end > begin) {
      weigh<kEvenHalf>(kv, first_block, i, whole, end + 1, work);
    }
  }
};

}  // namespace
}  // namespace pocket::POCKET_ISA
