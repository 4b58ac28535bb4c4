#include "rope_config.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "config_reader.h"
#include "pocket/base/error.h"
#include "pocket/base/quoted.h"
#include "pocket/quant/dequantize.h"

namespace pocket {
namespace {

double frequency(const RopeConfig& rope, std::size_t pair) {
  return std::pow(rope.base, -2.0 * static_cast<double>(pair) / static_cast<double>(rope.dims));
}

// Wavelengths above L / low are stretched by `factor`, those below L / high are kept, and between
// the two the frequency goes linearly from one to the other.
void scale_llama3(const ConfigReader& reader, RopeConfig& rope) {
  const double factor = reader.positive("rope.scaling.factor");
  const double low = reader.positive("rope.scaling.low_freq_factor");
  const double high = reader.positive("rope.scaling.high_freq_factor");
  const double length =
      static_cast<double>(reader.size("rope.scaling.original_context_length", 1 << 24));
  if (high <= low) {
    reader.fail(ErrorCode::kBadFile, "rope.scaling.high_freq_factor: got " + std::to_string(high) +
                                         "; must be above rope.scaling.low_freq_factor (" +
                                         std::to_string(low) + ")");
  }
  for (std::size_t pair = 0; pair < rope.dims / 2; ++pair) {
    const double turns = length * frequency(rope, pair) / (2.0 * std::numbers::pi);
    const double kept = std::clamp((turns - low) / (high - low), 0.0, 1.0);
    rope.frequency_factors.push_back(static_cast<float>(1.0 / ((1.0 - kept) / factor + kept)));
  }
}

// Pairs that turn more than beta_fast times in the original context are kept, those that turn less
// than beta_slow times are stretched, and the pairs between go linearly with their index.
void scale_yarn(const ConfigReader& reader, RopeConfig& rope) {
  const double factor = reader.positive("rope.scaling.factor");
  const double length =
      static_cast<double>(reader.size("rope.scaling.original_context_length", 1 << 24));
  const auto dims = static_cast<double>(rope.dims);
  const auto pair_with_turns = [&](double turns) {
    return dims * std::log(length / (turns * 2.0 * std::numbers::pi)) / (2.0 * std::log(rope.base));
  };
  const double fast = reader.positive_or("rope.scaling.yarn_beta_fast", 32.0);
  const double slow = reader.positive_or("rope.scaling.yarn_beta_slow", 1.0);
  const double first = std::max(std::floor(pair_with_turns(fast)), 0.0);
  double last = std::min(std::ceil(pair_with_turns(slow)), dims - 1.0);
  if (last == first) {
    last += 0.001;
  }
  for (std::size_t pair = 0; pair < rope.dims / 2; ++pair) {
    const double stretched =
        std::clamp((static_cast<double>(pair) - first) / (last - first), 0.0, 1.0);
    rope.frequency_factors.push_back(
        static_cast<float>(1.0 / (stretched / factor + (1.0 - stretched))));
  }
  rope.magnitude = reader.positive_or("rope.scaling.attn_factor", 1.0) *
                   (factor <= 1.0 ? 1.0 : 0.1 * std::log(factor) + 1.0);
}

void read_factors(const WeightSource& source, const ConfigReader& reader, RopeConfig& rope) {
  const auto factors = source.find("rope_freqs.weight");
  if (!factors) {
    return;
  }
  const std::size_t pairs = rope.dims / 2;
  if (factors->shape != std::vector<std::size_t>{pairs}) {
    reader.fail(ErrorCode::kBadFile, "rope_freqs.weight must have " + std::to_string(pairs) +
                                         " elements (half of rope.dimension_count) and has " +
                                         std::to_string(factors->elements()));
  }
  rope.frequency_factors.resize(pairs);
  dequantize_row(factors->type, factors->data, rope.frequency_factors);
}

// Whether they came from a tensor or from keys, each of which may be a number and the result not.
void check_result(const ConfigReader& reader, const RopeConfig& rope) {
  for (const float factor : rope.frequency_factors) {
    if (!std::isfinite(factor) || factor <= 0.0F) {
      reader.fail(ErrorCode::kBadFile,
                  "rope_freqs.weight or rope.scaling.* give a frequency factor of " +
                      std::to_string(factor) + "; factors must be finite and positive");
    }
  }
  if (!std::isfinite(static_cast<float>(rope.magnitude))) {
    reader.fail(ErrorCode::kBadFile,
                "rope.scaling.attn_factor and rope.scaling.factor give a "
                "magnitude of " +
                    std::to_string(rope.magnitude) + "; it must be finite");
  }
}

}  // namespace

RopeConfig read_rope_config(const WeightSource& source, std::size_t head_dim) {
  const ConfigReader reader(source);
  RopeConfig rope;
  rope.dims = reader.size_or("rope.dimension_count", 1 << 12, head_dim);
  if (rope.dims > head_dim) {
    reader.fail(ErrorCode::kBadFile, "rope.dimension_count: got " + std::to_string(rope.dims) +
                                         "; a head has only " + std::to_string(head_dim));
  }
  reader.multiple("rope.dimension_count", rope.dims, 2);
  rope.base = reader.positive_or("rope.freq_base", 10000.0);

  const std::string scaling = source.get_string("rope.scaling.type").value_or("none");
  if (scaling == "linear") {
    rope.position_scale = reader.positive_or("rope.scaling.factor", 1.0);
  } else if (scaling == "llama3") {
    scale_llama3(reader, rope);
  } else if (scaling == "yarn") {
    scale_yarn(reader, rope);
  } else if (scaling == "none") {
    rope.position_scale = reader.positive_or("rope.scale_linear", 1.0);  // the older key
  } else {
    reader.fail(ErrorCode::kUnsupported, "rope.scaling.type: got " + quoted(scaling) +
                                             "; supported are none, linear, llama3 and yarn");
  }
  read_factors(source, reader, rope);
  check_result(reader, rope);
  return rope;
}

}  // namespace pocket
