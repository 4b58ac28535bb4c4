#include "pocket/runtime/block_cache.h"

#include <algorithm>
#include <string>

#include "pocket/base/error.h"

namespace pocket {
namespace {

std::uint64_t mix(std::uint64_t value) {  // the finaliser of SplitMix64
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

std::uint64_t hash_of(std::uint64_t before, std::span<const std::int32_t> tokens) {
  std::uint64_t hash = mix(before);
  for (const std::int32_t token : tokens) {
    hash = mix(hash + 0x9E3779B97F4A7C15 + static_cast<std::uint32_t>(token));
  }
  return hash;
}

}  // namespace

BlockCache::BlockCache(std::size_t num_blocks, bool enabled)
    : enabled_(enabled), blocks_(num_blocks) {
  free_.reserve(num_blocks);
  for (std::size_t i = num_blocks; i-- > 0;) {
    free_.push_back(static_cast<std::int32_t>(i));  // low ids are handed out first
  }
}

BlockCache::Match BlockCache::match(std::span<const std::int32_t> tokens) {
  Match found;
  if (!enabled_ || tokens.empty()) {
    return found;
  }
  const std::size_t whole = (tokens.size() - 1) / kKvBlockTokens;
  for (std::size_t i = 0; i < whole; ++i) {
    const auto part = tokens.subspan(i * kKvBlockTokens, kKvBlockTokens);
    const auto block = find(hash_of(found.last, part), found.last, part);
    if (!block) {
      break;
    }
    hold(*block);
    found.blocks.push_back(*block);
    found.last = at(*block).node;
  }
  hits_ += found.blocks.size();
  misses_ += whole - found.blocks.size();
  return found;
}

std::optional<std::int32_t> BlockCache::allocate() {
  if (free_.empty() && idle_.empty()) {
    return std::nullopt;
  }
  std::int32_t block = -1;
  if (free_.empty()) {
    block = evict_one();
  } else {
    block = free_.back();
    free_.pop_back();
  }
  at(block).holders = 1;
  return block;
}

BlockCache::Node BlockCache::publish(std::int32_t block, Node before,
                                     std::span<const std::int32_t> tokens) {
  if (!enabled_) {
    return kRoot;
  }
  const std::uint64_t hash = hash_of(before, tokens);
  if (const auto known = find(hash, before, tokens)) {
    return at(*known).node;
  }
  Block& entry = at(block);
  const Node node = next_node_++;
  if (entry.node == kRoot && by_hash_.try_emplace(hash, block).second) {
    entry.node = node;
    entry.before = before;
    entry.hash = hash;
    entry.tokens.assign(tokens.begin(), tokens.end());
  }
  return node;
}

void BlockCache::release(std::span<const std::int32_t> blocks) {
  for (auto next = blocks.rbegin(); next != blocks.rend(); ++next) {
    const std::int32_t block = *next;
    Block& entry = at(block);
    if (entry.holders == 0) {
      throw Error(ErrorCode::kInternal, "block cache: block " + std::to_string(block) +
                                            " is released but held by nobody");
    }
    if (--entry.holders > 0) {
      continue;
    }
    if (entry.node == kRoot) {
      free_.push_back(block);
    } else {
      entry.idle = idle_.insert(idle_.end(), block);
    }
  }
}

std::size_t BlockCache::evict(std::size_t count) {
  const std::size_t evicted = std::min(count, idle_.size());
  for (std::size_t i = 0; i < evicted; ++i) {
    free_.push_back(evict_one());
  }
  return evicted;
}

BlockCounts BlockCache::counts() const noexcept {
  return {.total = blocks_.size(),
          .free = free_.size(),
          .in_use = blocks_.size() - free_.size() - idle_.size(),
          .cached = idle_.size(),
          .hits = hits_,
          .misses = misses_,
          .evictions = evictions_};
}

std::optional<std::int32_t> BlockCache::find(std::uint64_t hash, Node before,
                                             std::span<const std::int32_t> tokens) const {
  const auto found = by_hash_.find(hash);
  if (found == by_hash_.end()) {
    return std::nullopt;
  }
  const Block& entry = blocks_[static_cast<std::size_t>(found->second)];
  if (entry.before != before || !std::ranges::equal(entry.tokens, tokens)) {
    return std::nullopt;
  }
  return found->second;
}

void BlockCache::hold(std::int32_t block) {
  Block& entry = at(block);
  if (entry.holders++ == 0) {
    idle_.erase(entry.idle);
  }
}

std::int32_t BlockCache::evict_one() {
  const std::int32_t block = idle_.front();
  idle_.pop_front();
  Block& entry = at(block);
  by_hash_.erase(entry.hash);
  entry.node = kRoot;
  entry.tokens.clear();
  ++evictions_;
  return block;
}

}  // namespace pocket
