#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "decoder_config.h"
#include "hf_config.h"
#include "memory_source.h"
#include "pocket/base/error.h"
#include "pocket/io/json.h"
#include "pocket/models/model.h"

namespace {

void require(bool holds, const char* what) {
  if (!holds) {
    throw std::logic_error(what);
  }
}

// Everything of a configuration that the model would be built from.
void check(const pocket::HfConfig& config) {
  const auto supported = pocket::supported_architectures();
  require(std::find(supported.begin(), supported.end(), config.architecture) != supported.end(),
          "an architecture without a model");
  pocket::test::MemorySource source = pocket::test::small_source();
  source.architecture_name = config.architecture;
  source.uints = config.uints;
  source.floats = config.floats;
  source.strings = config.strings;
  source.bools = config.bools;
  source.flags = config.flags;
  source.norm_offset = config.norm_weight_offset;
  // An embedding that fits, so that what comes after it is read as well.
  constexpr std::size_t kMost = 1 << 26;  // beyond any limit of the engine
  const auto hidden = config.uints.find("embedding_length");
  const auto vocab = config.uints.find("vocab_size");
  const std::size_t columns =
      hidden == config.uints.end() ? 64 : std::min<std::size_t>(hidden->second, kMost);
  const std::size_t rows =
      vocab == config.uints.end() ? 40 : std::min<std::size_t>(vocab->second, kMost);
  source.remove("token_embd.weight");
  source.add("token_embd.weight", {rows, columns}, std::vector<float>(64));
  (void)pocket::describe_model(source);
  const auto decoder = pocket::read_decoder_config(source, true);
  require(decoder.rope.dims <= decoder.head_dim, "RoPE of more than a head");
  for (const float factor : decoder.rope.frequency_factors) {
    require(std::isfinite(factor) && factor > 0.0F, "a frequency of RoPE that is no number");
  }
  require(std::isfinite(decoder.rope.magnitude), "a magnitude of RoPE that is no number");
}

}  // namespace

// A config.json must be refused with pocket::Error or describe a model of finite sizes.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const auto root =
        pocket::parse_json(std::string_view(reinterpret_cast<const char*>(data), size), "fuzz");
    (void)pocket::read_eos_ids(root, "fuzz");
    check(pocket::read_hf_config(root, "fuzz"));
  } catch (const pocket::Error&) {
  }
  return 0;
}
