#include "pocket/kv/kv_pool.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "pocket/base/error.h"

namespace pocket {
namespace {

KvShape small_shape(KvDType dtype) {
  return {.layers = 2, .kv_heads = 3, .head_dim = 32, .num_blocks = 5, .dtype = dtype};
}

// K or V of one block, layer and head.
std::size_t half_bytes(KvDType dtype) {
  return kv_block_elements(dtype, 32) * kv_element_bytes(dtype);
}

// Gives every (layer, head, block, K or V) its own byte, so that a wrong address shows.
std::uint8_t stamp(std::size_t layer, std::size_t head, std::size_t block, bool value) {
  return static_cast<std::uint8_t>(1 + (((layer * 3 + head) * 5 + block) * 2 + (value ? 1 : 0)));
}

void fill(KvPool& pool) {
  const std::size_t half = half_bytes(pool.shape().dtype);
  for (std::size_t layer = 0; layer < 2; ++layer) {
    for (std::size_t head = 0; head < 3; ++head) {
      for (std::size_t block = 0; block < 5; ++block) {
        std::memset(pool.k_block(layer, head, block), stamp(layer, head, block, false), half);
        std::memset(pool.v_block(layer, head, block), stamp(layer, head, block, true), half);
      }
    }
  }
}

bool holds(KvPool& pool, std::size_t layer, std::size_t head, std::size_t block,
           std::size_t origin) {
  const std::size_t half = half_bytes(pool.shape().dtype);
  const auto* k = reinterpret_cast<const std::uint8_t*>(pool.k_block(layer, head, block));
  const auto* v = reinterpret_cast<const std::uint8_t*>(pool.v_block(layer, head, block));
  for (std::size_t i = 0; i < half; ++i) {
    if (k[i] != stamp(layer, head, origin, false) || v[i] != stamp(layer, head, origin, true)) {
      return false;
    }
  }
  return true;
}

ErrorCode code_of(auto&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::kInternal;
}

TEST_CASE("blocks of all layers and heads are disjoint and fill the pool") {
  for (const KvDType dtype : {KvDType::kF32, KvDType::kF16, KvDType::kBF16, KvDType::kI8}) {
    KvPool pool(small_shape(dtype));
    CHECK(pool.bytes() == kv_block_bytes(pool.shape()) * 5);
    CHECK(pool.bytes() == 2 * 3 * 5 * 2 * half_bytes(dtype));
    fill(pool);
    for (std::size_t layer = 0; layer < 2; ++layer) {
      for (std::size_t head = 0; head < 3; ++head) {
        for (std::size_t block = 0; block < 5; ++block) {
          CHECK(holds(pool, layer, head, block, block));
        }
      }
    }
  }
}

TEST_CASE("the kernels' address formula reaches every block") {
  KvPool pool(small_shape(KvDType::kF16));
  for (std::size_t block = 0; block < 5; ++block) {
    CHECK(pool.k_base(1, 2) + block * pool.block_stride() * 2 == pool.k_block(1, 2, block));
    CHECK(pool.v_base(1, 2) + block * pool.block_stride() * 2 == pool.v_block(1, 2, block));
  }
}

TEST_CASE("copy_blocks copies all layers and heads, in order, and nothing else") {
  KvPool pool(small_shape(KvDType::kF16));
  fill(pool);
  const std::vector<std::int32_t> from{0, 3, 4};
  const std::vector<std::int32_t> to{3, 1, 4};
  pool.copy_blocks(from, to);
  const std::size_t expected[] = {0, 0, 2, 0, 4};  // 0 -> 3 first, then the new 3 -> 1
  for (std::size_t layer = 0; layer < 2; ++layer) {
    for (std::size_t head = 0; head < 3; ++head) {
      for (std::size_t block = 0; block < 5; ++block) {
        CHECK(holds(pool, layer, head, block, expected[block]));
      }
    }
  }
}

TEST_CASE("ids out of range are refused before anything is copied") {
  KvPool pool(small_shape(KvDType::kF16));
  fill(pool);
  const auto copy = [&pool](std::vector<std::int32_t> from, std::vector<std::int32_t> to) {
    return code_of([&] { pool.copy_blocks(from, to); });
  };
  CHECK(copy({0, 5}, {1, 2}) == ErrorCode::kInvalidArgument);
  CHECK(copy({0, 1}, {1, -1}) == ErrorCode::kInvalidArgument);
  CHECK(copy({0}, {1, 2}) == ErrorCode::kInvalidArgument);
  CHECK(holds(pool, 0, 0, 1, 1));
}

TEST_CASE("shapes that cannot work are refused") {
  const auto make = [](auto change) {
    KvShape shape = small_shape(KvDType::kF16);
    change(shape);
    return code_of([&] { KvPool pool(shape); });
  };
  CHECK(make([](KvShape& s) { s.head_dim = 24; }) == ErrorCode::kInvalidArgument);
  CHECK(make([](KvShape& s) { s.num_blocks = 0; }) == ErrorCode::kInvalidArgument);
  CHECK(make([](KvShape& s) { s.layers = 0; }) == ErrorCode::kInvalidArgument);
  CHECK(make([](KvShape& s) {
          s.layers = std::size_t{1} << 40;
          s.kv_heads = std::size_t{1} << 40;
        }) == ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace pocket
