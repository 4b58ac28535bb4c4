#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "../compute.h"

namespace pocket {

/// out[r] = scale * row ids[r] of the packed embedding matrix, in float32: [ids.size(), columns].
void embed(const Compute& compute, const PackedMatrix& embedding, std::span<const std::int32_t> ids,
           float scale, float* out);

}  // namespace pocket
