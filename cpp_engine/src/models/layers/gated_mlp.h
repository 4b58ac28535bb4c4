#pragma once

#include "../compute.h"
#include "../decoder_config.h"
#include "../weight_loader.h"
#include "linear.h"

namespace pocket {

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
