#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "pocket/io/json.h"

namespace pocket {

/// A Hugging Face config.json in GGUF's terms: what `WeightSource` hands out.
struct HfConfig {
  template <typename T>
  using Keys = std::map<std::string, T, std::less<>>;

  std::string model_type;    ///< as config.json names it, of the text model
  std::string architecture;  ///< GGUF's name for it
  Keys<std::uint64_t> uints;
  Keys<double> floats;
  Keys<std::string> strings;
  Keys<bool> bools;
  Keys<std::vector<bool>> flags;
  bool tied = false;                        ///< the head is the embedding
  float norm_weight_offset = 0.0F;          ///< see `WeightSource::norm_weight_offset`
  std::vector<std::int64_t> eos_token_ids;  ///< as config.json states them, unchecked
};

/// Translates config.json; `name` is the file's name in messages. A multimodal model's text_config
/// is what counts. Fields that are absent get the defaults that Transformers gives them, except
/// sizes of the network, which must be there unless the model's family always leaves them out.
///
/// Throws `Error(kBadFile)` for a missing field or one of another type, `Error(kUnsupported)` for a
/// model_type without a model here, and for fields whose meaning this build does not compute
/// (quantisation, activations, RoPE types).
[[nodiscard]] HfConfig read_hf_config(const JsonValue& root, std::string_view name);

/// `eos_token_id` of config.json or generation_config.json: an id, a list of ids, or absent.
[[nodiscard]] std::vector<std::int64_t> read_eos_ids(const JsonValue& root, std::string_view name);

}  // namespace pocket
