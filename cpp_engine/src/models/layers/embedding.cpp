#include "embedding.h"

#include "row_tasks.h"

namespace pocket {

void embed(const Compute& compute, const PackedMatrix& embedding, std::span<const std::int32_t> ids,
           float* out) {
  for_each_row(compute, ids.size(), [&](std::size_t row, std::size_t) {
    compute.kernels->unpack_row(embedding, static_cast<std::size_t>(ids[row]),
                                out + row * embedding.columns);
  });
}

}  // namespace pocket
