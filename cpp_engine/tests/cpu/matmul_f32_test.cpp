#include <doctest/doctest.h>

#include "support.h"

using namespace pocket;
using namespace pocket::test;

namespace {

std::vector<float> multiply(const KernelTable& table, const PackedMatrix& w, const float* x,
                            std::size_t ldx, std::size_t m) {
  const std::size_t ldy = w.panels() * kPanelRows;
  std::vector<float> y(m * ldy, -1.0f);
  table.matmul_f32(w, x, ldx, m, 0, w.panels(), y.data(), ldy);
  return y;
}

}  // namespace

TEST_CASE("matmul_f32: the scalar table is one fused chain over the decoded weights") {
  const KernelTable& scalar = kernel_table(Isa::kScalar);
  for (const DType type : kAllTypes) {
    const Weights w(type, 21, 96, 5);
    const std::vector<float> x = random_floats(2 * 96, 9);
    const std::vector<float> y = multiply(scalar, w.matrix(), x.data(), 96, 2);
    for (std::size_t m = 0; m < 2; ++m) {
      for (std::size_t n = 0; n < 21; ++n) {
        const std::vector<float> row = w.row(n);
        float expected = 0.0f;
        double exact = 0.0;
        for (std::size_t k = 0; k < 96; ++k) {
          expected = std::fma(row[k], x[m * 96 + k], expected);
          exact += static_cast<double>(row[k]) * static_cast<double>(x[m * 96 + k]);
        }
        CHECK(y[m * 32 + n] == expected);
        CHECK(std::abs(y[m * 32 + n] - exact) < 1e-4);
      }
    }
  }
}

TEST_CASE("matmul_f32: every table gives the oracle's bits for every shape") {
  const KernelTable& scalar = kernel_table(Isa::kScalar);
  for (const DType type : kAllTypes) {
    for (const auto& [rows, columns] :
         {std::pair<std::size_t, std::size_t>{1, 32}, {17, 96}, {100, 160}, {90, 576}}) {
      const Weights w(type, rows, columns, static_cast<unsigned>(rows));
      const std::size_t ldx = columns + 5;
      const std::vector<float> x = random_floats(17 * ldx, 11);
      const std::vector<float> expected = multiply(scalar, w.matrix(), x.data(), ldx, 17);
      for (const KernelTable* table : vector_tables()) {
        for (std::size_t m = 1; m <= 17; ++m) {
          const std::vector<float> y = multiply(*table, w.matrix(), x.data(), ldx, m);
          CHECK_MESSAGE(first_difference(y, std::span(expected).first(y.size())) == -1,
                        isa_name(table->isa) << " " << type_name(type) << " [" << rows << ", "
                                             << columns << "] m=" << m);
        }
      }
    }
  }
}

TEST_CASE("matmul_f32: float formats take any number of columns") {
  const KernelTable& scalar = kernel_table(Isa::kScalar);
  for (const DType type : {DType::kF16, DType::kBF16, DType::kF32}) {
    for (const std::size_t columns : {1u, 7u, 33u, 100u}) {
      const Weights w(type, 33, columns, 4);
      const std::vector<float> x = random_floats(3 * columns, 2);
      const std::vector<float> expected = multiply(scalar, w.matrix(), x.data(), columns, 3);
      for (const KernelTable* table : vector_tables()) {
        const std::vector<float> y = multiply(*table, w.matrix(), x.data(), columns, 3);
        CHECK(first_difference(y, expected) == -1);
      }
    }
  }
}

TEST_CASE("matmul_f32: any split over panels gives the same bits") {
  for (const DType type : kAllTypes) {
    const Weights w(type, 112, 64, 6);
    const std::vector<float> x = random_floats(5 * 64, 8);
    for (const KernelTable* table : all_tables()) {
      const std::vector<float> whole = multiply(*table, w.matrix(), x.data(), 64, 5);
      for (std::size_t middle = 0; middle <= 7; ++middle) {
        std::vector<float> parts(whole.size());
        table->matmul_f32(w.matrix(), x.data(), 64, 5, 0, middle, parts.data(), 112);
        table->matmul_f32(w.matrix(), x.data(), 64, 5, middle, 7, parts.data(), 112);
        CHECK(first_difference(parts, whole) == -1);
      }
    }
  }
}
