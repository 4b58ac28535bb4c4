#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pocket/models/weight_source.h"

namespace pocket::test {

/// Keys and float32 tensors in memory.
class MemorySource final : public WeightSource {
 public:
  std::map<std::string, std::uint64_t, std::less<>> uints;
  std::map<std::string, double, std::less<>> floats;
  std::map<std::string, std::string, std::less<>> strings;
  std::map<std::string, bool, std::less<>> bools;
  std::map<std::string, std::vector<bool>, std::less<>> flags;
  std::string architecture_name = "llama";
  float norm_offset = 0.0F;
  bool interleaved = false;
  mutable int releases = 0;

  void add(const std::string& name, std::vector<std::size_t> shape, std::vector<float> values) {
    tensors_[name] = {std::move(shape), std::move(values)};
  }
  void remove(const std::string& name) { tensors_.erase(name); }

  std::string name() const override { return "memory"; }
  std::string architecture() const override { return architecture_name; }
  std::optional<std::uint64_t> get_uint(std::string_view key) const override {
    return get(uints, key);
  }
  std::optional<double> get_float(std::string_view key) const override { return get(floats, key); }
  std::optional<std::string> get_string(std::string_view key) const override {
    return get(strings, key);
  }
  std::optional<bool> get_bool(std::string_view key) const override { return get(bools, key); }
  std::optional<std::vector<bool>> get_flags(std::string_view key) const override {
    return get(flags, key);
  }
  std::size_t tokenizer_tokens() const override { return 0; }
  std::vector<std::int32_t> eos_token_ids() const override { return {}; }
  std::optional<StoredTensor> find(std::string_view tensor) const override {
    const auto found = tensors_.find(tensor);
    if (found == tensors_.end()) {
      return std::nullopt;
    }
    return StoredTensor{.name = found->first,
                        .type = DType::kF32,
                        .shape = found->second.shape,
                        .data = std::as_bytes(std::span(found->second.values))};
  }
  std::vector<std::string> tensor_names() const override {
    std::vector<std::string> names;
    for (const auto& [tensor, unused] : tensors_) {
      names.push_back(tensor);
    }
    return names;
  }
  bool rope_pairs_interleaved() const override { return interleaved; }
  float norm_weight_offset() const override { return norm_offset; }
  void release() const noexcept override { ++releases; }

 private:
  struct Tensor {
    std::vector<std::size_t> shape;
    std::vector<float> values;
  };

  template <typename Map>
  static std::optional<typename Map::mapped_type> get(const Map& map, std::string_view key) {
    const auto found = map.find(key);
    return found == map.end() ? std::nullopt : std::optional(found->second);
  }

  std::map<std::string, Tensor, std::less<>> tensors_;
};

/// The keys of a small valid model, and its embedding.
inline MemorySource small_source() {
  MemorySource source;
  source.uints = {{"block_count", 2},          {"embedding_length", 64},
                  {"feed_forward_length", 96}, {"context_length", 128},
                  {"attention.head_count", 4}, {"attention.head_count_kv", 2}};
  source.floats = {{"attention.layer_norm_rms_epsilon", 1e-6}};
  source.add("token_embd.weight", {40, 64}, std::vector<float>(40 * 64, 0.5F));
  return source;
}

}  // namespace pocket::test
