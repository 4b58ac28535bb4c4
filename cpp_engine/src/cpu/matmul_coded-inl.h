// Integer matmul of the coded layouts, written once over the lanes of an ISA. Per output and block
// of 32 columns, in block order, with exact integer sums:
//   per 32:  dot = sum of (code - offset) * q;  acc = fma(float(dot) * d, scale, acc);
//            with mins also acc = fma(m, scaled_sum, acc);
//   per 16:  t = float(dot0) * d0;  t = fma(float(dot1), d1, t);
//            with mins also t = fma(float(half_bias0), m0, t);  t = fma(float(half_bias1), m1, t);
//            acc = fma(t, scale, acc).
// d and m are coded_blocks-inl.h's.

#include "pocket/cpu/kernels.h"

namespace pocket::POCKET_ISA {
namespace {

/// Some rows of one row group (pocket/cpu/quantised_rows.h), from the first of them on.
struct CodedRows {
  const std::int8_t* q;
  const float* scale;
  const float* scaled_sum;
  const std::int32_t* negative_sum;
  const std::int32_t* half_bias;
  std::size_t blocks;
  std::size_t height;  ///< rows of the group
};

/// From lane `lane` of the group that starts at row `first` on.
inline CodedRows coded_rows_at(const QuantisedRows& x, std::size_t first, std::size_t height,
                               std::size_t lane) {
  const std::size_t blocks = x.columns / kQuantBlock;
  const std::size_t at = first * blocks + lane;
  return {x.q + first * x.columns + 4 * lane,
          x.scale + at,
          x.scaled_sum + at,
          x.negative_sum + at,
          x.half_bias + 2 * first * blocks + lane,
          blocks,
          height};
}

/// As prefetch_weights of matmul_q8_avx512-inl.h: few rows wait for memory and hint into L2, taller
/// tiles pull lines into L1.
template <std::size_t kBytes, std::size_t kRows>
inline void prefetch_block(const std::uint8_t* weights) {
  for (std::size_t line = 0; line < kBytes; line += 64) {
    if constexpr (kRows <= 4) {
      __builtin_prefetch(weights + 512 + line, 0, 2);
    } else {
      __builtin_prefetch(weights + 2048 + line, 0, 3);
    }
  }
}

/// What one block adds to one row; `x` starts at that block and row.
template <PackedLayout kLayout>
inline Vec add_block(Vec acc, const Bytes* w, const BlockScales& s, const CodedRows& x,
                     std::size_t height) {
  const std::size_t step = 4 * height;  // between column groups of q
  const std::int8_t* second = x.q + 4 * step;
  const Ints zeros = splat_int(0);
  if constexpr (kPerHalf<kLayout>) {
    constexpr bool kMins = kCodedMin<kLayout>;
    const Ints bias0 = splat_int(x.half_bias[0]);
    const Ints bias1 = splat_int(x.half_bias[height]);
    const Ints dot0 = dot_half_block<kMaxCode<kLayout>>(kMins ? zeros : bias0, w, x.q, step);
    const Ints dot1 = dot_half_block<kMaxCode<kLayout>>(kMins ? zeros : bias1, w + 4, second, step);
    Vec t = mul(to_float(dot0), s.d[0]);
    t = fma(to_float(dot1), s.d[1], t);
    if constexpr (kMins) {
      t = fma(to_float(bias0), s.m[0], t);
      t = fma(to_float(bias1), s.m[1], t);
    }
    return fma(t, splat(*x.scale), acc);
  } else {
    Ints dot = zeros;
    if constexpr (kIsIq4<kLayout>) {
      if constexpr (kIq4DotHasOffset) {
        dot = times_power<kIq4DotShift>(splat_int(*x.negative_sum));
      }
      dot = add(dot_iq4(dot, w, x.q, step), dot_iq4(zeros, w + 4, second, step));
    } else {
      if constexpr (kOffset<kLayout> > 0) {
        static_assert(kOffset<kLayout> == 16);
        dot = times_power<4>(splat_int(*x.negative_sum));
      }
      dot = add(dot_half_block<kMaxCode<kLayout>>(dot, w, x.q, step),
                dot_half_block<kMaxCode<kLayout>>(zeros, w + 4, second, step));
    }
    acc = fma(mul(to_float(dot), s.d[0]), splat(*x.scale), acc);
    if constexpr (kCodedMin<kLayout>) {
      acc = fma(s.m[0], splat(*x.scaled_sum), acc);
    }
    return acc;
  }
}

/// kRows activation rows by one panel: a block is unpacked once for all of them.
template <PackedLayout kLayout, std::size_t kRows>
void coded_tile(const std::uint8_t* weights, CodedRows x, float* y, std::size_t ldy) {
  constexpr BlockLayout kL = kBlocks<kLayout>;
  // Tiles as tall as groups have constant distances.
  const std::size_t height = kCodedTileRows == kRowGroup ? kRows : x.height;
  Vec acc[kRows];
#pragma GCC unroll 16
  for (std::size_t r = 0; r < kRows; ++r) {
    acc[r] = zero();
  }
  for (std::size_t run = 0; run < x.blocks; run += kL.blocks) {
    const RunScales shared = load_run_scales<kLayout>(weights);
    weights += kL.header_bytes;
    for (std::size_t block = 0; block < kL.blocks; ++block) {
      prefetch_block<kL.block_bytes, kRows>(weights);
      const BlockScales scales = load_block_scales<kLayout>(shared, weights);
      Bytes w[8];
      unpack_codes<kLayout>(weights + kL.scale_bytes, w);
#pragma GCC unroll 16
      for (std::size_t r = 0; r < kRows; ++r) {
        const CodedRows row{x.q + 4 * r,     x.scale + r, x.scaled_sum + r, x.negative_sum + r,
                            x.half_bias + r, x.blocks,    x.height};
        acc[r] = add_block<kLayout>(acc[r], w, scales, row, height);
      }
      weights += kL.block_bytes;
      x.q += kQuantBlock * height;
      x.scale += height;
      x.scaled_sum += height;
      x.negative_sum += height;
      x.half_bias += 2 * height;
    }
  }
#pragma GCC unroll 16
  for (std::size_t r = 0; r < kRows; ++r) {
    store(y + r * ldy, acc[r]);
  }
}

template <PackedLayout kLayout, std::size_t kRows = kCodedTileRows>
void coded_tile_of(std::size_t rows, const std::uint8_t* weights, const CodedRows& x, float* y,
                   std::size_t ldy) {
  if constexpr (kRows > 1) {
    if (rows != kRows) {
      return coded_tile_of<kLayout, kRows - 1>(rows, weights, x, y, ldy);
    }
  }
  coded_tile<kLayout, kRows>(weights, x, y, ldy);
}

void matmul_coded(const PackedMatrix& w, const QuantisedRows& x, std::size_t panel_begin,
                  std::size_t panel_end, float* y, std::size_t ldy) {
  constexpr std::size_t kPassRows = 64;  // activations of a pass stay in L2
  static_assert(kPassRows % kRowGroup == 0);
  const std::size_t panel_bytes = w.panel_bytes();
  const auto* data = reinterpret_cast<const std::uint8_t*>(w.data);
  with_coded_layout(w.layout, [&]<PackedLayout kLayout>() {
    for (std::size_t pass = 0; pass < x.rows; pass += kPassRows) {
      const std::size_t end = x.rows - pass < kPassRows ? x.rows : pass + kPassRows;
      for (std::size_t panel = panel_begin; panel < panel_end; ++panel) {
        for (std::size_t group = pass; group < end; group += kRowGroup) {
          const std::size_t height = end - group < kRowGroup ? end - group : kRowGroup;
          for (std::size_t lane = 0; lane < height; lane += kCodedTileRows) {
            const std::size_t rows =
                height - lane < kCodedTileRows ? height - lane : kCodedTileRows;
            coded_tile_of<kLayout>(rows, data + panel * panel_bytes,
                                   coded_rows_at(x, group, height, lane),
                                   y + (group + lane) * ldy + panel * kPanelRows, ldy);
          }
        }
      }
    }
  });
}

/// `KernelTable::matmul_q8`.
template <bool kWide>
void matmul_integer(const PackedMatrix& w, const QuantisedRows& x, std::size_t panel_begin,
                    std::size_t panel_end, float* y, std::size_t ldy) {
  const bool coded = w.layout >= PackedLayout::kU5Scale && w.layout <= PackedLayout::kU6Sub16;
  (coded ? matmul_coded : matmul_q8<kWide>)(w, x, panel_begin, panel_end, y, ldy);
}

}  // namespace
}  // namespace pocket::POCKET_ISA
