#include <doctest/doctest.h>

#include "support.h"

using namespace pocket;
using namespace pocket::test;

namespace {

std::vector<float> multiply(const KernelTable& table, const PackedMatrix& w, QuantisedRows x) {
  const std::size_t ldy = w.panels() * kPanelRows;
  std::vector<float> y(x.rows * ldy, -1.0f);
  table.matmul_q8(w, x, 0, w.panels(), y.data(), ldy);
  return y;
}

}  // namespace

TEST_CASE("matmul_q8: the scalar table agrees with a double-precision product of decoded values") {
  const KernelTable& scalar = kernel_table(Isa::kScalar);
  for (const DType type : kQuantTypes) {
    for (const std::size_t columns : {32u, 96u, 576u}) {
      const Weights w(type, 35, columns, 5);
      const std::vector<float> x = random_floats(3 * columns, 9);
      Quantised q(scalar, x, 3, columns);
      const std::vector<float> y = multiply(scalar, w.matrix(), q.view());
      for (std::size_t m = 0; m < 3; ++m) {
        for (std::size_t n = 0; n < 35; ++n) {
          const std::vector<float> row = w.row(n);
          double expected = 0;
          double magnitude = 0;
          for (std::size_t k = 0; k < columns; ++k) {
            const double term = static_cast<double>(row[k]) * q.code(m, k) *
                                static_cast<double>(q.block_scale(m, k / 32));
            expected += term;
            magnitude += std::abs(term);
          }
          // Q4_1 adds d*q and m apart, so intermediate sums may be larger than the terms.
          CHECK(std::abs(y[m * 48 + n] - expected) <= 1e-5 * (1.0 + magnitude));
        }
      }
    }
  }
}

TEST_CASE("matmul_q8: every table gives the oracle's bits for every shape") {
  const KernelTable& scalar = kernel_table(Isa::kScalar);
  for (const DType type : kQuantTypes) {
    for (const auto& [rows, columns] : {std::pair<std::size_t, std::size_t>{1, 32},
                                        {16, 64},
                                        {17, 96},
                                        {48, 576},
                                        {100, 160},
                                        {31, 1536},
                                        {40, 2080}}) {
      const Weights w(type, rows, columns, static_cast<unsigned>(rows + columns));
      const std::vector<float> x = random_floats(33 * columns, 11);
      Quantised all(scalar, x, 33, columns);
      const std::vector<float> expected = multiply(scalar, w.matrix(), all.view());
      for (const KernelTable* table : vector_tables()) {
        for (std::size_t m = 1; m <= 33; ++m) {
          Quantised q(*table, x, m, columns);
          const std::vector<float> y = multiply(*table, w.matrix(), q.view());
          CHECK_MESSAGE(first_difference(y, std::span(expected).first(y.size())) == -1,
                        isa_name(table->isa) << " " << type_name(type) << " [" << rows << ", "
                                             << columns << "] m=" << m);
        }
      }
    }
  }
}

TEST_CASE("matmul_q8: a long batch gives each row the bits that it gets alone") {
  for (const DType type : kQuantTypes) {
    const Weights w(type, 40, 96, 3);
    constexpr std::size_t kRows = 211;  // several passes and uneven tiles
    const std::vector<float> x = random_floats(kRows * 96, 4);
    for (const KernelTable* table : all_tables()) {
      Quantised q(*table, x, kRows, 96);
      const std::vector<float> batch = multiply(*table, w.matrix(), q.view());
      for (std::size_t m = 0; m < kRows; ++m) {
        Quantised one(*table, std::span(x).subspan(m * 96, 96), 1, 96);
        const std::vector<float> alone = multiply(*table, w.matrix(), one.view());
        CHECK(first_difference(alone, std::span(batch).subspan(m * 48, 48)) == -1);
      }
    }
  }
}

TEST_CASE("matmul_q8: any split over panels gives the same bits and writes only its own panels") {
  for (const DType type : kQuantTypes) {
    const Weights w(type, 112, 128, 6);
    const std::vector<float> x = random_floats(5 * 128, 8);
    for (const KernelTable* table : all_tables()) {
      Quantised q(*table, x, 5, 128);
      const std::vector<float> whole = multiply(*table, w.matrix(), q.view());
      for (std::size_t begin = 0; begin < 7; ++begin) {
        for (std::size_t end = begin; end <= 7; ++end) {
          std::vector<float> part(whole.size(), 123.0f);
          table->matmul_q8(w.matrix(), q.view(), begin, end, part.data(), 112);
          for (std::size_t i = 0; i < part.size(); ++i) {
            const std::size_t panel = i % 112 / 16;
            REQUIRE(part[i] == (panel >= begin && panel < end ? whole[i] : 123.0f));
          }
        }
      }
    }
  }
}

TEST_CASE("matmul_q8: the largest codes do not overflow, in any table") {
  for (const DType type : kQuantTypes) {
    constexpr std::size_t kColumns = 64;
    const std::size_t bytes = row_bytes(type, kColumns);
    for (const int code : {0x00, 0x7f, 0x80, 0x81, 0xff}) {
      std::vector<std::byte> stored(16 * bytes, static_cast<std::byte>(code));
      const std::uint16_t one = float_to_half(1.0f);
      for (std::size_t at = 0; at < stored.size(); at += dtype_info(type).block_bytes) {
        std::memcpy(stored.data() + at, &one, 2);
        if (type == DType::kQ4_1) {
          std::memcpy(stored.data() + at + 2, &one, 2);
        }
      }
      AlignedBytes packed(packed_bytes(packed_layout(type), 16, kColumns));
      const PackedMatrix w = pack_matrix(type, stored, 16, kColumns, {}, packed.span());
      std::vector<float> row(kColumns);
      dequantize_row(type, std::span(stored).first(bytes), row);
      for (const float sign : {1.0f, -1.0f}) {
        std::vector<float> x(kColumns, sign * 127.0f);  // scale 1, codes +-127
        double expected = 0;
        for (const float value : row) {
          expected += static_cast<double>(value) * sign * 127.0;
        }
        for (const KernelTable* table : all_tables()) {
          Quantised q(*table, x, 1, kColumns);
          for (const float value : multiply(*table, w, q.view())) {
            CHECK(value == expected);  // integers below 2^24 throughout
          }
        }
      }
    }
  }
}

TEST_CASE("matmul_q8: a NaN in one row stays in that row") {
  for (const DType type : kQuantTypes) {
    const Weights w(type, 20, 96, 2);
    std::vector<float> x = random_floats(4 * 96, 1);
    const std::vector<float> clean = x;
    x[96 + 40] = std::nanf("");
    x[2 * 96 + 5] = INFINITY;
    for (const KernelTable* table : all_tables()) {
      Quantised q(*table, x, 4, 96);
      Quantised reference(*table, clean, 4, 96);
      const std::vector<float> y = multiply(*table, w.matrix(), q.view());
      const std::vector<float> expected = multiply(*table, w.matrix(), reference.view());
      for (std::size_t n = 0; n < 20; ++n) {
        CHECK(y[n] == expected[n]);
        CHECK(std::isnan(y[32 + n]));
        CHECK(std::isnan(y[64 + n]));
        CHECK(y[96 + n] == expected[96 + n]);
      }
    }
  }
}
