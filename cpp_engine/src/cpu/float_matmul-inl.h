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

/// How a tile gets at 16 weights: as they lie in memory, or (codes) from a decoded block.
enum class WeightSource { kFloat, kHalf, kBfloat16, kCodes };

/// The panel's data from column k on (codes: decoded into `buffer`).
template <WeightSource kSource>
const void* columns_from(const FloatPanel& panel, std::size_t k, float* buffer) {
  switch (kSource) {
    case WeightSource::kFloat:
      return panel.data + k * kPanelRows * sizeof(float);
    case WeightSource::kHalf:
    case WeightSource::kBfloat16:
      return panel.data + k * kPanelRows * sizeof(std::uint16_t);
    case WeightSource::kCodes:
      break;
  }
  const std::size_t block = k / kQuantBlock;
  switch (panel.layout) {
    case PackedLayout::kU8Scale:
      decode_codes<false>(panel, block, buffer);
      break;
    case PackedLayout::kU4ScaleMin:
    case PackedLayout::kU4Scale:
      decode_codes<true>(panel, block, buffer);
      break;
    default:
      with_coded_layout(panel.layout, [&]<PackedLayout kLayout>() {
        decode_coded_columns<kLayout>(panel.data, block, buffer);
      });
      break;
  }
  return buffer;
}

template <WeightSource kSource>
inline Vec load_column(const void* columns, std::size_t c) {
  if constexpr (kSource == WeightSource::kHalf) {
    return load(static_cast<const std::uint16_t*>(columns) + c * kLanes);
  } else if constexpr (kSource == WeightSource::kBfloat16) {
    return load_bfloat16(static_cast<const std::uint16_t*>(columns) + c * kLanes);
  } else {
    return load(static_cast<const float*>(columns) + c * kLanes);
  }
}

/// kRows x kPanels output vectors at once.
template <WeightSource kSource, std::size_t kRows, std::size_t kPanels>
void float_tile(const FloatPanel* panels, std::size_t columns, const float* x, std::size_t ldx,
                float* y, std::size_t ldy) {
  alignas(64) float buffer[kPanels][kFloatChunk * kLanes];
  Vec acc[kRows][kPanels];
#pragma GCC unroll 16
  for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (std::size_t p = 0; p < kPanels; ++p) {
      acc[r][p] = zero();
    }
  }
  for (std::size_t k = 0; k < columns; k += kFloatChunk) {
    const std::size_t count = columns - k < kFloatChunk ? columns - k : kFloatChunk;
    const void* w[kPanels];
#pragma GCC unroll 8
    for (std::size_t p = 0; p < kPanels; ++p) {
      w[p] = columns_from<kSource>(panels[p], k, buffer[p]);
    }
    for (std::size_t c = 0; c < count; ++c) {
      Vec weight[kPanels];
#pragma GCC unroll 8
      for (std::size_t p = 0; p < kPanels; ++p) {
        weight[p] = load_column<kSource>(w[p], c);
      }
#pragma GCC unroll 16
      for (std::size_t r = 0; r < kRows; ++r) {
        const Vec value = splat(x[r * ldx + k + c]);
#pragma GCC unroll 8
        for (std::size_t p = 0; p < kPanels; ++p) {
          acc[r][p] = fma(weight[p], value, acc[r][p]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (std::size_t p = 0; p < kPanels; ++p) {
      store(y + r * ldy + p * kPanelRows, acc[r][p]);
    }
  }
}

/// All rows against kPanels panels, in tiles of kRows rows, then of half as many, and so on.
template <WeightSource kSource, std::size_t kPanels, std::size_t kRows = kFloatRows>
void float_rows(const FloatPanel* panels, std::size_t columns, const float* x, std::size_t ldx,
                std::size_t m_rows, float* y, std::size_t ldy) {
  for (; m_rows >= kRows; m_rows -= kRows) {
    float_tile<kSource, kRows, kPanels>(panels, columns, x, ldx, y, ldy);
    x += kRows * ldx;
    y += kRows * ldy;
  }
  if constexpr (kRows > 1) {
    float_rows<kSource, kPanels, kRows / 2>(panels, columns, x, ldx, m_rows, y, ldy);
  }
}

template <WeightSource kSource>
void matmul_f32_source(const PackedMatrix& w, const float* x, std::size_t ldx, std::size_t m_rows,
                       std::size_t panel_begin, std::size_t panel_end, float* y, std::size_t ldy) {
  const std::size_t panel_bytes = w.panel_bytes();
  const auto panel_at = [&](std::size_t index) {
    return FloatPanel{w.layout,
                      reinterpret_cast<const std::uint8_t*>(w.data) + index * panel_bytes};
  };
  std::size_t panel = panel_begin;
  // One or two rows wait for memory, and memory likes one ascending stream.
  if (m_rows > 2) {
    for (; panel + kFloatPanels <= panel_end; panel += kFloatPanels) {
      FloatPanel panels[kFloatPanels];
      for (std::size_t p = 0; p < kFloatPanels; ++p) {
        panels[p] = panel_at(panel + p);
      }
      float_rows<kSource, kFloatPanels>(panels, w.columns, x, ldx, m_rows, y + panel * kPanelRows,
                                        ldy);
    }
  }
  for (; panel < panel_end; ++panel) {
    const FloatPanel last = panel_at(panel);
    float_rows<kSource, 1>(&last, w.columns, x, ldx, m_rows, y + panel * kPanelRows, ldy);
  }
}

void matmul_f32(const PackedMatrix& w, const float* x, std::size_t ldx, std::size_t m_rows,
                std::size_t panel_begin, std::size_t panel_end, float* y, std::size_t ldy) {
  const auto run = [&](auto function) {
    function(w, x, ldx, m_rows, panel_begin, panel_end, y, ldy);
  };
  switch (w.layout) {
    case PackedLayout::kF32:
      return run(matmul_f32_source<WeightSource::kFloat>);
    case PackedLayout::kF16:
      return run(matmul_f32_source<WeightSource::kHalf>);
    case PackedLayout::kBF16:
      return run(matmul_f32_source<WeightSource::kBfloat16>);
    default:
      return run(matmul_f32_source<WeightSource::kCodes>);
  }
}

}  // namespace
}  // namespace pocket::POCKET_ISA
