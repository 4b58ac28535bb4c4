#include "pocket/quant/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "pocket/base/error.h"
#include "pocket/base/half.h"

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

// The value of largest magnitude becomes code 0, that is -8 times the scale: one code more than a
// symmetric range has.
void encode_q4_0(const float* x, std::byte* out) {
  const float largest = *std::max_element(
      x, x + kBlock, [](float a, float b) { return std::fabs(a) < std::fabs(b); });
  const float scale = largest / -8.0F;
  const float inverse = scale == 0.0F ? 0.0F : 1.0F / scale;
  out = store_half(scale, out);
  const auto code = [&](std::size_t i) {
    return static_cast<unsigned>(std::clamp(x[i] * inverse + 8.5F, 0.0F, 15.0F));
  };
  for (std::size_t i = 0; i < kBlock / 2; ++i) {
    out[i] = static_cast<std::byte>(code(i) | code(i + kBlock / 2) << 4);
  }
}

}  // namespace

bool can_quantize(DType type) noexcept {
  return type == DType::kQ8_0 || type == DType::kQ4_0;
}

void quantize_row(DType type, std::span<const float> row, std::span<std::byte> out) {
  const DTypeInfo& info = dtype_info(type);
  if (!can_quantize(type) || out.size() != row_bytes(type, row.size())) {
    throw Error(ErrorCode::kInvalidArgument, "cannot write " + std::to_string(row.size()) +
                                                 " elements as " + std::string(info.name) +
                                                 " into " + std::to_string(out.size()) + " bytes");
  }
  for (std::size_t block = 0; block < row.size() / kBlock; ++block) {
    const float* const x = row.data() + block * kBlock;
    std::byte* const target = out.data() + block * info.block_bytes;
    if (type == DType::kQ8_0) {
      encode_q8_0(x, target);
    } else {
      encode_q4_0(x, target);
    }
  }
}

}  // namespace pocket
