#include "pocket/models/weight_source.h"

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "pocket/base/error.h"
#include "pocket/base/quoted.h"
#include "pocket/io/gguf_model.h"

namespace pocket {

std::size_t StoredTensor::elements() const noexcept {
  std::size_t count = 1;
  for (const std::size_t extent : shape) {
    count *= extent;
  }
  return count;
}

namespace {

namespace fs = std::filesystem;

constexpr std::size_t kNamed = 4;  // of several models, in the message

fs::path only_gguf_model(const fs::path& folder) {
  const std::vector<fs::path> models = gguf_models_in(folder);
  if (models.empty()) {
    throw Error(ErrorCode::kBadFile, folder.string() +
                                         ": holds neither config.json nor a GGUF file; give a GGUF "
                                         "file or a Hugging Face directory");
  }
  if (models.size() > 1) {
    std::string names;
    for (std::size_t i = 0; i < std::min(models.size(), kNamed); ++i) {
      names += (i == 0 ? "" : ", ") + pocket::quoted(models[i].filename().string());
    }
    throw Error(ErrorCode::kBadFile,
                folder.string() + ": holds " + std::to_string(models.size()) + " GGUF models (" +
                    names + (models.size() > kNamed ? ", ..." : "") + "); name one of them");
  }
  return models.front();
}

}  // namespace

std::unique_ptr<WeightSource> open_weight_source(const std::string& path) {
  std::error_code ignored;  // whatever cannot be looked at is reported when it is opened
  if (!fs::is_directory(path, ignored)) {
    return open_gguf_source(path);
  }
  return fs::exists(fs::path(path) / "config.json", ignored)
             ? open_safetensors_source(path)
             : open_gguf_source(only_gguf_model(path).string());
}

}  // namespace pocket
