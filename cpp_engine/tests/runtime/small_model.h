#pragma once

#include <cstddef>
#include <vector>

namespace pocket::test {

inline constexpr std::size_t kVocab = 75;

/// A GGUF file: two layers, four heads over two KV heads, a context of 256, float weights that are
/// the same in every run, an untied head.
std::vector<std::byte> small_model();

}  // namespace pocket::test
