#include "pocket/io/gguf.h"

#include <limits>
#include <type_traits>
#include <utility>

#include "pocket/base/error.h"
#include "pocket/base/quoted.h"

namespace pocket {
namespace {

std::string_view type_of(const GgufValue& value) {
  return std::visit(
      [](const auto& held) -> std::string_view {
        using T = std::decay_t<decltype(held)>;
        if constexpr (std::is_same_v<T, std::int64_t>) return "a signed integer";
        if constexpr (std::is_same_v<T, std::uint64_t>) return "an unsigned integer";
        if constexpr (std::is_same_v<T, double>) return "a float";
        if constexpr (std::is_same_v<T, bool>) return "a bool";
        if constexpr (std::is_same_v<T, std::string>) return "a string";
        if constexpr (std::is_same_v<T, GgufArray>) return "an array";
      },
      value);
}

[[noreturn]] void throw_type(const GgufFile& file, std::string_view key, const GgufValue& value,
                             std::string_view wanted) {
  throw Error(ErrorCode::kBadFile, file.path().string() + ": metadata key " + quoted(key) + " is " +
                                       std::string(type_of(value)) + ", expected " +
                                       std::string(wanted));
}

}  // namespace

GgufFile::GgufFile(const std::filesystem::path& path)
    : file_(path), contents_(parse_gguf(file_.bytes(), path.string())) {}

const GgufTensor* GgufFile::find_tensor(std::string_view name) const noexcept {
  const auto found = tensors().find(name);
  return found == tensors().end() ? nullptr : &found->second;
}

std::optional<std::uint64_t> GgufFile::get_uint(std::string_view key) const {
  const auto found = metadata().find(key);
  if (found == metadata().end()) return std::nullopt;
  if (const auto* const value = std::get_if<std::uint64_t>(&found->second)) return *value;
  if (const auto* const value = std::get_if<std::int64_t>(&found->second)) {
    if (*value >= 0) return static_cast<std::uint64_t>(*value);
    throw Error(ErrorCode::kBadFile, file_.path().string() + ": metadata key " + quoted(key) +
                                         " is " + std::to_string(*value) +
                                         ", must not be negative");
  }
  throw_type(*this, key, found->second, "an integer");
}

std::optional<double> GgufFile::get_float(std::string_view key) const {
  const auto found = metadata().find(key);
  if (found == metadata().end()) return std::nullopt;
  if (const auto* const value = std::get_if<double>(&found->second)) return *value;
  throw_type(*this, key, found->second, "a float");
}

std::optional<std::string_view> GgufFile::get_string(std::string_view key) const {
  const auto found = metadata().find(key);
  if (found == metadata().end()) return std::nullopt;
  if (const auto* const value = std::get_if<std::string>(&found->second)) return *value;
  throw_type(*this, key, found->second, "a string");
}

std::optional<bool> GgufFile::get_bool(std::string_view key) const {
  const auto found = metadata().find(key);
  if (found == metadata().end()) return std::nullopt;
  if (const auto* const value = std::get_if<bool>(&found->second)) return *value;
  throw_type(*this, key, found->second, "a bool");
}

}  // namespace pocket
