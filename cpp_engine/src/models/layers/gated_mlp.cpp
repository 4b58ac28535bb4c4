#include "gated_mlp.h"

namespace pocket {

void GatedMlp::load(WeightLoader& loader, const std::string& prefix, const DecoderConfig& config) {
  activation = config.activation;
  loader.matrix(prefix + "ffn_gate.weight", config.ffn, config.hidden, gate);
  loader.matrix(prefix + "ffn_up.weight", config.ffn, config.hidden, up);
  loader.matrix(prefix + "ffn_down.weight", config.hidden, config.ffn, down);
}

TileGrid gated_tiles(std::size_t rows, std::size_t ffn, std::size_t threads) {
  constexpr std::size_t kGranuleUnits = 3;  // 6 panels: kernels for many rows take 3 at once
  return {rows, ffn / kQuantBlock, 2 * kQuantBlock, threads, kGranuleUnits};
}

void multiply_gated(const Compute& compute, const GatedWeights& weights, const Activations& x,
                    const Tile& tile, const Activations& inner, float* scratch) {
  constexpr std::size_t kUnitPanels = kQuantBlock / kPanelRows;
  const KernelTable& kernels = *compute.kernels;
  const bool gelu = weights.activation == Activation::kGelu;
  const auto gate_row = gelu ? kernels.gelu_mul : kernels.silu_mul;
  const auto gate_row_quantise = gelu ? kernels.gelu_mul_quantise : kernels.silu_mul_quantise;
  const std::size_t width = tile.units() * kQuantBlock;
  const std::size_t column = tile.unit_begin * kQuantBlock;
  float* gated = scratch;
  float* upper = gated + tile.rows() * width;
  const std::size_t begin = tile.unit_begin * kUnitPanels;
  const std::size_t end = tile.unit_end * kUnitPanels;
  multiply(compute, panel_slice(weights.gate, begin, end), x, tile.row_begin, tile.rows(), gated,
           width);
  multiply(compute, panel_slice(weights.up, begin, end), x, tile.row_begin, tile.rows(), upper,
           width);
  for (std::size_t r = 0; r < tile.rows(); ++r) {
    const std::size_t row = tile.row_begin + r;
    if (inner.values == nullptr) {
      gate_row_quantise(gated + r * width, upper + r * width,
                        quantised_row(inner.quantised, row, column, width));
      continue;
    }
    float* y = inner.values + row * inner.columns + column;
    gate_row(gated + r * width, upper + r * width, width, y);
    if (inner.quantised.q != nullptr) {
      kernels.quantise_row(y, quantised_row(inner.quantised, row, column, width));
    }
  }
}

void GatedMlp::run(const Compute& compute, const Activations& x, std::size_t rows,
                   const Activations& inner, float* residual, float* scratch) const {
  const TileGrid grid = gated_tiles(rows, gate.rows, compute.pool->size());
  compute.pool->parallel_for(grid.tasks(), [&](std::size_t task, std::size_t thread) {
    multiply_gated(compute, {gate, up, activation}, x, grid.tile(task), inner,
                   scratch + thread * matmul_scratch_floats());
  });
  project_add(compute, inner, rows, down, residual, scratch);
}

}  // namespace pocket
