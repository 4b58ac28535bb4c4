#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gguf_builder.h"
#include "pocket/io/gguf_parser.h"

namespace pocket::test {

/// A valid file with every value type, every array type and tensors of three formats.
GgufBuilder sample_file();

/// Throws `std::logic_error` unless everything that `contents` hands out is consistent and lies
/// inside `bytes`. It reads every byte of every tensor, so that a sanitizer sees a wrong span.
void check_contents(const GgufContents& contents, std::span<const std::byte> bytes);

}  // namespace pocket::test
