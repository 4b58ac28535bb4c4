#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>

#include "pocket/base/error.h"
#include "pocket/io/safetensors.h"

namespace {

void check(const pocket::SafetensorsMap& tensors, std::span<const std::byte> bytes) {
  std::size_t sum = 0;
  for (const auto& [name, tensor] : tensors) {
    std::size_t size = pocket::dtype_info(tensor.type).block_bytes;
    for (const std::size_t extent : tensor.shape) size *= extent;
    if (size != tensor.data.size()) {
      throw std::logic_error("a tensor's bytes do not match its shape");
    }
    if (!tensor.data.empty() &&
        (tensor.data.data() < bytes.data() ||
         tensor.data.data() + tensor.data.size() > bytes.data() + bytes.size())) {
      throw std::logic_error("a tensor lies outside the file");
    }
    for (const std::byte b : tensor.data) sum += static_cast<std::size_t>(b);
  }
  [[maybe_unused]] const volatile std::size_t read = sum;
}

}  // namespace

// A whole file (its header, and that header against the data) must be refused with pocket::Error or
// give tensors whose every byte lies inside it.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  try {
    check(pocket::parse_safetensors(bytes, "fuzz"), bytes);
  } catch (const pocket::Error&) {
  }
  return 0;
}
