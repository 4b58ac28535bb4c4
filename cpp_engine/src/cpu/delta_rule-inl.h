// Kernels of Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): linear attention whose memory is
// one matrix per head. Written once over the 16 lanes of vec16_*-inl.h; the order of operations is
// the contract between the tables (docs/kernels.md).

#include "pocket/cpu/kernels.h"

namespace pocket::POCKET_ISA {
namespace {

/// log(1 + y) for y in [0, 1], to about 1 ulp: 2 artanh(s) with s = y / (2 + y), so s^2 <= 1/9, by
/// its series up to s^15 (what is left out is below 2e-9 of the result).
Vec log_one_plus(const Vec& y) {
  const Vec s = div(y, add(splat(2.0f), y));
  const Vec z = mul(s, s);
  Vec p = splat(1.0f / 15.0f);
  p = fma(p, z, splat(1.0f / 13.0f));
  p = fma(p, z, splat(1.0f / 11.0f));
  p = fma(p, z, splat(1.0f / 9.0f));
  p = fma(p, z, splat(1.0f / 7.0f));
  p = fma(p, z, splat(1.0f / 5.0f));
  p = fma(p, z, splat(1.0f / 3.0f));
  const Vec twice = add(s, s);
  return fma(mul(twice, z), p, twice);
}

/// log(1 + e^x) as max(x, 0) + log(1 + e^-|x|): no overflow, and relative accuracy for x << 0.
Vec softplus(const Vec& x) {
  const Vec negative = sub(zero(), x);
  // The second operand survives a NaN, so it stays one.
  return add(max(zero(), x), log_one_plus(exp(min(negative, x))));
}

void sigmoid_mul(const float* gate, const float* x, std::size_t n, float* out) {
  map(gate, x, n, out,
      [](const Vec& g, const Vec& v) { return logistic_times(splat(1.0f), g, v); });
}

void delta_gates(const float* alpha, const float* beta, const float* rate, const float* bias,
                 std::size_t n, float* decay, float* strength) {
  map(alpha, bias, n, decay, [](const Vec& a, const Vec& b) { return softplus(add(a, b)); });
  map(decay, rate, n, decay, [](const Vec& s, const Vec& r) { return exp(mul(r, s)); });
  map(beta, beta, n, strength,
      [](const Vec& b, const Vec&) { return logistic_times(splat(1.0f), b, splat(1.0f)); });
}

void causal_conv_silu(const float* const* taps, std::size_t count, const float* weight,
                      std::size_t weight_stride, std::size_t n, float* out) {
  // Lanes are channels; the oldest tap comes first.
  const auto convolve = [&](auto load_at) {
    Vec sum = mul(load_at(taps[0]), load_at(weight));
    for (std::size_t j = 1; j < count; ++j) {
      sum = fma(load_at(taps[j]), load_at(weight + j * weight_stride), sum);
    }
    return silu_times(sum, splat(1.0f));
  };
  for_lanes(
      n,
      [&](std::size_t i) {
        store(out + i, convolve([i](const float* from) { return load(from + i); }));
      },
      [&](std::size_t i, std::size_t rest) {
        store_first(out + i,
                    convolve([=](const float* from) { return load_first(from + i, rest); }), rest);
      });
}

void l2_normalise(float* x, std::size_t n, float eps, float scale) {
  const float sum = sum_of_squares(x, n);
  const Vec factor = splat(scale / square_root(sum + eps));
  map(x, x, n, x, [&](const Vec& v, const Vec&) { return mul(v, factor); });
}

/// Columns [column, column + 16 kVectors) of the state, for all tokens: they stay in the first
/// cache while the tokens pass.
template <std::size_t kVectors>
void delta_columns(const DeltaRule& rule, std::size_t column) {
  for (std::size_t t = 0; t < rule.tokens; ++t) {
    const float* const q = rule.q + t * rule.qk_stride;
    const float* const k = rule.k + t * rule.qk_stride;
    const Vec decay = splat(rule.decay[t * rule.gate_stride]);
    const Vec strength = splat(rule.strength[t * rule.gate_stride]);
    Vec update[kVectors];
    Vec result[kVectors];
    for (std::size_t c = 0; c < kVectors; ++c) {
      update[c] = zero();
      result[c] = zero();
    }
    for (std::size_t i = 0; i < rule.key_dim; ++i) {
      const float* const row = rule.state + i * rule.value_dim + column;
      const Vec key = splat(k[i]);
      for (std::size_t c = 0; c < kVectors; ++c) {
        update[c] = fma(key, load(row + c * kLanes), update[c]);
      }
    }
    for (std::size_t c = 0; c < kVectors; ++c) {
      const Vec value = load(rule.v + t * rule.v_stride + column + c * kLanes);
      update[c] = mul(strength, fnma(decay, update[c], value));
    }
    for (std::size_t i = 0; i < rule.key_dim; ++i) {
      float* const row = rule.state + i * rule.value_dim + column;
      const Vec key = splat(k[i]);
      const Vec query = splat(q[i]);
      for (std::size_t c = 0; c < kVectors; ++c) {
        const Vec next = fma(key, update[c], mul(decay, load(row + c * kLanes)));
        store(row + c * kLanes, next);
        result[c] = fma(query, next, result[c]);
      }
    }
    for (std::size_t c = 0; c < kVectors; ++c) {
      store(rule.out + t * rule.out_stride + column + c * kLanes, result[c]);
    }
  }
}

void delta_rule(const DeltaRule& rule) {
  constexpr std::size_t kVectors = 2;
  std::size_t column = 0;
  for (; column + kVectors * kLanes <= rule.value_dim; column += kVectors * kLanes) {
    delta_columns<kVectors>(rule, column);
  }
  for (; column < rule.value_dim; column += kLanes) {
    delta_columns<1>(rule, column);
  }
}

}  // namespace
}  // namespace pocket::POCKET_ISA
