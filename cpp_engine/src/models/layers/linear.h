#pragma once

#include <cstddef>
#include <span>

#include "../compute.h"

namespace pocket {

/// Floats of private scratch per thread that the layers' matmuls need.
[[nodiscard]] std::size_t matmul_scratch_floats() noexcept;

/// One matrix of a projection: y[rows, ldy] = x . W for all its panels.
struct Projection {
  const PackedMatrix* weight;
  float* y;
  std::size_t ldy;  ///< floats, at least `weight->panels() * 16`
};

/// Multiplies `rows` rows of x by several matrices of equal `columns` in one parallel region.
void project(const Compute& compute, const Activations& x, std::size_t rows,
             std::span<const Projection> projections);

/// residual[rows, W.rows] += x . W; `scratch` is [threads][matmul_scratch_floats()].
/// W.rows is a multiple of 16.
void project_add(const Compute& compute, const Activations& x, std::size_t rows,
                 const PackedMatrix& weight, float* residual, float* scratch);

/// Panels [begin, end) of a matrix as a matrix.
[[nodiscard]] PackedMatrix panel_slice(const PackedMatrix& w, std::size_t begin,
                                       std::size_t end) noexcept;

/// y[r] = x[row_begin + r] . W for all panels of W, on the calling thread.
void multiply(const Compute& compute, const PackedMatrix& w, const Activations& x,
              std::size_t row_begin, std::size_t rows, float* y, std::size_t ldy);

}  // namespace pocket
