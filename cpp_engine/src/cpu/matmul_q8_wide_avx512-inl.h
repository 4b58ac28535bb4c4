// Integer matmul for many rows: 4 rows by 3 (or 2) panels at a time, from unpacked codes.
//
// The tile of matmul_q8_avx512-inl.h loads one group of activations per dot product. Cores that
// start two 512-bit dot products and two loads per cycle (Intel from Ice Lake on) then wait for
// loads (docs/kernels.md). Here 12 dot products share 7 loads. What makes room for that is
// unpacking beforehand: `kWideBlocks` blocks of 3 panels become bytes and floats in a buffer in L1,
// once for all rows.
//
// The order of the float operations is the oracle's: a chain that is cut at the end of a buffer
// continues from y.

#include <immintrin.h>

#include "pocket/cpu/kernels.h"
#include "tables.h"

namespace pocket::POCKET_ISA {
namespace {

constexpr std::size_t kWideRows = 4;
/// Fewer rows do not pay for the unpacking.
constexpr std::size_t kWideFromRows = 12;
/// 8 blocks of 3 panels are 15 KiB; with 64 rows' activations for them, 31 KiB: L1.
constexpr std::size_t kWideBlocks = 8;
static_assert(kRowGroup % kWideRows == 0);

/// A block of kPanels panels, unpacked.
template <std::size_t kPanels>
struct alignas(64) WideBlock {
  std::uint8_t codes[8][kPanels][64];
  float scale[kPanels][kPanelRows];
  float min[kPanels][kPanelRows];
};

/// Weights of the next buffer, pulled into L2 a few lines per block of the present one: all at once
/// they would fill the core's miss buffers and hold up the dot products.
template <std::size_t kPanels>
struct WeightsAhead {
  const std::uint8_t* at;  ///< in the first panel
  std::size_t panel_bytes;
  std::size_t lines;  ///< left, per panel
  std::size_t per_block;

  void pull() {
    for (std::size_t line = 0; line < per_block && lines > 0; ++line, --lines, at += 64) {
#pragma GCC unroll 4
      for (std::size_t panel = 0; panel < kPanels; ++panel) {
        _mm_prefetch(reinterpret_cast<const char*>(at + panel * panel_bytes), _MM_HINT_T1);
      }
    }
  }
};

/// What a tile reads of its weights: consecutive blocks of kPanels panels.
template <std::size_t kPanels>
struct WideBuffer {
  WideBlock<kPanels> blocks[kWideBlocks];
  std::size_t count;
  bool first;  ///< its blocks are the first ones: sums start from zero, not from y
  WeightsAhead<kPanels> ahead;
};

template <PackedLayout kLayout, std::size_t kPanels>
void unpack_wide(const std::uint8_t* weights, std::size_t panel_bytes, WideBuffer<kPanels>& out) {
  for (std::size_t panel = 0; panel < kPanels; ++panel) {
    const std::uint8_t* from = weights + panel * panel_bytes;
    for (std::size_t block = 0; block < out.count; ++block) {
      WideBlock<kPanels>& to = out.blocks[block];
#pragma GCC unroll 8
      for (std::size_t group = 0; group < 8; ++group) {
        _mm512_store_si512(to.codes[group][panel],
                           load_codes<kLayout>(from + kScaleBytes<kLayout>, group));
      }
      _mm512_store_ps(to.scale[panel], load_halves(from));
      if constexpr (kHasMin<kLayout>) {
        _mm512_store_ps(to.min[panel], load_halves(from + 32));
      }
      from += kBlockBytes<kLayout>;
    }
  }
}

/// kRows rows of a group by kPanels panels over the buffer's blocks. kHeight is the group's height,
/// so that addresses are constants; 0: any height.
template <PackedLayout kLayout, std::size_t kPanels, std::size_t kRows, std::size_t kHeight>
[[gnu::noinline]] void wide_tile(WideBuffer<kPanels>& weights, const ActivationTile& x, float* y,
                                 std::size_t ldy) {
  const std::size_t height = kHeight == 0 ? x.height : kHeight;
  const std::int8_t* q = x.q;
  const float* scale = x.scale;
  const float* scaled_sum = x.scaled_sum;
  const std::int32_t* negative_sum = x.negative_sum;
  __m512 acc[kRows][kPanels];
#pragma GCC unroll 4
  for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (std::size_t p = 0; p < kPanels; ++p) {
      acc[r][p] =
          weights.first ? _mm512_setzero_ps() : _mm512_loadu_ps(y + r * ldy + p * kPanelRows);
    }
  }
  for (std::size_t block = 0; block < weights.count; ++block) {
    weights.ahead.pull();
    const WideBlock<kPanels>& w = weights.blocks[block];
    __m512i dot[kRows][kPanels];
#pragma GCC unroll 4
    for (std::size_t r = 0; r < kRows; ++r) {
      __m512i start = _mm512_setzero_si512();
      if constexpr (!kHasMin<kLayout>) {
        start =
            _mm512_slli_epi32(_mm512_set1_epi32(negative_sum[r]), kNibbleCodes<kLayout> ? 3 : 7);
      }
#pragma GCC unroll 4
      for (std::size_t p = 0; p < kPanels; ++p) {
        dot[r][p] = start;
      }
    }
#pragma GCC unroll 8
    for (std::size_t group = 0; group < 8; ++group) {
      __m512i codes[kPanels];
#pragma GCC unroll 4
      for (std::size_t p = 0; p < kPanels; ++p) {
        codes[p] = _mm512_load_si512(w.codes[group][p]);
      }
#pragma GCC unroll 4
      for (std::size_t r = 0; r < kRows; ++r) {
        const __m512i activations = splat_group(q + 4 * (group * height + r));
#pragma GCC unroll 4
        for (std::size_t p = 0; p < kPanels; ++p) {
          dot[r][p] = dot_add(dot[r][p], codes[p], activations);
        }
      }
    }
#pragma GCC unroll 4
    for (std::size_t r = 0; r < kRows; ++r) {
      const __m512 row_scale = _mm512_set1_ps(scale[r]);
#pragma GCC unroll 4
      for (std::size_t p = 0; p < kPanels; ++p) {
        const __m512 scaled =
            _mm512_mul_ps(_mm512_cvtepi32_ps(dot[r][p]), _mm512_load_ps(w.scale[p]));
        acc[r][p] = _mm512_fmadd_ps(scaled, row_scale, acc[r][p]);
        if constexpr (kHasMin<kLayout>) {
          acc[r][p] =
              _mm512_fmadd_ps(_mm512_load_ps(w.min[p]), _mm512_set1_ps(scaled_sum[r]), acc[r][p]);
        }
      }
    }
    q += kQuantBlock * height;
    scale += height;
    scaled_sum += height;
    negative_sum += height;
  }
#pragma GCC unroll 4
  for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (std::size_t p = 0; p < kPanels; ++p) {
      _mm512_storeu_ps(y + r * ldy + p * kPanelRows, acc[r][p]);
    }
  }
}

