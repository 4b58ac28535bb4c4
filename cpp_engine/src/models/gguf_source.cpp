#include <algorithm>
#include <limits>
#include <string>
#include <variant>

#include "pocket/base/error.h"
#include "pocket/io/gguf_model.h"
#include "pocket/models/weight_source.h"

namespace pocket {
namespace {

class GgufSource final : public WeightSource {
 public:
  explicit GgufSource(const std::string& path) : model_(path), file_(model_.first()) {}

  std::string name() const override { return file_.path().filename().string(); }

  std::string architecture() const override {
    const auto value = file_.get_string("general.architecture");
    if (!value) {
      throw Error(ErrorCode::kBadFile, name() + ": the key general.architecture is missing");
    }
    return std::string(*value);
  }

  std::optional<std::uint64_t> get_uint(std::string_view key) const override {
    return file_.get_uint(prefixed(key));
  }
  std::optional<double> get_float(std::string_view key) const override {
    return file_.get_float(prefixed(key));
  }
  std::optional<std::string> get_string(std::string_view key) const override {
    const auto value = file_.get_string(prefixed(key));
    return value ? std::optional<std::string>(*value) : std::nullopt;
  }

  std::optional<bool> get_bool(std::string_view key) const override {
    return file_.get_bool(prefixed(key));
  }

  std::optional<std::vector<bool>> get_flags(std::string_view key) const override {
    const auto found = file_.metadata().find(prefixed(key));
    if (found == file_.metadata().end()) {
      return std::nullopt;
    }
    const auto* array = std::get_if<GgufArray>(&found->second);
    if (array == nullptr) {
      return periodic_flags(file_.get_uint(found->first).value());
    }
    const auto* flags = std::get_if<std::vector<bool>>(array);
    if (flags == nullptr) {
      throw Error(ErrorCode::kBadFile, name() + ": " + found->first + " must be an array of bools");
    }
    return *flags;
  }

  std::size_t tokenizer_tokens() const override {
    const auto found = file_.metadata().find("tokenizer.ggml.tokens");
    if (found == file_.metadata().end()) {
      return 0;
    }
    const auto* array = std::get_if<GgufArray>(&found->second);
    const auto* tokens = array ? std::get_if<std::vector<std::string>>(array) : nullptr;
    if (tokens == nullptr) {
      throw Error(ErrorCode::kBadFile,
                  name() + ": tokenizer.ggml.tokens must be an array of strings");
    }
    return tokens->size();
  }

  std::vector<std::int32_t> eos_token_ids() const override {
    const std::size_t tokens = tokenizer_tokens();
    std::vector<std::int32_t> ids;
    for (const char* name : {"eos", "eot", "eom"}) {
      const std::string key = std::string("tokenizer.ggml.") + name + "_token_id";
      const auto id = file_.get_uint(key);
      if (!id) {
        continue;
      }
      if (*id >= tokens || *id > std::numeric_limits<std::int32_t>::max()) {
        throw Error(ErrorCode::kBadFile, this->name() + ": " + key + ": got " +
                                             std::to_string(*id) + "; the tokenizer has " +
                                             std::to_string(tokens) + " tokens");
      }
      const auto token = static_cast<std::int32_t>(*id);
      if (std::find(ids.begin(), ids.end(), token) == ids.end()) {
        ids.push_back(token);
      }
    }
    return ids;
  }

  std::optional<StoredTensor> find(std::string_view tensor) const override {
    const GgufTensor* found = model_.find_tensor(tensor);
    if (found == nullptr) {
      return std::nullopt;
    }
    return StoredTensor{
        .name = found->name, .type = found->type, .shape = found->shape, .data = found->data};
  }

  std::vector<std::string> tensor_names() const override {
    std::vector<std::string> names;
    for (const auto& [tensor, unused] : model_.tensors()) {
      names.emplace_back(tensor);
    }
    return names;
  }

  // Converters to GGUF permute q and k of "llama" files only (algorithms: GGUF conventions).
  bool rope_pairs_interleaved() const override { return architecture() == "llama"; }

  float norm_weight_offset() const override { return 0.0F; }

  void release() const noexcept override { model_.release_pages(); }

 private:
  std::string prefixed(std::string_view key) const {
    return architecture() + "." + std::string(key);
  }

  // An absurd number of layers is refused later, by its own name.
  std::vector<bool> periodic_flags(std::uint64_t period) const {
    const std::uint64_t layers =
        std::min<std::uint64_t>(get_uint("block_count").value_or(0), 1 << 16);
    std::vector<bool> flags;
    for (std::uint64_t layer = 1; layer <= layers; ++layer) {
      flags.push_back(period == 0 || layer % period != 0);
    }
    return flags;
  }

  GgufModel model_;
  const GgufFile& file_;  // with the metadata
};

}  // namespace

std::unique_ptr<WeightSource> open_gguf_source(const std::string& path) {
  return std::make_unique<GgufSource>(path);
}

}  // namespace pocket
