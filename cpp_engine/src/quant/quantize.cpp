#include "pocket/quant/quantize.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "pocket/base/error.h"
#include "pocket/base/half.h"
#include "pocket/base/quoted.h"
#include "quantize_k.h"

namespace pocket {
namespace {

constexpr std::size_t kBlock = 32;

std::byte* store_half(float value, std::byte* out) {
  const std::uint16_t half = float_to_half(value);
  std::memcpy(out, &half, sizeof half);
  return out + sizeof half;
}

void encode_q8_0(const float* x, std::byte* out) {
  float amax = 0.0F;
  for (std::size_t i = 0; i < kBlock; ++i) {
    amax = std::max(amax, std::fabs(x[i]));
  }
  const float scale = amax / 127.0F;
  const float inverse = scale == 0.0F ? 0.0F : 1.0F / scale;
  out = store_half(scale, out);
  for (std::size_t i = 0; i < kBlock; ++i) {
    out[i] = static_cast<std::byte>(static_cast<std::int8_t>(std::round(x[i] * inverse)));
  }
}

// Below 0 and NaN: 0. The largest code in a format of `bits` bits at most.
unsigned truncated(float value, unsigned bits) {
  const auto top = static_cast<float>((1U << bits) - 1U);
  return value >= 1.0F ? static_cast<unsigned>(std::min(value, top)) : 0U;
}

// Codes of `bits` bits, in halves; the fifth bits of all before them.
void store_codes(const std::array<unsigned, kBlock>& code, unsigned bits, std::byte* out) {
  if (bits == 5) {
    std::uint32_t high = 0;
    for (std::size_t i = 0; i < kBlock; ++i) {
      high |= code[i] >> 4 << i;
    }
    std::memcpy(out, &high, sizeof high);
    out += sizeof high;
  }
  for (std::size_t i = 0; i < kBlock / 2; ++i) {
    out[i] = static_cast<std::byte>((code[i] & 15U) | (code[i + kBlock / 2] & 15U) << 4);
  }
}

// Q4_0, Q5_0. The value of largest magnitude becomes code 0, that is -8 (or -16) times the scale:
// one code more than a symmetric range has.
void encode_signed(const float* x, unsigned bits, std::byte* out) {
  const float largest = *std::max_element(
      x, x + kBlock, [](float a, float b) { return std::fabs(a) < std::fabs(b); });
  const auto middle = static_cast<float>(1U << (bits - 1U));
  const float scale = largest / -middle;
  const float inverse = scale == 0.0F ? 0.0F : 1.0F / scale;
  std::array<unsigned, kBlock> code;
  for (std::size_t i = 0; i < kBlock; ++i) {
    code[i] = truncated(x[i] * inverse + (middle + 0.5F), bits);
  }
  store_codes(code, bits, store_half(scale, out));
}

// Q4_1, Q5_1.
void encode_with_minimum(const float* x, unsigned bits, std::byte* out) {
  const auto [low, high] = std::minmax_element(x, x + kBlock);
  const float minimum = *low;
  const float scale = (*high - minimum) / static_cast<float>((1U << bits) - 1U);
  const float inverse = scale == 0.0F ? 0.0F : 1.0F / scale;
  std::array<unsigned, kBlock> code;
  for (std::size_t i = 0; i < kBlock; ++i) {
    code[i] = truncated((x[i] - minimum) * inverse + 0.5F, bits);
  }
  store_codes(code, bits, store_half(minimum, store_half(scale, out)));
}

constexpr std::array kWritten{DType::kQ8_0, DType::kQ4_0, DType::kQ4_1, DType::kQ5_0,
                              DType::kQ5_1, DType::kQ4_K, DType::kQ5_K, DType::kQ6_K};

std::string lower(std::string_view name) {
  std::string text(name);
  std::transform(text.begin(), text.end(), text.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; });
  return text;
}

void encode(DType type, const float* x, std::byte* out) {
  switch (type) {
    case DType::kQ8_0:
      return encode_q8_0(x, out);
    case DType::kQ4_0:
      return encode_signed(x, 4, out);
    case DType::kQ5_0:
      return encode_signed(x, 5, out);
    case DType::kQ4_1:
      return encode_with_minimum(x, 4, out);
    case DType::kQ5_1:
      return encode_with_minimum(x, 5, out);
    default:
      return quant::encode_k_block(type, x, out);
  }
}

}  // namespace

bool can_quantize(DType type) noexcept {
  return std::find(kWritten.begin(), kWritten.end(), type) != kWritten.end();
}

DType parse_quantized_format(std::string_view option, std::string_view name) {
  std::string supported;
  for (const DType type : kWritten) {
    const std::string known = lower(dtype_info(type).name);
    if (known == name) {
      return type;
    }
    supported += (supported.empty() ? "" : ", ") + known;
  }
  throw Error(ErrorCode::kUnsupported,
              std::string(option) + ": got " + quoted(name) + "; supported are " + supported);
}

DType narrow_blocks(DType type) noexcept {
  switch (type) {
    case DType::kQ4_K:
      return DType::kQ5_0;
    case DType::kQ5_K:
      return DType::kQ5_1;
    case DType::kQ6_K:
      return DType::kQ8_0;
    default:
      return type;
  }
}

void quantize_row(DType type, std::span<const float> row, std::span<std::byte> out) {
  const DTypeInfo& info = dtype_info(type);
  if (!can_quantize(type) || out.size() != row_bytes(type, row.size())) {
    throw Error(ErrorCode::kInvalidArgument, "cannot write " + std::to_string(row.size()) +
                                                 " elements as " + std::string(info.name) +
                                                 " into " + std::to_string(out.size()) + " bytes");
  }
  for (std::size_t block = 0; block < row.size() / info.block_size; ++block) {
    encode(type, row.data() + block * info.block_size, out.data() + block * info.block_bytes);
  }
}

}  // namespace pocket
