#include "pocket/quant/coded_block.h"

#include <bit>
#include <cstring>

#include "pocket/base/half.h"

namespace pocket {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF files are little-endian");

constexpr std::size_t kSuperBlock = 256;
constexpr std::size_t kBlock = 32;

/// Reads a block's fields in the order in which they are stored.
class Fields {
 public:
  explicit Fields(const std::byte* at) : at_(reinterpret_cast<const std::uint8_t*>(at)) {}

  const std::uint8_t* bytes(std::size_t count) {
    const std::uint8_t* const taken = at_;
    at_ += count;
    return taken;
  }
  template <typename T>
  T number() {
    T value;
    std::memcpy(&value, bytes(sizeof value), sizeof value);
    return value;
  }

 private:
  const std::uint8_t* at_;
};

/// Blocks of 32: byte l holds elements l (low nibble) and l + 16 (high nibble).
void read_nibbles_32(const std::uint8_t* stored, std::uint8_t* code) {
  for (std::size_t l = 0; l < kBlock / 2; ++l) {
    code[l] = stored[l] & 15;
    code[l + kBlock / 2] = stored[l] >> 4;
  }
}

/// Planes of super-blocks: each run of 32 bytes holds 8 / kBits runs of 32 elements, lowest bits
/// first. Adds the plane to `code` at bit `shift`.
template <unsigned kBits>
void add_plane(const std::uint8_t* stored, unsigned shift, std::uint8_t* code) {
  constexpr unsigned kFields = 8 / kBits;
  constexpr unsigned kMask = (1u << kBits) - 1u;
  for (std::size_t run = 0; run < kSuperBlock / kBlock; ++run) {
    const std::uint8_t* const from = stored + run / kFields * kBlock;
    const unsigned field = static_cast<unsigned>(run % kFields) * kBits;
    for (std::size_t l = 0; l < kBlock; ++l) {
      code[run * kBlock + l] =
          static_cast<std::uint8_t>(code[run * kBlock + l] | ((from[l] >> field & kMask) << shift));
    }
  }
}

void clear_codes(CodedBlock& out) {
  std::memset(out.code, 0, sizeof out.code);
}

void read_q5(const std::byte* stored, bool has_min, CodedBlock& out) {
  Fields fields(stored);
  out.d = fields.number<std::uint16_t>();
  if (has_min) out.m = fields.number<std::uint16_t>();
  const auto high = fields.number<std::uint32_t>();
  read_nibbles_32(fields.bytes(kBlock / 2), out.code);
  for (std::size_t i = 0; i < kBlock; ++i) {
    out.code[i] = static_cast<std::uint8_t>(out.code[i] | (high >> i & 1u) << 4);
  }
}

void read_q2_k(const std::byte* stored, CodedBlock& out) {
  Fields fields(stored);
  const std::uint8_t* const scales = fields.bytes(16);
  for (std::size_t j = 0; j < 16; ++j) {
    out.scale[j] = static_cast<std::int8_t>(scales[j] & 15);
    out.min[j] = scales[j] >> 4;
  }
  clear_codes(out);
  add_plane<2>(fields.bytes(64), 0, out.code);
  out.d = fields.number<std::uint16_t>();
  out.m = fields.number<std::uint16_t>();
}

void read_q3_k(const std::byte* stored, CodedBlock& out) {
  Fields fields(stored);
  clear_codes(out);
  add_plane<1>(fields.bytes(32), 2, out.code);
  add_plane<2>(fields.bytes(64), 0, out.code);
  // 16 scales of 6 bits: low nibbles of two times 8, then 2-bit pieces of four times 4.
  const std::uint8_t* const low = fields.bytes(8);
  const std::uint8_t* const high = fields.bytes(4);
  for (std::size_t j = 0; j < 16; ++j) {
    const unsigned value = (low[j % 8] >> 4 * (j / 8) & 15u) | (high[j % 4] >> 2 * (j / 4) & 3u)
                                                                   << 4;
    out.scale[j] = static_cast<std::int8_t>(static_cast<int>(value) - 32);
  }
  out.d = fields.number<std::uint16_t>();
}

/// Q4_K and Q5_K: 8 scales and 8 mins of 6 bits in 12 bytes; the upper bits of the first eight hold
/// two bits each of numbers 4 to 7.
void read_scales_and_mins(const std::uint8_t* stored, CodedBlock& out) {
  for (std::size_t j = 0; j < 4; ++j) {
    out.scale[j] = static_cast<std::int8_t>(stored[j] & 63);
    out.min[j] = stored[j + 4] & 63;
    out.scale[j + 4] = static_cast<std::int8_t>((stored[j + 8] & 15) | (stored[j] >> 6) << 4);
    out.min[j + 4] = static_cast<std::uint8_t>(stored[j + 8] >> 4 | (stored[j + 4] >> 6) << 4);
  }
}

void read_q4_k_or_q5_k(const std::byte* stored, bool five_bits, CodedBlock& out) {
  Fields fields(stored);
  out.d = fields.number<std::uint16_t>();
  out.m = fields.number<std::uint16_t>();
  read_scales_and_mins(fields.bytes(12), out);
  clear_codes(out);
  if (five_bits) add_plane<1>(fields.bytes(32), 4, out.code);
  add_plane<4>(fields.bytes(128), 0, out.code);
}

void read_q6_k(const std::byte* stored, CodedBlock& out) {
  Fields fields(stored);
  const std::uint8_t* const low = fields.bytes(128);
  const std::uint8_t* const high = fields.bytes(64);
  // Per half of 128: 64 bytes whose low nibbles are elements 0..63 and high nibbles 64..127.
  for (std::size_t i = 0; i < kSuperBlock; ++i) {
    const std::size_t half = i / 128;
    const std::uint8_t byte = low[64 * half + i % 64];
    out.code[i] = i % 128 < 64 ? byte & 15 : byte >> 4;
  }
  add_plane<2>(high, 4, out.code);
  std::memcpy(out.scale, fields.bytes(16), 16);
  out.d = fields.number<std::uint16_t>();
}

void read_iq4_nl(const std::byte* stored, CodedBlock& out) {
  Fields fields(stored);
  out.d = fields.number<std::uint16_t>();
  read_nibbles_32(fields.bytes(kBlock / 2), out.code);
}

void read_iq4_xs(const std::byte* stored, CodedBlock& out) {
  Fields fields(stored);
  out.d = fields.number<std::uint16_t>();
  const auto high = fields.number<std::uint16_t>();
  const std::uint8_t* const low = fields.bytes(4);
  for (std::size_t j = 0; j < 8; ++j) {
    const int value = (low[j / 2] >> 4 * (j & 1) & 15) | (high >> 2 * j & 3) << 4;
    out.scale[j] = static_cast<std::int8_t>(value - 32);
    read_nibbles_32(fields.bytes(kBlock / 2), out.code + j * kBlock);
  }
}

/// out[i] = (d * scale) * value(code): the order of `gguf.quants`.
template <typename Value>
void decode_scaled(const CodedBlock& block, std::size_t sub_block, Value value, float* out) {
  const float d = half_to_float(block.d);
  for (std::size_t i = 0; i < kSuperBlock; ++i) {
    const float scale = d * static_cast<float>(block.scale[i / sub_block]);
    out[i] = scale * static_cast<float>(value(block.code[i]));
  }
}

/// out[i] = (d * scale) * code - dmin * min.
void decode_scaled_with_mins(const CodedBlock& block, std::size_t sub_block, float* out) {
  const float d = half_to_float(block.d);
  const float dmin = half_to_float(block.m);
  for (std::size_t i = 0; i < kSuperBlock; ++i) {
    const float scale = d * static_cast<float>(block.scale[i / sub_block]);
    const float minimum = dmin * static_cast<float>(block.min[i / sub_block]);
    out[i] = scale * static_cast<float>(block.code[i]) - minimum;
  }
}

}  // namespace

