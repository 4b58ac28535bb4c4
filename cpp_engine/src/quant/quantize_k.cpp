#include "quantize_k.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "pocket/base/half.h"
#include "pocket/quant/coded_block.h"

namespace pocket::quant {
namespace {

constexpr std::size_t kSuper = 256;
// Steps tried per sub-block: the plain number of steps in the range plus -1 to 1 in eighths. A
// finer grid changed the error of Gaussian weights by less than half a percent.
constexpr int kTries = 8;
constexpr float kTryStep = 0.125F;

/// x = scale * code - minimum; both of a sub-block, before they are rounded to integers.
struct Line {
  float scale = 0.0F;
  float minimum = 0.0F;  ///< at least 0
};

// To the nearest integer, ties to even: above 2^23 floats have no fraction left.
float nearest_integer(float value) {
  constexpr float kMagic = 12582912.0F;  // 1.5 * 2^23, for either sign of |value| < 2^22
  return (value + kMagic) - kMagic;
}

// Limits are compared so that NaN becomes the lower one.
unsigned nearest(float value, unsigned top) {
  const auto highest = static_cast<float>(top);
  value = value > 0.0F ? value : 0.0F;
  return static_cast<unsigned>(nearest_integer(value < highest ? value : highest));
}

int nearest_signed(float value, int lowest, int highest) {
  const auto low = static_cast<float>(lowest), high = static_cast<float>(highest);
  value = value > low ? value : low;
  return static_cast<int>(nearest_integer(value < high ? value : high));
}

float inverse_of(float value) {
  const float inverse = 1.0F / value;
  return value == 0.0F || !std::isfinite(inverse) ? 0.0F : inverse;
}

// --- Q4_K, Q5_K: scale and minimum ---------------------------------------------------------------

constexpr std::size_t kWide = 32;

Line plain_line(const float* x, unsigned top) {
  const auto [low, high] = std::minmax_element(x, x + kWide);
  const float least = std::min(*low, 0.0F);
  return {(std::max(*high, 0.0F) - least) / static_cast<float>(top), -least};
}

// The line through given codes: least squares, with a minimum that is not negative.
Line fit(const float* x, const std::array<std::uint8_t, kWide>& code) {
  float n1 = 0.0F, n2 = 0.0F, sum = 0.0F, product = 0.0F;
  for (std::size_t i = 0; i < kWide; ++i) {
    const auto q = static_cast<float>(code[i]);
    n1 += q;
    n2 += q * q;
    sum += x[i];
    product += q * x[i];
  }
  const float count = kWide;
  const float determinant = count * n2 - n1 * n1;
  if (!(determinant > 0.0F)) {
    return {};
  }
  Line line{(count * product - n1 * sum) / determinant, (n1 * product - n2 * sum) / determinant};
  if (!(line.minimum > 0.0F)) {
    line = {product / n2, 0.0F};
  }
  return line.scale > 0.0F ? line : Line{};
}

Line best_line(const float* x, unsigned top) {
  const Line plain = plain_line(x, top);
  const float range = plain.scale * static_cast<float>(top);
  Line best = plain;
  float least = HUGE_VALF;
  std::array<std::uint8_t, kWide> code{};
  for (int attempt = -kTries; attempt <= kTries; ++attempt) {
    const float steps = static_cast<float>(top) + kTryStep * static_cast<float>(attempt);
    const float inverse = inverse_of(range / steps);
    for (std::size_t i = 0; i < kWide; ++i) {
      code[i] = static_cast<std::uint8_t>(nearest((x[i] + plain.minimum) * inverse, top));
    }
    const Line line = fit(x, code);
    float error = 0.0F;
    for (std::size_t i = 0; i < kWide; ++i) {
      const float off = line.scale * static_cast<float>(code[i]) - line.minimum - x[i];
      error += off * off;
    }
    if (error < least) {
      least = error;
      best = line;
    }
  }
  return best;
}

// Rounds the lines to the block's integers and codes `x` under them; returns the squared error.
float encode_lines(const float* x, const std::array<Line, 8>& lines, unsigned top,
                   CodedBlock& block) {
  Line most;
  for (const Line& line : lines) {
    most = {std::max(most.scale, line.scale), std::max(most.minimum, line.minimum)};
  }
  constexpr unsigned kMost = 63;
  block.d = float_to_half(most.scale / kMost);
  block.m = float_to_half(most.minimum / kMost);
  const float d = half_to_float(block.d), dmin = half_to_float(block.m);
  const float inverse_d = inverse_of(d), inverse_dmin = inverse_of(dmin);
  float error = 0.0F;
  for (std::size_t j = 0; j < lines.size(); ++j) {
    block.scale[j] = static_cast<std::int8_t>(nearest(lines[j].scale * inverse_d, kMost));
    block.min[j] = static_cast<std::uint8_t>(nearest(lines[j].minimum * inverse_dmin, kMost));
    const float scale = d * static_cast<float>(block.scale[j]);
    const float minimum = dmin * static_cast<float>(block.min[j]);
    const float inverse = inverse_of(scale);
    for (std::size_t i = j * kWide; i < (j + 1) * kWide; ++i) {
      const unsigned code = nearest((x[i] + minimum) * inverse, top);
      block.code[i] = static_cast<std::uint8_t>(code);
      const float off = scale * static_cast<float>(code) - minimum - x[i];
      error += off * off;
    }
  }
  return error;
}

void encode_with_mins(const float* x, unsigned top, CodedBlock& block) {
  std::array<Line, 8> plain;
  std::array<Line, 8> fitted;
  for (std::size_t j = 0; j < plain.size(); ++j) {
    plain[j] = plain_line(x + j * kWide, top);
    fitted[j] = best_line(x + j * kWide, top);
  }
  CodedBlock other;
  const float plain_error = encode_lines(x, plain, top, block);
  if (encode_lines(x, fitted, top, other) < plain_error) {
    block = other;
  }
}

// --- Q6_K: a signed scale ------------------------------------------------------------------------

constexpr std::size_t kNarrow = 16;
constexpr int kLowest = -32, kHighest = 31;

float largest(const float* x, std::size_t count) {
  return *std::max_element(x, x + count,
                           [](float a, float b) { return std::fabs(a) < std::fabs(b); });
}

float best_scale(const float* x) {
  const float far = largest(x, kNarrow);
  float best = 0.0F;
  float least = HUGE_VALF;
  for (int attempt = -kTries; attempt <= kTries; ++attempt) {
    // The value of largest magnitude gets a code near the one that reaches farther.
    const float inverse =
        inverse_of(far / (static_cast<float>(kLowest) + kTryStep * static_cast<float>(attempt)));
    float squares = 0.0F, product = 0.0F, total = 0.0F;
    for (std::size_t i = 0; i < kNarrow; ++i) {
      const auto q = static_cast<float>(nearest_signed(x[i] * inverse, kLowest, kHighest));
      squares += q * q;
      product += q * x[i];
      total += x[i] * x[i];
    }
    if (!(squares > 0.0F)) continue;
    const float error = total - product * product / squares;  // at scale = product / squares
    if (error < least) {
      least = error;
      best = product / squares;
    }
  }
  return best;
}

// `farthest`: the integer of the scale of largest magnitude.
float encode_scales(const float* x, const std::array<float, 16>& scales, int farthest,
                    CodedBlock& block) {
  constexpr int kLeast = -128, kMost = 127;
  block.d = float_to_half(largest(scales.data(), scales.size()) / static_cast<float>(farthest));
  const float d = half_to_float(block.d);
  const float inverse_d = inverse_of(d);
  float error = 0.0F;
  for (std::size_t j = 0; j < scales.size(); ++j) {
    block.scale[j] = static_cast<std::int8_t>(nearest_signed(scales[j] * inverse_d, kLeast, kMost));
    const float scale = d * static_cast<float>(block.scale[j]);
    const float inverse = inverse_of(scale);
    for (std::size_t i = j * kNarrow; i < (j + 1) * kNarrow; ++i) {
      const int code = nearest_signed(x[i] * inverse, kLowest, kHighest);
      block.code[i] = static_cast<std::uint8_t>(code - kLowest);
      const float off = scale * static_cast<float>(code) - x[i];
      error += off * off;
    }
  }
  return error;
}

void encode_signed(const float* x, CodedBlock& block) {
  std::array<float, 16> plain;
  std::array<float, 16> fitted;
  for (std::size_t j = 0; j < plain.size(); ++j) {
    plain[j] = std::fabs(largest(x + j * kNarrow, kNarrow)) / static_cast<float>(kHighest);
    fitted[j] = best_scale(x + j * kNarrow);
  }
  CodedBlock other;
  const float plain_error = encode_scales(x, plain, 127, block);
  if (encode_scales(x, fitted, -128, other) < plain_error) {
    block = other;
  }
}

// --- layouts: the inverse of read_coded_block
// ------------------------------------------------------

class Bytes {
 public:
  explicit Bytes(std::byte* at) : at_(reinterpret_cast<std::uint8_t*>(at)) {}

