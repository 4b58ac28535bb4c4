#pragma once

#include <cstddef>

#include "pocket/quant/dtype.h"

namespace pocket::quant {

/// Encodes 256 floats as one block of Q4_K, Q5_K or Q6_K: scales by least squares.
///
/// Per sub-block several step sizes around the plain one (range / largest code) are tried; for the
/// codes of each the scale (and minimum) of least squared error is taken, and the best of them is
/// kept. Scales and minima are then rounded to the block's integers, and codes to the nearest under
/// those. A block whose squared error is larger than with plain scales gets plain scales, so no
/// block is worse than those (tests/unit/test_quantise.py).
///
/// `out` has `dtype_info(type).block_bytes` bytes. Infinities and NaN give a block of that kind or
/// of zeros, never an access out of bounds.
void encode_k_block(DType type, const float* x, std::byte* out);

}  // namespace pocket::quant
