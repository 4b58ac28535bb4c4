// Integer matmul, the oracle. Per output and block of 32 columns, in block order:
//   dot = sum of (code - offset) * q, exact;  acc = fma(float(dot) * d, scale, acc);
//   with mins also acc = fma(m, scaled_sum, acc).

#include <cmath>

#include "pocket/base/half.h"
#include "pocket/cpu/kernels.h"
#include "tables.h"

namespace pocket::POCKET_ISA {
namespace {

/// dot[row] = sum over the block of code * q for the panel's 16 rows. Groups of 4 columns of q are
/// `height` groups apart.
template <bool kNibbles>
void block_dots(const std::uint8_t* codes, const std::int8_t* q, std::size_t height,
                std::int32_t* dot) {
  for (std::size_t row = 0; row < kPanelRows; ++row) {
    dot[row] = 0;
  }
  for (std::size_t group = 0; group < (kNibbles ? 4 : 8); ++group) {
    for (std::size_t row = 0; row < kPanelRows; ++row) {
      for (std::size_t c = 0; c < 4; ++c) {
        const int code = codes[group * 64 + row * 4 + c];
        const std::int8_t* at = q + 4 * group * height + c;
        dot[row] += kNibbles ? (code & 15) * at[0] + (code >> 4) * at[16 * height] : code * at[0];
      }
    }
  }
}

template <bool>
void matmul_q8(const PackedMatrix& w, const QuantisedRows& x, std::size_t panel_begin,
               std::size_t panel_end, float* y, std::size_t ldy) {
  const std::size_t blocks = w.columns / kQuantBlock;
  const std::size_t panel_bytes = w.panel_bytes();
  const bool has_min = w.layout == PackedLayout::kU4ScaleMin;
  const bool nibbles = w.layout != PackedLayout::kU8Scale;
  const std::size_t scale_bytes = has_min ? 64 : 32;
  const std::int32_t offset = has_min ? 0 : nibbles ? 8 : 128;
  for (std::size_t panel = panel_begin; panel < panel_end; ++panel) {
    const auto* data = reinterpret_cast<const std::uint8_t*>(w.data) + panel * panel_bytes;
    for (std::size_t m = 0; m < x.rows; ++m) {
      const std::size_t lane = m % kRowGroup;
      const std::size_t first = m - lane;
      const std::size_t height = x.rows - first < kRowGroup ? x.rows - first : kRowGroup;
      float acc[kPanelRows] = {};
      const std::uint8_t* at_block = data;
      for (std::size_t block = 0; block < blocks; ++block) {
        const std::size_t at = first * blocks + block * height + lane;
        const auto* scales = reinterpret_cast<const std::uint16_t*>(at_block);
        const std::uint8_t* codes = at_block + scale_bytes;
        const std::int8_t* q = x.q + first * x.columns + block * kQuantBlock * height + 4 * lane;
        std::int32_t dot[kPanelRows];
        if (nibbles) {
          block_dots<true>(codes, q, height, dot);
        } else {
          block_dots<false>(codes, q, height, dot);
        }
        for (std::size_t row = 0; row < kPanelRows; ++row) {
          const auto exact = static_cast<float>(dot[row] + offset * x.negative_sum[at]);
          acc[row] = std::fma(exact * half_to_float(scales[row]), x.scale[at], acc[row]);
          if (has_min) {
            acc[row] =
                std::fma(half_to_float(scales[row + kPanelRows]), x.scaled_sum[at], acc[row]);
          }
        }
        at_block = codes + kPanelRows * (nibbles ? 16 : 32);
      }
      for (std::size_t row = 0; row < kPanelRows; ++row) {
        y[m * ldy + panel * kPanelRows + row] = acc[row];
      }
    }
  }
}

}  // namespace
}  // namespace pocket::POCKET_ISA
