#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numbers>

#include "support.h"

using namespace pocket;
using namespace pocket::test;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const std::size_t kLengths[] = {1, 7, 15, 16, 17, 31, 32, 33, 100, 576, 1000};

/// Runs `kernel` in every table and compares the output with the scalar one's.
void check_tables(std::size_t outputs,
                  const std::function<void(const KernelTable&, std::vector<float>&)>& kernel) {
  std::vector<float> expected(outputs);
  kernel(kernel_table(Isa::kScalar), expected);
  for (const KernelTable* table : vector_tables()) {
    std::vector<float> out(outputs);
    kernel(*table, out);
    const long at = first_difference(out, expected);
    CHECK_MESSAGE(at == -1, isa_name(table->isa) << " at " << at << " of " << outputs);
  }
}

}  // namespace

TEST_CASE("rms_norm: formula in double, and the oracle's bits") {
  for (const std::size_t n : kLengths) {
    const std::vector<float> x = random_floats(n, 1, 3.0f);
    const std::vector<float> weight = random_floats(n, 2);
    double sum = 0;
    for (const float value : x) {
      sum += static_cast<double>(value) * static_cast<double>(value);
    }
    const double inverse = 1.0 / std::sqrt(sum / static_cast<double>(n) + 1e-5);
    std::vector<float> y(n);
    kernel_table(Isa::kScalar).rms_norm(x.data(), weight.data(), n, 1e-5f, y.data());
    for (std::size_t i = 0; i < n; ++i) {
      const double expected = x[i] * inverse * weight[i];
      CHECK(std::abs(y[i] - expected) <= 1e-6 * std::abs(expected));
    }
    check_tables(n, [&](const KernelTable& table, std::vector<float>& out) {
      table.rms_norm(x.data(), weight.data(), n, 1e-5f, out.data());
    });
  }
}

namespace {

using GatedKernel = void (*KernelTable::*)(const float*, const float*, std::size_t, float*);

/// Compares a gated activation g / (1 + e^-x(g)) with double precision, and all tables' bits.
/// `x_error` is the relative error of x, which e^-x carries as x times it.
void check_gated(GatedKernel kernel, double (*x_of)(double), double x_error) {
  std::vector<float> gate;
  for (float x = -110.0f; x < 110.0f; x += 0.0173f) {
    gate.push_back(x);
  }
  for (const float x :
       {0.0f, -0.0f, 1e-40f, -1e-40f, 1e30f, -1e30f, kInfinity, 88.7f, -88.7f, -104.5f}) {
    gate.push_back(x);
  }
  const std::vector<float> up = random_floats(gate.size(), 3);
  std::vector<float> out(gate.size());
  (kernel_table(Isa::kScalar).*kernel)(gate.data(), up.data(), gate.size(), out.data());
  for (std::size_t i = 0; i < gate.size(); ++i) {
    const double g = gate[i];
    const double x = x_of(g);
    const double expected = g / (1.0 + std::exp(-x)) * static_cast<double>(up[i]);
    // Below x = -88 the quotient leaves float's normal range.
    const double relative = 6e-7 + std::clamp(-x, 0.0, 88.0) * x_error;
    CHECK((out[i] == static_cast<float>(expected) ||
           std::abs(out[i] - expected) <= relative * std::abs(expected) + 1e-35));
  }
  for (const std::size_t n : {gate.size(), std::size_t{5}, std::size_t{16}, std::size_t{33}}) {
    check_tables(n, [&](const KernelTable& table, std::vector<float>& result) {
      (table.*kernel)(gate.data(), up.data(), n, result.data());
    });
    check_tables(n, [&](const KernelTable& table, std::vector<float>& result) {
      std::copy_n(gate.begin(), n, result.begin());
      (table.*kernel)(result.data(), up.data(), n, result.data());
    });
  }
}

}  // namespace

TEST_CASE("silu_mul: accurate for every magnitude, the oracle's bits, aliasing allowed") {
  check_gated(&KernelTable::silu_mul, [](double g) { return g; }, 0.0);
}

TEST_CASE("gelu_mul: accurate for every magnitude, the oracle's bits, aliasing allowed") {
  const auto x_of = [](double g) {
    return 2.0 * std::sqrt(2.0 / std::numbers::pi) * (g + 0.044715 * g * g * g);
  };
  check_gated(&KernelTable::gelu_mul, x_of, 3 * 6e-8);  // three roundings
}

