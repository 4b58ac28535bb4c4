// Sixteen lanes of two bfloat16 values each, multiplied and added in pairs: what the bfloat16
// attention is written over. pair_lanes_avx2-inl.h and pair_lanes_avx512-inl.h define the same
// names.

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "pocket/base/half.h"

namespace pocket::POCKET_ISA {
namespace {

/// The low half of a lane is the even value.
struct Pairs {
  std::uint32_t lane[kLanes];
};

Pairs load_pairs(const std::uint16_t* from) {
  Pairs out;
  std::memcpy(out.lane, from, sizeof out.lane);
  return out;
}
/// The two values at `from` in every lane.
Pairs splat_pair(const std::uint16_t* from) {
  Pairs out;
  for (std::uint32_t& lane : out.lane) {
    std::memcpy(&lane, from, sizeof lane);
  }
  return out;
}
/// Every lane's bits under the mask.
template <std::uint32_t kMask>
Pairs keep_bits(Pairs a) {
  for (std::uint32_t& lane : a.lane) {
    lane &= kMask;
  }
  return a;
}
/// acc = fma(a.odd, b.odd, acc), then fma(a.even, b.even, acc): what VDPBF16PS does (Intel SDM) for
/// values that are not denormal. kInstruction: by that instruction, which only AVX-512 has.
template <bool kInstruction>
Vec pair_dot_add(Vec acc, const Pairs& a, const Pairs& b) {
  for (std::size_t i = 0; i < kLanes; ++i) {
    const auto value = [](std::uint32_t bits) { return std::bit_cast<float>(bits); };
    const float odd =
        std::fma(value(a.lane[i] & 0xffff0000u), value(b.lane[i] & 0xffff0000u), acc.lane[i]);
    acc.lane[i] = std::fma(value(a.lane[i] << 16), value(b.lane[i] << 16), odd);
  }
  return acc;
}
/// To the nearest, ties to even; denormal floats become zeros, since VDPBF16PS takes them for such.
template <bool kInstruction>
void store_bfloat16(std::uint16_t* to, const Vec& v) {
  for (std::size_t i = 0; i < kLanes; ++i) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(v.lane[i]);
    to[i] = (bits & 0x7f800000u) == 0 ? static_cast<std::uint16_t>(bits >> 16 & 0x8000u)
                                      : float_to_bfloat16(v.lane[i]);
  }
}

}  // namespace
}  // namespace pocket::POCKET_ISA
