#include <doctest/doctest.h>

#include <algorithm>

#include "support.h"

using namespace pocket;
using namespace pocket::test;

namespace {

constexpr KvDType kKvTypes[] = {KvDType::kF32, KvDType::kF16, KvDType::kBF16, KvDType::kI8};

/// One KV head's cache of `length` positions behind a shuffled block table. Blocks that the table
/// does not name, and slots past `length`, are filled with NaN.
class Cache {
 public:
  Cache(KvDType type, std::size_t length, std::size_t head_dim, unsigned seed)
      : type_(type), length_(length), head_dim_(head_dim) {
    const std::size_t blocks = (length + kKvBlockTokens - 1) / kKvBlockTokens;
    block_elements_ = kv_block_elements(type, head_dim);
    storage_.resize((2 * blocks + 1) * 2 * block_elements_ * element(), std::byte{0xff});
    for (std::size_t i = 0; i < blocks; ++i) {
      table_.push_back(static_cast<std::int32_t>(2 * ((i * 5 + 3) % blocks) + 1));
    }
    if (blocks % 5 == 0) {  // 5 i is no permutation then
      for (std::size_t i = 0; i < blocks; ++i) {
        table_[i] = static_cast<std::int32_t>(2 * (blocks - 1 - i) + 1);
      }
    }
    k_ = random_floats(length * head_dim, seed);
    v_ = random_floats(length * head_dim, seed + 1);
    for (std::size_t t = 0; t < length; ++t) {
      write(kernel_table(Isa::kScalar), t);
    }
  }

  void write(const KernelTable& table, std::size_t t) {
    std::byte* block = storage_.data() + static_cast<std::size_t>(table_[t / kKvBlockTokens]) * 2 *
                                             block_elements_ * element();
    table.kv_write(type_, &k_[t * head_dim_], &v_[t * head_dim_], head_dim_, t % kKvBlockTokens,
                   block, block + block_elements_ * element());
  }

  [[nodiscard]] AttentionTile tile(std::size_t rows, std::size_t group, std::size_t first_position,
                                   std::size_t window = 0) const {
    AttentionTile tile{};
    tile.row_stride = group * head_dim_ + 3;
    tile.rows = rows;
    tile.group = group;
    tile.head_dim = head_dim_;
    tile.first_position = first_position;
    tile.window = window;
    tile.scale = 1.0f / std::sqrt(static_cast<float>(head_dim_));
    tile.k_base = storage_.data();
    tile.v_base = storage_.data() + block_elements_ * element();
    tile.block_stride = 2 * block_elements_;
    tile.block_table = table_.data();
    return tile;
  }

  /// The value that the cache holds.
  [[nodiscard]] double k(std::size_t t, std::size_t d) const {
    return type_ == KvDType::kI8 ? decoded(t, (d / 4 * 16 + t % 16) * 4 + d % 4, 0, 128)
                                 : rounded(k_[t * head_dim_ + d]);
  }
  [[nodiscard]] double v(std::size_t t, std::size_t d) const {
    return type_ == KvDType::kI8
               ? decoded(t, (t % 16 / 4 * head_dim_ + d) * 4 + t % 4, block_elements_, 0)
               : rounded(v_[t * head_dim_ + d]);
  }
  [[nodiscard]] float original_k(std::size_t t, std::size_t d) const {
    return k_[t * head_dim_ + d];
  }
  [[nodiscard]] float original_v(std::size_t t, std::size_t d) const {
    return v_[t * head_dim_ + d];
  }
  void poison_value(std::size_t t) {
    v_[t * head_dim_] = std::nanf("");
    write(kernel_table(Isa::kScalar), t);
  }
  /// K and V of position t become NaN.
  void poison(std::size_t t) {
    k_[t * head_dim_] = std::nanf("");
    poison_value(t);
  }
  /// The table names a block of NaN for the block of position t.
  void forget_block(std::size_t t) { table_[t / kKvBlockTokens] = 0; }
  [[nodiscard]] const std::vector<std::byte>& storage() const { return storage_; }