TEST_CASE("silu_mul, gelu_mul: NaN stays NaN and minus infinity gives NaN, as documented") {
  for (const KernelTable* table : all_tables()) {
    const float gate[] = {std::nanf(""), -kInfinity, 1.0f};
    const float up[] = {1.0f, 1.0f, std::nanf("")};
    for (const GatedKernel kernel : {&KernelTable::silu_mul, &KernelTable::gelu_mul}) {
      float out[3];
      (table->*kernel)(gate, up, 3, out);
      for (const float value : out) {
        CHECK(std::isnan(value));
      }
    }
  }
}

TEST_CASE("rope: rotates pairs half a head apart") {
  for (const std::size_t head_dim : {16u, 24u, 64u, 96u, 128u}) {
    const std::size_t half = head_dim / 2;
    const std::vector<float> x = random_floats(3 * head_dim, 1);
    std::vector<float> cos(half);
    std::vector<float> sin(half);
    for (std::size_t i = 0; i < half; ++i) {
      cos[i] = std::cos(static_cast<float>(i));
      sin[i] = std::sin(static_cast<float>(i));
    }
    std::vector<float> y = x;
    kernel_table(Isa::kScalar).rope(y.data(), 3, head_dim, cos.data(), sin.data());
    for (std::size_t head = 0; head < 3; ++head) {
      for (std::size_t i = 0; i < half; ++i) {
        const std::size_t at = head * head_dim + i;
        const double a = x[at];
        const double b = x[at + half];
        CHECK(std::abs(y[at] - (a * cos[i] - b * sin[i])) < 1e-6);
        CHECK(std::abs(y[at + half] - (b * cos[i] + a * sin[i])) < 1e-6);
      }
    }
    check_tables(x.size(), [&](const KernelTable& table, std::vector<float>& out) {
      out = x;
      table.rope(out.data(), 3, head_dim, cos.data(), sin.data());
    });
  }
}

TEST_CASE("add: exact sum") {
  for (const std::size_t n : kLengths) {
    const std::vector<float> x = random_floats(n, 1);
    const std::vector<float> y = random_floats(n, 2);
    for (const KernelTable* table : all_tables()) {
      std::vector<float> out = x;
      table->add(out.data(), y.data(), n);
      for (std::size_t i = 0; i < n; ++i) {
        CHECK(out[i] == x[i] + y[i]);
      }
    }
  }
}

TEST_CASE("row kernels write nothing past their length") {
  for (const KernelTable* table : all_tables()) {
    for (const std::size_t n : {1u, 5u, 17u, 40u}) {
      const std::vector<float> x = random_floats(n, 1);
      const std::vector<float> y = random_floats(n, 2);
      std::vector<float> out(n + 32, 9.0f);
      table->rms_norm(x.data(), y.data(), n, 1e-5f, out.data());
      table->silu_mul(x.data(), y.data(), n, out.data());
      table->gelu_mul(x.data(), y.data(), n, out.data());
      table->add(out.data(), y.data(), n);
      for (std::size_t i = n; i < out.size(); ++i) {
        CHECK(out[i] == 9.0f);
      }
    }
  }
}

TEST_CASE("quantise_row: codes, sums and scales follow their definition") {
  const std::vector<float> x = random_floats(2 * 96, 1, 4.0f);
  Quantised q(kernel_table(Isa::kScalar), x, 2, 96);
  for (std::size_t block = 0; block < 6; ++block) {
    const QuantisedRow at = quantised_row(q.view(), block / 3, block % 3 * 32, 32);
    float amax = 0.0f;
    for (std::size_t i = 0; i < 32; ++i) {
      amax = std::max(amax, std::abs(x[block * 32 + i]));
    }
    CHECK(*at.scale == amax / 127.0f);
    std::int32_t sum = 0;
    for (std::size_t i = 0; i < 32; ++i) {
      const int code = q.code(block / 3, block % 3 * 32 + i);
      CHECK(code == std::nearbyint(x[block * 32 + i] * (127.0f / amax)));
      CHECK(std::abs(static_cast<float>(code) * *at.scale - x[block * 32 + i]) <=
            0.5001f * *at.scale);
      sum += code;
    }
    CHECK(*at.negative_sum == -sum);
    CHECK(*at.scaled_sum == *at.scale * static_cast<float>(sum));
  }
}

