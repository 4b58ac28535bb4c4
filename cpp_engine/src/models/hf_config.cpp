#include "hf_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <utility>

#include "hf_expert_config.h"
#include "hf_families.h"
#include "hf_fields.h"
#include "hf_hybrid_config.h"
#include "pocket/base/error.h"
#include "pocket/base/quoted.h"

namespace pocket {
namespace {

struct Family {
  std::string_view model_type;
  std::string_view architecture;
};

// model_type of config.json -> the registry's (GGUF's) name.
constexpr std::array kFamilies{
    Family{"gemma3_text", "gemma3"},
    Family{"llama", "llama"},
    Family{"mistral", "llama"},
    Family{"mixtral", "llama"},
    Family{"qwen2", "qwen2"},
    Family{"qwen2_moe", "qwen2moe"},
    Family{"qwen3", "qwen3"},
    Family{"qwen3_moe", "qwen3moe"},
    Family{"qwen3_next", "qwen3next"},
    Family{"qwen3_5_text", "qwen35"},
    Family{"qwen3_5_moe_text", "qwen35moe"},
};

bool is_gemma3(const HfConfig& config) {
  return config.architecture == "gemma3";
}

// A size of the network, and the default of Gemma 3, whose checkpoints for images leave it out.
struct Size {
  std::string_view field;
  const char* key;
  std::uint64_t gemma3 = 0;  // 0: must be there
};

void read_sizes(const Fields& fields, HfConfig& config) {
  constexpr Size kRequired[] = {
      {"num_hidden_layers", "block_count"},
      {"hidden_size", "embedding_length"},
      {"intermediate_size", "feed_forward_length"},
      {"max_position_embeddings", "context_length", 131072},
      {"num_attention_heads", "attention.head_count", 8},
  };
  constexpr Size kOptional[] = {
      {"num_key_value_heads", "attention.head_count_kv", 4},
      {"head_dim", "attention.key_length", 256},
      {"head_dim", "attention.value_length", 256},
  };
  const auto read = [&](const Size& size) {
    auto value = fields.uint(size.field);
    if (!value && is_gemma3(config) && size.gemma3 > 0) {
      value = size.gemma3;
    }
    if (value) {
      config.uints[size.key] = *value;
    }
    return value.has_value();
  };
  for (const Size& size : kRequired) {
    const bool unused = size.field == "intermediate_size" && config.architecture == "qwen35moe";
    if (!read(size) && !unused) {  // all of its layers have experts
      fields.fail(std::string(size.field) + " is missing");
    }
  }
  for (const Size& size : kOptional) {
    read(size);
  }
  if (const auto vocab = fields.uint("vocab_size")) {
    config.uints["vocab_size"] = *vocab;
  }
  config.floats["attention.layer_norm_rms_epsilon"] =
      fields.number("rms_norm_eps").value_or(config.model_type == "mixtral" ? 1e-5 : 1e-6);
}

// The parameters of one RoPE as Transformers 4 (rope_scaling) and 5 (rope_parameters) write them.
void read_rope_scaling(const Fields& rope, const HfConfig& context, HfConfig& config) {
  const std::string type =
      rope.string("rope_type").value_or(rope.string("type").value_or("default"));
  if (type == "default") {
    return;
  }
  if (type != "linear" && type != "llama3" && type != "yarn") {
    rope.fail("rope_type: got " + quoted(type) + "; supported are default, linear, llama3 and yarn",
              ErrorCode::kUnsupported);
  }
  config.strings["rope.scaling.type"] = type;
  const auto factor = rope.number("factor");
  if (!factor) {
    rope.fail("factor of the " + type + " RoPE is missing");
  }
  config.floats["rope.scaling.factor"] = *factor;
  if (type == "linear") {
    return;
  }
  config.uints["rope.scaling.original_context_length"] =
      rope.uint("original_max_position_embeddings").value_or(context.uints.at("context_length"));
  if (type == "llama3") {
    for (const char* field : {"low_freq_factor", "high_freq_factor"}) {
      if (const auto value = rope.number(field)) {
        config.floats[std::string("rope.scaling.") + field] = *value;
      }
    }
    return;
  }
  if (!rope.boolean("truncate", true)) {
    rope.fail("truncate: got false; this build rounds YaRN's range of dimensions",
              ErrorCode::kUnsupported);
  }
  if (const auto fast = rope.number("beta_fast")) {
    config.floats["rope.scaling.yarn_beta_fast"] = *fast;
  }
  if (const auto slow = rope.number("beta_slow")) {
    config.floats["rope.scaling.yarn_beta_slow"] = *slow;
  }
  // GGUF keeps the factor on top of YaRN's own 0.1 ln(factor) + 1, Transformers the whole.
  const auto own = [&](double scale) {
    return *factor <= 1.0 ? 1.0 : 0.1 * scale * std::log(*factor) + 1.0;
  };
  if (const auto attention = rope.number("attention_factor")) {
    config.floats["rope.scaling.attn_factor"] = *attention / own(1.0);
  } else if (const auto all = rope.number("mscale_all_dim"), part = rope.number("mscale");
             all && part && *all != 0.0 && *part != 0.0) {
    config.floats["rope.scaling.attn_factor"] = own(*part) / own(*all) / own(1.0);
  }
}

// The RoPE of Gemma 3's sliding layers: a base of its own, never scaled.
void read_sliding_rope(const Fields& fields, const Fields& parameters, HfConfig& config) {
  double base = fields.number("rope_local_base_freq").value_or(10000.0);
  if (const JsonValue* const sliding = parameters.object("sliding_attention")) {
    const Fields rope(*sliding, fields.file());
    base = rope.number("rope_theta").value_or(base);
    if (const auto type = rope.string("rope_type").value_or("default"); type != "default") {
      fields.fail("rope_parameters.sliding_attention.rope_type: got " + quoted(type) +
                      "; supported is default",
                  ErrorCode::kUnsupported);
    }
  }
  config.floats["rope.freq_base_swa"] = base;
}

void read_rope(const Fields& fields, HfConfig& config) {
  const bool wide = is_gemma3(config) || config.model_type == "mixtral";
  double base = fields.number("rope_theta").value_or(wide ? 1e6 : 10000.0);
  auto partial = fields.number("partial_rotary_factor");
  if (!partial && is_hybrid(config.architecture)) {
    partial = 0.25;
  }
  const JsonValue* parameters = fields.object("rope_parameters");
  if (is_gemma3(config)) {
    const JsonValue none;
    const Fields by_type(parameters == nullptr ? none : *parameters, fields.file());
    read_sliding_rope(fields, by_type, config);
    parameters = by_type.object("full_attention");
  }
  if (parameters == nullptr) {
    parameters = fields.object("rope_scaling");
  }
  if (parameters != nullptr) {
    const Fields rope(*parameters, fields.file());
    base = rope.number("rope_theta").value_or(base);
    if (const auto factor = rope.number("partial_rotary_factor")) {
      partial = factor;
    }
    read_rope_scaling(rope, config, config);
  }
  config.floats["rope.freq_base"] = base;
  if (partial) {
    if (!(*partial > 0.0 && *partial <= 1.0)) {
      fields.fail("partial_rotary_factor: got " + std::to_string(*partial) +
                  "; must be above 0 and at most 1");
    }
    const auto head_dim = config.uints.find("attention.key_length");
    const std::uint64_t dims =
        head_dim != config.uints.end()
            ? head_dim->second
            : config.uints["embedding_length"] /
                  std::max<std::uint64_t>(1, config.uints["attention.head_count"]);
    config.uints["rope.dimension_count"] =
        static_cast<std::uint64_t>(static_cast<double>(dims) * *partial);
  }
}

void check_activation(const Fields& fields, const char* field, std::string_view wanted) {
  const std::string activation = fields.string(field).value_or(std::string(wanted));
  if (activation != wanted) {
    fields.fail(std::string(field) + ": got " + quoted(activation) + "; supported is " +
                    std::string(wanted),
                ErrorCode::kUnsupported);
  }
}

// How many flags of layers to make: an absurd number of layers is refused later, by its own name.
std::uint64_t layer_flags(const HfConfig& config) {
  return std::min<std::uint64_t>(config.uints.at("block_count"), 1 << 16);
}

// Which layers slide, as layer_types lists it.
std::vector<bool> read_layer_types(const Fields& fields, const JsonArray& types) {
  std::vector<bool> slides;
  for (const JsonValue& item : types) {
    const auto* const type = item.as<std::string>();
    if (type == nullptr || (*type != "full_attention" && *type != "sliding_attention")) {
      fields.fail("layer_types: got " +
                      (type == nullptr ? std::string(item.kind()) : quoted(*type)) +
                      "; supported are full_attention and sliding_attention",
                  ErrorCode::kUnsupported);
    }
    slides.push_back(*type == "sliding_attention");
  }
  return slides;
}

// Mistral and Mixtral slide in all layers unless the window is null; Qwen only if
// use_sliding_window says so, Qwen3-MoE then in all layers. Which layers do is said by layer_types,
// or where that is absent, in Qwen by max_window_layers (the first that does; in Qwen2-MoE every
// other layer before it), in Gemma 3 by sliding_window_pattern (the last of as many does not).
void read_window(const Fields& fields, HfConfig& config) {
  const bool wanted = fields.boolean("use_sliding_window", false);
  const bool mistral = config.model_type == "mistral" || config.model_type == "mixtral";
  const bool all = mistral || (config.architecture == "qwen3moe" && wanted);
  const bool some = is_gemma3(config) || (config.model_type != "llama" && wanted);
  auto window = fields.uint("sliding_window");
  if (!window && is_gemma3(config)) {
    window = 4096;  // Transformers' default
  }
  if (!(all || some) || !window || *window == 0) {
    return;
  }
  config.uints["attention.sliding_window"] = *window;
  if (all) {
    return;
  }
  std::vector<bool>& slides = config.flags["attention.sliding_window_pattern"];
  if (const JsonArray* const types = fields.array("layer_types")) {
    slides = read_layer_types(fields, *types);
    return;
  }
  const std::uint64_t first = fields.uint("max_window_layers").value_or(28);
  const std::uint64_t pattern = fields.uint("sliding_window_pattern").value_or(6);
  if (pattern == 0) {
    fields.fail("sliding_window_pattern: got 0; must be at least 1");
  }
  for (std::uint64_t layer = 0; layer < layer_flags(config); ++layer) {
    slides.push_back(is_gemma3(config)                   ? (layer + 1) % pattern != 0
                     : config.architecture == "qwen2moe" ? layer % 2 == 0 && layer < first
                                                         : layer >= first);
  }
}

void read_gemma3(const Fields& fields, HfConfig& config) {
  config.norm_weight_offset = 1.0F;
  config.floats["attention.scale"] =
      1.0 / std::sqrt(fields.number("query_pre_attn_scalar").value_or(256.0));
  for (const char* field : {"attn_logit_softcapping", "final_logit_softcapping"}) {
    if (const auto cap = fields.number(field)) {
      config.floats[field] = *cap;  // refused by the model
    }
  }
  if (fields.boolean("use_bidirectional_attention", false)) {
    fields.fail("use_bidirectional_attention: got true; this build computes causal attention",
                ErrorCode::kUnsupported);
  }
}

const Family& find_family(const Fields& fields, const std::string& model_type) {
  std::string supported;
  for (const Family& family : kFamilies) {
    if (family.model_type == model_type) {
      return family;
    }
    supported += (supported.empty() ? "" : ", ") + std::string(family.model_type);
  }
  fields.fail("model_type: got " + quoted(model_type) + "; supported are " + supported,
              ErrorCode::kUnsupported);
}

}  // namespace

HfConfig read_hf_config(const JsonValue& root, std::string_view name) {
  const Fields outer(root, name);
  if (root.as<JsonObject>() == nullptr) {
    outer.fail("must be an object and is " + std::string(root.kind()));
  }
  for (const char* field : {"quantization_config", "compression_config"}) {
    if (const JsonValue* const quantisation = outer.object(field)) {
      const auto method = Fields(*quantisation, name).string("quant_method").value_or("unnamed");
      outer.fail(std::string(field) + ": the weights are quantised by " + quoted(method) +
                     "; supported are F32, F16 and BF16 weights, and GGUF files",
                 ErrorCode::kUnsupported);
    }
  }
  const JsonValue* const text = outer.object("text_config");
  const Fields fields(text == nullptr ? root : *text, name);

  HfConfig config;
  const auto model_type = fields.string("model_type");
  if (!model_type) {
    fields.fail("model_type is missing");
  }
  config.model_type = *model_type;
  config.architecture = find_family(fields, *model_type).architecture;
  const bool hybrid = is_hybrid(config.architecture);
  read_sizes(fields, config);
  if (hybrid) {
    read_hybrid_config(fields, config);
  }
  if (has_experts(config.architecture) || config.model_type == "mixtral") {
    read_hf_experts(fields, config);
  }
  read_rope(fields, config);
  read_window(fields, config);
  if (is_gemma3(config)) {
    read_gemma3(fields, config);
    check_activation(fields, "hidden_activation", "gelu_pytorch_tanh");
  } else {
    check_activation(fields, "hidden_act", "silu");
  }
  // Beside a vision tower, Qwen3.5's own field may stand on either level.
  const bool tied = is_gemma3(config) || (hybrid && outer.boolean("tie_word_embeddings", false));
  config.tied = fields.boolean("tie_word_embeddings", tied);
  config.eos_token_ids =
      read_eos_ids(text != nullptr && text->find("eos_token_id") ? *text : root, name);
  return config;
}

std::vector<std::int64_t> read_eos_ids(const JsonValue& root, std::string_view name) {
  const JsonValue* const value = root.find("eos_token_id");
  if (value == nullptr) {
    return {};
  }
  const auto id_of = [name](const JsonValue& item) {
    const auto* const id = item.as<std::int64_t>();
    if (id == nullptr) {
      throw Error(ErrorCode::kBadFile, std::string(name) + ": eos_token_id is " +
                                           std::string(item.kind()) +
                                           ", must be an id or a list of ids");
    }
    return *id;
  };
  const auto* const list = value->as<JsonArray>();
  if (list == nullptr) {
    return {id_of(*value)};
  }
  std::vector<std::int64_t> ids;
  std::transform(list->begin(), list->end(), std::back_inserter(ids), id_of);
  return ids;
}

}  // namespace pocket