 private:
  [[nodiscard]] std::size_t element() const {
    return type_ == KvDType::kF32 ? 4 : type_ == KvDType::kI8 ? 1 : 2;
  }
  [[nodiscard]] double rounded(float value) const {
    switch (type_) {
      case KvDType::kF16:
        return half_to_float(float_to_half(value));
      case KvDType::kBF16:
        return bfloat16_to_float(float_to_bfloat16(value));
      default:
        return value;
    }
  }
  /// An int8 value: the byte at `at` of position t's K (or, `skip` bytes on, V) block.
  [[nodiscard]] double decoded(std::size_t t, std::size_t at, std::size_t skip, int offset) const {
    const std::byte* block =
        storage_.data() + skip + static_cast<std::size_t>(table_[t / 16]) * 2 * block_elements_;
    float scale;
    std::memcpy(&scale, block + 16 * head_dim_ + 4 * (t % 16), sizeof scale);
    const auto byte = static_cast<std::uint8_t>(block[at]);
    const int code = offset == 0 ? static_cast<std::int8_t>(byte) : byte - offset;
    return static_cast<double>(scale) * code;
  }

  KvDType type_;
  std::size_t length_, head_dim_, block_elements_ = 0;
  std::vector<std::byte> storage_;
  std::vector<std::int32_t> table_;
  std::vector<float> k_, v_;
};

std::vector<float> attend(const KernelTable& table, KvDType type, AttentionTile tile,
                          std::span<const float> query) {
  std::vector<float> out(query.size(), 55.0f);
  std::vector<float> scratch(attention_scratch_floats(tile.rows, tile.group, tile.head_dim));
  tile.query = query.data();
  tile.out = out.data();
  tile.scratch = scratch.data();
  table.attention(type, tile);
  return out;
}

}  // namespace

TEST_CASE("kv_write: every table writes the same bytes") {
  for (const KvDType type : kKvTypes) {
    for (const std::size_t head_dim : {16u, 64u, 128u}) {
      Cache cache(type, 40, head_dim, 5);
      const std::vector<std::byte> expected = cache.storage();
      for (const KernelTable* table : vector_tables()) {
        for (std::size_t t = 0; t < 40; ++t) {
          cache.write(*table, t);
        }
        CHECK(cache.storage() == expected);
      }
    }
  }
}

TEST_CASE("kv_write: int8 codes are within half a step of the value") {
  const Cache cache(KvDType::kI8, 40, 64, 5);
  for (std::size_t t = 0; t < 40; ++t) {
    float k_max = 0.0f;
    float v_max = 0.0f;
    for (std::size_t d = 0; d < 64; ++d) {
      k_max = std::max(k_max, std::abs(cache.original_k(t, d)));
      v_max = std::max(v_max, std::abs(cache.original_v(t, d)));
    }
    for (std::size_t d = 0; d < 64; ++d) {
      CHECK(std::abs(cache.k(t, d) - cache.original_k(t, d)) <= 0.5001 / 127 * k_max);
      CHECK(std::abs(cache.v(t, d) - cache.original_v(t, d)) <= 0.5001 / 127 * v_max);
    }
  }
}

