// Walks a matmul as tiles of rows by panels; the tile itself comes from matmul_q8_<isa>-inl.h.

#include "pocket/cpu/kernels.h"
#include "tables.h"

namespace pocket::POCKET_ISA {
namespace {

/// Rows whose activations are walked for one panel before the next: 64 rows of 4,096 columns are
/// 256 KiB, a quarter of L2.
constexpr std::size_t kRowsPerPass = 64;

template <PackedLayout kLayout>
using TileFunction = void (*)(const std::uint8_t*, const ActivationTile&, float*, std::size_t);

/// The tile function for `rows` <= kRows rows.
template <PackedLayout kLayout, std::size_t kRows = kMaxTileRows>
TileFunction<kLayout> tile_function(std::size_t rows) {
  if constexpr (kRows > 1) {
    return rows == kRows ? q8_tile<kLayout, kRows> : tile_function<kLayout, kRows - 1>(rows);
  } else {
    return q8_tile<kLayout, 1>;
  }
}

template <PackedLayout kLayout>
void matmul_q8_layout(const PackedMatrix& w, const QuantisedRows& x, std::size_t m_rows,
                      std::size_t panel_begin, std::size_t panel_end, float* y, std::size_t ldy) {
  const std::size_t panel_bytes = w.panel_bytes();
  const auto* data = reinterpret_cast<const std::uint8_t*>(w.data);
  for (std::size_t pass = 0; pass < m_rows; pass += kRowsPerPass) {
    const std::size_t pass_rows = m_rows - pass < kRowsPerPass ? m_rows - pass : kRowsPerPass;
    // Tiles of nearly equal height: 13 rows are 7 + 6, not 12 + 1.
    const std::size_t tiles = (pass_rows + kMaxTileRows - 1) / kMaxTileRows;
    for (std::size_t panel = panel_begin; panel < panel_end; ++panel) {
      const std::uint8_t* weights = data + panel * panel_bytes;
      for (std::size_t tile = 0; tile < tiles; ++tile) {
        const std::size_t begin = pass + tile * pass_rows / tiles;
        const std::size_t end = pass + (tile + 1) * pass_rows / tiles;
        tile_function<kLayout>(end - begin)(weights, rows_from(x, begin),
                                            y + begin * ldy + panel * kPanelRows, ldy);
      }
    }
  }
}

void matmul_q8(const PackedMatrix& w, const QuantisedRows& x, std::size_t m_rows,
               std::size_t panel_begin, std::size_t panel_end, float* y, std::size_t ldy) {
  switch (w.layout) {
    case PackedLayout::kU4ScaleMin:
      matmul_q8_layout<PackedLayout::kU4ScaleMin>(w, x, m_rows, panel_begin, panel_end, y, ldy);
      break;
    case PackedLayout::kU4Scale:
      matmul_q8_layout<PackedLayout::kU4Scale>(w, x, m_rows, panel_begin, panel_end, y, ldy);
      break;
    case PackedLayout::kU8Scale:
      matmul_q8_layout<PackedLayout::kU8Scale>(w, x, m_rows, panel_begin, panel_end, y, ldy);
      break;
    default:
      break;  // float layouts have no integer path: callers use matmul_f32
  }
}

}  // namespace
}  // namespace pocket::POCKET_ISA
