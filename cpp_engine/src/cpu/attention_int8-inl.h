// Attention over int8 KV: all products are integer and exact (docs/kernels.md has the formulas).
//
// A block is bytes: K as [head_dim / 4, 16 positions, 4 dims] codes offset by 128, V as [4 groups,
// head_dim, 4 positions] codes, each followed by 16 float scales, one per position. So one dot
// product instruction takes 4 dims of 16 positions of K, or 4 positions of 16 dims of V.
//
// Probabilities times V's scales become 16-bit codes against their maximum in the split, split into
// a high and a low byte plane. A position that a query does not see has code 0: it adds nothing,
// whatever the cache holds there.

#include "attention_scratch.h"
#include "pocket/cpu/kernels.h"

namespace pocket::POCKET_ISA {
namespace {

constexpr float kProbabilityCodes = 65535.0f;
/// Below this maximum, 65535 / max is not finite: the split counts as zero.
constexpr std::uint32_t kSmallestMaxBits = 0x08000000u;  // 2^-111

struct Int8Work {
  std::int8_t* query;   ///< [head_dim / 4, kMaxAttentionQueries, 4] codes
  std::uint8_t* codes;  ///< [kMaxAttentionQueries, 2, kAttentionSplit]: high and low bytes
  float query_scale[kMaxAttentionQueries];
  std::int32_t query_sum[kMaxAttentionQueries];
};

/// The scale of values with this largest magnitude, and its inverse; 0 and 0 for (almost) zero
/// values, NaN and 0 for a NaN or an infinity.
struct CodeScale {
  float scale;
  float inverse;
};
CodeScale code_scale(std::uint32_t bits, float codes, std::uint32_t smallest) {
  float largest;
  __builtin_memcpy(&largest, &bits, sizeof largest);
  if (bits >= kInfinityBits) {
    return {__builtin_nanf(""), 0.0f};
  }
  return bits < smallest ? CodeScale{0.0f, 0.0f} : CodeScale{largest / codes, codes / largest};
}

/// n (a multiple of 16) values as int8 codes; returns the scale, writes the sum of the codes.
template <typename Values>
float quantise_head(std::size_t n, Values values, std::int8_t* codes, std::int32_t* sum) {
  Vec largest = zero();
  for (std::size_t d = 0; d < n; d += kLanes) {
    largest = larger_magnitude(largest, values(d));
  }
  const CodeScale result = code_scale(max_magnitude(largest, largest), 127.0f, kSmallestBlockBits);
  const Vec inverse = splat(result.inverse);
  *sum = 0;
  for (std::size_t d = 0; d < n; d += kLanes) {
    // A head with a NaN or infinity has no codes to speak of; its scale is NaN.
    const Vec scaled = result.scale == result.scale ? mul(values(d), inverse) : zero();
    *sum += store_signed_codes(codes + d, scaled);
  }
  return result.scale;
}

void kv_write_int8(const float* k, const float* v, std::size_t head_dim, std::size_t offset,
                   void* k_block, void* v_block) {
  std::int8_t codes[kMaxHeadDim];
  std::int32_t sum;
  auto* keys = static_cast<std::uint8_t*>(k_block);
  const float k_scale =
      quantise_head(head_dim, [&](std::size_t d) { return load(k + d); }, codes, &sum);
  for (std::size_t d = 0; d < head_dim; ++d) {
    keys[(d / 4 * kKvBlockTokens + offset) * 4 + d % 4] = static_cast<std::uint8_t>(codes[d] + 128);
  }
  __builtin_memcpy(keys + head_dim * kKvBlockTokens + 4 * offset, &k_scale, sizeof k_scale);

  auto* values = static_cast<std::int8_t*>(v_block);
  const float v_scale =
      quantise_head(head_dim, [&](std::size_t d) { return load(v + d); }, codes, &sum);
  for (std::size_t d = 0; d < head_dim; ++d) {
    values[(offset / 4 * head_dim + d) * 4 + offset % 4] = codes[d];
  }
  __builtin_memcpy(values + head_dim * kKvBlockTokens + 4 * offset, &v_scale, sizeof v_scale);
}

inline const float* block_scales(const std::uint8_t* block, std::size_t head_dim) {
  return reinterpret_cast<const float*>(block + head_dim * kKvBlockTokens);
}

/// s[t] = float(q . k[t]) * (q scale * k scale) for kQueries queries, kBlocks blocks.
template <std::size_t kQueries, std::size_t kBlocks>
void score_blocks_int8(const KvView<std::uint8_t>& kv, std::size_t block, const Int8Work& work,
                       float* scores) {
  const std::uint8_t* k[kBlocks];
#pragma GCC unroll 8
  for (std::size_t b = 0; b < kBlocks; ++b) {
    k[b] = kv.k_block(block + b);
  }
  Ints acc[kQueries][kBlocks];
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kQueries; ++i) {
#pragma GCC unroll 8
    for (std::size_t b = 0; b < kBlocks; ++b) {
      acc[i][b] = splat_int(0);
    }
  }
  const std::int8_t* query = work.query;
  for (std::size_t d = 0; d < kv.head_dim; d += 4) {
    Bytes key[kBlocks];
#pragma GCC unroll 8
    for (std::size_t b = 0; b < kBlocks; ++b) {
      key[b] = load_bytes(k[b] + d * kKvBlockTokens);
    }
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kQueries; ++i) {
      const Bytes q = splat_group(query + 4 * i);
#pragma GCC unroll 8
      for (std::size_t b = 0; b < kBlocks; ++b) {
        acc[i][b] = dot_add(acc[i][b], key[b], q);
      }
    }
    query += 4 * kMaxAttentionQueries;
  }
#pragma GCC unroll 8
  for (std::size_t b = 0; b < kBlocks; ++b) {
    const Vec key_scale = load(block_scales(k[b], kv.head_dim));
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kQueries; ++i) {
      const Vec dot = to_float(sub(acc[i][b], splat_int(128 * work.query_sum[i])));
      store(scores + i * kAttentionSplit + b * kLanes,
            mul(dot, mul(splat(work.query_scale[i]), key_scale)));
    }
  }
}

