#include "expert_config.h"

#include <string>
#include <utility>

#include "config_reader.h"
#include "pocket/base/error.h"
#include "pocket/cpu/packed_matrix.h"

namespace pocket {
namespace {

// Far above any known model; they keep products of sizes inside 64 bits.
constexpr std::uint64_t kMaxExperts = 1 << 12;
constexpr std::uint64_t kMaxWidth = 1 << 20;
constexpr std::uint64_t kSoftmax = 1;  // of expert_gating_func

// Ways to choose or weigh experts that other architectures have.
void refuse_other_routers(const WeightSource& source, const ConfigReader& reader) {
  if (const auto gate = source.get_uint("expert_gating_func");
      gate.value_or(kSoftmax) != kSoftmax && *gate != 0) {
    reader.fail(ErrorCode::kUnsupported,
                "expert_gating_func: got " + std::to_string(*gate) + "; supported is 1 (softmax)");
  }
  if (const auto scale = source.get_float("expert_weights_scale");
      scale.value_or(1.0) != 1.0 && *scale != 0.0) {
    reader.fail(ErrorCode::kUnsupported,
                "expert_weights_scale: got " + std::to_string(*scale) + "; supported is 1");
  }
  if (const auto groups = source.get_uint("expert_group_count"); groups.value_or(1) > 1) {
    reader.fail(ErrorCode::kUnsupported,
                "expert_group_count: got " + std::to_string(*groups) + "; supported is 1");
  }
}

std::vector<bool> read_layers(const WeightSource& source, const ConfigReader& reader,
                              std::size_t layers) {
  if (auto flags = source.get_flags("expert_layers")) {
    if (flags->size() != layers) {
      reader.fail(ErrorCode::kBadFile, "expert_layers: has " + std::to_string(flags->size()) +
                                           " entries; must have one for each of the " +
                                           std::to_string(layers) + " layers");
    }
    return *std::move(flags);
  }
  std::vector<bool> sparse;
  for (std::size_t layer = 0; layer < layers; ++layer) {
    const auto router = source.find("blk." + std::to_string(layer) + ".ffn_gate_inp.weight");
    sparse.push_back(router.has_value());
  }
  return sparse;
}

}  // namespace

ExpertConfig read_expert_config(const WeightSource& source, const DecoderConfig& config,
                                ExpertDefaults defaults) {
  const ConfigReader reader(source);
  ExpertConfig experts;
  experts.count = reader.size("expert_count", kMaxExperts);
  experts.used = reader.size("expert_used_count", kMaxExperts);
  if (experts.used > experts.count) {
    reader.fail(ErrorCode::kBadFile, "expert_used_count (" + std::to_string(experts.used) +
                                         ") must be at most expert_count (" +
                                         std::to_string(experts.count) + ")");
  }
  // Older files say these two by the dense length only.
  experts.ffn = reader.size_or("expert_feed_forward_length", kMaxWidth,
                               defaults.ffn > 0 ? defaults.ffn : config.ffn / experts.used);
  reader.multiple("expert_feed_forward_length", experts.ffn, kQuantBlock);
  if (defaults.shared) {
    experts.shared_ffn = reader.size_or("expert_shared_feed_forward_length", kMaxWidth, config.ffn);
    reader.multiple("expert_shared_feed_forward_length", experts.shared_ffn, kQuantBlock);
  }
  experts.normalised = source.get_bool("expert_weights_norm").value_or(defaults.normalised);
  experts.layers = read_layers(source, reader, config.layers);
  refuse_other_routers(source, reader);
  return experts;
}

}  // namespace pocket
