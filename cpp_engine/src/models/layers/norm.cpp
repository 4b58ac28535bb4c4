#include "norm.h"

#include "row_tasks.h"

namespace pocket {

void normalise(const Compute& compute, const float* x, std::size_t rows,
               std::span<const std::int32_t> source_rows, std::span<const float> weight,
               float epsilon, const Activations& out, float* scratch) {
  const std::size_t n = weight.size();
  for_each_row(compute, rows, [&](std::size_t row, std::size_t thread) {
    const std::size_t source =
        source_rows.empty() ? row : static_cast<std::size_t>(source_rows[row]);
    float* y = out.values != nullptr ? out.values + row * n : scratch + thread * n;
    compute.kernels->rms_norm(x + source * n, weight.data(), n, epsilon, y);
    if (out.quantised.q != nullptr) {
      compute.kernels->quantise_rows(y, n, 1, out.quantised_part(row, 0, n));
    }
  });
}

}  // namespace pocket
