// The exact path: y = x . W with float activations against any layout. Per output one chain
// acc = fma(w[k], x[k], acc) from k = 0 upwards, starting at +0.

#include "pocket/cpu/kernels.h"
#include "tables.h"

namespace pocket::POCKET_ISA {
namespace {

/// Columns that are decoded at a time into a buffer on the stack (2 KiB per panel).
constexpr std::size_t kFloatChunk = kQuantBlock;

/// One panel, seen as a source of decoded columns.
struct FloatPanel {
  PackedLayout layout;
  const std::uint8_t* data;
};

const std::uint16_t* halves(const std::uint8_t* data) {
  return reinterpret_cast<const std::uint16_t*>(data);
}

/// Quantised weights are d * q (+ m) with a product that is exact in float (11 bits by at most 8):
/// the same bits as the format's own dequantisation.
template <bool kNibbles>
void decode_codes(const FloatPanel& panel, std::size_t block, float* out) {
  const bool has_min = panel.layout == PackedLayout::kU4ScaleMin;
  const std::size_t scale_bytes = has_min ? 64 : 32;
  const std::uint8_t* at = panel.data + block * (scale_bytes + (kNibbles ? 256 : 512));
  const std::uint16_t* scales = halves(at);
  const std::uint8_t* codes = at + scale_bytes;
  const Vec scale = load(scales);
  const Vec offset = splat(has_min ? 0.0f : kNibbles ? 8.0f : 128.0f);
  for (std::size_t c = 0; c < kQuantBlock; ++c) {
    const Vec value = mul(sub(load_code_column<kNibbles>(codes, c), offset), scale);
    store(out + c * kLanes, has_min ? add(value, load(scales + kPanelRows)) : value);
  }
}

/// Columns [k, k + count) as [count, 16] floats: in place for F32, else decoded into `buffer`.
const float* decode_columns(const FloatPanel& panel, std::size_t k, std::size_t count,
                            float* buffer) {
  switch (panel.layout) {
    case PackedLayout::kF32:
      return reinterpret_cast<const float*>(panel.data) + k * kPanelRows;
    case PackedLayout::kF16:
      for (std::size_t c = 0; c < count; ++c) {
        store(buffer + c * kLanes, load(halves(panel.data) + (k + c) * kPanelRows));
      }
      break;
    case PackedLayout::kBF16:
      for (std::size_t c = 0; c < count; ++c) {
        store(buffer + c * kLanes, load_bfloat16(halves(panel.data) + (k + c) * kPanelRows));
      }
      break;
    case PackedLayout::kU4ScaleMin:
    case PackedLayout::kU4Scale:
      decode_codes<true>(panel, k / kQuantBlock, buffer);
      break;
    case PackedLayout::kU8Scale:
      decode_codes<false>(panel, k / kQuantBlock, buffer);
      break;
  }
  return buffer;
}

/// kRows x kPanels outputs vectors at once.
template <std::size_t kRows, std::size_t kPanels>
void float_tile(const FloatPanel* panels, std::size_t columns, const float* x, std::size_t ldx,
                float* y, std::size_t ldy) {
  alignas(64) float buffer[kPanels][kFloatChunk * kLanes];
  Vec acc[kRows][kPanels];
  for (std::size_t r = 0; r < kRows; ++r) {
    for (std::size_t p = 0; p < kPanels; ++p) {
      acc[r][p] = zero();
    }
  }
  for (std::size_t k = 0; k < columns; k += kFloatChunk) {
    const std::size_t count = columns - k < kFloatChunk ? columns - k : kFloatChunk;
    const float* w[kPanels];
    for (std::size_t p = 0; p < kPanels; ++p) {
      w[p] = decode_columns(panels[p], k, count, buffer[p]);
    }
    for (std::size_t c = 0; c < count; ++c) {
      Vec weight[kPanels];
#pragma GCC unroll 8
      for (std::size_t p = 0; p < kPanels; ++p) {
        weight[p] = load(w[p] + c * kLanes);
      }
#pragma GCC unroll 8
      for (std::size_t r = 0; r < kRows; ++r) {
        const Vec value = splat(x[r * ldx + k + c]);
#pragma GCC unroll 8
        for (std::size_t p = 0; p < kPanels; ++p) {
          acc[r][p] = fma(weight[p], value, acc[r][p]);
        }
      }
    }
  }
  for (std::size_t r = 0; r < kRows; ++r) {
    for (std::size_t p = 0; p < kPanels; ++p) {
      store(y + r * ldy + p * kPanelRows, acc[r][p]);
    }
  }
}

template <std::size_t kPanels>
void float_rows(const FloatPanel* panels, std::size_t columns, const float* x, std::size_t ldx,
                std::size_t m_rows, float* y, std::size_t ldy) {
  std::size_t m = 0;
  for (; m + kFloatRows <= m_rows; m += kFloatRows) {
    float_tile<kFloatRows, kPanels>(panels, columns, x + m * ldx, ldx, y + m * ldy, ldy);
  }
  for (; m < m_rows; ++m) {
    float_tile<1, kPanels>(panels, columns, x + m * ldx, ldx, y + m * ldy, ldy);
  }
}

void matmul_f32(const PackedMatrix& w, const float* x, std::size_t ldx, std::size_t m_rows,
                std::size_t panel_begin, std::size_t panel_end, float* y, std::size_t ldy) {
  const std::size_t panel_bytes = w.panel_bytes();
  const auto panel_at = [&](std::size_t index) {
    return FloatPanel{w.layout,
                      reinterpret_cast<const std::uint8_t*>(w.data) + index * panel_bytes};
  };
  std::size_t panel = panel_begin;
  for (; panel + kFloatPanels <= panel_end; panel += kFloatPanels) {
    FloatPanel panels[kFloatPanels];
    for (std::size_t p = 0; p < kFloatPanels; ++p) {
      panels[p] = panel_at(panel + p);
    }
    float_rows<kFloatPanels>(panels, w.columns, x, ldx, m_rows, y + panel * kPanelRows, ldy);
  }
  for (; panel < panel_end; ++panel) {
    const FloatPanel last = panel_at(panel);
    float_rows<1>(&last, w.columns, x, ldx, m_rows, y + panel * kPanelRows, ldy);
  }
}

}  // namespace
}  // namespace pocket::POCKET_ISA
