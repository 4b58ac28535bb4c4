#include "blocks.h"

#include <bit>
#include <cstdint>
#include <cstring>

#include "pocket/base/half.h"

namespace pocket::quant {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF files are little-endian");

constexpr std::size_t kBlock = 32;      // elements of a Q4_0, Q4_1 or Q8_0 block
constexpr std::size_t kHalfBlock = 16;  // bytes of its 4-bit codes
constexpr std::size_t kScaleBytes = 2;  // one half

std::uint16_t load_u16(const std::byte* in) {
  std::uint16_t value;
  std::memcpy(&value, in, sizeof value);
  return value;
}

float load_half(const std::byte* in) {
  return half_to_float(load_u16(in));
}

/// The low nibbles of the 16 bytes are elements 0..15, the high nibbles 16..31.
int low_nibble(std::byte codes) {
  return std::to_integer<int>(codes & std::byte{0x0f});
}
int high_nibble(std::byte codes) {
  return std::to_integer<int>(codes >> 4);
}

}  // namespace

void decode_f32(const std::byte* in, std::size_t blocks, float* out) {
  std::memcpy(out, in, blocks * sizeof(float));
}

void decode_f16(const std::byte* in, std::size_t blocks, float* out) {
  for (std::size_t i = 0; i < blocks; ++i) out[i] = load_half(in + 2 * i);
}

void decode_bf16(const std::byte* in, std::size_t blocks, float* out) {
  for (std::size_t i = 0; i < blocks; ++i) out[i] = bfloat16_to_float(load_u16(in + 2 * i));
}

void decode_q4_0(const std::byte* in, std::size_t blocks, float* out) {
  for (std::size_t b = 0; b < blocks; ++b) {
    const float scale = load_half(in);
    const std::byte* const codes = in + kScaleBytes;
    for (std::size_t i = 0; i < kHalfBlock; ++i) {
      out[i] = scale * static_cast<float>(low_nibble(codes[i]) - 8);
      out[kHalfBlock + i] = scale * static_cast<float>(high_nibble(codes[i]) - 8);
    }
    in += kScaleBytes + kHalfBlock;
    out += kBlock;
  }
}

void decode_q4_1(const std::byte* in, std::size_t blocks, float* out) {
  for (std::size_t b = 0; b < blocks; ++b) {
    const float scale = load_half(in);
    const float minimum = load_half(in + kScaleBytes);
    const std::byte* const codes = in + 2 * kScaleBytes;
    for (std::size_t i = 0; i < kHalfBlock; ++i) {
      out[i] = scale * static_cast<float>(low_nibble(codes[i])) + minimum;
      out[kHalfBlock + i] = scale * static_cast<float>(high_nibble(codes[i])) + minimum;
    }
    in += 2 * kScaleBytes + kHalfBlock;
    out += kBlock;
  }
}

void decode_q8_0(const std::byte* in, std::size_t blocks, float* out) {
  for (std::size_t b = 0; b < blocks; ++b) {
    const float scale = load_half(in);
    const std::byte* const codes = in + kScaleBytes;
    for (std::size_t i = 0; i < kBlock; ++i) {
      const auto code = std::bit_cast<std::int8_t>(codes[i]);
      out[i] = scale * static_cast<float>(code);
    }
    in += kScaleBytes + kBlock;
    out += kBlock;
  }
}

}  // namespace pocket::quant