bool has_coded_blocks(DType type) noexcept {
  switch (type) {
    case DType::kQ5_0:
    case DType::kQ5_1:
    case DType::kQ2_K:
    case DType::kQ3_K:
    case DType::kQ4_K:
    case DType::kQ5_K:
    case DType::kQ6_K:
    case DType::kIQ4_NL:
    case DType::kIQ4_XS:
      return true;
    default:
      return false;
  }
}

void read_coded_block(DType type, const std::byte* stored, CodedBlock& out) noexcept {
  switch (type) {
    case DType::kQ5_0:
      return read_q5(stored, false, out);
    case DType::kQ5_1:
      return read_q5(stored, true, out);
    case DType::kQ2_K:
      return read_q2_k(stored, out);
    case DType::kQ3_K:
      return read_q3_k(stored, out);
    case DType::kQ4_K:
      return read_q4_k_or_q5_k(stored, false, out);
    case DType::kQ5_K:
      return read_q4_k_or_q5_k(stored, true, out);
    case DType::kQ6_K:
      return read_q6_k(stored, out);
    case DType::kIQ4_NL:
      return read_iq4_nl(stored, out);
    case DType::kIQ4_XS:
      return read_iq4_xs(stored, out);
    default:
      return;  // excluded by the precondition
  }
}

void decode_coded_block(DType type, const CodedBlock& block, float* out) noexcept {
  const auto less = [](int offset) { return [offset](int code) { return code - offset; }; };
  const auto iq4 = [](int code) { return kIq4Values[code]; };
  switch (type) {
    case DType::kQ5_0:
    case DType::kIQ4_NL: {
      const float d = half_to_float(block.d);
      for (std::size_t i = 0; i < kBlock; ++i) {
        const int value = type == DType::kQ5_0 ? block.code[i] - 16 : iq4(block.code[i]);
        out[i] = d * static_cast<float>(value);
      }
      return;
    }
    case DType::kQ5_1: {
      const float d = half_to_float(block.d);
      const float m = half_to_float(block.m);
      for (std::size_t i = 0; i < kBlock; ++i) out[i] = d * static_cast<float>(block.code[i]) + m;
      return;
    }
    case DType::kQ2_K:
      return decode_scaled_with_mins(block, 16, out);
    case DType::kQ3_K:
      return decode_scaled(block, 16, less(4), out);
    case DType::kQ4_K:
    case DType::kQ5_K:
      return decode_scaled_with_mins(block, 32, out);
    case DType::kQ6_K:
      return decode_scaled(block, 16, less(32), out);
    case DType::kIQ4_XS:
      return decode_scaled(block, 32, iq4, out);
    default:
      return;  // excluded by the precondition
  }
}

}  // namespace pocket
