#include "small_model.h"

#include <cmath>
#include <cstdint>
#include <random>
#include <string>

#include "gguf_builder.h"

namespace pocket::test {
namespace {

constexpr std::size_t kHidden = 64;
constexpr std::size_t kFfn = 96;

std::vector<float> random_values(std::size_t n, float scale, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0F, scale);
  std::vector<float> values(n);
  for (float& value : values) {
    value = normal(random);
  }
  return values;
}

}  // namespace

std::vector<std::byte> small_model() {
  std::mt19937 random(3);
  GgufBuilder file;
  file.key("general.architecture", "llama");
  const auto count = [&](const char* name, std::uint32_t value) {
    file.key(std::string("llama.") + name, value);
  };
  count("block_count", 2);
  count("context_length", 256);
  count("embedding_length", kHidden);
  count("feed_forward_length", kFfn);
  count("attention.head_count", 4);
  count("attention.head_count_kv", 2);
  file.key("llama.attention.layer_norm_rms_epsilon", 1e-5F);
  const auto matrix = [&](const std::string& name, std::size_t rows, std::size_t columns) {
    const float scale = 1.0F / std::sqrt(static_cast<float>(columns));
    file.tensor(name, {columns, rows}, DType::kF32, random_values(rows * columns, scale, random));
  };
  const auto norm = [&](const std::string& name) {
    file.tensor(name, {kHidden}, DType::kF32, std::vector<float>(kHidden, 1.0F));
  };
  matrix("token_embd.weight", kVocab, kHidden);
  matrix("output.weight", kVocab, kHidden);
  norm("output_norm.weight");
  for (const std::string prefix : {"blk.0.", "blk.1."}) {
    norm(prefix + "attn_norm.weight");
    matrix(prefix + "attn_q.weight", 64, kHidden);
    matrix(prefix + "attn_k.weight", 32, kHidden);
    matrix(prefix + "attn_v.weight", 32, kHidden);
    matrix(prefix + "attn_output.weight", kHidden, 64);
    norm(prefix + "ffn_norm.weight");
    matrix(prefix + "ffn_gate.weight", kFfn, kHidden);
    matrix(prefix + "ffn_up.weight", kFfn, kHidden);
    matrix(prefix + "ffn_down.weight", kHidden, kFfn);
  }
  return file.bytes();
}

}  // namespace pocket::test
