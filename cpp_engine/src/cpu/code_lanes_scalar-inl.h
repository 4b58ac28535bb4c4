// Vectors of packed codes (16 rows x 4 columns of bytes) and the dot products of half a block: what
// the coded layouts' kernels are written over. code_lanes_avx2-inl.h and code_lanes_avx512-inl.h
// define the same names; every function here states what the other two must reproduce.

#include <cstdint>
#include <cstring>

#include "block_layouts.h"
#include "pocket/quant/coded_block.h"

namespace pocket::POCKET_ISA {
namespace {

/// Rows of a tile of the coded matmul.
constexpr std::size_t kCodedTileRows = 2;
/// Offset of `dot_iq4`'s result: it is the exact product plus this many times the sum of q.
constexpr unsigned kIq4DotShift = 7;
constexpr bool kIq4DotHasOffset = true;

/// (byte >> kShift) & kMask in every byte; a negative shift goes left.
template <unsigned kMask, int kShift>
Bytes field(const Bytes& v) {
  Bytes out;
  for (std::size_t i = 0; i < 4 * kLanes; ++i) {
    const unsigned byte = v.byte[i];
    const unsigned shifted = kShift >= 0 ? byte >> (kShift & 7) : byte << (-kShift & 7);
    out.byte[i] = static_cast<std::uint8_t>(shifted & kMask);
  }
  return out;
}
Bytes either(const Bytes& a, const Bytes& b) {
  Bytes out;
  for (std::size_t i = 0; i < 4 * kLanes; ++i) {
    out.byte[i] = a.byte[i] | b.byte[i];
  }
  return out;
}
/// The values of 16-entry codes, plus 128.
Bytes iq4_bytes(const Bytes& codes) {
  Bytes out;
  for (std::size_t i = 0; i < 4 * kLanes; ++i) {
    out.byte[i] = static_cast<std::uint8_t>(kIq4Values[codes.byte[i]] + 128);
  }
  return out;
}
void store_bytes(std::uint8_t* to, const Bytes& v) {
  std::memcpy(to, v.byte, sizeof v.byte);
}

Ints add(const Ints& a, const Ints& b) {
  Ints out;
  for (std::size_t i = 0; i < kLanes; ++i) {
    out.lane[i] = a.lane[i] + b.lane[i];
  }
  return out;
}
template <unsigned kShift>
Ints times_power(Ints a) {
  for (std::int32_t& lane : a.lane) {
    lane *= 1 << kShift;
  }
  return a;
}

/// start + the dot products of 16 columns, exact: w[group] with the 4 codes at q + group * step. No
/// code is above kMaxCode.
template <unsigned kMaxCode>
Ints dot_half_block(Ints start, const Bytes* w, const std::int8_t* q, std::size_t step) {
  for (std::size_t group = 0; group < 4; ++group) {
    start = dot_add(start, w[group], splat_group(q + step * group));
  }
  return start;
}
/// The same with bytes from `iq4_bytes`; see `kIq4DotHasOffset`.
Ints dot_iq4(Ints start, const Bytes* w, const std::int8_t* q, std::size_t step) {
  return dot_half_block<255>(start, w, q, step);
}

/// 16 bytes as floats.
Vec load_unsigned(const std::uint8_t* from) {
  return each([=](std::size_t i) { return static_cast<float>(from[i]); });
}
Vec load_signed(const std::uint8_t* from) {
  return each([=](std::size_t i) { return static_cast<float>(static_cast<std::int8_t>(from[i])); });
}
/// The low, or high, nibbles of 16 bytes as floats.
Vec load_low_nibbles(const std::uint8_t* from) {
  return each([=](std::size_t i) { return static_cast<float>(from[i] & 15); });
}
Vec load_high_nibbles(const std::uint8_t* from) {
  return each([=](std::size_t i) { return static_cast<float>(from[i] >> 4); });
}

}  // namespace
}  // namespace pocket::POCKET_ISA
