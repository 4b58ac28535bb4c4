#include "pocket/runtime/qwen_engine.h"

#include <algorithm>
#include <utility>

#include "slot_errors.h"

namespace pocket {
namespace {

constexpr std::size_t kDefaultPoolTokens = 32768;

std::size_t blocks_for(std::size_t tokens) {
  return (tokens + kKvBlockTokens - 1) / kKvBlockTokens;
}

}  // namespace

QwenEngine::QwenEngine(const std::filesystem::path& checkpoint, QwenEngineOptions options,
                       std::size_t layer_count, std::size_t max_context)
    : options_(std::move(options)) {
  check_qwen_options(options_);
  if (max_context < 2) {
    misuse("max_context: got " + std::to_string(max_context) + "; must be at least 2");
  }
  const KvDType kv =
      options_.kv_cache_dtype == QwenKvCacheDType::kFp16 ? KvDType::kF16 : KvDType::kI8;
  const ModelInfo info = inspect_model(checkpoint, kv);
  if (layer_count != 0 && layer_count < info.layers) {
    throw UnsupportedFeature(
        "layer_count " + std::to_string(layer_count),
        "all of the model's " + std::to_string(info.layers) + " layers run; give that, or 0");
  }
  if (info.state_bytes != 0) {
    // Slots share KV blocks of equal beginnings here, which without a state at their end are of no
    // use to such a model.
    throw UnsupportedFeature("model architecture " + info.architecture,
                             "it keeps a recurrent state per sequence, which QwenEngine does not "
                             "manage; use pocket_backend's LLM, or `pocketllm serve`");
  }
  max_context_ = std::min(max_context, info.context);
  const std::size_t slots = options_.max_batch_size;
  std::size_t blocks = std::max(blocks_for(max_context_), std::min(slots * blocks_for(max_context_),
                                                                   blocks_for(kDefaultPoolTokens)));
  if (options_.kv_cache_bytes != 0) {
    blocks = options_.kv_cache_bytes / info.kv_bytes_per_block;
    if (blocks == 0) {
      misuse("kv_cache_bytes: got " + std::to_string(options_.kv_cache_bytes) +
             "; one KV block of this model takes " + std::to_string(info.kv_bytes_per_block));
    }
  }
  // A step holds one chunk of prompts and one token of every slot.
  const std::size_t step_tokens = options_.prefill_chunk_tokens + slots;
  engine_ = Engine::load(checkpoint, {.num_blocks = blocks,
                                      .max_sequences = slots,
                                      .max_batch_tokens = step_tokens,
                                      .max_context = max_context_,
                                      .kv_dtype = kv,
                                      .precision = options_.precision,
                                      .threads = options_.threads});
  const std::size_t tokens = engine_->model().tokenizer_tokens;
  vocab_ = tokens == 0 ? engine_->model().vocab : std::min(tokens, engine_->model().vocab);
  cache_.emplace(blocks, options_.prefix_cache);
  sampler_.emplace(kernel_table(*engine_->options().isa), engine_->model().vocab);
  slots_.resize(slots);
  table_stride_ = blocks_for(max_context_);
  tables_.assign(slots * table_stride_, 0);
  prefix_stats_.bytes_per_block = engine_->model().kv_bytes_per_block;
}

ForwardResult QwenEngine::prefill(std::span<const std::int32_t> tokens, std::int32_t id) {
  const std::lock_guard lock(mutex_);
  Slot& slot = slot_at(id);
  check_tokens(tokens);
  if (!slot.tokens.empty()) {
    misuse(slot_name(id) + ": already holds " + std::to_string(slot.tokens.size()) +
           " tokens; reset it before another prefill");
  }
  const bool was_taken = std::exchange(slot.taken, true);
  try {
    std::size_t done = attach(slot, tokens);
    std::copy(slot.blocks.begin(), slot.blocks.end(),
              tables_.begin() + static_cast<std::ptrdiff_t>(id * table_stride_));
    ForwardResult result;
    while (done < tokens.size()) {
      const std::size_t chunk = std::min(options_.prefill_chunk_tokens, tokens.size() - done);
      grow_or_throw(id, done + chunk);
      result = forward(id, tokens.subspan(done, chunk), done + chunk == tokens.size());
      done += chunk;
    }
    return result;
  } catch (...) {
    clear(slot);
    slot.taken = was_taken;
    throw;
  }
}

ForwardResult QwenEngine::decode_step(std::int32_t token, std::int32_t id) {
  const std::lock_guard lock(mutex_);
  Slot& slot = slot_at(id);
  if (slot.tokens.empty()) {
    misuse(slot_name(id) + ": holds no tokens; prefill it before decode_step");
  }
  const std::int32_t one[] = {token};
  check_tokens(one);
  if (slot.tokens.size() >= max_context_) {
    misuse(slot_name(id) + ": its context of " + std::to_string(max_context_) +
           " tokens is full; reset it");
  }
  grow_or_throw(id, slot.tokens.size() + 1);
  return forward(id, one, true);
}

std::vector<std::int32_t> QwenEngine::generate(std::span<const std::int32_t> tokens,
                                               std::size_t max_new_tokens) {
  const std::optional<std::int32_t> slot = allocate_slot();
  if (!slot) {
    throw Error(ErrorCode::kResourceExhausted, "generate: no slot is free; reset one");
  }
  std::vector<std::int32_t> output;
  try {
    const std::size_t room = max_context_ - std::min(max_context_, tokens.size());
    const std::size_t limit = std::min(max_new_tokens, room);
    const std::vector<std::int32_t> ends = eos_token_ids();
    std::int32_t next = prefill(tokens, *slot).top_token;
    while (output.size() < limit && next >= 0) {
      output.push_back(next);
      if (output.size() == limit || std::ranges::find(ends, next) != ends.end()) {
        break;
      }
      next = decode_step(next, *slot).top_token;
    }
  } catch (...) {
    free_slot(*slot);
    throw;
  }
  free_slot(*slot);
  return output;
}

void QwenEngine::reset(std::int32_t slot) {
  free_slot(slot);
}

void QwenEngine::clear_prefix_cache() {
  (void)kv_evict_cache_blocks(engine_->options().num_blocks);
}

std::size_t QwenEngine::position(std::int32_t slot) const {
  const std::lock_guard lock(mutex_);
  return slots_[index_of(slot)].tokens.size();
}

QwenPrefixCacheStats QwenEngine::prefix_cache_stats() const {
  const std::lock_guard lock(mutex_);
  QwenPrefixCacheStats stats = prefix_stats_;
  stats.blocks = cache_->counts();
  return stats;
}

Capabilities QwenEngine::caps() const {
  return {.paged_kv = true,
          .continuous_batching = true,
          .chunked_prefill = true,
          .max_slots = options_.max_batch_size,
          .per_request_sampling = true,
          .per_request_top_k = true,
          .fixed_temperature = options_.temperature,
          .fixed_top_p = options_.top_p,
          .fixed_top_k = options_.top_k,
          .fixed_seed = options_.sampling_seed};
}

std::vector<std::int32_t> QwenEngine::eos_token_ids() const {
  return engine_->model().eos_token_ids;
}

std::size_t QwenEngine::max_prefill_tokens() const {
  return options_.prefill_chunk_tokens;
}

std::size_t QwenEngine::kv_total_blocks() const {
  return engine_->options().num_blocks;
}

std::size_t QwenEngine::kv_free_blocks() const {
  const std::lock_guard lock(mutex_);
  return cache_->counts().free;
}

std::size_t QwenEngine::kv_cache_pinned_blocks() const {
  const std::lock_guard lock(mutex_);
  return cache_->counts().cached;
}

std::size_t QwenEngine::kv_evict_cache_blocks(std::size_t count) {
  const std::lock_guard lock(mutex_);
  return cache_->evict(count);
}

std::size_t QwenEngine::kv_blocks_for_tokens(std::size_t tokens) const {
  return blocks_for(tokens);
}

std::optional<std::int32_t> QwenEngine::allocate_slot() {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!slots_[i].taken) {
      slots_[i].taken = true;
      return static_cast<std::int32_t>(i);
    }
  }
  return std::nullopt;
}

