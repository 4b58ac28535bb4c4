#pragma once

#include <memory>

#include "decoder_config.h"
#include "pocket/models/model.h"

namespace pocket {

/// Entries of the registry; each model's file defines its own.
[[nodiscard]] std::unique_ptr<Model> make_llama(const WeightSource& source,
                                                const ModelOptions& options);
[[nodiscard]] ModelInfo describe_llama(const WeightSource& source);
[[nodiscard]] std::unique_ptr<Model> make_qwen2(const WeightSource& source,
                                                const ModelOptions& options);
[[nodiscard]] ModelInfo describe_qwen2(const WeightSource& source);
[[nodiscard]] std::unique_ptr<Model> make_qwen3(const WeightSource& source,
                                                const ModelOptions& options);
[[nodiscard]] ModelInfo describe_qwen3(const WeightSource& source);
[[nodiscard]] std::unique_ptr<Model> make_qwen2moe(const WeightSource& source,
                                                   const ModelOptions& options);
[[nodiscard]] ModelInfo describe_qwen2moe(const WeightSource& source);
[[nodiscard]] std::unique_ptr<Model> make_qwen3moe(const WeightSource& source,
                                                   const ModelOptions& options);
[[nodiscard]] ModelInfo describe_qwen3moe(const WeightSource& source);
[[nodiscard]] std::unique_ptr<Model> make_gemma3(const WeightSource& source,
                                                 const ModelOptions& options);
[[nodiscard]] ModelInfo describe_gemma3(const WeightSource& source);
[[nodiscard]] std::unique_ptr<Model> make_qwen35(const WeightSource& source,
                                                 const ModelOptions& options);
[[nodiscard]] ModelInfo describe_qwen35(const WeightSource& source);
[[nodiscard]] std::unique_ptr<Model> make_qwen35moe(const WeightSource& source,
                                                    const ModelOptions& options);
[[nodiscard]] ModelInfo describe_qwen35moe(const WeightSource& source);
[[nodiscard]] std::unique_ptr<Model> make_qwen3next(const WeightSource& source,
                                                    const ModelOptions& options);
[[nodiscard]] ModelInfo describe_qwen3next(const WeightSource& source);

/// The assembly that they share: `config` says what its blocks have.
[[nodiscard]] std::unique_ptr<Model> make_decoder(const WeightSource& source,
                                                  const ModelOptions& options,
                                                  DecoderConfig config);

}  // namespace pocket
