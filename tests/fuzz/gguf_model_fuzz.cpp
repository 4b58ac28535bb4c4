#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <span>
#include <string>

#include "load_parts.h"
#include "pocket/base/error.h"

// A GGUF model of one file or of as many as there are parts (load_parts.h). It must be refused with
// pocket::Error or load and compute.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const pocket::test::Folder folder;
  const auto parts = pocket::test::split_parts({data, size});
  const auto name = [&parts](std::size_t number) {
    std::array<char, 64> text{};
    std::snprintf(text.data(), text.size(), "m-%05zu-of-%05zu.gguf", number, parts.size());
    return std::string(text.data());
  };
  for (std::size_t number = 1; number <= parts.size(); ++number) {
    folder.write(name(number), parts[number - 1]);
  }
  try {
    pocket::test::load_and_step(folder.path() / name(1));
  } catch (const pocket::Error&) {
  }
  return 0;
}
