#include "pocket/runtime/block_cache.h"

#include <doctest/doctest.h>

#include <numeric>

#include "pocket/base/error.h"

namespace pocket {
namespace {

std::vector<std::int32_t> numbers(std::size_t n, std::int32_t first = 0) {
  std::vector<std::int32_t> out(n);
  std::iota(out.begin(), out.end(), first);
  return out;
}

// Computes `tokens` in fresh blocks and publishes the full ones; the blocks are held afterwards.
std::vector<std::int32_t> compute(BlockCache& cache, const std::vector<std::int32_t>& tokens) {
  BlockCache::Match match = cache.match(tokens);
  while (match.blocks.size() * kKvBlockTokens < tokens.size()) {
    const auto block = cache.allocate();
    REQUIRE(block.has_value());
    const std::size_t begin = match.blocks.size() * kKvBlockTokens;
    if (begin + kKvBlockTokens <= tokens.size()) {
      match.last =
          cache.publish(*block, match.last, std::span(tokens).subspan(begin, kKvBlockTokens));
    }
    match.blocks.push_back(*block);
  }
  return match.blocks;
}

void check_sum(const BlockCache& cache) {
  const BlockCounts c = cache.counts();
  CHECK(c.free + c.in_use + c.cached == c.total);
}

TEST_CASE("whole blocks of a known prompt are found, and its last token is left over") {
  BlockCache cache(8, true);
  const auto prompt = numbers(40);
  const auto blocks = compute(cache, prompt);
  CHECK(cache.counts().in_use == 3);
  const auto again = cache.match(prompt);  // while the first still holds them
  CHECK(again.blocks == std::vector<std::int32_t>{blocks[0], blocks[1]});
  CHECK(cache.match(std::span(prompt).first(32)).blocks.size() == 1);
  CHECK(cache.match(std::span(prompt).first(33)).blocks.size() == 2);
  CHECK(cache.match(std::span(prompt).first(16)).blocks.empty());
  check_sum(cache);
}

TEST_CASE("tokens and predecessor both count") {
  BlockCache cache(8, true);
  const auto first = numbers(33);
  cache.release(compute(cache, first));
  auto other = first;
  other[3] = 99;
  CHECK(cache.match(other).blocks.empty());
  // The second block's tokens after another beginning are not that block.
  const auto tail = numbers(17, 16);
  CHECK(cache.match(tail).blocks.empty());
  CHECK(cache.match(first).blocks.size() == 2);
}

TEST_CASE("idle blocks are evicted oldest first, a prompt's end before its beginning") {
  BlockCache cache(4, true);
  const auto a = numbers(33);
  const auto b = numbers(17, 100);
  cache.release(compute(cache, a));  // two findable blocks and one that is not
  CHECK(cache.counts().cached == 2);
  cache.release(compute(cache, b));
  CHECK(cache.counts().cached == 3);
  CHECK(cache.counts().free == 1);
  const auto first = cache.allocate();
  const auto second = cache.allocate();  // evicts the end of a
  CHECK(first.has_value());
  CHECK(second.has_value());
  CHECK(cache.counts().evictions == 1);
  CHECK(cache.match(a).blocks.size() == 1);
  CHECK(cache.match(b).blocks.size() == 1);
  CHECK_FALSE(cache.allocate().has_value());  // all four are held
  check_sum(cache);
}

TEST_CASE("a recycled block has no successors of its former life") {
  BlockCache cache(2, true);
  const auto a = numbers(33);
  const auto blocks = compute(cache, std::vector<std::int32_t>(a.begin(), a.begin() + 32));
  cache.release(blocks);
  CHECK(cache.evict(1) == 1);  // the end
  CHECK(cache.evict(1) == 1);  // the beginning
  const auto fresh = cache.allocate();
  REQUIRE(fresh.has_value());
  (void)cache.publish(*fresh, BlockCache::kRoot, std::span(a).first(16));
  CHECK(cache.match(a).blocks.size() == 1);
}

TEST_CASE("the same block computed twice is found once, and both go back") {
  BlockCache cache(4, true);
  const auto prompt = numbers(17);
  const auto one = cache.allocate();
  const auto two = cache.allocate();
  const auto node = cache.publish(*one, BlockCache::kRoot, std::span(prompt).first(16));
  CHECK(cache.publish(*two, BlockCache::kRoot, std::span(prompt).first(16)) == node);
  const std::int32_t both[] = {*one, *two};
  cache.release(both);
  CHECK(cache.counts().cached == 1);
  CHECK(cache.counts().free == 3);
  CHECK_THROWS_AS(cache.release(both), Error);
}

TEST_CASE("off: nothing is found and nothing is kept") {
  BlockCache cache(4, false);
  const auto prompt = numbers(33);
  cache.release(compute(cache, prompt));
  CHECK(cache.counts().free == 4);
  CHECK(cache.match(prompt).blocks.empty());
}

}  // namespace
}  // namespace pocket
