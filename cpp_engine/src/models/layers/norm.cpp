#include "norm.h"

#include "row_tasks.h"

namespace pocket {

void normalise(const Compute& compute, const float* x, std::size_t rows,
               std::span<const std::int32_t> source_rows, std::span<const float> weight,
               float epsilon, const Activations& out) {
  const std::size_t n = weight.size();
  const KernelTable& kernels = *compute.kernels;
  for_each_row(compute, rows, [&](std::size_t row, std::size_t) {
    const std::size_t source =
        source_rows.empty() ? row : static_cast<std::size_t>(source_rows[row]);
    if (out.values == nullptr) {
      kernels.rms_norm_quantise(x + source * n, weight.data(), epsilon,
                                quantised_row(out.quantised, row, 0, n));
      return;
    }
    float* y = out.values + row * n;
    kernels.rms_norm(x + source * n, weight.data(), n, epsilon, y);
    if (out.quantised.q != nullptr) {
      kernels.quantise_row(y, quantised_row(out.quantised, row, 0, n));
    }
  });
}

void add_normalised(const Compute& compute, float* x, std::size_t rows,
                    std::span<const float> weight, float epsilon, float* residual) {
  const std::size_t n = weight.size();
  for_each_row(compute, rows, [&](std::size_t row, std::size_t) {
    float* const values = x + row * n;
    compute.kernels->rms_norm(values, weight.data(), n, epsilon, values);
    compute.kernels->add(residual + row * n, values, n);
  });
}

}  // namespace pocket
