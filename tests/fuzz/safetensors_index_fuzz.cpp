#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string_view>

#include "pocket/base/error.h"
#include "pocket/io/safetensors.h"

// An index must be refused with pocket::Error or name, for every tensor, a file beside the index.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const auto shards = pocket::parse_safetensors_index(
        std::string_view(reinterpret_cast<const char*>(data), size), "fuzz");
    if (shards.empty()) {
      throw std::logic_error("an index of nothing");
    }
    for (const auto& [tensor, shard] : shards) {
      if (shard.empty() || shard == "." || shard == ".." || shard.find('/') != shard.npos ||
          shard.find('\0') != shard.npos) {
        throw std::logic_error("a shard that is no file's name");
      }
    }
  } catch (const pocket::Error&) {
  }
  return 0;
}
