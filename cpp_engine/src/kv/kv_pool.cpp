#include "pocket/kv/kv_pool.h"

#include <cstring>
#include <limits>
#include <string>

#include "pocket/base/error.h"

namespace pocket {
namespace {

// Multiplies sizes that come from a file or a user.
std::size_t checked_product(std::initializer_list<std::size_t> factors) {
  std::size_t product = 1;
  for (const std::size_t factor : factors) {
    if (factor != 0 && product > std::numeric_limits<std::size_t>::max() / factor) {
      throw Error(ErrorCode::kInvalidArgument,
                  "kv pool: its size overflows; use fewer blocks (num_blocks)");
    }
    product *= factor;
  }
  return product;
}

const KvShape& validated(const KvShape& shape) {
  const auto require = [](bool ok, const char* field, std::size_t value, const char* remedy) {
    if (!ok) {
      throw Error(ErrorCode::kInvalidArgument, std::string("kv pool: ") + field + ": got " +
                                                   std::to_string(value) + "; " + remedy);
    }
  };
  require(shape.layers > 0, "layers", shape.layers, "must be positive");
  require(shape.kv_heads > 0, "kv_heads", shape.kv_heads, "must be positive");
  require(shape.head_dim > 0 && shape.head_dim % 16 == 0, "head_dim", shape.head_dim,
          "must be a positive multiple of 16");
  require(shape.num_blocks > 0, "num_blocks", shape.num_blocks, "must be positive");
  require(shape.num_blocks <= std::numeric_limits<std::int32_t>::max(), "num_blocks",
          shape.num_blocks, "block ids are 32-bit");
  return shape;
}

}  // namespace

std::size_t kv_element_bytes(KvDType dtype) noexcept {
  switch (dtype) {
    case KvDType::kF32:
      return 4;
    case KvDType::kF16:
    case KvDType::kBF16:
      return 2;
    case KvDType::kI8:
      break;
  }
  return 1;
}

std::size_t kv_block_bytes(const KvShape& shape) {
  // Checked before kv_block_elements multiplies the same two; int8 adds 64 bytes of scales.
  (void)checked_product({shape.head_dim, 2 * kKvBlockTokens});
  return checked_product({shape.layers, shape.kv_heads, 2,
                          kv_block_elements(shape.dtype, shape.head_dim),
                          kv_element_bytes(shape.dtype)});
}

KvPool::KvPool(const KvShape& shape)
    : shape_(validated(shape)),
      element_bytes_(kv_element_bytes(shape.dtype)),
      half_bytes_(kv_block_elements(shape.dtype, shape.head_dim) * element_bytes_),
      block_bytes_(kv_block_bytes(shape)),
      buffer_(checked_product({block_bytes_, shape.num_blocks})) {}

void KvPool::copy_blocks(std::span<const std::int32_t> from, std::span<const std::int32_t> to) {
  if (from.size() != to.size()) {
    throw Error(ErrorCode::kInvalidArgument,
                "copy_blocks: from has " + std::to_string(from.size()) + " blocks and to has " +
                    std::to_string(to.size()) + "; they must be pairs");
  }
  const auto check = [this](const char* field, std::span<const std::int32_t> blocks) {
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      if (blocks[i] < 0 || static_cast<std::size_t>(blocks[i]) >= shape_.num_blocks) {
        throw Error(ErrorCode::kInvalidArgument,
                    std::string("copy_blocks: ") + field + "[" + std::to_string(i) + "]: got " +
                        std::to_string(blocks[i]) + "; must be from 0 to " +
                        std::to_string(shape_.num_blocks - 1));
      }
    }
  };
  check("from", from);
  check("to", to);
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (from[i] != to[i]) {
      std::memcpy(buffer_.data() + static_cast<std::size_t>(to[i]) * block_bytes_,
                  buffer_.data() + static_cast<std::size_t>(from[i]) * block_bytes_, block_bytes_);
    }
  }
}

}  // namespace pocket