TEST_CASE("attention: the scalar table agrees with a softmax in double precision") {
  const KernelTable& scalar = kernel_table(Isa::kScalar);
  struct Seen {
    std::size_t length, window;
  };
  for (const KvDType type : kKvTypes) {
    for (const Seen& seen : {Seen{1, 0}, {15, 0},    {16, 0},    {17, 0},    {255, 0},  {256, 0},
                             {257, 0},   {600, 0},   {1, 1},     {17, 1},    {17, 2},   {100, 33},
                             {256, 255}, {257, 256}, {257, 1},   {300, 257}, {272, 16}, {530, 18},
                             {600, 64},  {600, 344}, {600, 345}, {600, 600}}) {
      constexpr std::size_t kDim = 32;
      constexpr std::size_t kGroup = 3;
      const std::size_t length = seen.length;
      const std::size_t begin = seen.window == 0 ? 0 : length - seen.window;
      const Cache cache(type, length, kDim, 7);
      const AttentionTile tile = cache.tile(1, kGroup, length - 1, seen.window);
      // Integers with 127 as the largest: int8 attention quantises them without error.
      std::vector<float> query = random_floats(tile.row_stride, 3, 50.0f);
      for (std::size_t i = 0; i < query.size(); ++i) {
        query[i] = i % kDim == 3 ? 127.0f : std::round(std::clamp(query[i], -127.0f, 127.0f));
        query[i] /= 32.0f;
      }
      const double tolerance = type == KvDType::kI8 ? 1e-4 : 4e-6;
      const std::vector<float> out = attend(scalar, type, tile, query);
      for (std::size_t head = 0; head < kGroup; ++head) {
        std::vector<double> weights(length);
        double sum = 0;
        for (std::size_t t = begin; t < length; ++t) {
          double score = 0;
          for (std::size_t d = 0; d < kDim; ++d) {
            const float scaled = query[head * kDim + d] * tile.scale;
            score += type == KvDType::kBF16
                         ? bfloat16_to_float(float_to_bfloat16(scaled)) * cache.k(t, d)
                         : query[head * kDim + d] * cache.k(t, d) * tile.scale;
          }
          weights[t] = std::exp(score);
          sum += weights[t];
        }
        for (std::size_t d = 0; d < kDim; ++d) {
          double expected = 0;
          double magnitude = 0;
          for (std::size_t t = begin; t < length; ++t) {
            expected += weights[t] / sum * cache.v(t, d);
            magnitude += weights[t] / sum * std::abs(cache.v(t, d));
          }
          // Rounding a probability to bfloat16 moves it by 2^-9 of itself at most.
          const double rounding = type == KvDType::kBF16 ? magnitude / 512 : 0.0;
          CHECK_MESSAGE(
              std::abs(out[head * kDim + d] - expected) < tolerance + rounding,
              "length " << length << " window " << seen.window << " head " << head << " dim " << d);
        }
      }
    }
  }
}

namespace {

/// Checks the bits of every table for the last rows of a sequence, in tiles of several heights,
/// against the oracle's, which computes each row alone.
void check_tiles(KvDType type, std::size_t length, std::size_t head_dim, std::size_t group,
                 std::size_t window) {
  const Cache cache(type, length, head_dim, 13);
  const std::size_t rows = std::min<std::size_t>(length, 19);
  const std::size_t first = length - rows;
  const std::size_t stride = cache.tile(rows, group, first).row_stride;
  const std::vector<float> query = random_floats(rows * stride, 3, 2.0f);
  const auto row_of = [&](std::span<const float> all, std::size_t row, std::size_t count) {
    return all.subspan(row * stride, count * stride);
  };
  std::vector<float> expected;
  for (std::size_t row = 0; row < rows; ++row) {
    const std::vector<float> out =
        attend(kernel_table(Isa::kScalar), type, cache.tile(1, group, first + row, window),
               row_of(query, row, 1));
    expected.insert(expected.end(), out.begin(), out.end());
  }
  for (const KernelTable* table : all_tables()) {
    for (const std::size_t step : {std::size_t{1}, std::size_t{2}, std::size_t{5}, rows}) {
      for (std::size_t row = 0; row < rows; row += step) {
        const std::size_t count = std::min(step, rows - row);
        const std::vector<float> out = attend(
            *table, type, cache.tile(count, group, first + row, window), row_of(query, row, count));
        const long at = first_difference(out, row_of(expected, row, count));
        CHECK_MESSAGE(at == -1, isa_name(table->isa) << " length " << length << " head_dim "
                                                     << head_dim << " window " << window << " step "
                                                     << step << " row " << row << " at " << at);
      }
    }
  }
}

}  // namespace

