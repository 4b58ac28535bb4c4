// Sixteen int32 lanes that collect dot products of 4 bytes each: what the int8 attention is written
// over. int_lanes_avx2-inl.h and int_lanes_avx512-inl.h define the same names.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace pocket::POCKET_ISA {
namespace {

struct Ints {
  std::int32_t lane[kLanes];
};
/// 16 groups of 4 bytes, signed or unsigned as the user says.
struct Bytes {
  std::uint8_t byte[4 * kLanes];
};

Ints splat_int(std::int32_t value) {
  Ints out;
  for (std::int32_t& lane : out.lane) {
    lane = value;
  }
  return out;
}
Bytes load_bytes(const void* from) {
  Bytes out;
  std::memcpy(out.byte, from, sizeof out.byte);
  return out;
}
/// The 4 bytes at `from` in every group.
Bytes splat_group(const void* from) {
  Bytes out;
  for (std::size_t i = 0; i < kLanes; ++i) {
    std::memcpy(out.byte + 4 * i, from, 4);
  }
  return out;
}
/// acc[i] += sum of unsigned_bytes * signed_bytes over group i, exact (all 255 x 127 of them).
Ints dot_add(Ints acc, const Bytes& unsigned_bytes, const Bytes& signed_bytes) {
  for (std::size_t i = 0; i < 4 * kLanes; ++i) {
    acc.lane[i / 4] += unsigned_bytes.byte[i] *
                       static_cast<std::int32_t>(static_cast<std::int8_t>(signed_bytes.byte[i]));
  }
  return acc;
}
Ints sub(const Ints& a, const Ints& b) {
  Ints out;
  for (std::size_t i = 0; i < kLanes; ++i) {
    out.lane[i] = a.lane[i] - b.lane[i];
  }
  return out;
}
Ints times_256(Ints a) {
  for (std::int32_t& lane : a.lane) {
    lane *= 256;
  }
  return a;
}
Vec to_float(const Ints& a) {
  return each([&](std::size_t i) { return static_cast<float>(a.lane[i]); });
}
/// Lanes' larger magnitudes, compared as bits: NaN > infinity > every number.
Vec larger_magnitude(const Vec& a, const Vec& b) {
  return each([&](std::size_t i) {
    const std::uint32_t left = std::bit_cast<std::uint32_t>(a.lane[i]) & 0x7fffffffu;
    const std::uint32_t right = std::bit_cast<std::uint32_t>(b.lane[i]) & 0x7fffffffu;
    return std::bit_cast<float>(left > right ? left : right);
  });
}
/// Rounds 16 values in 0..65535 to nearest even; the high bytes go to `high`, the low ones to
/// `low`.
void store_split_codes(std::uint8_t* high, std::uint8_t* low, const Vec& v) {
  for (std::size_t i = 0; i < kLanes; ++i) {
    const auto code = static_cast<std::uint32_t>(std::nearbyint(v.lane[i]));
    high[i] = static_cast<std::uint8_t>(code >> 8);
    low[i] = static_cast<std::uint8_t>(code & 255u);
  }
}
/// Rounds 16 values in -127..127 to nearest even and returns their sum.
std::int32_t store_signed_codes(std::int8_t* to, const Vec& v) {
  std::int32_t sum = 0;
  for (std::size_t i = 0; i < kLanes; ++i) {
    to[i] = static_cast<std::int8_t>(std::nearbyint(v.lane[i]));
    sum += to[i];
  }
  return sum;
}

}  // namespace
}  // namespace pocket::POCKET_ISA
