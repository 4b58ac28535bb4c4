#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "pocket/base/half.h"
#include "pocket/cpu/kernels.h"
#include "pocket/quant/dequantize.h"

/// What the kernel tests share: random tensors, the tables that this CPU can run, bit comparison.

namespace pocket::test {

inline constexpr DType kQuantTypes[] = {DType::kQ4_1, DType::kQ4_0, DType::kQ8_0};
inline constexpr DType kAllTypes[] = {DType::kQ4_1, DType::kQ4_0, DType::kQ8_0,
                                      DType::kF16,  DType::kBF16, DType::kF32};

inline constexpr DType kCodedTypes[] = {DType::kQ5_0, DType::kQ5_1,   DType::kQ2_K,
                                        DType::kQ3_K, DType::kQ4_K,   DType::kQ5_K,
                                        DType::kQ6_K, DType::kIQ4_NL, DType::kIQ4_XS};

/// Where a block keeps its halves: d, then m or dmin.
inline std::vector<std::size_t> half_offsets(DType type) {
  switch (type) {
    case DType::kQ2_K:
      return {80, 82};
    case DType::kQ3_K:
      return {108};
    case DType::kQ6_K:
      return {208};
    case DType::kQ4_1:
    case DType::kQ5_1:
    case DType::kQ4_K:
    case DType::kQ5_K:
      return {0, 2};
    default:
      return {0};
  }
}

/// The vector tables; those that the CPU lacks are left out, and isa_test.cpp says so.
inline std::vector<const KernelTable*> vector_tables() {
  std::vector<const KernelTable*> tables = kernel_tables();
  tables.erase(tables.begin());
  return tables;
}

inline std::vector<const KernelTable*> all_tables() {
  return kernel_tables();
}

inline std::vector<float> random_floats(std::size_t count, unsigned seed, float scale = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(count);
  for (float& value : values) {
    value = normal(random);
  }
  return values;
}

/// Index of the first value whose bits differ, NaNs counting as equal; -1 if there is none.
inline long first_difference(std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size()) {
    return 0;
  }
  for (std::size_t i = 0; i < a.size(); ++i) {
    const bool both_nan = a[i] != a[i] && b[i] != b[i];
    if (!both_nan && std::bit_cast<std::uint32_t>(a[i]) != std::bit_cast<std::uint32_t>(b[i])) {
      return static_cast<long>(i);
    }
  }
  return -1;
}

inline std::string type_name(DType type) {
  return std::string(dtype_info(type).name);
}

/// Memory aligned for panels.
class AlignedBytes {
 public:
  explicit AlignedBytes(std::size_t size) : storage_(size + 64), size_(size) {}
  [[nodiscard]] std::span<std::byte> span() {
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data());
    return {storage_.data() + (64 - address % 64) % 64, size_};
  }

 private:
  std::vector<std::byte> storage_;
  std::size_t size_;
};

/// A stored tensor of random codes and scales, packed.
class Weights {
 public:
  Weights(DType type, std::size_t rows, std::size_t columns, unsigned seed = 1)
      : type_(type),
        stored_(rows * row_bytes(type, columns)),
        packed_(packed_bytes(packed_layout(type), rows, columns)) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, 0.05f);
    const DTypeInfo& info = dtype_info(type);
    for (std::byte& byte : stored_) {
      byte = static_cast<std::byte>(random());
    }
    for (std::size_t at = 0; at < stored_.size(); at += info.block_bytes) {
      const auto put = [&](std::size_t offset, std::uint16_t half) {
        std::memcpy(stored_.data() + at + offset, &half, 2);
      };
      const float value = normal(random);
      if (type == DType::kF32) {
        std::memcpy(stored_.data() + at, &value, 4);
      } else if (type == DType::kBF16) {
        put(0, float_to_bfloat16(value));
      } else {
        // Super-blocks multiply by up to 127 again: a smaller d keeps products near the others'.
        const float scale = info.block_size > kQuantBlock ? 0.05f : 1.0f;
        put(half_offsets(type).front(), float_to_half(scale * value));
        if (half_offsets(type).size() == 2) {
          put(half_offsets(type).back(), float_to_half(scale * normal(random)));
        }
      }
    }
    matrix_ = pack_matrix(type, stored_, rows, columns, {}, packed_.span());
  }

  [[nodiscard]] const PackedMatrix& matrix() const { return matrix_; }
  [[nodiscard]] std::span<const std::byte> stored() const { return stored_; }
  /// Row `row` as the format's own decoder gives it.
  [[nodiscard]] std::vector<float> row(std::size_t row) const {
    std::vector<float> out(matrix_.columns);
    const std::size_t bytes = row_bytes(type_, matrix_.columns);
    dequantize_row(type_, std::span(stored_).subspan(row * bytes, bytes), out);
    return out;
  }

 private:
  DType type_;
  std::vector<std::byte> stored_;
  AlignedBytes packed_;
  PackedMatrix matrix_;
};

/// Owns quantised activations.
struct Quantised {
  Quantised(std::size_t rows, std::size_t columns)
      : q(rows * columns),
        scale(rows * columns / kQuantBlock),
        scaled_sum(scale.size()),
        negative_sum(scale.size()),
        half_bias(2 * scale.size()),
        width(columns),
        height(rows) {}
  Quantised(const KernelTable& table, std::span<const float> x, std::size_t rows,
            std::size_t columns)
      : Quantised(rows, columns) {
    for (std::size_t row = 0; row < rows; ++row) {
      table.quantise_row(x.data() + row * columns, this->row(row));
    }
  }
  [[nodiscard]] QuantisedRows view() {
    return {q.data(), scale.data(), scaled_sum.data(), negative_sum.data(), half_bias.data(),
            width,    height};
  }
  [[nodiscard]] QuantisedRow row(std::size_t row) { return quantised_row(view(), row, 0, width); }
  [[nodiscard]] int code(std::size_t row, std::size_t column) {
    const QuantisedRow at = quantised_row(view(), row, column / 32 * 32, 32);
    return at.q[column % 32 / 4 * 4 * at.stride + column % 4];
  }
  [[nodiscard]] float block_scale(std::size_t row, std::size_t block) {
    return *quantised_row(view(), row, block * 32, 32).scale;
  }
  std::vector<std::int8_t> q;
  std::vector<float> scale, scaled_sum;
  std::vector<std::int32_t> negative_sum, half_bias;
  std::size_t width;
  std::size_t height;
};

}  // namespace pocket::test
