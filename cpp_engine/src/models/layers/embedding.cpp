#include "embedding.h"

#include "row_tasks.h"

namespace pocket {

void embed(const Compute& compute, const PackedMatrix& embedding, std::span<const std::int32_t> ids,
           float scale, float* out) {
  for_each_row(compute, ids.size(), [&](std::size_t row, std::size_t) {
    float* const y = out + row * embedding.columns;
    compute.kernels->unpack_row(embedding, static_cast<std::size_t>(ids[row]), y);
    // One rounding per value: the same bits however it is compiled.
    for (std::size_t i = 0; scale != 1.0F && i < embedding.columns; ++i) {
      y[i] *= scale;
    }
  });
}

}  // namespace pocket
