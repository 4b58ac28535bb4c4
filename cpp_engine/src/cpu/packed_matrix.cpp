#include "pocket/cpu/packed_matrix.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "coded_panels.h"
#include "pocket/base/error.h"
#include "pocket/base/half.h"
#include "tables.h"

namespace pocket {
namespace {

constexpr std::size_t kAlign = 64;

constexpr std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

[[noreturn]] void invalid(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, "pack_matrix: " + message);
}

/// Bytes of codes that a row contributes to a block of 32 columns; 0 for float layouts.
std::size_t row_code_bytes(PackedLayout layout) {
  switch (layout) {
    case PackedLayout::kU4ScaleMin:
    case PackedLayout::kU4Scale:
      return kQuantBlock / 2;
    case PackedLayout::kU8Scale:
      return kQuantBlock;
    default:
      return 0;
  }
}

/// Bytes of the 16 scales (and 16 mins) in front of a block's codes.
std::size_t block_scale_bytes(PackedLayout layout) {
  return (layout == PackedLayout::kU4ScaleMin ? 2 : 1) * kPanelRows * sizeof(std::uint16_t);
}

std::size_t block_bytes(PackedLayout layout) {
  return block_scale_bytes(layout) + kPanelRows * row_code_bytes(layout);
}

std::size_t float_bytes(PackedLayout layout) {
  return layout == PackedLayout::kF32 ? 4 : 2;
}

/// One stored row into lane `lane` of a quantised panel. A stored 4-bit block keeps element j in
/// the low and j + 16 in the high nibble of byte j, so its four 32-bit words are the panel's words
/// unchanged; 8-bit codes are offset by 128.
void pack_quantised_row(PackedLayout layout, const std::byte* row, std::size_t columns,
                        std::size_t lane, std::byte* panel) {
  const std::size_t halves = block_scale_bytes(layout) / (kPanelRows * 2);
  const std::size_t words = row_code_bytes(layout) / 4;
  const std::uint32_t flip = layout == PackedLayout::kU8Scale ? 0x80808080u : 0u;
  for (std::size_t k = 0; k < columns; k += kQuantBlock) {
    for (std::size_t h = 0; h < halves; ++h) {
      std::memcpy(panel + (h * kPanelRows + lane) * 2, row, 2);
      row += 2;
    }
    std::byte* codes = panel + block_scale_bytes(layout) + 4 * lane;
    for (std::size_t w = 0; w < words; ++w) {
      std::uint32_t word;
      std::memcpy(&word, row, 4);
      word ^= flip;
      std::memcpy(codes + 4 * kPanelRows * w, &word, 4);
      row += 4;
    }
    panel += block_bytes(layout);
  }
}

template <typename T>
void pack_float_row(const std::byte* row, std::size_t columns, std::size_t lane, std::byte* panel) {
  for (std::size_t column = 0; column < columns; ++column) {
    std::memcpy(panel + (column * kPanelRows + lane) * sizeof(T), row + column * sizeof(T),
                sizeof(T));
  }
}

}  // namespace

std::size_t PackedMatrix::panel_bytes() const noexcept {
  const std::size_t bytes = is_coded(layout) ? coded_panel_bytes(layout, columns)
                            : quantised()    ? columns / kQuantBlock * block_bytes(layout)
                                             : columns * kPanelRows * float_bytes(layout);
  return round_up(bytes, kAlign);
}

PackedLayout packed_layout(DType type) {
  switch (type) {
    case DType::kQ4_1:
      return PackedLayout::kU4ScaleMin;
    case DType::kQ4_0:
      return PackedLayout::kU4Scale;
    case DType::kQ8_0:
      return PackedLayout::kU8Scale;
    case DType::kQ5_0:
      return PackedLayout::kU5Scale;
    case DType::kQ5_1:
      return PackedLayout::kU5ScaleMin;
    case DType::kIQ4_NL:
      return PackedLayout::kT4Scale;
    case DType::kIQ4_XS:
      return PackedLayout::kT4Sub32;
    case DType::kQ4_K:
      return PackedLayout::kU4Sub32Min;
    case DType::kQ5_K:
      return PackedLayout::kU5Sub32Min;
    case DType::kQ2_K:
      return PackedLayout::kU2Sub16Min;
    case DType::kQ3_K:
      return PackedLayout::kU3Sub16;
    case DType::kQ6_K:
      return PackedLayout::kU6Sub16;
    case DType::kF32:
      return PackedLayout::kF32;
    case DType::kF16:
      return PackedLayout::kF16;
    case DType::kBF16:
      return PackedLayout::kBF16;
  }
  throw Error(ErrorCode::kUnsupported,
              "no packed layout for GGUF type " + std::to_string(static_cast<std::uint32_t>(type)));
}

std::size_t packed_bytes(PackedLayout layout, std::size_t rows, std::size_t columns) {
  const PackedMatrix shape{nullptr, rows, columns, layout};
  return shape.panels() * shape.panel_bytes();
}