  std::uint8_t* take(std::size_t count) {
    std::uint8_t* const taken = at_;
    at_ += count;
    return taken;
  }
  void half(std::uint16_t value) { std::memcpy(take(sizeof value), &value, sizeof value); }

 private:
  std::uint8_t* at_;
};

// The bits from `shift` on, `bits` of them: each byte holds 8 / bits runs of `run` elements.
void write_plane(const std::uint8_t* code, unsigned bits, unsigned shift, std::size_t run,
                 std::uint8_t* out) {
  const std::size_t fields = 8 / bits;
  const unsigned mask = (1U << bits) - 1U;
  for (std::size_t i = 0; i < kSuper; ++i) {
    const std::size_t at = i / (run * fields) * run + i % run;
    const auto field = static_cast<unsigned>(i / run % fields) * bits;
    const unsigned value = (static_cast<unsigned>(code[i]) >> shift & mask) << field;
    out[at] = static_cast<std::uint8_t>((field == 0 ? 0U : out[at]) | value);
  }
}

void write_scales_and_mins(const CodedBlock& block, std::uint8_t* out) {
  for (std::size_t j = 0; j < 4; ++j) {
    const auto s0 = static_cast<unsigned>(block.scale[j]);
    const auto s1 = static_cast<unsigned>(block.scale[j + 4]);
    const unsigned m0 = block.min[j], m1 = block.min[j + 4];
    out[j] = static_cast<std::uint8_t>(s0 | (s1 >> 4) << 6);
    out[j + 4] = static_cast<std::uint8_t>(m0 | (m1 >> 4) << 6);
    out[j + 8] = static_cast<std::uint8_t>((s1 & 15U) | (m1 & 15U) << 4);
  }
}

}  // namespace

void encode_k_block(DType type, const float* x, std::byte* out) {
  CodedBlock block;
  Bytes bytes(out);
  if (type == DType::kQ6_K) {
    encode_signed(x, block);
    write_plane(block.code, 4, 0, 64, bytes.take(128));
    write_plane(block.code, 2, 4, 32, bytes.take(64));
    std::memcpy(bytes.take(sizeof block.scale), block.scale, sizeof block.scale);
    bytes.half(block.d);
    return;
  }
  const bool five = type == DType::kQ5_K;
  encode_with_mins(x, five ? 31 : 15, block);
  bytes.half(block.d);
  bytes.half(block.m);
  write_scales_and_mins(block, bytes.take(12));
  if (five) {
    write_plane(block.code, 1, 4, 32, bytes.take(32));
  }
  write_plane(block.code, 4, 0, 32, bytes.take(128));
}

}  // namespace pocket::quant
