#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "pocket/cpu/kernels.h"

namespace pocket {

/// A counter snapshot of a `BlockCache`. free + in_use + cached = total, always.
struct BlockCounts {
  std::size_t total = 0;
  std::size_t free = 0;    ///< hold nothing
  std::size_t in_use = 0;  ///< held by sequences
  std::size_t cached = 0;  ///< held by nobody, kept for prefixes; evicted when blocks run out
  std::uint64_t hits = 0, misses = 0, evictions = 0;  ///< blocks of prompts found, not found
};

/// Ids of KV blocks: who holds which, and which full blocks hold the beginning of a known prompt.
///
/// A full block is found by (the block before it, its tokens): hashed, then both compared, so a
/// collision cannot serve another prompt's keys and values. A block's identity as a predecessor is
/// a number of its own that is never used again, so a recycled block has no old successors. Blocks
/// leave the cache least recently used first.
///
/// Cost: O(blocks) per call. Thread contract: one call at a time. Errors: `Error(kInternal)` when a
/// block is released that nobody holds.
class BlockCache {
 public:
  /// What precedes a sequence's next block: kRoot, or what `publish` or `Match` gave.
  using Node = std::uint64_t;
  static constexpr Node kRoot = 0;

  struct Match {
    std::vector<std::int32_t> blocks;
    Node last = kRoot;
  };

  /// `enabled` false: nothing is ever found or kept.
  BlockCache(std::size_t num_blocks, bool enabled);

  /// The longest known beginning of `tokens` in whole blocks; the caller now holds its blocks. At
  /// least one token is always left over, since the last one has to be computed.
  [[nodiscard]] Match match(std::span<const std::int32_t> tokens);
  /// A block for the caller to write, by evicting if need be; nullopt if all are in use.
  [[nodiscard]] std::optional<std::int32_t> allocate();
  /// Makes a fully written block findable after `before`. Returns what precedes the next block: if
  /// another block holds the same already, that one's node.
  Node publish(std::int32_t block, Node before, std::span<const std::int32_t> tokens);
  /// The caller no longer holds these. Later blocks are let go first and so evicted first.
  void release(std::span<const std::int32_t> blocks);
  /// Evicts up to `count` blocks that nobody holds; how many there were.
  std::size_t evict(std::size_t count);

  [[nodiscard]] BlockCounts counts() const noexcept;

 private:
  struct Block {
    std::size_t holders = 0;
    Node node = kRoot;  // kRoot: not findable
    Node before = kRoot;
    std::uint64_t hash = 0;
    std::vector<std::int32_t> tokens;
    std::list<std::int32_t>::iterator idle;  // in idle_, if findable and held by nobody
  };

  [[nodiscard]] std::optional<std::int32_t> find(std::uint64_t hash, Node before,
                                                 std::span<const std::int32_t> tokens) const;
  void hold(std::int32_t block);
  std::int32_t evict_one();
  Block& at(std::int32_t block) { return blocks_[static_cast<std::size_t>(block)]; }

  bool enabled_;
  std::vector<Block> blocks_;
  std::vector<std::int32_t> free_;
  std::list<std::int32_t> idle_;  // least recently used first
  std::unordered_map<std::uint64_t, std::int32_t> by_hash_;
  Node next_node_ = kRoot + 1;
  std::uint64_t hits_ = 0, misses_ = 0, evictions_ = 0;
};

}  // namespace pocket