TEST_CASE("attention: every table gives the oracle's bits, alone and in tiles") {
  struct Shape {
    std::size_t length, head_dim, group;
  };
  for (const KvDType type : kKvTypes) {
    for (const Shape& s : {Shape{1, 64, 3},
                           {15, 64, 3},
                           {16, 32, 1},
                           {17, 64, 4},
                           {100, 80, 2},
                           {255, 64, 3},
                           {256, 128, 1},
                           {257, 64, 3},
                           {280, 48, 7},
                           {600, 64, 3},
                           {530, 256, 2}}) {
      check_tiles(type, s.length, s.head_dim, s.group, 0);
    }
  }
}

TEST_CASE("attention: every table gives the oracle's bits with a sliding window") {
  // With 19 rows, the window's begin passes block boundaries in all cases, and split boundaries in
  // those where length - window is in 256..274 or 512..530; windows below 19 leave a piece of a
  // tile without a position that all of its queries see.
  struct Case {
    std::size_t length, window;
  };
  for (const KvDType type : kKvTypes) {
    for (const Case& c :
         {Case{19, 1}, {40, 2},    {50, 15},   {50, 16},   {50, 17},   {100, 33},  {257, 255},
          {260, 256},  {275, 257}, {300, 40},  {265, 1},   {275, 5},   {530, 256}, {530, 260},
          {600, 88},   {600, 330}, {600, 344}, {790, 256}, {790, 270}, {800, 540}}) {
      check_tiles(type, c.length, 48, 3, c.window);
    }
    check_tiles(type, 300, 256, 1, 37);
    check_tiles(type, 540, 64, 8, 273);
  }
}

TEST_CASE("attention: a window that hides nothing changes no bit") {
  for (const KvDType type : kKvTypes) {
    const Cache cache(type, 300, 64, 13);
    const AttentionTile open = cache.tile(19, 3, 281);
    const std::vector<float> query = random_floats(19 * open.row_stride, 3, 2.0f);
    for (const KernelTable* table : all_tables()) {
      const std::vector<float> expected = attend(*table, type, open, query);
      for (const std::size_t window : {std::size_t{300}, ~std::size_t{0}}) {
        const AttentionTile tile = cache.tile(19, 3, 281, window);
        CHECK(first_difference(attend(*table, type, tile, query), expected) == -1);
      }
      const AttentionTile narrower = cache.tile(19, 3, 281, 299);
      CHECK(first_difference(attend(*table, type, narrower, query), expected) ==
            static_cast<long>(18 * open.row_stride));
    }
  }
}

TEST_CASE("attention: what lies before a row's window does not reach it") {
  constexpr std::size_t kWindow = 40;
  for (const KvDType type : kKvTypes) {
    for (const std::size_t length : {70u, 300u, 310u}) {
      Cache cache(type, length, 64, 3);
      const AttentionTile tile = cache.tile(8, 2, length - 8, kWindow);
      const std::vector<float> query = random_floats(8 * tile.row_stride, 5);
      const std::vector<float> clean = attend(kernel_table(Isa::kScalar), type, tile, query);
      const std::size_t begin = length - 7 - kWindow;  // row 0's
      cache.poison(begin + 3);                         // rows 0 to 3 see it
      if (begin % kKvBlockTokens > 0) {
        cache.poison(begin - 1);
      }
      for (std::size_t t = 0; t + kKvBlockTokens <= begin; t += kKvBlockTokens) {
        cache.forget_block(t);
      }
      const AttentionTile dirty = cache.tile(8, 2, length - 8, kWindow);
      for (const KernelTable* table : all_tables()) {
        const std::vector<float> out = attend(*table, type, dirty, query);
        for (std::size_t row = 0; row < 8; ++row) {
          for (std::size_t at = row * tile.row_stride; at < (row + 1) * tile.row_stride; ++at) {
            const bool written = at - row * tile.row_stride < 2 * 64;
            if (written && row > 3) {
              CHECK(out[at] == clean[at]);
            }
          }
          if (row <= 3) {
            CHECK(std::isnan(out[row * tile.row_stride]));
          }
        }
      }
    }
  }
}

