#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "hf_config.h"
#include "hf_tensor_names.h"
#include "pocket/base/error.h"
#include "pocket/base/quoted.h"
#include "pocket/io/json.h"
#include "pocket/io/mapped_file.h"
#include "pocket/io/safetensors.h"
#include "pocket/models/weight_source.h"

namespace pocket {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMaxConfigBytes = std::size_t{16} << 20;
constexpr std::size_t kMaxTokenizerBytes = std::size_t{256} << 20;
// Ids beyond this are no token's: a table of tokens must not be sized by a stray number.
constexpr std::int64_t kMaxTokenId = 1 << 22;

/// What the engine needs of tokenizer.json: how many ids there are, and the ids of some texts.
class TokenIds {
 public:
  explicit TokenIds(const fs::path& file) {
    const MappedFile mapped(file);
    if (mapped.bytes().size() > kMaxTokenizerBytes) {
      throw Error(ErrorCode::kBadFile,
                  file.string() + ": has " + std::to_string(mapped.bytes().size()) +
                      " bytes; at most " + std::to_string(kMaxTokenizerBytes) + " are accepted");
    }
    const JsonValue root =
        parse_json({reinterpret_cast<const char*>(mapped.bytes().data()), mapped.bytes().size()},
                   file.string(), "merges");
    if (const JsonValue* const model = root.find("model")) {
      add_vocabulary(model->find("vocab"));
    }
    const JsonValue* const added = root.find("added_tokens");
    if (const auto* const list = added == nullptr ? nullptr : added->as<JsonArray>()) {
      for (const JsonValue& token : *list) {
        const JsonValue* const content = token.find("content");
        const JsonValue* const id = token.find("id");
        if (content != nullptr && id != nullptr && content->as<std::string>() != nullptr) {
          added_[*content->as<std::string>()] = add(*id);
        }
      }
    }
  }

  [[nodiscard]] std::size_t count() const noexcept { return count_; }

  /// The id of an added token, which all special ones are.
  [[nodiscard]] std::optional<std::int64_t> find(const std::string& content) const {
    const auto found = added_.find(content);
    return found == added_.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  // BPE and WordPiece map texts to ids; Unigram lists texts in the order of their ids.
  void add_vocabulary(const JsonValue* vocabulary) {
    if (vocabulary == nullptr) {
      return;
    }
    if (const auto* const list = vocabulary->as<JsonArray>()) {
      count_ = std::max(count_, std::min(list->size(), std::size_t{kMaxTokenId}));
    }
    if (const auto* const map = vocabulary->as<JsonObject>()) {
      for (const auto& [unused, id] : *map) {
        add(id);
      }
    }
  }

  std::int64_t add(const JsonValue& id) {
    const auto* const number = id.as<std::int64_t>();
    if (number == nullptr || *number < 0 || *number >= kMaxTokenId) {
      return -1;
    }
    count_ = std::max(count_, static_cast<std::size_t>(*number) + 1);
    return *number;
  }

  std::map<std::string, std::int64_t> added_;
  std::size_t count_ = 0;
};

class SafetensorsSource final : public WeightSource {
 public:
  explicit SafetensorsSource(const fs::path& directory)
      : directory_(directory), config_(read_config(directory)), checkpoint_(directory) {
    for (const auto& [hf_name, tensor] : checkpoint_.tensors()) {
      auto name = gguf_tensor_name(hf_name, config_.architecture);
      // A tied model's own head is ignored, as Transformers does; an empty tensor holds nothing.
      if (!name || tensor.data.empty() || (config_.tied && *name == "output.weight")) {
        continue;
      }
      const auto [place, added] = tensors_.try_emplace(*std::move(name), &tensor);
      if (!added) {
        fail("tensor " + pocket::quoted(hf_name) + ": another tensor is " + place->first +
             " as well");
      }
    }
    if (!config_.tied && !tensors_.contains("output.weight")) {
      fail("tensor lm_head.weight is missing, and config.json does not set tie_word_embeddings");
    }
    read_tokenizer();
  }

  std::string name() const override {
    const fs::path name = directory_.filename();
    return name.empty() ? directory_.parent_path().filename().string() : name.string();
  }
  std::string architecture() const override { return config_.architecture; }