PackedMatrix pack_matrix(DType type, std::span<const std::byte> stored, std::size_t rows,
                         std::size_t columns, std::span<const std::uint32_t> row_order,
                         std::span<std::byte> out) {
  const PackedLayout layout = packed_layout(type);
  const PackedMatrix matrix{out.data(), rows, columns, layout};
  const std::size_t stored_row = row_bytes(type, columns);
  if (rows == 0 || columns == 0 || stored.size() != rows * stored_row) {
    invalid("a [" + std::to_string(rows) + ", " + std::to_string(columns) + "] tensor takes " +
            std::to_string(rows * stored_row) + " bytes, got " + std::to_string(stored.size()));
  }
  if (!row_order.empty() && row_order.size() != rows) {
    invalid("row_order names " + std::to_string(row_order.size()) + " rows of " +
            std::to_string(rows));
  }
  if (out.size() != packed_bytes(layout, rows, columns) ||
      reinterpret_cast<std::uintptr_t>(out.data()) % kAlign != 0) {
    invalid("the output takes " + std::to_string(packed_bytes(layout, rows, columns)) +
            " bytes, 64-byte aligned, got " + std::to_string(out.size()));
  }

  const std::size_t panel_bytes = matrix.panel_bytes();
  for (std::size_t panel = 0; panel < matrix.panels(); ++panel) {
    std::byte* target = out.data() + panel * panel_bytes;
    const std::size_t first = panel * kPanelRows;
    const std::size_t lanes = std::min(kPanelRows, rows - first);
    if (lanes < kPanelRows) {
      std::memset(target, 0, panel_bytes);  // scale 0 makes a missing row zero, whatever its codes
    } else {
      std::memset(target + panel_bytes - kAlign, 0, kAlign);  // a panel's own padding
    }
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      const std::size_t source = row_order.empty() ? first + lane : row_order[first + lane];
      if (source >= rows) {
        invalid("row_order names row " + std::to_string(source) + " of " + std::to_string(rows));
      }
      const std::byte* row = stored.data() + source * stored_row;
      if (is_coded(layout)) {
        pack_coded_row(type, layout, row, columns, lane, target);
      } else if (matrix.quantised()) {
        pack_quantised_row(layout, row, columns, lane, target);
      } else if (layout == PackedLayout::kF32) {
        pack_float_row<float>(row, columns, lane, target);
      } else {
        pack_float_row<std::uint16_t>(row, columns, lane, target);
      }
    }
  }
  return matrix;
}

namespace {

std::uint16_t load_u16(const std::byte* data) {
  std::uint16_t value;
  std::memcpy(&value, data, 2);
  return value;
}

void unpack_quantised_row(const PackedMatrix& w, const std::byte* panel, std::size_t lane,
                          float* out) {
  const bool has_min = w.layout == PackedLayout::kU4ScaleMin;
  const bool nibbles = w.layout != PackedLayout::kU8Scale;
  const std::byte* scales = panel + 2 * lane;
  const std::byte* codes = panel + block_scale_bytes(w.layout) + 4 * lane;
  const int offset = has_min ? 0 : (nibbles ? 8 : 128);
  for (std::size_t k = 0; k < w.columns; k += kQuantBlock) {
    const float scale = half_to_float(load_u16(scales));
    const float min = has_min ? half_to_float(load_u16(scales + 2 * kPanelRows)) : 0.0f;
    for (std::size_t j = 0; j < kQuantBlock; ++j) {
      const std::size_t stored = nibbles ? j % 16 : j;
      const auto byte = static_cast<int>(codes[(stored / 4) * 4 * kPanelRows + stored % 4]);
      const int code = nibbles ? (j < 16 ? byte & 15 : byte >> 4) : byte;
      const float scaled = static_cast<float>(code - offset) * scale;
      out[k + j] = has_min ? scaled + min : scaled;
    }
    scales += block_bytes(w.layout);
    codes += block_bytes(w.layout);
  }
}

}  // namespace

void unpack_packed_row(const PackedMatrix& w, std::size_t row, float* out) {
  const std::byte* panel = w.data + row / kPanelRows * w.panel_bytes();
  const std::size_t lane = row % kPanelRows;
  switch (w.layout) {
    case PackedLayout::kU4ScaleMin:
    case PackedLayout::kU4Scale:
    case PackedLayout::kU8Scale:
      unpack_quantised_row(w, panel, lane, out);
      break;
    default:
      unpack_coded_row(w.layout, panel, w.columns, lane, out);
      break;
    case PackedLayout::kF32:
      for (std::size_t k = 0; k < w.columns; ++k) {
        std::memcpy(out + k, panel + (k * kPanelRows + lane) * 4, 4);
      }
      break;
    case PackedLayout::kF16:
      for (std::size_t k = 0; k < w.columns; ++k) {
        out[k] = half_to_float(load_u16(panel + (k * kPanelRows + lane) * 2));
      }
      break;
    case PackedLayout::kBF16:
      for (std::size_t k = 0; k < w.columns; ++k) {
        out[k] = bfloat16_to_float(load_u16(panel + (k * kPanelRows + lane) * 2));
      }
      break;
  }
}

}  // namespace pocket