void QwenEngine::free_slot(std::int32_t id) {
  const std::lock_guard lock(mutex_);
  Slot& slot = slot_at(id);
  clear(slot);
  slot.taken = false;
}

std::size_t QwenEngine::attach_prefix(std::int32_t id, std::span<const std::int32_t> tokens) {
  const std::lock_guard lock(mutex_);
  Slot& slot = slot_at(id);
  if (!slot.tokens.empty() || !slot.blocks.empty()) {
    misuse(slot_name(id) + ": a prefix goes into an empty slot only");
  }
  const std::size_t found = attach(slot, tokens);
  std::copy(slot.blocks.begin(), slot.blocks.end(),
            tables_.begin() + static_cast<std::ptrdiff_t>(id * table_stride_));
  return found;
}

bool QwenEngine::reserve(std::int32_t id, std::size_t tokens) {
  const std::lock_guard lock(mutex_);
  return grow(id, tokens);
}

std::size_t QwenEngine::index_of(std::int32_t slot) const {
  if (slot < 0 || static_cast<std::size_t>(slot) >= slots_.size()) {
    misuse("slot_id: got " + std::to_string(slot) + "; must be from 0 to " +
           std::to_string(slots_.size() - 1) + " (max_batch_size)");
  }
  return static_cast<std::size_t>(slot);
}