TEST_CASE("quantise_row: zero, subnormal, huge, NaN and infinite blocks, alike in every table") {
  const float cases[] = {0.0f,   -0.0f, 1e-45f,  1e-40f,    2e-37f,     3.8e-37f,
                         1e-36f, 1e30f, 3.4e38f, kInfinity, -kInfinity, std::nanf("")};
  for (const float special : cases) {
    for (const std::size_t at : {0u, 13u, 31u}) {
      std::vector<float> x = random_floats(96, 3, std::isfinite(special) ? special : 1.0f);
      x[32 + at] = special;
      Quantised expected(kernel_table(Isa::kScalar), x, 1, 96);
      if (!std::isfinite(special)) {
        CHECK(std::isnan(expected.scale[1]));
        CHECK(std::isnan(expected.scaled_sum[1]));
        CHECK(expected.negative_sum[1] == 0);
        CHECK(std::isfinite(expected.scale[0]));
      } else if (std::abs(special) < 1e-38f) {
        CHECK(expected.scale[1] == 0.0f);
        CHECK(expected.negative_sum[1] == 0);
      }
      for (const KernelTable* table : vector_tables()) {
        Quantised q(*table, x, 1, 96);
        CHECK(q.q == expected.q);
        CHECK(q.negative_sum == expected.negative_sum);
        CHECK(first_difference(q.scale, expected.scale) == -1);
        CHECK(first_difference(q.scaled_sum, expected.scaled_sum) == -1);
      }
    }
  }
}

TEST_CASE("quantise_row: ties round to even") {
  constexpr std::size_t kStride = 70;
  std::vector<float> x(3 * kStride, 0.0f);
  for (std::size_t row = 0; row < 3; ++row) {
    x[row * kStride] = 127.0f;  // scale 1
    for (std::size_t i = 1; i < 64; ++i) {
      x[row * kStride + i] = static_cast<float>(i) / 2.0f - 10.0f;
    }
    x[row * kStride + 32] = -127.0f;
  }
  for (const KernelTable* table : all_tables()) {
    Quantised q(3, 64);
    for (std::size_t row = 0; row < 3; ++row) {
      table->quantise_row(x.data() + row * kStride, q.row(row));
      for (std::size_t i = 0; i < 64; ++i) {
        CHECK(q.code(row, i) == std::nearbyint(x[row * kStride + i]));
      }
    }
  }
}

TEST_CASE("fused kernels give the bits of their parts, in every table") {
  const KernelTable& scalar = kernel_table(Isa::kScalar);
  for (const std::size_t n : {32u, 96u, 576u, 1536u}) {
    const std::vector<float> residual = random_floats(n, 2);
    const std::vector<float> weight = random_floats(n, 3);
    const auto same = [](const Quantised& a, const Quantised& b) {
      return a.q == b.q && a.negative_sum == b.negative_sum &&
             first_difference(a.scale, b.scale) == -1 &&
             first_difference(a.scaled_sum, b.scaled_sum) == -1;
    };
    std::vector<float> normed(n);
    scalar.rms_norm(residual.data(), weight.data(), n, 1e-5f, normed.data());
    const Quantised normed_codes(scalar, normed, 1, n);
    for (const KernelTable* table : all_tables()) {
      Quantised out(1, n);
      table->rms_norm_quantise(residual.data(), weight.data(), 1e-5f, out.row(0));
      CHECK(same(out, normed_codes));
    }
    std::vector<float> product(n);
    scalar.silu_mul(residual.data(), weight.data(), n, product.data());
    const Quantised silu_codes(scalar, product, 1, n);
    scalar.gelu_mul(residual.data(), weight.data(), n, product.data());
    const Quantised gelu_codes(scalar, product, 1, n);
    for (const KernelTable* table : all_tables()) {
      Quantised out(1, n);
      table->silu_mul_quantise(residual.data(), weight.data(), out.row(0));
      CHECK(same(out, silu_codes));
      table->gelu_mul_quantise(residual.data(), weight.data(), out.row(0));
      CHECK(same(out, gelu_codes));
    }
  }
}

TEST_CASE("argmax: largest value, lowest index, no winner with a NaN") {
  for (const KernelTable* table : all_tables()) {
    CHECK(table->argmax(nullptr, 0) == 0);
    for (const std::size_t n : {1u, 15u, 16u, 17u, 255u, 256u, 257u, 300u, 1000u}) {
      std::vector<float> x = random_floats(n, static_cast<unsigned>(n));
      for (const std::size_t at : {std::size_t{0}, n / 2, n - 1}) {
        std::vector<float> y = x;
        y[at] = 100.0f;
        CHECK(table->argmax(y.data(), n) == at);
        y[n - 1] = 100.0f;
        CHECK(table->argmax(y.data(), n) == at);
        y[at] = kInfinity;
        CHECK(table->argmax(y.data(), n) == at);
        y[at] = std::nanf("");
        CHECK(table->argmax(y.data(), n) == n);
      }
      for (float& value : x) {
        value = -kInfinity;
      }
      CHECK(table->argmax(x.data(), n) == 0);
      x[n - 1] = -1e30f;
      CHECK(table->argmax(x.data(), n) == n - 1);
    }
  }
}
