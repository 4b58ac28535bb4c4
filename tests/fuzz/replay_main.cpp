#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <vector>

// Stands in for libFuzzer where the compiler has none: runs a target over files and folders of
// inputs, so that the corpus and old findings are replayed by every build.

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

void run_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  const std::vector<char> contents{std::istreambuf_iterator<char>(in), {}};
  // An allocation of exactly this size, so that AddressSanitizer sees any read past it.
  const auto exact = std::make_unique<std::uint8_t[]>(contents.size());
  std::copy(contents.begin(), contents.end(), exact.get());
  LLVMFuzzerTestOneInput(exact.get(), contents.size());
}

}  // namespace

int main(int argc, char** argv) {
  std::size_t files = 0;
  for (int i = 1; i < argc; ++i) {
    const std::filesystem::path path(argv[i]);
    if (!std::filesystem::is_directory(path)) {
      run_file(path);
      ++files;
      continue;
    }
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      run_file(entry.path());
      ++files;
    }
  }
  std::cout << "replayed " << files << " inputs\n";
  return files == 0 ? 1 : 0;  // a wrong path must not look like a clean run
}
