// Element-wise kernels and reductions over rows, written once over the 16 lanes of vec16_*-inl.h.
// The order of operations is the contract between the tables (docs/kernels.md).

#include "pocket/cpu/kernels.h"

namespace pocket::POCKET_ISA {
namespace {

/// e^x to about 1 ulp for every x: 0 below -104, infinity above 89, NaN for NaN.
///
/// x = n ln 2 + r with n integral and |r| <= 0.3466 (ln 2 split in two so that n * ln2 is exact);
/// e^r = 1 + r + r^2 P(r), P of degree 5 fitted to the least relative error (5e-11 before
/// rounding).
Vec exp(Vec x) {
  x = max(splat(-104.0f), min(splat(89.0f), x));
  const Vec n = round(mul(x, splat(0x1.715476p+0f)));
  Vec r = fnma(n, splat(0x1.63p-1f), x);
  r = fnma(n, splat(-0x1.bd0106p-13f), r);
  Vec p = splat(0x1.9f081ep-13f);
  p = fma(p, r, splat(0x1.6d8db4p-10f));
  p = fma(p, r, splat(0x1.111272p-7f));
  p = fma(p, r, splat(0x1.55548ep-5f));
  p = fma(p, r, splat(0x1.555554p-3f));
  p = fma(p, r, splat(0x1.0p-1f));
  p = add(fma(mul(r, r), p, r), splat(1.0f));
  return scale_by_power(p, n);
}

/// Calls `full(i)` for whole vectors of [0, n) and `tail(i, count)` for the rest.
template <typename Full, typename Tail>
void for_lanes(std::size_t n, Full full, Tail tail) {
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    full(i);
  }
  if (i < n) {
    tail(i, n - i);
  }
}

/// out[i] = function(a[i], b[i]); out may alias either.
template <typename Function>
void map(const float* a, const float* b, std::size_t n, float* out, Function function) {
  for_lanes(
      n, [&](std::size_t i) { store(out + i, function(load(a + i), load(b + i))); },
      [&](std::size_t i, std::size_t count) {
        const Vec result = function(load_first(a + i, count), load_first(b + i, count));
        store_first(out + i, result, count);
      });
}

void add_to(float* x, const float* y, std::size_t n) {
  map(x, y, n, x, [](const Vec& a, const Vec& b) { return add(a, b); });
}

/// (g / (1 + e^-x)) * u
Vec logistic_times(const Vec& gate, const Vec& x, const Vec& up) {
  return mul(div(gate, add(splat(1.0f), exp(sub(zero(), x)))), up);
}

/// silu(g) * u
Vec silu_times(const Vec& gate, const Vec& up) {
  return logistic_times(gate, gate, up);
}

/// gelu(g) * u with gelu(g) = g (1 + tanh y) / 2 and y = sqrt(2 / pi) (g + 0.044715 g^3), which is
/// g / (1 + e^-2y): no difference of nearly equal numbers for any g.
Vec gelu_times(const Vec& gate, const Vec& up) {
  const Vec slope = fma(mul(gate, gate), splat(0x1.2444f2p-4f), splat(0x1.988454p+0f));
  return logistic_times(gate, mul(gate, slope), up);
}

void silu_mul(const float* gate, const float* up, std::size_t n, float* out) {
  map(gate, up, n, out, [](const Vec& g, const Vec& u) { return silu_times(g, u); });
}

void gelu_mul(const float* gate, const float* up, std::size_t n, float* out) {
  map(gate, up, n, out, [](const Vec& g, const Vec& u) { return gelu_times(g, u); });
}

/// Sum of x^2 in 16 strided partial sums.
float sum_of_squares(const float* x, std::size_t n) {
  Vec sum = zero();
  const auto accumulate = [&](const Vec& v) { sum = fma(v, v, sum); };
  for_lanes(
      n, [&](std::size_t i) { accumulate(load(x + i)); },
      [&](std::size_t i, std::size_t count) { accumulate(load_first(x + i, count)); });
  return reduce_add(sum);
}

/// 1 / sqrt(mean(x^2) + eps)
float inverse_rms(const float* x, std::size_t n, float eps) {
  const float mean = sum_of_squares(x, n) / static_cast<float>(n);
  return 1.0f / square_root(mean + eps);
}

void rms_norm(const float* x, const float* weight, std::size_t n, float eps, float* y) {
  const Vec inverse = splat(inverse_rms(x, n, eps));
  map(x, weight, n, y, [&](const Vec& v, const Vec& w) { return mul(mul(v, inverse), w); });
}

void rope(float* x, std::size_t heads, std::size_t head_dim, const float* cos, const float* sin) {
  const std::size_t half = head_dim / 2;
  for (std::size_t head = 0; head < heads; ++head) {
    float* low = x + head * head_dim;
    float* high = low + half;
    const auto rotate = [](const Vec& a, const Vec& b, const Vec& c, const Vec& s, Vec& out_low,
                           Vec& out_high) {
      out_low = fnma(b, s, mul(a, c));
      out_high = fma(a, s, mul(b, c));
    };
    Vec a;
    Vec b;
    for_lanes(
        half,
        [&](std::size_t i) {
          rotate(load(low + i), load(high + i), load(cos + i), load(sin + i), a, b);
          store(low + i, a);
          store(high + i, b);
        },
        [&](std::size_t i, std::size_t count) {
          rotate(load_first(low + i, count), load_first(high + i, count),
                 load_first(cos + i, count), load_first(sin + i, count), a, b);
          store_first(low + i, a, count);
          store_first(high + i, b, count);
        });
  }
}

/// Below this amax, 127 / amax is not finite: the block counts as zero.
constexpr std::uint32_t kSmallestBlockBits = 0x03000000u;  // 2^-121 > 127 / FLT_MAX
constexpr std::uint32_t kInfinityBits = 0x7f800000u;

/// One block of 32 values (`a`, then `b`): amax, scale = amax / 127, q = round(x * (127 / amax)).
/// kStride: the row's stride if it is a compile-time number (then addresses are constants), else 0.
template <std::size_t kStride>
inline void quantise_block(const Vec& a, const Vec& b, std::size_t block, const QuantisedRow& out) {
  const std::size_t stride = kStride == 0 ? out.stride : kStride;
  const std::size_t at = block * stride;
  const std::uint32_t bits = max_magnitude(a, b);
  float amax;
  __builtin_memcpy(&amax, &bits, sizeof amax);
  const bool finite = bits < kInfinityBits;
  const bool usable = finite && bits >= kSmallestBlockBits;
  // A NaN or infinity has no codes to speak of; its scale is NaN.
  const Vec inverse = splat(usable ? 127.0f / amax : 0.0f);
  const float scale = usable ? amax / 127.0f : finite ? 0.0f : __builtin_nanf("");
  std::int8_t codes[kQuantBlock];
  std::int32_t sums[2];
  store_codes(codes, finite ? mul(a, inverse) : zero(), finite ? mul(b, inverse) : zero(), sums);
  constexpr std::size_t kGroup = 4;
  std::int8_t* q = out.q + at * kQuantBlock;
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kQuantBlock; i += kGroup) {
    __builtin_memcpy(q + i * stride, codes + i, kGroup);
  }
  const std::int32_t total = sums[0] + sums[1];
  out.scale[at] = scale;
  out.negative_sum[at] = -total;
  out.scaled_sum[at] = scale * static_cast<float>(total);
  if (out.half_bias != nullptr) {
    out.half_bias[2 * at] = kHalfBiasFactor * sums[0];
    out.half_bias[2 * at + stride] = kHalfBiasFactor * sums[1];
  }
}

