#pragma once

#include "../compute.h"
#include "../decoder_config.h"
#include "../tile_grid.h"
#include "../weight_loader.h"
#include "linear.h"

namespace pocket {

/// The first half of a gated MLP.
struct GatedWeights {
  const PackedMatrix& gate;  ///< [ffn, hidden]
  const PackedMatrix& up;    ///< [ffn, hidden]
  Activation activation;     ///< f
};

/// Tasks of the first half of a gated MLP. A unit is one quantisation block of the inner
/// activations: a task makes gate, up and their product for its columns and quantises them while
/// they are in its cache.
[[nodiscard]] TileGrid gated_tiles(std::size_t rows, std::size_t ffn, std::size_t threads);

/// inner[tile] = f(gate(x)) * up(x), on the calling thread; `scratch` holds
/// `matmul_scratch_floats()`.
void multiply_gated(const Compute& compute, const GatedWeights& weights, const Activations& x,
                    const Tile& tile, const Activations& inner, float* scratch);

/// down(f(gate(x)) * up(x)), added to the residual (SwiGLU, GEGLU: Shazeer 2020).
struct GatedMlp {
  Activation activation = Activation::kSilu;  ///< f
  PackedMatrix gate;                          ///< [ffn, hidden]
  PackedMatrix up;                            ///< [ffn, hidden]
  PackedMatrix down;                          ///< [hidden, ffn]

  /// Registers `prefix`ffn_{gate,up,down}.weight.
  void load(WeightLoader& loader, const std::string& prefix, const DecoderConfig& config);

  [[nodiscard]] InputForm input(Precision precision) const {
    return input_form(gate, precision) | input_form(up, precision);
  }
  [[nodiscard]] InputForm inner(Precision precision) const { return input_form(down, precision); }

  /// `inner` [rows, ffn] and `scratch` [threads][matmul_scratch_floats()] are work space.
  void run(const Compute& compute, const Activations& x, std::size_t rows, const Activations& inner,
           float* residual, float* scratch) const;
};

}  // namespace pocket
