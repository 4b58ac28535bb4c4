#include <cstddef>
#include <cstdint>
#include <span>

#include "gguf_samples.h"
#include "pocket/base/error.h"
#include "pocket/io/gguf_parser.h"

// Any bytes must either be refused with pocket::Error or give contents that are consistent and can
// be read in full. Every other exception, crash, sanitizer report or time-out is a bug.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  try {
    pocket::test::check_contents(pocket::parse_gguf(bytes, "fuzz"), bytes);
  } catch (const pocket::Error&) {
  }
  return 0;
}
