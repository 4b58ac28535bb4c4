#include "linear.h"

#include <algorithm>

#include "../tile_grid.h"

namespace pocket {
namespace {

// Kernels for many rows take 3 panels at once.
constexpr std::size_t kGranulePanels = 3;

}  // namespace

std::size_t matmul_scratch_floats() noexcept {
  return TileGrid::kTileFloats;
}

PackedMatrix panel_slice(const PackedMatrix& w, std::size_t begin, std::size_t end) noexcept {
  return {.data = w.data + begin * w.panel_bytes(),
          .rows = std::min(w.rows, end * kPanelRows) - begin * kPanelRows,
          .columns = w.columns,
          .layout = w.layout};
}

void multiply(const Compute& compute, const PackedMatrix& w, const Activations& x,
              std::size_t row_begin, std::size_t rows, float* y, std::size_t ldy) {
  if (input_form(w, compute.precision).quantised) {
    compute.kernels->matmul_q8(w, quantised_range(x.quantised, row_begin, rows), 0, w.panels(), y,
                               ldy);
  } else {
    compute.kernels->matmul_f32(w, x.values + row_begin * x.columns, x.columns, rows, 0, w.panels(),
                                y, ldy);
  }
}

void project(const Compute& compute, const Activations& x, std::size_t rows,
             std::span<const Projection> projections) {
  std::size_t panels = 0;
  for (const Projection& projection : projections) {
    panels += projection.weight->panels();
  }
  const TileGrid grid(rows, panels, kPanelRows, compute.pool->size(), kGranulePanels);
  compute.pool->parallel_for(grid.tasks(), [&](std::size_t task, std::size_t) {
    const Tile tile = grid.tile(task);
    std::size_t first = 0;  // of the projection, among the panels of all
    for (const Projection& projection : projections) {
      const std::size_t count = projection.weight->panels();
      const std::size_t begin = std::max(tile.unit_begin, first);
      const std::size_t end = std::min(tile.unit_end, first + count);
      if (begin < end) {
        multiply(compute, panel_slice(*projection.weight, begin - first, end - first), x,
                 tile.row_begin, tile.rows(),
                 projection.y + tile.row_begin * projection.ldy + (begin - first) * kPanelRows,
                 projection.ldy);
      }
      first += count;
    }
  });
}

void project_add(const Compute& compute, const Activations& x, std::size_t rows,
                 const PackedMatrix& weight, float* residual, float* scratch) {
  const TileGrid grid(rows, weight.panels(), kPanelRows, compute.pool->size(), kGranulePanels);
  compute.pool->parallel_for(grid.tasks(), [&](std::size_t task, std::size_t thread) {
    const Tile tile = grid.tile(task);
    const std::size_t width = tile.units() * kPanelRows;
    float* y = scratch + thread * matmul_scratch_floats();
    multiply(compute, panel_slice(weight, tile.unit_begin, tile.unit_end), x, tile.row_begin,
             tile.rows(), y, width);
    for (std::size_t r = 0; r < tile.rows(); ++r) {
      compute.kernels->add(
          residual + (tile.row_begin + r) * weight.rows + tile.unit_begin * kPanelRows,
          y + r * width, width);
    }
  });
}

}  // namespace pocket
