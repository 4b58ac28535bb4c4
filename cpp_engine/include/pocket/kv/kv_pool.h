#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "pocket/base/aligned_buffer.h"
#include "pocket/cpu/kernels.h"

namespace pocket {

/// Geometry of a pool. `layers` counts the layers that have a KV cache.
struct KvShape {
  std::size_t layers = 0;
  std::size_t kv_heads = 0;
  std::size_t head_dim = 0;  ///< a multiple of 16
  std::size_t num_blocks = 0;
  KvDType dtype = KvDType::kF16;
};

[[nodiscard]] std::size_t kv_element_bytes(KvDType dtype) noexcept;
/// Bytes of one block of `kKvBlockTokens` positions over all layers and heads, K and V.
[[nodiscard]] std::size_t kv_block_bytes(const KvShape& shape);

/// The storage of all KV blocks, in one arena.
///
/// Order: block, layer, KV head, then K [head_dim, 16] followed by V [16, head_dim]. Blocks are
/// outermost so that a pool's pages are touched as its blocks are first used (with huge pages and
/// layers outermost, the first token of a process would clear the whole pool: 100 ms and its full
/// resident size), and so that a block is one piece to copy, swap or send. The pool owns storage
/// only: which sequence holds which block is decided elsewhere (`pocket_backend.kv`).
///
/// Errors: `Error(kInvalidArgument)` for a bad shape or an index out of range,
/// `Error(kResourceExhausted)` when the memory is refused. Thread contract: as for plain memory;
/// concurrent calls may not write the same block.
class KvPool {
 public:
  explicit KvPool(const KvShape& shape);

  [[nodiscard]] const KvShape& shape() const noexcept { return shape_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return buffer_.size(); }
  /// Elements between consecutive blocks of one layer and head (K and V alike).
  [[nodiscard]] std::size_t block_stride() const noexcept { return block_bytes_ / element_bytes_; }

  /// K and V of block 0 of a layer and head; unchecked, for the forward pass.
  [[nodiscard]] std::byte* k_base(std::size_t layer, std::size_t head) noexcept {
    return buffer_.data() + (layer * shape_.kv_heads + head) * 2 * half_bytes_;
  }
  [[nodiscard]] std::byte* v_base(std::size_t layer, std::size_t head) noexcept {
    return k_base(layer, head) + half_bytes_;
  }
  /// Address of a block of one layer and head; unchecked.
  [[nodiscard]] std::byte* k_block(std::size_t layer, std::size_t head,
                                   std::size_t block) noexcept {
    return k_base(layer, head) + block * block_bytes_;
  }
  [[nodiscard]] std::byte* v_block(std::size_t layer, std::size_t head,
                                   std::size_t block) noexcept {
    return v_base(layer, head) + block * block_bytes_;
  }

  /// Copies block from[i] to to[i], in order, for all layers and heads. Nothing is copied if an id
  /// is out of range or the spans differ in length.
  void copy_blocks(std::span<const std::int32_t> from, std::span<const std::int32_t> to);

 private:
  KvShape shape_;
  std::size_t element_bytes_ = 0;
  std::size_t half_bytes_ = 0;   // K or V of one block, layer and head
  std::size_t block_bytes_ = 0;  // all of a block
  AlignedBuffer buffer_;
};

}  // namespace pocket
