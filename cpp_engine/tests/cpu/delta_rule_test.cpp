// Kernels of Gated DeltaNet against formulas in double precision, and all tables' bits.

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <vector>

#include "support.h"

using namespace pocket;
using namespace pocket::test;

namespace {

void check_tables(std::size_t outputs,
                  const std::function<void(const KernelTable&, std::vector<float>&)>& kernel) {
  std::vector<float> expected(outputs);
  kernel(kernel_table(Isa::kScalar), expected);
  for (const KernelTable* table : vector_tables()) {
    std::vector<float> out(outputs);
    kernel(*table, out);
    CHECK_MESSAGE(first_difference(out, expected) == -1, isa_name(table->isa));
  }
}

bool near(float value, double expected, double relative) {
  return std::abs(value - expected) <= relative * std::abs(expected) + 1e-37;
}

constexpr std::size_t kTokens = 37;

/// Inputs and state of one head; rows lie apart, as in a model's buffers.
struct Head {
  Head(std::size_t key_dim, std::size_t value_dim)
      : dk(key_dim),
        dv(value_dim),
        q(random_floats(kTokens * (dk + 3), 1, 0.2f)),
        k(random_floats(kTokens * (dk + 3), 2, 0.2f)),
        v(random_floats(kTokens * (dv + 5), 3)),
        decay(random_floats(kTokens * 2, 4)),
        strength(random_floats(kTokens * 2, 5)),
        state(random_floats(dk * dv, 6)) {
    for (std::vector<float>* gate : {&decay, &strength}) {
      for (float& value : *gate) {
        value = 1.0f / (1.0f + std::exp(-value));
      }
    }
  }

  // Tokens [begin, end) into `out`, [tokens, dv + 1].
  void run(const KernelTable& table, std::size_t begin, std::size_t end, float* out) {
    table.delta_rule({.q = q.data() + begin * (dk + 3),
                      .k = k.data() + begin * (dk + 3),
                      .v = v.data() + begin * (dv + 5),
                      .out = out + begin * (dv + 1),
                      .qk_stride = dk + 3,
                      .v_stride = dv + 5,
                      .out_stride = dv + 1,
                      .decay = decay.data() + begin * 2,
                      .strength = strength.data() + begin * 2,
                      .gate_stride = 2,
                      .tokens = end - begin,
                      .key_dim = dk,
                      .value_dim = dv,
                      .state = state.data()});
  }

  std::size_t dk, dv;
  std::vector<float> q, k, v, decay, strength, state;
};

std::vector<double> expected_outputs(const Head& head) {
  std::vector<double> state(head.state.begin(), head.state.end());
  std::vector<double> out;
  for (std::size_t t = 0; t < kTokens; ++t) {
    const float* q = head.q.data() + t * (head.dk + 3);
    const float* k = head.k.data() + t * (head.dk + 3);
    for (double& value : state) {
      value *= head.decay[2 * t];
    }
    for (std::size_t j = 0; j < head.dv; ++j) {
      double known = 0;
      for (std::size_t i = 0; i < head.dk; ++i) {
        known += state[i * head.dv + j] * k[i];
      }
      const double update = head.strength[2 * t] * (head.v[t * (head.dv + 5) + j] - known);
      double result = 0;
      for (std::size_t i = 0; i < head.dk; ++i) {
        state[i * head.dv + j] += k[i] * update;
        result += state[i * head.dv + j] * q[i];
      }
      out.push_back(result);
    }
  }
  return out;
}

constexpr std::array<std::array<std::size_t, 2>, 4> kHeads{
    {{16, 16}, {24, 48}, {64, 80}, {128, 128}}};

}  // namespace

TEST_CASE("delta_rule: the recurrence in double, and the oracle's bits") {
  for (const auto& [dk, dv] : kHeads) {
    Head head(dk, dv);
    const std::vector<double> expected = expected_outputs(head);
    std::vector<float> out(kTokens * (dv + 1));
    head.run(kernel_table(Isa::kScalar), 0, kTokens, out.data());
    double worst = 0;
    for (std::size_t t = 0; t < kTokens; ++t) {
      for (std::size_t j = 0; j < dv; ++j) {
        worst = std::max(worst, std::abs(out[t * (dv + 1) + j] - expected[t * dv + j]));
      }
    }
    CHECK(worst < 1e-5);
    check_tables(out.size() + dk * dv, [&](const KernelTable& table, std::vector<float>& result) {
      Head same(dk, dv);
      same.run(table, 0, kTokens, result.data());
      std::copy(same.state.begin(), same.state.end(), result.begin() + kTokens * (dv + 1));
    });
  }
}

TEST_CASE("delta_rule: however the tokens are cut into calls, the bits are the same") {
  for (const KernelTable* table : all_tables()) {
    for (const auto& [dk, dv] : kHeads) {
      Head whole(dk, dv);
      std::vector<float> expected(kTokens * (dv + 1));
      whole.run(*table, 0, kTokens, expected.data());
      for (const std::size_t size : {1u, 2u, 5u, 16u}) {
        Head cut(dk, dv);
        std::vector<float> out(expected.size());
        for (std::size_t begin = 0; begin < kTokens; begin += size) {
          cut.run(*table, begin, std::min(begin + size, kTokens), out.data());
        }
        CHECK(first_difference(out, expected) == -1);
        CHECK(first_difference(cut.state, whole.state) == -1);
      }
    }
  }
}

