#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "load_parts.h"
#include "pocket/base/error.h"

namespace {

// In the order of an input's parts (load_parts.h); a part that is empty or missing is no file.
constexpr std::array kFiles{
    "config.json",      "model.safetensors",     "generation_config.json",
    "tokenizer.json",   "tokenizer_config.json", "model.safetensors.index.json",
    "other.safetensors"};

}  // namespace

// A Hugging Face directory must be refused with pocket::Error or load and compute.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const pocket::test::Folder folder;
  const auto parts = pocket::test::split_parts({data, size});
  for (std::size_t i = 0; i < kFiles.size(); ++i) {
    if (i < parts.size() && !parts[i].empty()) {
      folder.write(kFiles[i], parts[i]);
    } else {
      folder.remove(kFiles[i]);
    }
  }
  try {
    pocket::test::load_and_step(folder.path());
  } catch (const pocket::Error&) {
  }
  return 0;
}
