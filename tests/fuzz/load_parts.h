#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace pocket::test {

/// What divides an input that stands for several files.
inline constexpr char kPartMark[] = "\n--part--\n";
/// Further marks belong to the last part.
inline constexpr std::size_t kMostParts = 8;

/// The files of an input; at least one, each of which may be empty.
[[nodiscard]] std::vector<std::span<const std::uint8_t>> split_parts(
    std::span<const std::uint8_t> input);

/// A folder of this process alone, below `TMPDIR`; deleted at exit. `write` replaces files.
class Folder {
 public:
  Folder();
  ~Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  void write(const std::string& name, std::span<const std::uint8_t> bytes) const;
  void remove(const std::string& name) const;

 private:
  std::filesystem::path path_;
};

/// Describes the model and loads it on two threads; runs a prompt over a chunk boundary and samples
/// greedily. Throws `std::logic_error` if an accepted model answers with what is no token, and what
/// `Engine::load` throws.
void load_and_step(const std::filesystem::path& model);

}  // namespace pocket::test
