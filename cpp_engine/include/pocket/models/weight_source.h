#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pocket/quant/dtype.h"

namespace pocket {

/// A weight as it is stored; `data` stays valid while its source lives.
struct StoredTensor {
  std::string_view name;
  DType type = DType::kF32;
  std::vector<std::size_t> shape;  ///< outermost dimension first
  std::span<const std::byte> data;

  [[nodiscard]] std::size_t elements() const noexcept;
};

/// Where a model's hyper-parameters and weights come from: the seam between file formats and
/// models.
///
/// Names of keys and tensors are GGUF's (ggml-org/ggml, docs/gguf.md); a source of another format
/// translates. Thread contract: const and thread-safe.
class WeightSource {
 public:
  virtual ~WeightSource() = default;

  /// The file's name, for messages.
  [[nodiscard]] virtual std::string name() const = 0;
  /// `general.architecture`. Throws `Error(kBadFile)` when absent.
  [[nodiscard]] virtual std::string architecture() const = 0;
  /// `nullopt` when absent, `Error(kBadFile)` when of another type or out of range. Keys carry no
  /// architecture prefix: "block_count".
  [[nodiscard]] virtual std::optional<std::uint64_t> get_uint(std::string_view key) const = 0;
  [[nodiscard]] virtual std::optional<double> get_float(std::string_view key) const = 0;
  [[nodiscard]] virtual std::optional<std::string> get_string(std::string_view key) const = 0;
  [[nodiscard]] virtual std::optional<bool> get_bool(std::string_view key) const = 0;
  /// One bool per layer. GGUF also has a short form, a number n: all but every n-th are true, or
  /// all if n is 0.
  [[nodiscard]] virtual std::optional<std::vector<bool>> get_flags(std::string_view key) const = 0;
  /// Tokens of the tokenizer that comes with the weights; 0 if none does.
  [[nodiscard]] virtual std::size_t tokenizer_tokens() const = 0;
  /// Ids that end a text, each one of the tokenizer's if there is one; empty if nothing says.
  [[nodiscard]] virtual std::vector<std::int32_t> eos_token_ids() const = 0;
  [[nodiscard]] virtual std::optional<StoredTensor> find(std::string_view tensor) const = 0;
  [[nodiscard]] virtual std::vector<std::string> tensor_names() const = 0;
  /// True if rows of q and k are ordered for RoPE on neighbouring pairs (GGUF's "llama" files).
  [[nodiscard]] virtual bool rope_pairs_interleaved() const = 0;
  /// What to add to a stored norm's weights: 1 where the file keeps them around zero (Gemma's
  /// safetensors), else 0.
  [[nodiscard]] virtual float norm_weight_offset() const = 0;
  /// Gives back memory that only reading needed; called once the weights are packed.
  virtual void release() const noexcept = 0;
};

/// A GGUF model as a weight source: a file, or a split model by its first part. Throws what
/// `GgufModel` throws, and `Error(kBadFile)` for an end of text that its tokenizer does not have.
[[nodiscard]] std::unique_ptr<WeightSource> open_gguf_source(const std::string& path);

/// A Hugging Face directory as a weight source: config.json, safetensors, and as far as they are
/// there generation_config.json, tokenizer.json and tokenizer_config.json. Throws what
/// `SafetensorsCheckpoint` and `read_hf_config` throw.
[[nodiscard]] std::unique_ptr<WeightSource> open_safetensors_source(const std::string& directory);

/// A folder with a config.json as safetensors, one without as the only GGUF model in it, anything
/// else as GGUF. `Error(kBadFile)` for a folder with neither, or with several GGUF models, which it
/// names.
[[nodiscard]] std::unique_ptr<WeightSource> open_weight_source(const std::string& path);

}  // namespace pocket
