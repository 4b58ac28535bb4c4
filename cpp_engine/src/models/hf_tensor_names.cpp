#include "hf_tensor_names.h"

#include <algorithm>
#include <array>

#include "hf_families.h"

namespace pocket {
namespace {

struct Part {
  std::string_view hf;
  std::string_view gguf;
};

// Outside of the blocks.
constexpr std::array kGlobal{
    Part{"embed_tokens.weight", "token_embd.weight"},
    Part{"norm.weight", "output_norm.weight"},
    Part{"lm_head.weight", "output.weight"},
};

// Inside of a block, without ".weight" or ".bias".
constexpr std::array kBlock{
    Part{"input_layernorm", "attn_norm"},    Part{"self_attn.q_proj", "attn_q"},
    Part{"self_attn.k_proj", "attn_k"},      Part{"self_attn.v_proj", "attn_v"},
    Part{"self_attn.o_proj", "attn_output"}, Part{"self_attn.q_norm", "attn_q_norm"},
    Part{"self_attn.k_norm", "attn_k_norm"}, Part{"post_attention_layernorm", "ffn_norm"},
    Part{"mlp.gate_proj", "ffn_gate"},       Part{"mlp.up_proj", "ffn_up"},
    Part{"mlp.down_proj", "ffn_down"},
};

// Those that Gemma, whose blocks have norms behind attention and MLP, uses otherwise or in
// addition.
constexpr std::array kGemmaBlock{
    Part{"post_attention_layernorm", "post_attention_norm"},
    Part{"pre_feedforward_layernorm", "ffn_norm"},
    Part{"post_feedforward_layernorm", "post_ffw_norm"},
};

// Hybrids': Gated DeltaNet, and the norm before the MLP by the place that it has in other models.
// Qwen3-Next has two projections where Qwen3.5 has four.
constexpr std::array kHybridBlock{
    Part{"post_attention_layernorm", "post_attention_norm"},
    Part{"linear_attn.in_proj_qkv", "attn_qkv"},
    Part{"linear_attn.in_proj_z", "attn_gate"},
    Part{"linear_attn.in_proj_a", "ssm_alpha"},
    Part{"linear_attn.in_proj_b", "ssm_beta"},
    Part{"linear_attn.in_proj_qkvz", "ssm_in"},
    Part{"linear_attn.in_proj_ba", "ssm_ba"},
    Part{"linear_attn.conv1d", "ssm_conv1d"},
    Part{"linear_attn.norm", "ssm_norm"},
    Part{"linear_attn.out_proj", "ssm_out"},
};
constexpr std::array kHybridParameters{
    // GGUF's ssm_a is -e^A_log.
    Part{"linear_attn.A_log", "ssm_a_log"},
    Part{"linear_attn.dt_bias", "ssm_dt.bias"},
};

// Mixtures of experts': the router, and an expert that all rows use. Experts one by one are
// named by `expert_part`; stacks of all of them have no ".weight".
constexpr std::array kExpertBlock{
    Part{"mlp.gate", "ffn_gate_inp"},
    Part{"block_sparse_moe.gate", "ffn_gate_inp"},  // Mixtral's
    Part{"mlp.shared_expert_gate", "ffn_gate_inp_shexp"},
    Part{"mlp.shared_expert.gate_proj", "ffn_gate_shexp"},
    Part{"mlp.shared_expert.up_proj", "ffn_up_shexp"},
    Part{"mlp.shared_expert.down_proj", "ffn_down_shexp"},
};
constexpr std::array kExpertStacks{
    Part{"mlp.experts.gate_up_proj", "ffn_gate_up_exps.weight"},
    Part{"mlp.experts.down_proj", "ffn_down_exps.weight"},
};
constexpr std::array kExpert{
    Part{"gate_proj.weight", "ffn_gate"}, Part{"up_proj.weight", "ffn_up"},
    Part{"down_proj.weight", "ffn_down"}, Part{"w1.weight", "ffn_gate"},  // Mixtral's
    Part{"w3.weight", "ffn_up"},          Part{"w2.weight", "ffn_down"},
};

template <std::size_t kCount>
std::optional<std::string> look_up(const std::array<Part, kCount>& parts, std::string_view name) {
  const auto found = std::find_if(parts.begin(), parts.end(),
                                  [name](const Part& part) { return part.hf == name; });
  return found == parts.end() ? std::nullopt : std::optional(std::string(found->gguf));
}

bool strip_prefix(std::string_view& name, std::string_view prefix) {
  if (!name.starts_with(prefix)) {
    return false;
  }
  name.remove_prefix(prefix.size());
  return true;
}

// mlp.experts.7.up_proj.weight, block_sparse_moe.experts.7.w3.weight -> ffn_up.7.weight
std::optional<std::string> expert_part(std::string_view part) {
  if (!strip_prefix(part, "mlp.experts.") && !strip_prefix(part, "block_sparse_moe.experts.")) {
    return std::nullopt;
  }
  const std::size_t dot = part.find('.');
  const std::string_view number = part.substr(0, dot);
  if (dot == std::string_view::npos || number.empty() ||
      number.find_first_not_of("0123456789") != std::string_view::npos) {
    return std::nullopt;
  }
  const auto name = look_up(kExpert, part.substr(dot + 1));
  return name ? std::optional(*name + "." + std::string(number) + ".weight") : std::nullopt;
}

std::optional<std::string> block_part(std::string_view part, std::string_view architecture) {
  const std::size_t dot = part.rfind('.');
  if (dot == std::string_view::npos) {
    return std::nullopt;
  }
  std::optional<std::string> name;
  if (architecture == "gemma3") {
    name = look_up(kGemmaBlock, part.substr(0, dot));
  } else if (is_hybrid(architecture)) {
    if (auto parameter = look_up(kHybridParameters, part)) {
      return parameter;
    }
    name = look_up(kHybridBlock, part.substr(0, dot));
  }
  if (!name && (has_experts(architecture) || architecture == "llama")) {
    auto expert = look_up(kExpertStacks, part);
    if (!expert) {
      expert = expert_part(part);
    }
    if (expert) {
      return expert;
    }
    name = look_up(kExpertBlock, part.substr(0, dot));
  }
  if (!name) {
    name = look_up(kBlock, part.substr(0, dot));
  }
  return name ? std::optional(*name + std::string(part.substr(dot))) : std::nullopt;
}

}  // namespace

std::optional<std::string> gguf_tensor_name(std::string_view hf_name,
                                            std::string_view architecture) {
  if (hf_name.ends_with("rotary_emb.inv_freq")) {
    return std::nullopt;
  }
  std::string_view name = hf_name;
  // Layers that predict further tokens, which Transformers leaves out as well.
  if (is_hybrid(architecture) && name.starts_with("mtp.")) {
    return std::nullopt;
  }
  strip_prefix(name, "model.");
  if (is_hybrid(architecture)) {  // beside a vision tower
    if (name.starts_with("visual.")) {
      return std::nullopt;
    }
    strip_prefix(name, "language_model.");
  }
  if (architecture == "gemma3") {  // beside a vision tower, in Transformers 5's layout or 4's
    if (name.starts_with("vision_tower.") || name.starts_with("multi_modal_projector.")) {
      return std::nullopt;
    }
    strip_prefix(name, "language_model.");
    strip_prefix(name, "model.");
  }
  if (!strip_prefix(name, "layers.")) {
    return look_up(kGlobal, name).value_or(std::string(hf_name));
  }
  const std::size_t dot = name.find('.');
  if (dot == std::string_view::npos) {
    return std::string(hf_name);
  }
  const auto part = block_part(name.substr(dot + 1), architecture);
  return part ? "blk." + std::string(name.substr(0, dot)) + "." + *part : std::string(hf_name);
}

}  // namespace pocket