  std::optional<std::uint64_t> get_uint(std::string_view key) const override {
    return get(config_.uints, key);
  }
  std::optional<double> get_float(std::string_view key) const override {
    return get(config_.floats, key);
  }
  std::optional<std::string> get_string(std::string_view key) const override {
    return get(config_.strings, key);
  }
  std::optional<bool> get_bool(std::string_view key) const override {
    return get(config_.bools, key);
  }
  std::optional<std::vector<bool>> get_flags(std::string_view key) const override {
    return get(config_.flags, key);
  }

  std::size_t tokenizer_tokens() const override { return tokenizer_tokens_; }
  std::vector<std::int32_t> eos_token_ids() const override { return eos_token_ids_; }

  std::optional<StoredTensor> find(std::string_view tensor) const override {
    const auto found = tensors_.find(tensor);
    if (found == tensors_.end()) {
      return std::nullopt;
    }
    const SafetensorsTensor& stored = *found->second;
    return StoredTensor{
        .name = found->first, .type = stored.type, .shape = stored.shape, .data = stored.data};
  }

  std::vector<std::string> tensor_names() const override {
    std::vector<std::string> names;
    for (const auto& [name, unused] : tensors_) {
      names.push_back(name);
    }
    return names;
  }

  bool rope_pairs_interleaved() const override { return false; }
  float norm_weight_offset() const override { return config_.norm_weight_offset; }
  void release() const noexcept override { checkpoint_.release_pages(); }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(ErrorCode::kBadFile, directory_.string() + ": " + what);
  }

  static HfConfig read_config(const fs::path& directory) {
    const fs::path file = directory / "config.json";
    if (!fs::exists(file)) {
      throw Error(ErrorCode::kBadFile,
                  directory.string() +
                      ": holds no config.json; give a GGUF file or a Hugging Face directory");
    }
    return read_hf_config(parse_json(read_text_file(file, kMaxConfigBytes), file.string()),
                          file.string());
  }

  /// The named file's JSON, null if there is none.
  [[nodiscard]] JsonValue read_optional(const char* name) const {
    const fs::path file = directory_ / name;
    return fs::exists(file) ? parse_json(read_text_file(file, kMaxConfigBytes), file.string())
                            : JsonValue();
  }

  // Ends of text: generation_config.json's, which wins over config.json's, and the tokenizer's own.
  void read_tokenizer() {
    std::vector<std::int64_t> ids = read_eos_ids(read_optional("generation_config.json"),
                                                 (directory_ / "generation_config.json").string());
    if (ids.empty()) {
      ids = config_.eos_token_ids;
    }
    std::size_t known = static_cast<std::size_t>(kMaxTokenId);
    if (const fs::path file = directory_ / "tokenizer.json"; fs::exists(file)) {
      const TokenIds tokens(file);
      known = tokenizer_tokens_ = tokens.count();
      const JsonValue settings = read_optional("tokenizer_config.json");
      const JsonValue* eos = settings.find("eos_token");
      if (eos != nullptr && eos->as<JsonObject>() != nullptr) {
        eos = eos->find("content");
      }
      if (const auto* const text = eos == nullptr ? nullptr : eos->as<std::string>()) {
        ids.push_back(tokens.find(*text).value_or(-1));
      }
    }
    for (const std::int64_t id : ids) {
      // An id that the tokenizer lacks is never sampled, so it ends nothing.
      if (id < 0 || static_cast<std::size_t>(id) >= known) {
        continue;
      }
      const auto token = static_cast<std::int32_t>(id);
      if (std::find(eos_token_ids_.begin(), eos_token_ids_.end(), token) == eos_token_ids_.end()) {
        eos_token_ids_.push_back(token);
      }
    }
  }

  template <typename T>
  static std::optional<T> get(const HfConfig::Keys<T>& keys, std::string_view key) {
    const auto found = keys.find(key);
    return found == keys.end() ? std::nullopt : std::optional(found->second);
  }

  fs::path directory_;
  HfConfig config_;
  SafetensorsCheckpoint checkpoint_;
  std::map<std::string, const SafetensorsTensor*, std::less<>> tensors_;  // by GGUF's names
  std::size_t tokenizer_tokens_ = 0;
  std::vector<std::int32_t> eos_token_ids_;
};

}  // namespace

std::unique_ptr<WeightSource> open_safetensors_source(const std::string& directory) {
  return std::make_unique<SafetensorsSource>(fs::path(directory));
}

}  // namespace pocket