/// Turns exp(s - max) of one query over positions [begin, end) into code planes of p * v scale;
/// returns the codes' scale. The codes of other positions in `blocks` blocks are 0.
float encode_probabilities(const KvView<std::uint8_t>& kv, std::size_t first_block,
                           std::size_t begin, std::size_t end, std::size_t blocks, float* p,
                           std::uint8_t* codes) {
  Vec largest = zero();
  for (std::size_t b = begin / kLanes; b * kLanes < end; ++b) {
    const Vec scale = load(block_scales(kv.v_block(first_block + b), kv.head_dim));
    Vec scaled = mul(load(p + b * kLanes), scale);
    if (end - b * kLanes < kLanes) {
      scaled = keep_first(scaled, end - b * kLanes, 0.0f);
    }
    store(p + b * kLanes, scaled);
    if (b * kLanes < begin) {  // a scale there may be NaN
      for (std::size_t t = b * kLanes; t < begin; ++t) {
        p[t] = 0.0f;
      }
      scaled = load(p + b * kLanes);
    }
    largest = larger_magnitude(largest, scaled);
  }
  const CodeScale result =
      code_scale(max_magnitude(largest, largest), kProbabilityCodes, kSmallestMaxBits);
  const bool usable = result.scale == result.scale;
  const Vec inverse = splat(result.inverse);
  for (std::size_t b = 0; b < blocks; ++b) {
    const bool seen = begin < (b + 1) * kLanes && b * kLanes < end && usable;
    store_split_codes(codes + b * kLanes, codes + kAttentionSplit + b * kLanes,
                      seen ? mul(load(p + b * kLanes), inverse) : zero());
  }
  return result.scale;
}

/// acc[i][n] += codes . V over the split's blocks, for one byte plane. Inlined by force: behind a
/// reference the accumulators would live in memory, since bytes may alias them.
template <std::size_t kQueries, std::size_t kDims>
[[gnu::always_inline]] inline void value_dots(const KvView<std::uint8_t>& kv,
                                              std::size_t first_block, std::size_t blocks,
                                              std::size_t d, const std::uint8_t* codes,
                                              Ints (&acc)[kQueries][kDims]) {
  for (std::size_t b = 0; b < blocks; ++b) {
    const std::uint8_t* v = kv.v_block(first_block + b) + 4 * d;
#pragma GCC unroll 4
    for (std::size_t group = 0; group < kKvBlockTokens / 4; ++group) {
      Bytes value[kDims];
#pragma GCC unroll 8
      for (std::size_t n = 0; n < kDims; ++n) {
        value[n] = load_bytes(v + 4 * n * kLanes);
      }
#pragma GCC unroll 8
      for (std::size_t i = 0; i < kQueries; ++i) {
        const Bytes p = splat_group(codes + i * 2 * kAttentionSplit + 4 * group);
#pragma GCC unroll 8
        for (std::size_t n = 0; n < kDims; ++n) {
          acc[i][n] = dot_add(acc[i][n], p, value[n]);
        }
      }
      v += 4 * kv.head_dim;
    }
    codes += kKvBlockTokens;
  }
}