/// The rows of a group.
template <PackedLayout kLayout, std::size_t kPanels>
void wide_group(WideBuffer<kPanels>& weights, const ActivationTile& x, float* y, std::size_t ldy) {
  std::size_t lane = 0;
  if (x.height == kRowGroup) {
    for (; lane < kRowGroup; lane += kWideRows) {
      wide_tile<kLayout, kPanels, kWideRows, kRowGroup>(weights, lanes_from(x, lane),
                                                        y + lane * ldy, ldy);
    }
  }
  for (; lane + 2 <= x.height; lane += 2) {
    wide_tile<kLayout, kPanels, 2, 0>(weights, lanes_from(x, lane), y + lane * ldy, ldy);
  }
  if (lane < x.height) {
    wide_tile<kLayout, kPanels, 1, 0>(weights, lanes_from(x, lane), y + lane * ldy, ldy);
  }
}

/// Rows [begin, end) of x by the kPanels panels at `weights`; y is theirs.
template <PackedLayout kLayout, std::size_t kPanels>
void wide_panels(const std::uint8_t* weights, std::size_t panel_bytes, const QuantisedRows& x,
                 std::size_t begin, std::size_t end, float* y, std::size_t ldy) {
  constexpr std::size_t kBlock = kBlockBytes<kLayout>;
  const std::size_t blocks = x.columns / kQuantBlock;
  const std::size_t tiles = (end - begin + kWideRows - 1) / kWideRows;
  WideBuffer<kPanels> buffer;
  for (std::size_t block = 0; block < blocks; block += kWideBlocks) {
    const std::uint8_t* from = weights + block * kBlock;
    buffer.count = blocks - block < kWideBlocks ? blocks - block : kWideBlocks;
    buffer.first = block == 0;
    const std::size_t left = blocks - block - buffer.count;
    const std::size_t next = left > 0 ? left : blocks;
    buffer.ahead = {
        .at = left > 0 ? from + buffer.count * kBlock : weights + kPanels * panel_bytes,
        .panel_bytes = panel_bytes,
        .lines = (next < kWideBlocks ? next : kWideBlocks) * kBlock / 64 + 1,
        .per_block = (kBlock / 64 + tiles) / tiles,
    };
    unpack_wide<kLayout, kPanels>(from, panel_bytes, buffer);
    for (std::size_t group = begin; group < end; group += kRowGroup) {
      const std::size_t height = end - group < kRowGroup ? end - group : kRowGroup;
      wide_group<kLayout, kPanels>(buffer, tile_from_block(tile_at(x, group, height, 0), block),
                                   y + group * ldy, ldy);
    }
  }
}

}  // namespace
}  // namespace pocket::POCKET_ISA
