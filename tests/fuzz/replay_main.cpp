#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

// Stands in for libFuzzer where the compiler has none: runs a target over files and folders of
// inputs, and over `-mutations=N` changed copies of each, the same ones in every run.

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

void run(std::span<const std::uint8_t> input) {
  // An allocation of exactly this size, so that AddressSanitizer sees any read past it.
  const auto exact = std::make_unique<std::uint8_t[]>(input.size());
  std::copy(input.begin(), input.end(), exact.get());
  LLVMFuzzerTestOneInput(exact.get(), input.size());
}

void mutate(std::vector<std::uint8_t>& bytes, std::mt19937& random) {
  constexpr std::string_view kSyntax = "{}[]\",:\\0-.eu";
  if (bytes.empty()) {
    return;
  }
  const auto at = bytes.begin() + static_cast<std::ptrdiff_t>(random() % bytes.size());
  const auto rest = static_cast<std::size_t>(bytes.end() - at);
  const auto end = at + static_cast<std::ptrdiff_t>(std::min<std::size_t>(1 + random() % 16, rest));
  switch (random() % 5) {
    case 0:
      *at ^= static_cast<std::uint8_t>(1U << random() % 8);
      break;
    case 1:
      *at = static_cast<std::uint8_t>(kSyntax[random() % kSyntax.size()]);
      break;
    case 2:
      std::fill(at, end, static_cast<std::uint8_t>(random() % 2 == 0 ? 0 : 0xff));
      break;
    case 3:
      bytes.erase(at, end);
      break;
    default: {
      const std::vector<std::uint8_t> copy(at, end);
      bytes.insert(at, copy.begin(), copy.end());
    }
  }
}

void run_file(const std::filesystem::path& path, std::size_t mutations) {
  std::ifstream in(path, std::ios::binary);
  const std::vector<std::uint8_t> contents{std::istreambuf_iterator<char>(in), {}};
  run(contents);
  std::mt19937 random(1);
  for (std::size_t i = 0; i < mutations; ++i) {
    std::vector<std::uint8_t> changed = contents;
    for (std::size_t change = 0; change <= i % 4; ++change) {
      mutate(changed, random);
    }
    run(changed);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::size_t files = 0;
  std::size_t mutations = 0;
  for (int i = 1; i < argc; ++i) {
    constexpr std::string_view kOption = "-mutations=";
    if (std::string_view(argv[i]).starts_with(kOption)) {
      mutations = std::stoul(argv[i] + kOption.size());
      continue;
    }
    const std::filesystem::path path(argv[i]);
    if (!std::filesystem::is_directory(path)) {
      run_file(path, mutations);
      ++files;
      continue;
    }
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      run_file(entry.path(), mutations);
      ++files;
    }
  }
  std::cout << "replayed " << files << " inputs, each with " << mutations << " changes\n";
  return files == 0 ? 1 : 0;  // a wrong path must not look like a clean run
}
