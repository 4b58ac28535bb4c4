// Walks a matmul as tiles of rows by panels; the tile itself comes from matmul_q8_<isa>-inl.h, and
// from matmul_q8_wide_<isa>-inl.h where an ISA has one (POCKET_WIDE_TILES).

#include "pocket/cpu/kernels.h"
#include "tables.h"

namespace pocket::POCKET_ISA {
namespace {

/// Rows whose activations are walked for one panel before the next: 64 rows of 4,096 columns are
/// 256 KiB, a quarter of L2.
constexpr std::size_t kRowsPerPass = 64;
static_assert(kRowsPerPass % kRowGroup == 0);

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

/// kWide: use the tiles for many rows where the ISA has them (the same bits).
template <PackedLayout kLayout, bool kWide>
void matmul_q8_layout(const PackedMatrix& w, const QuantisedRows& x, std::size_t panel_begin,
                      std::size_t panel_end, float* y, std::size_t ldy) {
  const std::size_t panel_bytes = w.panel_bytes();
  const auto* data = reinterpret_cast<const std::uint8_t*>(w.data);
  for (std::size_t pass = 0; pass < x.rows; pass += kRowsPerPass) {
    const std::size_t end = x.rows - pass < kRowsPerPass ? x.rows : pass + kRowsPerPass;
    std::size_t panel = panel_begin;
#ifdef POCKET_WIDE_TILES
    if (kWide && x.rows >= kWideFromRows) {
      for (; panel + 3 <= panel_end; panel += 3) {
        wide_panels<kLayout, 3>(data + panel * panel_bytes, panel_bytes, x, pass, end,
                                y + panel * kPanelRows, ldy);
      }
      for (; panel + 2 <= panel_end; panel += 2) {
        wide_panels<kLayout, 2>(data + panel * panel_bytes, panel_bytes, x, pass, end,
                                y + panel * kPanelRows, ldy);
      }
    }
#endif
    for (; panel < panel_end; ++panel) {
      const std::uint8_t* weights = data + panel * panel_bytes;
      for (std::size_t group = pass; group < end; group += kRowGroup) {
        const std::size_t height = end - group < kRowGroup ? end - group : kRowGroup;
        for (std::size_t lane = 0; lane < height; lane += kMaxTileRows) {
          const std::size_t rows = height - lane < kMaxTileRows ? height - lane : kMaxTileRows;
          tile_function<kLayout>(rows)(weights, tile_at(x, group, height, lane),
                                       y + (group + lane) * ldy + panel * kPanelRows, ldy);
        }
      }
    }
  }
}

template <bool kWide>
void matmul_q8(const PackedMatrix& w, const QuantisedRows& x, std::size_t panel_begin,
               std::size_t panel_end, float* y, std::size_t ldy) {
  switch (w.layout) {
    case PackedLayout::kU4ScaleMin:
      matmul_q8_layout<PackedLayout::kU4ScaleMin, kWide>(w, x, panel_begin, panel_end, y, ldy);
      break;
    case PackedLayout::kU4Scale:
      matmul_q8_layout<PackedLayout::kU4Scale, kWide>(w, x, panel_begin, panel_end, y, ldy);
      break;
    case PackedLayout::kU8Scale:
      matmul_q8_layout<PackedLayout::kU8Scale, kWide>(w, x, panel_begin, panel_end, y, ldy);
      break;
    default:
      break;  // float layouts have no integer path: callers use matmul_f32
  }
}

}  // namespace
}  // namespace pocket::POCKET_ISA
