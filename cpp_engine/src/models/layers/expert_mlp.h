#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "../compute.h"
#include "../decoder_config.h"
#include "../tile_grid.h"
#include "../weight_loader.h"
#include "expert_routing.h"

namespace pocket {

/// Work space of expert MLPs, shared by all layers. `pairs` = tokens * experts used.
struct ExpertBuffers {
  float* scores = nullptr;       ///< [tokens, score_stride]: the router's logits
  std::size_t score_stride = 0;  ///< floats: the experts, rounded up to a panel
  float* shared_gate = nullptr;  ///< [tokens, 16]; null without a shared expert
  Activations gathered;          ///< [pairs, hidden]: the inputs, an expert's rows together
  Activations inner;             ///< [pairs, experts.ffn]
  Activations shared_inner;      ///< [tokens, experts.shared_ffn]
};

/// A mixture of gated MLPs, added to the residual (Shazeer et al. 2017, arXiv 1701.06538):
///
///   p = softmax(router(x)), in float32 at either precision
///   sum over the chosen e, ascending, of w_e down_e(f(gate_e(x)) * up_e(x))
///     [+ sigmoid(shared_gate(x)) times a shared expert's output]
///
/// with the chosen ones and w as `choose_experts` gives them. Rows are sorted by expert, so that
/// each expert's weights are read once for all of its rows. The terms of a row are added one by one
/// and in that order whatever else is in the step: one task owns some columns of the output and
/// adds all experts to them. So a row's bits depend on the row only.
class ExpertMlp {
 public:
  /// Registers `prefix`ffn_gate_inp.weight and the experts' weights, which files hold in one of
  /// these ways: ffn_{gate,up,down}_exps.weight [experts, out, in]; ffn_gate_up_exps.weight
  /// [experts, gate's rows and then up's, in]; one by one as ffn_gate.{e}.weight. A shared expert
  /// is ffn_{gate,up,down}_shexp.weight and ffn_gate_inp_shexp.weight.
  void load(WeightLoader& loader, const std::string& prefix, const DecoderConfig& config);

  /// Of x; always floats, too, which the router reads.
  [[nodiscard]] InputForm input(Precision precision) const;
  [[nodiscard]] InputForm gathered(Precision precision) const;
  [[nodiscard]] InputForm inner(Precision precision) const;
  [[nodiscard]] InputForm shared_inner(Precision precision) const;

  /// `scratch` [threads][matmul_scratch_floats()] is work space.
  void run(const Compute& compute, const Activations& x, std::size_t rows, ExpertRouting& routing,
           const ExpertBuffers& buffers, float* residual, float* scratch) const;

 private:
  struct Expert {
    PackedMatrix gate;  ///< [ffn, hidden]
    PackedMatrix up;    ///< [ffn, hidden]
    PackedMatrix down;  ///< [hidden, ffn]
  };

  void load_experts(WeightLoader& loader, const std::string& prefix, const DecoderConfig& config);
  void route(const Compute& compute, const Activations& x, std::size_t rows, ExpertRouting& routing,
             const ExpertBuffers& buffers) const;
  void gather(const Compute& compute, const Activations& x, const ExpertRouting& routing,
              const ExpertBuffers& buffers) const;
  void multiply_up(const Compute& compute, const Activations& x, std::size_t rows,
                   ExpertRouting& routing, const ExpertBuffers& buffers, float* scratch) const;
  void multiply_down(const Compute& compute, std::size_t rows, const ExpertRouting& routing,
                     const ExpertBuffers& buffers, float* residual, float* scratch) const;

  Activation activation_ = Activation::kSilu;
  PackedMatrix router_;             // [experts, hidden]
  std::vector<PackedMatrix> gate_;  // [experts]
  std::vector<PackedMatrix> up_;
  std::vector<PackedMatrix> down_;
  bool shared_ = false;
  PackedMatrix shared_gate_;  // [1, hidden]
  Expert shared_expert_;
};

}  // namespace pocket
