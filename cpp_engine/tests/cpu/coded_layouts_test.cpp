#include <doctest/doctest.h>

#include <algorithm>

#include "support.h"

/// Packing and both matmuls of the coded layouts: the oracle is `dequantize_row`, itself checked
/// against gguf, and between tables bits are compared.

using namespace pocket;
using namespace pocket::test;

namespace {

/// Columns that hold at least two runs of every layout.
constexpr std::size_t kColumns = 512;

std::vector<float> multiply(const KernelTable& table, const PackedMatrix& w, QuantisedRows x) {
  const std::size_t ldy = w.panels() * kPanelRows;
  std::vector<float> y(x.rows * ldy, -1.0f);
  table.matmul_q8(w, x, 0, w.panels(), y.data(), ldy);
  return y;
}

std::vector<float> multiply_floats(const KernelTable& table, const PackedMatrix& w, const float* x,
                                   std::size_t m) {
  const std::size_t ldy = w.panels() * kPanelRows;
  std::vector<float> y(m * ldy, -1.0f);
  table.matmul_f32(w, x, w.columns, m, 0, w.panels(), y.data(), ldy);
  return y;
}

/// 16 rows of `columns` columns in which every byte is `code` and every half `half`.
struct Uniform {
  Uniform(DType type, std::size_t columns, int code, std::uint16_t half)
      : stored(16 * row_bytes(type, columns), static_cast<std::byte>(code)),
        packed(packed_bytes(packed_layout(type), 16, columns)),
        row(columns) {
    for (std::size_t at = 0; at < stored.size(); at += dtype_info(type).block_bytes) {
      for (const std::size_t offset : half_offsets(type)) {
        std::memcpy(stored.data() + at + offset, &half, 2);
      }
    }
    matrix = pack_matrix(type, stored, 16, columns, {}, packed.span());
    dequantize_row(type, std::span(stored).first(row_bytes(type, columns)), row);
  }
  std::vector<std::byte> stored;
  AlignedBytes packed;
  std::vector<float> row;
  PackedMatrix matrix;
};

}  // namespace

TEST_CASE("coded layouts: unpack_row gives the format's own dequantisation, bit for bit") {
  for (const DType type : kCodedTypes) {
    for (const std::size_t rows : {1u, 17u}) {
      const Weights w(type, rows, kColumns, static_cast<unsigned>(rows));
      for (std::size_t row = 0; row < rows; ++row) {
        std::vector<float> out(kColumns);
        kernel_table(Isa::kScalar).unpack_row(w.matrix(), row, out.data());
        CHECK_MESSAGE(first_difference(out, w.row(row)) == -1, type_name(type) << " row " << row);
      }
    }
  }
}

