#pragma once

#include <cstddef>

/// Decoders of the block layouts in docs/formats.md. Each follows `gguf.quants` operation by
/// operation in float32 (multiply, then add: never fused), so results are equal bit for bit.

namespace pocket::quant {

void decode_f32(const std::byte* in, std::size_t blocks, float* out);
void decode_f16(const std::byte* in, std::size_t blocks, float* out);
void decode_bf16(const std::byte* in, std::size_t blocks, float* out);
void decode_q4_0(const std::byte* in, std::size_t blocks, float* out);
void decode_q4_1(const std::byte* in, std::size_t blocks, float* out);
void decode_q8_0(const std::byte* in, std::size_t blocks, float* out);

}  // namespace pocket::quant
