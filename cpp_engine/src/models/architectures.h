#pragma once

#include <memory>

#include "pocket/models/model.h"

namespace pocket {

/// Entries of the registry; each model's file defines its own.
[[nodiscard]] std::unique_ptr<Model> make_llama(const WeightSource& source,
                                                const ModelOptions& options);
[[nodiscard]] ModelInfo describe_llama(const WeightSource& source);

}  // namespace pocket