TEST_CASE("coded layouts: packing loses nothing whatever the scales") {
  for (const DType type : kCodedTypes) {
    for (const unsigned bits : {0x0000u, 0x8000u, 0x0001u, 0x83ffu, 0x7bffu, 0xfbffu, 0x7c00u}) {
      const auto half = static_cast<std::uint16_t>(bits);
      for (const int code : {0x00, 0x5a, 0x7f, 0x80, 0xff}) {
        const Uniform w(type, 256, code, half);
        std::vector<float> out(256);
        kernel_table(Isa::kScalar).unpack_row(w.matrix, 3, out.data());
        CHECK_MESSAGE(first_difference(out, w.row) == -1,
                      type_name(type) << " half " << half << " code " << code);
        // The exact path decodes by vectors: one column at a time, from its own input.
        for (const KernelTable* table : all_tables()) {
          for (const std::size_t k : {0u, 15u, 16u, 37u, 255u}) {
            std::vector<float> x(256);
            x[k] = 1.0f;
            if (half != 0x7c00) {  // infinity times the other zeros is NaN
              CHECK(multiply_floats(*table, w.matrix, x.data(), 1)[3] == w.row[k]);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("coded layouts: bytes per weight stay near the file's") {
  for (const DType type : kCodedTypes) {
    const std::size_t file = 16 * row_bytes(type, 4096);
    const std::size_t packed = packed_bytes(packed_layout(type), 16, 4096);
    CHECK_MESSAGE(packed <= file + file / 25, type_name(type));
  }
}

TEST_CASE("coded layouts: padding rows multiply to zero, row_order permutes") {
  for (const DType type : kCodedTypes) {
    const Weights w(type, 17, kColumns);
    const std::vector<float> x = random_floats(kColumns, 3);
    for (const KernelTable* table : all_tables()) {
      Quantised q(*table, x, 1, kColumns);
      const std::vector<float> y = multiply(*table, w.matrix(), q.view());
      CHECK(std::all_of(y.begin() + 17, y.end(), [](float value) { return value == 0.0f; }));
    }
    std::vector<std::uint32_t> order(17);
    for (std::uint32_t i = 0; i < 17; ++i) {
      order[i] = (i * 7 + 3) % 17;
    }
    AlignedBytes bytes(packed_bytes(packed_layout(type), 17, kColumns));
    const PackedMatrix permuted = pack_matrix(type, w.stored(), 17, kColumns, order, bytes.span());
    std::vector<float> out(kColumns);
    for (std::size_t i = 0; i < 17; ++i) {
      kernel_table(Isa::kScalar).unpack_row(permuted, i, out.data());
      CHECK(first_difference(out, w.row(order[i])) == -1);
    }
  }
}

TEST_CASE("coded layouts: matmul_q8 agrees with a double-precision product of decoded values") {
  const KernelTable& scalar = kernel_table(Isa::kScalar);
  for (const DType type : kCodedTypes) {
    const Weights w(type, 35, kColumns, 5);
    const std::vector<float> x = random_floats(3 * kColumns, 9);
    Quantised q(scalar, x, 3, kColumns);
    const std::vector<float> y = multiply(scalar, w.matrix(), q.view());
    for (std::size_t m = 0; m < 3; ++m) {
      for (std::size_t n = 0; n < 35; ++n) {
        const std::vector<float> row = w.row(n);
        double expected = 0;
        double magnitude = 0;
        for (std::size_t k = 0; k < kColumns; ++k) {
          const double term = static_cast<double>(row[k]) * q.code(m, k) *
                              static_cast<double>(q.block_scale(m, k / 32));
          expected += term;
          magnitude += std::abs(term);
        }
        CHECK_MESSAGE(std::abs(y[m * 48 + n] - expected) <= 2e-6 * magnitude, type_name(type));
      }
    }
  }
}

TEST_CASE("coded layouts: every table gives the oracle's bits for every shape") {
  const KernelTable& scalar = kernel_table(Isa::kScalar);
  for (const DType type : kCodedTypes) {
    for (const auto& [rows, columns] :
         {std::pair<std::size_t, std::size_t>{1, 256}, {17, 512}, {40, 2304}}) {
      const Weights w(type, rows, columns, static_cast<unsigned>(rows + columns));
      const std::vector<float> x = random_floats(19 * columns, 11);
      Quantised q(scalar, x, 19, columns);
      const std::vector<float> expected = multiply(scalar, w.matrix(), q.view());
      const std::vector<float> exact = multiply_floats(scalar, w.matrix(), x.data(), 19);
      for (const KernelTable* table : vector_tables()) {
        for (std::size_t m = 1; m <= 19; ++m) {
          Quantised some(*table, std::span(x).first(m * columns), m, columns);
          const std::vector<float> y = multiply(*table, w.matrix(), some.view());
          CHECK_MESSAGE(first_difference(y, std::span(expected).first(y.size())) == -1,
                        isa_name(table->isa) << " " << type_name(type) << " [" << rows << ", "
                                             << columns << "] m=" << m);
        }
        CHECK(first_difference(multiply_floats(*table, w.matrix(), x.data(), 19), exact) == -1);
      }
    }
  }
}

TEST_CASE("coded layouts: matmul_f32 is one fused chain over the decoded weights") {
  const KernelTable& scalar = kernel_table(Isa::kScalar);
  for (const DType type : kCodedTypes) {
    const Weights w(type, 21, kColumns, 5);
    const std::vector<float> x = random_floats(kColumns, 9);
    const std::vector<float> y = multiply_floats(scalar, w.matrix(), x.data(), 1);
    for (std::size_t n = 0; n < 21; ++n) {
      const std::vector<float> row = w.row(n);
      float expected = 0.0f;
      for (std::size_t k = 0; k < kColumns; ++k) {
        expected = std::fma(row[k], x[k], expected);
      }
      CHECK_MESSAGE(y[n] == expected, type_name(type));
    }
  }
}

TEST_CASE("coded layouts: a row gets the same bits alone, in a long batch, and from any split") {
  for (const DType type : kCodedTypes) {
    const Weights w(type, 40, 256, 3);
    constexpr std::size_t kRows = 83;  // two passes and uneven tiles
    const std::vector<float> x = random_floats(kRows * 256, 4);
    for (const KernelTable* table : all_tables()) {
      Quantised q(*table, x, kRows, 256);
      const std::vector<float> batch = multiply(*table, w.matrix(), q.view());
      for (std::size_t m = 0; m < kRows; ++m) {
        Quantised one(*table, std::span(x).subspan(m * 256, 256), 1, 256);
        const std::vector<float> alone = multiply(*table, w.matrix(), one.view());
        CHECK(first_difference(alone, std::span(batch).subspan(m * 48, 48)) == -1);
      }
      for (std::size_t begin = 0; begin <= 3; ++begin) {
        for (std::size_t end = begin; end <= 3; ++end) {
          std::vector<float> part(batch.size(), 123.0f);
          table->matmul_q8(w.matrix(), q.view(), begin, end, part.data(), 48);
          for (std::size_t i = 0; i < part.size(); ++i) {
            const std::size_t panel = i % 48 / 16;
            REQUIRE(part[i] == (panel >= begin && panel < end ? batch[i] : 123.0f));
          }
        }
      }
    }
  }
}

TEST_CASE("coded layouts: the largest codes do not overflow, in any table") {
  for (const DType type : kCodedTypes) {
    for (const int code : {0x00, 0x7f, 0x80, 0x81, 0xf0, 0xff}) {
      const Uniform w(type, 256, code, float_to_half(1.0f));
      for (const float sign : {1.0f, -1.0f}) {
        const std::vector<float> x(256, sign * 127.0f);  // scale 1, codes +-127
        double expected = 0;
        double magnitude = 0;
        for (const float value : w.row) {
          expected += static_cast<double>(value) * sign * 127.0;
          magnitude += std::abs(static_cast<double>(value)) * 127.0;
        }
        for (const KernelTable* table : all_tables()) {
          Quantised q(*table, x, 1, 256);
          for (const float value : multiply(*table, w.matrix, q.view())) {
            CHECK_MESSAGE(std::abs(value - expected) <= 1e-6 * magnitude,
                          isa_name(table->isa) << " " << type_name(type) << " code " << code);
          }
        }
      }
    }
  }
}

TEST_CASE("coded layouts: a NaN in one row stays in that row") {
  for (const DType type : kCodedTypes) {
    const Weights w(type, 20, 256, 2);
    std::vector<float> x = random_floats(3 * 256, 1);
    const std::vector<float> clean = x;
    x[256 + 40] = std::nanf("");
    for (const KernelTable* table : all_tables()) {
      Quantised q(*table, x, 3, 256);
      Quantised reference(*table, clean, 3, 256);
      const std::vector<float> y = multiply(*table, w.matrix(), q.view());
      const std::vector<float> expected = multiply(*table, w.matrix(), reference.view());
      for (std::size_t n = 0; n < 20; ++n) {
        CHECK(y[n] == expected[n]);
        CHECK(std::isnan(y[32 + n]));
        CHECK(y[64 + n] == expected[64 + n]);
      }
    }
  }
}

TEST_CASE("quantise_row: half_bias is -32 times the sum of each 16 codes, in every table") {
  constexpr std::size_t kRows = 11;  // a whole group of rows and a part of one
  std::vector<float> x = random_floats(kRows * 96, 12);
  x[96 + 3] = INFINITY;
  std::fill(x.begin() + 2 * 96, x.begin() + 3 * 96, 0.0f);
  for (const KernelTable* table : all_tables()) {
    Quantised q(*table, x, kRows, 96);
    for (std::size_t row = 0; row < kRows; ++row) {
      for (std::size_t block = 0; block < 3; ++block) {
        const QuantisedRow at = quantised_row(q.view(), row, block * 32, 32);
        std::int32_t sums[2] = {};
        for (std::size_t i = 0; i < 32; ++i) {
          sums[i / 16] += q.code(row, block * 32 + i);
        }
        CHECK(at.half_bias[0] == kHalfBiasFactor * sums[0]);
        CHECK(at.half_bias[at.stride] == kHalfBiasFactor * sums[1]);
        CHECK(*at.negative_sum == -(sums[0] + sums[1]));
      }
    }
  }
}
