#pragma once

#include <cstddef>
#include <span>

#include "../compute.h"

namespace pocket {

/// out[r] = rms_norm(x[source_rows[r]]) * weight in the forms that `out` has; an empty
/// `source_rows` means row r. x is [*, weight.size()].
void normalise(const Compute& compute, const float* x, std::size_t rows,
               std::span<const std::int32_t> source_rows, std::span<const float> weight,
               float epsilon, const Activations& out);

/// residual[r] += rms_norm(x[r]) * weight; x, [rows, weight.size()], is overwritten.
void add_normalised(const Compute& compute, float* x, std::size_t rows,
                    std::span<const float> weight, float epsilon, float* residual);

}  // namespace pocket