TEST_CASE("attention: a NaN at a later position does not reach earlier rows of the tile") {
  for (const KvDType type : kKvTypes) {
    for (const std::size_t length : {20u, 260u}) {
      Cache cache(type, length, 64, 3);
      const AttentionTile tile = cache.tile(8, 2, length - 8);
      const std::vector<float> query = random_floats(8 * tile.row_stride, 5);
      const std::vector<float> clean = attend(kernel_table(Isa::kScalar), type, tile, query);
      cache.poison_value(length - 3);  // row 5
      for (const KernelTable* table : all_tables()) {
        const std::vector<float> out = attend(*table, type, tile, query);
        for (std::size_t row = 0; row < 8; ++row) {
          const auto at = row * tile.row_stride;
          CHECK((row < 5 ? out[at] == clean[at] : std::isnan(out[at])));
        }
      }
    }
  }
}

TEST_CASE("attention: int8 stays near float, also where one position takes nearly all weight") {
  for (const float sharpness : {1.0f, 30.0f}) {
    const Cache exact(KvDType::kF32, 300, 64, 9);
    const Cache coded(KvDType::kI8, 300, 64, 9);
    const AttentionTile tile = exact.tile(1, 3, 299);
    AttentionTile int8_tile = coded.tile(1, 3, 299);
    const std::vector<float> query = random_floats(tile.row_stride, 4, sharpness);
    const std::vector<float> a = attend(kernel_table(Isa::kScalar), KvDType::kF32, tile, query);
    const std::vector<float> b = attend(kernel_table(Isa::kScalar), KvDType::kI8, int8_tile, query);
    double error = 0;
    double norm = 0;
    for (std::size_t i = 0; i < 3 * 64; ++i) {
      error += std::pow(a[i] - b[i], 2.0);
      norm += std::pow(a[i], 2.0);
    }
    CHECK(std::sqrt(error / norm) < 0.08);
  }
}

TEST_CASE("attention: a K or V of zeros, or tiny, is handled alike in every table") {
  for (const float size : {0.0f, 1e-40f, 1e-37f, 1e-30f, 1e30f}) {
    std::vector<float> k(32, size);
    std::vector<float> v(32, -size);
    std::vector<std::byte> block(2 * kv_block_elements(KvDType::kI8, 32));
    std::byte* v_block = block.data() + block.size() / 2;
    kernel_table(Isa::kScalar)
        .kv_write(KvDType::kI8, k.data(), v.data(), 32, 0, block.data(), v_block);
    const std::int32_t table = 0;
    std::vector<float> scratch(attention_scratch_floats(1, 1, 32));
    const std::vector<float> query(32, 1e-3f);
    std::vector<float> expected;
    for (const KernelTable* kernels : all_tables()) {
      std::vector<float> out(32);
      kernels->attention(KvDType::kI8, {.query = query.data(),
                                        .out = out.data(),
                                        .row_stride = 32,
                                        .rows = 1,
                                        .group = 1,
                                        .head_dim = 32,
                                        .first_position = 0,
                                        .scale = 1.0f,
                                        .k_base = block.data(),
                                        .v_base = v_block,
                                        .block_stride = block.size(),
                                        .block_table = &table,
                                        .scratch = scratch.data()});
      if (expected.empty()) {
        expected = out;
        const float wanted = size < 1e-33f ? 0.0f : -size;
        CHECK(std::abs(out[7] - wanted) <= 0.01f * std::abs(wanted));
      }
      CHECK(first_difference(out, expected) == -1);
    }
  }
}

TEST_CASE("attention: large scores neither overflow nor lose the sum") {
  for (const KernelTable* table : all_tables()) {
    const Cache cache(KvDType::kF32, 300, 64, 21);
    AttentionTile tile = cache.tile(1, 1, 299);
    tile.scale = 40.0f;
    const std::vector<float> out =
        attend(*table, KvDType::kF32, tile, random_floats(tile.row_stride, 2, 3.0f));
    for (std::size_t d = 0; d < 64; ++d) {
      CHECK(std::isfinite(out[d]));
      CHECK(std::abs(out[d]) < 6.0f);
    }
  }
}