/// out[i][d..d + 16 kDims) = float(sum over the split of code * v) * scale[i]. The sum is at most
/// 65,535 * 127 * 256 < 2^31.
template <std::size_t kQueries, std::size_t kDims>
void weigh_values_int8(const KvView<std::uint8_t>& kv, std::size_t first_block, std::size_t blocks,
                       std::size_t d, const std::uint8_t* codes, const float* scale, float* out) {
  Ints acc[kQueries][kDims];
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kQueries; ++i) {
#pragma GCC unroll 8
    for (std::size_t n = 0; n < kDims; ++n) {
      acc[i][n] = splat_int(0);
    }
  }
  value_dots(kv, first_block, blocks, d, codes, acc);
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kQueries; ++i) {
#pragma GCC unroll 8
    for (std::size_t n = 0; n < kDims; ++n) {
      acc[i][n] = times_256(acc[i][n]);
    }
  }
  value_dots(kv, first_block, blocks, d, codes + kAttentionSplit, acc);
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kQueries; ++i) {
#pragma GCC unroll 8
    for (std::size_t n = 0; n < kDims; ++n) {
      store(out + i * kv.head_dim + d + n * kLanes, mul(to_float(acc[i][n]), splat(scale[i])));
    }
  }
}

template <std::size_t kQueries>
void weigh_all_dims_int8(const KvView<std::uint8_t>& kv, std::size_t first_block,
                         std::size_t blocks, const std::uint8_t* codes, const float* scale,
                         float* out) {
  std::size_t d = 0;
  for (; d + kTileDims * kLanes <= kv.head_dim; d += kTileDims * kLanes) {
    weigh_values_int8<kQueries, kTileDims>(kv, first_block, blocks, d, codes, scale, out);
  }
  for (; d < kv.head_dim; d += kLanes) {
    weigh_values_int8<kQueries, 1>(kv, first_block, blocks, d, codes, scale, out);
  }
}

/// The queries of one piece of a tile, as codes in groups of 4 dims.
template <std::size_t kQueries>
void encode_queries(const AttentionTile& tile, const TileQueries<kQueries>& queries,
                    Int8Work& work) {
  const Vec scale = splat(tile.scale);
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kQueries; ++i) {
    std::int8_t codes[kMaxHeadDim];
    const float* query = tile.query + queries.offset[i];
    work.query_scale[i] = quantise_head(
        tile.head_dim, [&](std::size_t d) { return mul(load(query + d), scale); }, codes,
        &work.query_sum[i]);
    for (std::size_t d = 0; d < tile.head_dim; d += 4) {
      __builtin_memcpy(work.query + d * kMaxAttentionQueries + 4 * i, codes + d, 4);
    }
  }
}

/// The int8 counterpart of FloatSplits (attention-inl.h).
struct Int8Splits {
  using Element = std::uint8_t;
  Int8Work work;

  Int8Splits(AttentionWork& shared)
      : work{reinterpret_cast<std::int8_t*>(shared.query),
             reinterpret_cast<std::uint8_t*>(shared.codes),
             {},
             {}} {}

  template <std::size_t kQueries>
  void begin(const AttentionTile& tile, const TileQueries<kQueries>& queries, AttentionWork&) {
    encode_queries(tile, queries, work);
  }

  template <std::size_t kQueries>
  void scores(const KvView<Element>& kv, const Split<kQueries>& split, AttentionWork& shared) {
    std::size_t block = 0;
    for (; block + kTileBlocks <= split.blocks; block += kTileBlocks) {
      score_blocks_int8<kQueries, kTileBlocks>(kv, split.first_block + block, work,
                                               shared.scores + block * kLanes);
    }
    for (; block < split.blocks; ++block) {
      score_blocks_int8<kQueries, 1>(kv, split.first_block + block, work,
                                     shared.scores + block * kLanes);
    }
  }

  template <std::size_t kQueries>
  void values(const KvView<Element>& kv, const Split<kQueries>& split, AttentionWork& shared) {
    float scale[kQueries];
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kQueries; ++i) {
      scale[i] = encode_probabilities(kv, split.first_block, split.begin[i], split.end[i],
                                      split.blocks, shared.scores + i * kAttentionSplit,
                                      work.codes + i * 2 * kAttentionSplit);
    }
    weigh_all_dims_int8<kQueries>(kv, split.first_block, split.blocks, work.codes, scale,
                                  shared.partial);
  }
};

}  // namespace
}  // namespace pocket::POCKET_ISA