/// Quantises a row; `values(k)` gives the 16 values from column k on.
template <typename Values>
void quantise_values(const QuantisedRow& out, Values values) {
  const std::size_t blocks = out.columns / kQuantBlock;
  if (out.stride == kRowGroup) {
    for (std::size_t block = 0; block < blocks; ++block) {
      const std::size_t k = block * kQuantBlock;
      quantise_block<kRowGroup>(values(k), values(k + kLanes), block, out);
    }
    return;
  }
  for (std::size_t block = 0; block < blocks; ++block) {
    const std::size_t k = block * kQuantBlock;
    quantise_block<0>(values(k), values(k + kLanes), block, out);
  }
}

void quantise_row(const float* x, const QuantisedRow& out) {
  quantise_values(out, [&](std::size_t k) { return load(x + k); });
}

void rms_norm_quantise(const float* x, const float* weight, float eps, const QuantisedRow& out) {
  const Vec inverse = splat(inverse_rms(x, out.columns, eps));
  quantise_values(out,
                  [&](std::size_t k) { return mul(mul(load(x + k), inverse), load(weight + k)); });
}

void silu_mul_quantise(const float* gate, const float* up, const QuantisedRow& out) {
  quantise_values(out, [&](std::size_t k) { return silu_times(load(gate + k), load(up + k)); });
}

void gelu_mul_quantise(const float* gate, const float* up, const QuantisedRow& out) {
  quantise_values(out, [&](std::size_t k) { return gelu_times(load(gate + k), load(up + k)); });
}

/// Keeps the largest value of each run of 256 and searches only the winning run for its index.
std::size_t argmax(const float* x, std::size_t n) {
  constexpr std::size_t kRun = 256;
  const float lowest = -__builtin_inff();
  float best = lowest;
  std::size_t best_run = 0;
  for (std::size_t begin = 0; begin < n; begin += kRun) {
    const std::size_t count = n - begin < kRun ? n - begin : kRun;
    Vec largest = splat(lowest);
    Vec sum = zero();  // a NaN anywhere makes it NaN
    const auto visit = [&](const Vec& v) {
      largest = max(v, largest);
      sum = fma(v, zero(), sum);
    };
    for_lanes(
        count, [&](std::size_t i) { visit(load(x + begin + i)); },
        [&](std::size_t i, std::size_t rest) {
          visit(keep_first(load_first(x + begin + i, rest), rest, lowest));
        });
    const float run_best = reduce_max(largest);
    if (any_nan(sum)) {
      // Infinities give NaN, too, by 0 * inf: look again.
      for (std::size_t i = 0; i < count; ++i) {
        if (x[begin + i] != x[begin + i]) {
          return n;
        }
      }
    }
    if (run_best > best) {
      best = run_best;
      best_run = begin;
    }
  }
  for (std::size_t i = best_run; i < n; ++i) {
    if (x[i] == best) {
      return i;
    }
  }
  return n;
}

}  // namespace
}  // namespace pocket::POCKET_ISA