TEST_CASE("delta_gates: e^(rate softplus(alpha + bias)) and sigmoid(beta) for every magnitude") {
  std::vector<float> alpha;
  for (float x = -120.0f; x < 120.0f; x += 0.037f) {
    alpha.push_back(x);
  }
  const std::size_t n = alpha.size();
  const std::vector<float> beta(alpha.rbegin(), alpha.rend());
  std::vector<float> rate = random_floats(n, 8);
  for (float& value : rate) {
    value = -std::abs(value) - 0.01f;
  }
  const std::vector<float> bias = random_floats(n, 9);
  std::vector<float> decay(n), strength(n);
  kernel_table(Isa::kScalar)
      .delta_gates(alpha.data(), beta.data(), rate.data(), bias.data(), n, decay.data(),
                   strength.data());
  for (std::size_t i = 0; i < n; ++i) {
    const double x = static_cast<double>(alpha[i] + bias[i]);
    const double exponent = rate[i] * (std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))));
    // A rounding of the exponent, at most 104, is a relative error of e^exponent.
    const double relative = 6e-7 + 4e-7 * std::min(-exponent, 104.0);
    CHECK((near(decay[i], std::exp(exponent), relative) || decay[i] < 1e-37f));
    const double b = beta[i];
    CHECK(near(strength[i], 1.0 / (1.0 + std::exp(-b)), 6e-7 + 1.2e-7 * std::max(-b, 0.0)));
  }
  for (const std::size_t count : {n, std::size_t{3}, std::size_t{32}}) {
    check_tables(2 * count, [&](const KernelTable& table, std::vector<float>& out) {
      // In place, as the layer calls it.
      std::copy_n(alpha.begin(), count, out.begin());
      std::copy_n(beta.begin(), count, out.begin() + static_cast<long>(count));
      table.delta_gates(out.data(), out.data() + count, rate.data(), bias.data(), count, out.data(),
                        out.data() + count);
    });
  }
}

TEST_CASE("causal_conv_silu: taps from oldest to newest, in place") {
  for (const std::size_t n : {1u, 16u, 37u, 96u}) {
    for (const std::size_t taps : {2u, 4u}) {
      const std::vector<float> x = random_floats(taps * n, 10);
      const std::vector<float> weight = random_floats(taps * (n + 2), 11);
      const auto run = [&](const KernelTable& table, std::vector<float>& rows) {
        rows = x;
        std::vector<const float*> pointers;
        for (std::size_t j = 0; j < taps; ++j) {
          pointers.push_back(rows.data() + j * n);
        }
        table.causal_conv_silu(pointers.data(), taps, weight.data(), n + 2, n,
                               rows.data() + (taps - 1) * n);
      };
      std::vector<float> rows;
      run(kernel_table(Isa::kScalar), rows);
      for (std::size_t c = 0; c < n; ++c) {
        double sum = 0;
        double size = 0;
        for (std::size_t j = 0; j < taps; ++j) {
          const double term = static_cast<double>(x[j * n + c]) * weight[j * (n + 2) + c];
          sum += term;
          size += std::abs(term);
        }
        const double expected = sum / (1.0 + std::exp(-sum));
        CHECK(std::abs(rows[(taps - 1) * n + c] - expected) <= 1e-6 * size);
      }
      check_tables(taps * n, run);
    }
  }
}

TEST_CASE("l2_normalise and sigmoid_mul: formulas and bits") {
  for (const std::size_t n : {1u, 16u, 24u, 128u, 200u}) {
    const std::vector<float> x = random_floats(n, 12);
    const std::vector<float> gate = random_floats(n, 13, 4.0f);
    double sum = 1e-6;
    for (const float value : x) {
      sum += static_cast<double>(value) * static_cast<double>(value);
    }
    std::vector<float> y = x;
    kernel_table(Isa::kScalar).l2_normalise(y.data(), n, 1e-6f, 0.25f);
    std::vector<float> gated(n);
    kernel_table(Isa::kScalar).sigmoid_mul(gate.data(), x.data(), n, gated.data());
    for (std::size_t i = 0; i < n; ++i) {
      CHECK(near(y[i], 0.25 * x[i] / std::sqrt(sum), 1e-6));
      CHECK(near(gated[i], x[i] / (1.0 + std::exp(-static_cast<double>(gate[i]))), 2e-6));
    }
    check_tables(2 * n, [&](const KernelTable& table, std::vector<float>& out) {
      std::copy(x.begin(), x.end(), out.begin());
      table.l2_normalise(out.data(), n, 1e-6f, 0.25f);
      table.sigmoid_mul(gate.data(), x.data(), n, out.data() + n);
    });
  }
}
