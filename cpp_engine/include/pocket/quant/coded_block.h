#pragma once

#include <cstddef>
#include <cstdint>

#include "pocket/quant/dtype.h"

namespace pocket {

/// One stored block of Q5_0, Q5_1, Q2_K to Q6_K, IQ4_NL or IQ4_XS, taken apart: what decoders and
/// repackers share, so that the bit layouts of docs/formats.md are written down once.
///
/// A value is `d * scale[j] * (code - offset) - m * min[j]` with j counting sub-blocks of
/// `sub_block` elements; a format without sub-block scales has scale 1, Q5_1 adds m instead, and
/// IQ4 codes index `kIq4Values`.
struct CodedBlock {
  std::uint8_t code[256];
  std::uint16_t d;  ///< half
  std::uint16_t m;  ///< half: Q5_1's minimum, dmin of Q2_K, Q4_K and Q5_K
  std::int8_t scale[16];
  std::uint8_t min[16];
};

/// Values of the 16 codes of IQ4_NL and IQ4_XS.
inline constexpr std::int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                               1,    13,   25,  38,  53,  69,  89,  113};

/// True for the formats above.
[[nodiscard]] bool has_coded_blocks(DType type) noexcept;

/// Takes the block at `stored` (`dtype_info(type).block_bytes` bytes of any alignment) apart;
/// fields that the format lacks are left alone. `type` must satisfy `has_coded_blocks`.
void read_coded_block(DType type, const std::byte* stored, CodedBlock& out) noexcept;

/// out[0..block_size) = the block's values, as `gguf.dequantize` computes them.
void decode_coded_block(DType type, const CodedBlock& block, float* out) noexcept;

}  // namespace pocket