void QwenEngine::check_tokens(std::span<const std::int32_t> tokens) const {
  if (tokens.empty()) {
    misuse("token_ids: got none; give at least one");
  }
  if (tokens.size() > max_context_) {
    misuse("token_ids: got " + std::to_string(tokens.size()) + "; the context holds " +
           std::to_string(max_context_));
  }
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || static_cast<std::size_t>(tokens[i]) >= vocab_) {
      misuse("token_ids[" + std::to_string(i) + "]: got " + std::to_string(tokens[i]) +
             "; must be from 0 to " + std::to_string(vocab_ - 1));
    }
  }
}

void QwenEngine::clear(Slot& slot) {
  cache_->release(slot.blocks);
  slot.tokens.clear();
  slot.blocks.clear();
  slot.published = 0;
  slot.node = BlockCache::kRoot;
  slot.drawn = 0;
}

std::size_t QwenEngine::attach(Slot& slot, std::span<const std::int32_t> tokens) {
  BlockCache::Match match = cache_->match(tokens);
  const std::size_t found = match.blocks.size() * kKvBlockTokens;
  slot.blocks = std::move(match.blocks);
  slot.published = slot.blocks.size();
  slot.node = match.last;
  slot.tokens.assign(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(found));
  prefix_stats_.prompt_tokens = tokens.size();
  prefix_stats_.reused_tokens = prefix_stats_.matched_tokens = found;
  prefix_stats_.computed_tokens = tokens.size() - found;
  prefix_stats_.resume_source = found > 0 ? "blocks" : "none";
  ++(found > 0 ? prefix_stats_.hits : prefix_stats_.misses);
  return found;
}

bool QwenEngine::grow(std::int32_t id, std::size_t tokens) {
  Slot& slot = slot_at(id);
  if (tokens > max_context_) {
    misuse(slot_name(id) + ": " + std::to_string(tokens) + " tokens; the context holds " +
           std::to_string(max_context_));
  }
  const std::size_t before = slot.blocks.size();
  while (slot.blocks.size() < blocks_for(tokens)) {
    const std::optional<std::int32_t> block = cache_->allocate();
    if (!block) {
      cache_->release(std::span(slot.blocks).subspan(before));
      slot.blocks.resize(before);
      return false;
    }
    tables_[static_cast<std::size_t>(id) * table_stride_ + slot.blocks.size()] = *block;
    slot.blocks.push_back(*block);
  }
  return true;
}

void QwenEngine::grow_or_throw(std::int32_t id, std::size_t tokens) {
  if (!grow(id, tokens)) {
    throw Error(ErrorCode::kResourceExhausted,
                slot_name(id) + ": " + std::to_string(tokens) + " tokens need " +
                    std::to_string(blocks_for(tokens)) + " KV blocks and the pool of " +
                    std::to_string(kv_total_blocks()) +
                    " has no free one; reset other slots or raise kv_cache_bytes");
  }
}

}  // namespace pocket
