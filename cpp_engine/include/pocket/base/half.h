#pragma once

#include <bit>
#include <cstdint>

/// Portable conversions between float32 and the 16-bit float formats, given as bit patterns.
///
/// They agree bit for bit with x86 F16C (round to nearest even, subnormals kept, NaNs quieted with
/// the leading payload bits kept), so a kernel may use either. Constant-time and pure.

namespace pocket {

/// IEEE binary16 to binary32; exact.
[[nodiscard]] constexpr float half_to_float(std::uint16_t half) noexcept {
  const std::uint32_t sign = (half & 0x8000u) << 16;
  const std::uint32_t exponent = (half >> 10) & 0x1fu;
  const std::uint32_t mantissa = half & 0x3ffu;
  if (exponent == 0x1f) {
    const std::uint32_t quiet = mantissa != 0 ? 0x00400000u : 0u;
    return std::bit_cast<float>(sign | 0x7f800000u | quiet | (mantissa << 13));
  }
  if (exponent != 0) {
    return std::bit_cast<float>(sign | ((exponent + 127 - 15) << 23) | (mantissa << 13));
  }
  // Zero or subnormal: mantissa * 2^-24, exact in float32.
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
}

/// IEEE binary32 to binary16, rounding to nearest even; overflow gives infinity.
[[nodiscard]] constexpr std::uint16_t float_to_half(float value) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t result;
  if (magnitude > 0x7f800000u) {
    result = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520, halfway between the largest half and 2^16
    result = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // 2^-14, the smallest normal half
    // Adding just under half a unit, plus the kept part's last bit, rounds to nearest even; a carry
    // into the exponent is the right result.
    const std::uint32_t rebased = magnitude - ((127u - 15u) << 23);
    result = (rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13;
  } else if (magnitude <= 0x33000000u) {  // 2^-25, halfway to the smallest subnormal: ties to zero
    result = 0;
  } else {
    const std::uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const std::uint32_t shift = 126u - (magnitude >> 23);  // 14..24 bits below the unit 2^-24
    const std::uint32_t kept = mantissa >> shift;
    const std::uint32_t rest = mantissa & ((1u << shift) - 1u);
    const std::uint32_t half_unit = 1u << (shift - 1u);
    result = kept + ((rest > half_unit || (rest == half_unit && (kept & 1u) != 0)) ? 1u : 0u);
  }
  return static_cast<std::uint16_t>(sign | result);
}

/// bfloat16 to binary32; exact, every bit pattern kept.
[[nodiscard]] constexpr float bfloat16_to_float(std::uint16_t value) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16);
}

/// binary32 to bfloat16, rounding to nearest even; subnormals are kept, NaNs quieted.
[[nodiscard]] constexpr std::uint16_t float_to_bfloat16(float value) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  }
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace pocket
