#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "pocket/base/aligned_buffer.h"
#include "pocket/base/half.h"
#include "pocket/cpu/kernels.h"
#include "pocket/quant/dtype.h"

namespace pocket::bench {

// SmolLM2-135M: what one token meets in a step.
inline constexpr std::size_t kLayers = 30;
inline constexpr std::size_t kHidden = 576;
inline constexpr std::size_t kKvHeads = 3;
inline constexpr std::size_t kGroup = 3;
inline constexpr std::size_t kHeadDim = 64;
inline constexpr std::size_t kFfn = 1536;
inline constexpr std::size_t kVocab = 49152;

/// Where a block of a quantised format keeps its halves: d, then m or dmin (Q4_1 and others).
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

/// Stored rows of random codes with scales around 0.01.
inline std::vector<std::byte> random_tensor(DType type, std::size_t rows, std::size_t columns) {
  std::mt19937 random(42);
  std::vector<std::byte> bytes(rows * row_bytes(type, columns));
  const DTypeInfo& info = dtype_info(type);
  for (auto& byte : bytes) {
    byte = static_cast<std::byte>(random());
  }
  const auto put = [&](std::size_t at, std::uint16_t half) {
    std::memcpy(bytes.data() + at, &half, 2);
  };
  const bool quantised = info.block_size >= kQuantBlock;
  for (std::size_t at = 0; at < bytes.size(); at += info.block_bytes) {
    const float value = 0.005f + 0.0001f * static_cast<float>(random() % 100);
    if (quantised) {
      const std::vector<std::size_t> halves = half_offsets(type);
      put(at + halves.front(), float_to_half(value));
      if (halves.size() == 2) {
        put(at + halves.back(), float_to_half(-8 * value));
      }
    } else if (type == DType::kF32) {
      std::memcpy(bytes.data() + at, &value, 4);
    } else {
      put(at, type == DType::kF16 ? float_to_half(value) : float_to_bfloat16(value));
    }
  }
  return bytes;
}

/// Every weight matrix of the model in one arena, in the order in which a step reads them. Formats
/// with blocks of 256 values cannot hold 576 columns: theirs are 768.
class ModelWeights {
 public:
  ModelWeights(DType type, bool with_head) {
    struct Shape {
      std::size_t rows, columns;
      DType type;
    };
    const std::size_t block = dtype_info(type).block_size;
    const std::size_t hidden = (kHidden + block - 1) / block * block;
    std::vector<Shape> shapes;
    for (std::size_t layer = 0; layer < kLayers; ++layer) {
      shapes.push_back({kHidden + 2 * kKvHeads * kHeadDim, hidden, type});  // q, k, v
      shapes.push_back({kHidden, hidden, type});                            // o
      shapes.push_back({2 * kFfn, hidden, type});                           // gate, up
      shapes.push_back({kHidden, kFfn, type});                              // down
    }
    if (with_head) {
      shapes.push_back({kVocab, kHidden, DType::kQ8_0});
    }
    std::size_t bytes = 0;
    for (const Shape& s : shapes) {
      bytes += packed_bytes(packed_layout(s.type), s.rows, s.columns);
    }
    arena_ = AlignedBuffer(bytes);
    std::size_t offset = 0;
    for (const Shape& s : shapes) {
      const std::size_t size = packed_bytes(packed_layout(s.type), s.rows, s.columns);
      matrices_.push_back(pack_matrix(s.type, random_tensor(s.type, s.rows, s.columns), s.rows,
                                      s.columns, {}, arena_.view<std::byte>(offset, size)));
      offset += size;
    }
  }
  [[nodiscard]] const std::vector<PackedMatrix>& matrices() const { return matrices_; }
  [[nodiscard]] std::span<const std::byte> bytes() const { return {arena_.data(), arena_.size()}; }
  [[nodiscard]] double operations() const {
    double sum = 0;
    for (const PackedMatrix& w : matrices_) {
      sum += 2.0 * static_cast<double>(w.rows) * static_cast<double>(w.columns);
    }
    return sum;
  }

 private:
  AlignedBuffer arena_;
  std::vector<PackedMatrix> matrices_;
};

/// Activations of up to `rows` rows of kFfn columns, and room for every output.
struct Activations {
  explicit Activations(std::size_t rows)
      : x(rows * kFfn),
        y(rows * (2 * kFfn)),
        head(std::min<std::size_t>(rows, 16) * kVocab),
        q(rows * kFfn),
        scale(rows * kFfn / kQuantBlock),
        scaled_sum(scale.size()),
        negative_sum(scale.size()),
        half_bias(2 * scale.size()) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (float& value : x) {
      value = normal(random);
    }
  }
  [[nodiscard]] QuantisedRows rows_of(std::size_t columns, std::size_t rows) {
    return {q.data(), scale.data(), scaled_sum.data(), negative_sum.data(), half_bias.data(),
            columns,  rows};
  }
  std::vector<float> x, y, head;
  std::vector<std::int8_t> q;
  std::vector<float> scale, scaled_sum;
  std::vector<std::int32_t> negative_sum, half_bias;
};

}  // namespace pocket::bench
