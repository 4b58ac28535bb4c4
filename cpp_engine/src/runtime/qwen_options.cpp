#include <array>
#include <string_view>

#include "pocket/runtime/qwen_engine.h"

namespace pocket {
namespace {

constexpr std::array<std::pair<QwenKvCacheDType, const char*>, 4> kKvNames{{
    {QwenKvCacheDType::kFp16, "fp16"},
    {QwenKvCacheDType::kFp8, "fp8"},
    {QwenKvCacheDType::kTurboQuantK8V4, "turboquant_k8v4"},
    {QwenKvCacheDType::kInt8PerTokenHead, "int8_per_token_head"},
}};

template <typename T>
void only(const char* name, const T& value, const T& only_value, const char* why) {
  if (!(value == only_value)) {
    throw UnsupportedFeature(name, why);
  }
}

void in_range(const char* name, std::size_t value, std::size_t low, std::size_t high) {
  if (value < low || value > high) {
    throw Error(ErrorCode::kInvalidArgument, std::string(name) + ": got " + std::to_string(value) +
                                                 "; must be from " + std::to_string(low) + " to " +
                                                 std::to_string(high));
  }
}

}  // namespace

const char* qwen_kv_cache_dtype_name(QwenKvCacheDType dtype) noexcept {
  for (const auto& [known, name] : kKvNames) {
    if (known == dtype) {
      return name;
    }
  }
  return "unknown";
}

QwenKvCacheDType parse_qwen_kv_cache_dtype(const std::string& name) {
  std::string all;
  for (const auto& [dtype, known] : kKvNames) {
    if (name == known) {
      return dtype;
    }
    all += (all.empty() ? "" : ", ") + std::string(known);
  }
  throw Error(ErrorCode::kInvalidArgument,
              "kv_cache_dtype: got '" + name.substr(0, 64) + "'; must be one of " + all);
}

void check_qwen_options(const QwenEngineOptions& options) {
  const QwenEngineOptions defaults;
  const char* const one_machine = "the engine runs in one process on the CPU";
  only("tp_world", options.tp_world, 1, one_machine);
  only("tp_rank", options.tp_rank, 0, one_machine);
  only("device", options.device, 0, one_machine);
  only("nccl_id_path", options.nccl_id_path, defaults.nccl_id_path, one_machine);
  if (options.kv_cache_dtype == QwenKvCacheDType::kFp8 ||
      options.kv_cache_dtype == QwenKvCacheDType::kTurboQuantK8V4) {
    throw UnsupportedFeature(
        std::string("kv_cache_dtype ") + qwen_kv_cache_dtype_name(options.kv_cache_dtype),
        "there are fp16 and int8_per_token_head");
  }
  const char* const model_windows = "a model's own sliding window applies, and no other";
  only("attention_window", options.attention_window, std::size_t{0}, model_windows);
  only("attention_sink_tokens", options.attention_sink_tokens, std::size_t{0}, model_windows);
  const char* const no_snapshots = "prefixes are kept as KV blocks, without state snapshots";
  only("state_snapshot_interval_tokens", options.state_snapshot_interval_tokens,
       defaults.state_snapshot_interval_tokens, no_snapshots);
  only("max_state_snapshots", options.max_state_snapshots, defaults.max_state_snapshots,
       no_snapshots);
  only("prefix_cache_bytes", options.prefix_cache_bytes, std::size_t{0},
       "the prefix cache uses the KV pool's idle blocks (kv_cache_bytes)");
  const char* const no_drafts = "there is no speculative decoding";
  only("mtp", options.mtp, false, no_drafts);
  only("mtp_speculative_tokens", options.mtp_speculative_tokens, std::size_t{0}, no_drafts);
  only("mtp_adaptive", options.mtp_adaptive, false, no_drafts);
  only("dspark_checkpoint", options.dspark_checkpoint, std::string(), no_drafts);
  only("dflash2_checkpoint", options.dflash2_checkpoint, std::string(), no_drafts);
  only("kv_paged", options.kv_paged, true, "the KV cache is always paged");
  only("kv_block_size", options.kv_block_size, kKvBlockTokens, "a KV block has 16 tokens");
  in_range("max_batch_size", options.max_batch_size, 1, 1024);
  in_range("prefill_chunk_tokens", options.prefill_chunk_tokens, 1, std::size_t{1} << 19);
  validate_sampling(
      {.temperature = options.temperature, .top_k = options.top_k, .top_p = options.top_p});
}

}  // namespace pocket
