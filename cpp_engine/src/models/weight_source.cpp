#include "pocket/models/weight_source.h"

#include <filesystem>

namespace pocket {

std::size_t StoredTensor::elements() const noexcept {
  std::size_t count = 1;
  for (const std::size_t extent : shape) {
    count *= extent;
  }
  return count;
}

std::unique_ptr<WeightSource> open_weight_source(const std::string& path) {
  std::error_code ignored;  // whatever cannot be looked at is reported when it is opened
  return std::filesystem::is_directory(path, ignored) ? open_safetensors_source(path)
                                                      : open_gguf_source(path);
}

}  // namespace pocket
