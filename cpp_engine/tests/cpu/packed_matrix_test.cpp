#include "pocket/cpu/packed_matrix.h"

#include <doctest/doctest.h>

#include "pocket/base/error.h"
#include "support.h"

using namespace pocket;
using namespace pocket::test;

TEST_CASE("packed matrix: unpack_row gives the format's own dequantisation, bit for bit") {
  for (const DType type : kAllTypes) {
    for (const std::size_t rows : {1u, 15u, 16u, 17u, 50u}) {
      const Weights w(type, rows, 96, static_cast<unsigned>(rows));
      for (const KernelTable* table : all_tables()) {
        for (std::size_t row = 0; row < rows; ++row) {
          std::vector<float> out(96);
          table->unpack_row(w.matrix(), row, out.data());
          CHECK_MESSAGE(first_difference(out, w.row(row)) == -1, type_name(type) << " row " << row);
        }
      }
    }
  }
}

TEST_CASE("packed matrix: row_order permutes rows") {
  const Weights plain(DType::kQ4_1, 40, 64);
  std::vector<std::uint32_t> order(40);
  for (std::uint32_t i = 0; i < 40; ++i) {
    order[i] = (i * 7 + 3) % 40;
  }
  AlignedBytes bytes(packed_bytes(PackedLayout::kU4ScaleMin, 40, 64));
  const PackedMatrix permuted =
      pack_matrix(DType::kQ4_1, plain.stored(), 40, 64, order, bytes.span());
  std::vector<float> out(64);
  for (std::size_t i = 0; i < 40; ++i) {
    kernel_table(Isa::kScalar).unpack_row(permuted, i, out.data());
    CHECK(first_difference(out, plain.row(order[i])) == -1);
  }
}

TEST_CASE("packed matrix: the padding rows of the last panel multiply to zero") {
  for (const DType type : kAllTypes) {
    const Weights w(type, 17, 64);
    const std::vector<float> x = random_floats(64, 3);
    std::vector<float> y(32, 7.0f);
    for (const KernelTable* table : all_tables()) {
      if (w.matrix().quantised()) {
        Quantised q(*table, x, 1, 64);
        table->matmul_q8(w.matrix(), q.view(), 0, 2, y.data(), 32);
      } else {
        table->matmul_f32(w.matrix(), x.data(), 64, 1, 0, 2, y.data(), 32);
      }
      for (std::size_t i = 17; i < 32; ++i) {
        CHECK(y[i] == 0.0f);
      }
    }
  }
}

TEST_CASE("packed matrix: sizes are multiples of 64 and panels are aligned") {
  for (const DType type : kAllTypes) {
    for (const std::size_t columns : {32u, 64u, 96u, 576u, 1536u}) {
      const PackedLayout layout = packed_layout(type);
      const PackedMatrix shape{nullptr, 33, columns, layout};
      CHECK(shape.panels() == 3);
      CHECK(shape.panel_bytes() % 64 == 0);
      CHECK(packed_bytes(layout, 33, columns) == 3 * shape.panel_bytes());
    }
  }
}

TEST_CASE("packed matrix: a wrong size, alignment or order is refused") {
  const Weights w(DType::kQ8_0, 16, 64);
  AlignedBytes bytes(packed_bytes(PackedLayout::kU8Scale, 16, 64) + 64);
  const auto out = bytes.span().first(bytes.span().size() - 64);
  const auto pack = [&](std::span<const std::byte> stored, std::size_t rows, std::size_t columns,
                        std::span<const std::uint32_t> order, std::span<std::byte> to) {
    (void)pack_matrix(DType::kQ8_0, stored, rows, columns, order, to);
  };
  CHECK_NOTHROW(pack(w.stored(), 16, 64, {}, out));
  CHECK_THROWS_AS(pack(w.stored().first(10), 16, 64, {}, out), Error);
  CHECK_THROWS_AS(pack(w.stored(), 16, 33, {}, out), Error);
  CHECK_THROWS_AS(pack(w.stored(), 0, 64, {}, out), Error);
  CHECK_THROWS_AS(pack(w.stored(), 16, 64, {}, out.first(64)), Error);
  CHECK_THROWS_AS(pack(w.stored(), 16, 64, {}, bytes.span().subspan(1, out.size())), Error);
  const std::vector<std::uint32_t> short_order(15);
  CHECK_THROWS_AS(pack(w.stored(), 16, 64, short_order, out), Error);
  const std::vector<std::uint32_t> wild_order(16, 16);
  CHECK_THROWS_AS(pack(w.stored(), 16, 64, wild_order, out), Error);
}
