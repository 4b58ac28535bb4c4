#pragma once

#include <cstddef>

#include "decoder_config.h"

namespace pocket {

/// What an architecture's files mean where they leave keys out.
struct ExpertDefaults {
  bool normalised = false;  ///< see `ExpertConfig::normalised`
  bool shared = false;      ///< whether there is a shared expert
  std::size_t ffn = 0;  ///< of one expert; 0: the dense length divided by the experts of a token
};

/// Reads and checks the keys of `config`'s experts: expert_count, expert_used_count, ... A layer
/// has experts if the source's flags `expert_layers` say so or, where they are absent, if it has a
/// router. Throws as `read_decoder_config` does.
[[nodiscard]] ExpertConfig read_expert_config(const WeightSource& source,
                                              const DecoderConfig& config, ExpertDefaults defaults);

}  // namespace pocket
