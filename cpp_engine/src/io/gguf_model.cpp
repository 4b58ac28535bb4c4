#include "pocket/io/gguf_model.h"

#include <algorithm>
#include <cstdio>
#include <set>
#include <utility>

#include "pocket/base/error.h"
#include "pocket/base/quoted.h"

namespace pocket {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kDigits = 5;

[[noreturn]] void fail(const fs::path& path, const std::string& what) {
  throw Error(ErrorCode::kBadFile, path.string() + ": " + what);
}

std::string count_of(std::size_t count, const char* what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

std::string part_of(std::size_t number, std::size_t count) {
  return "part " + std::to_string(number) + " of " + std::to_string(count);
}

std::string part_name(const std::string& stem, std::size_t number, std::size_t count) {
  char numbers[64];
  std::snprintf(numbers, sizeof numbers, "-%05zu-of-%05zu.gguf", number, count);
  return stem + numbers;
}

/// Takes `-12345` or the like off the end of `text`.
std::optional<std::size_t> take_number(std::string_view& text, std::string_view before) {
  if (text.size() < before.size() + kDigits) return std::nullopt;
  const std::string_view digits = text.substr(text.size() - kDigits);
  std::size_t value = 0;
  for (const char digit : digits) {
    if (digit < '0' || digit > '9') return std::nullopt;
    value = value * 10 + static_cast<std::size_t>(digit - '0');
  }
  text.remove_suffix(kDigits);
  if (!text.ends_with(before)) return std::nullopt;
  text.remove_suffix(before.size());
  return value;
}

}  // namespace

std::optional<GgufPartName> parse_gguf_part_name(std::string_view file) {
  constexpr std::string_view kSuffix = ".gguf";
  if (!file.ends_with(kSuffix)) return std::nullopt;
  file.remove_suffix(kSuffix.size());
  const auto count = take_number(file, "-of-");
  const auto number = count ? take_number(file, "-") : std::nullopt;
  if (!number || file.empty() || *number == 0 || *number > *count) return std::nullopt;
  return GgufPartName{.stem = std::string(file), .number = *number, .count = *count};
}

std::vector<fs::path> gguf_models_in(const fs::path& folder) {
  std::error_code failed;
  std::set<fs::path> models;
  for (fs::directory_iterator entry(folder, failed), end; !failed && entry != end;
       entry.increment(failed)) {
    const std::string file = entry->path().filename().string();
    if (!file.ends_with(".gguf")) continue;
    const auto name = parse_gguf_part_name(file);
    models.insert(name ? folder / part_name(name->stem, 1, name->count) : entry->path());
  }
  if (failed) {
    throw Error(ErrorCode::kBadFile, folder.string() + ": cannot be read: " + failed.message());
  }
  return {models.begin(), models.end()};
}

GgufModel::GgufModel(const fs::path& path) {
  const auto name = parse_gguf_part_name(path.filename().string());
  if (name && name->number != 1) {
    fail(path, "is " + part_of(name->number, name->count) + " of a model; give the first one, " +
                   part_name(name->stem, 1, name->count));
  }
  parts_.emplace_back(path);
  const std::uint64_t count = first().get_uint("split.count").value_or(1);
  if (name && name->count > 1) {
    open_parts(*name);
  } else if (count > 1) {
    fail(path, "is a part of a model of " + std::to_string(count) +
                   " files (split.count); its name must end like " + part_name("", 1, count));
  }
  index_tensors();
  if (parts_.size() > 1) check_tensor_count();
}

void GgufModel::open_parts(const GgufPartName& name) {
  check_part(first(), 1, name.count);
  const fs::path folder = first().path().parent_path();
  std::vector<std::size_t> missing;
  parts_.reserve(name.count);
  for (std::size_t number = 2; number <= name.count; ++number) {
    const fs::path path = folder / part_name(name.stem, number, name.count);
    std::error_code ignored;  // whatever cannot be looked at is reported when it is opened
    if (fs::status(path, ignored).type() == fs::file_type::not_found) {
      missing.push_back(number);
      continue;
    }
    check_part(parts_.emplace_back(path), number, name.count);
  }
  if (!missing.empty()) {
    const fs::path path = folder / part_name(name.stem, missing.front(), name.count);
    const std::uint64_t tensors = first().get_uint("split.tensors.count").value_or(0);
    fail(path,
         "the file is missing: " + part_of(missing.front(), name.count) +
             (missing.size() == 1 ? ""
                                  : " (and " + count_of(missing.size() - 1, "other part") + ")") +
             "; the model has " + count_of(tensors, "tensor") + ", the " + held());
  }
}

void GgufModel::check_part(const GgufFile& part, std::size_t number, std::size_t count) const {
  const auto agree = [&](const char* key, std::uint64_t expected) {
    const auto value = part.get_uint(key);
    if (!value || *value != expected) {
      fail(part.path(), "its name says " + part_of(number, count) + ", but its key " + key +
                            " is " +
                            (value ? std::to_string(*value) + ", not " + std::to_string(expected)
                                   : std::string("missing")));
    }
  };
  agree("split.no", number - 1);
  agree("split.count", count);
  const auto tensors = first().get_uint("split.tensors.count");
  if (!tensors) {
    fail(first().path(), "the key split.tensors.count is missing");
  }
  if (part.get_uint("split.tensors.count").value_or(*tensors) != *tensors) {
    agree("split.tensors.count", *tensors);
  }
  const auto architecture = part.get_string("general.architecture");
  if (architecture && architecture != first().get_string("general.architecture")) {
    fail(part.path(), "general.architecture is " + pocket::quoted(*architecture) +
                          ", but the first part's " + "is " +
                          pocket::quoted(first().get_string("general.architecture").value_or("")) +
                          ": the parts belong to different models");
  }
}

void GgufModel::index_tensors() {
  std::map<std::string_view, const GgufFile*> owners;
  for (const GgufFile& part : parts_) {
    for (const auto& [name, tensor] : part.tensors()) {
      if (!tensors_.emplace(name, &tensor).second) {
        fail(part.path(), "tensor " + pocket::quoted(name) + ": is in " +
                              owners.at(name)->path().filename().string() + " as well");
      }
      owners.emplace(name, &part);
    }
  }
}

void GgufModel::check_tensor_count() const {
  const std::uint64_t expected = first().get_uint("split.tensors.count").value_or(0);
  if (tensors_.size() != expected) {
    fail(first().path(),
         "split.tensors.count is " + std::to_string(expected) + ", but the " + held());
  }
}

std::string GgufModel::held() const {
  std::size_t tensors = 0, bytes = 0;
  for (const GgufFile& part : parts_) {
    for (const auto& [unused, tensor] : part.tensors()) {
      ++tensors;
      bytes += tensor.data.size();
    }
  }
  return count_of(parts_.size(), "part") + " here hold" + (parts_.size() == 1 ? "s " : " ") +
         count_of(tensors, "tensor") + " of " + count_of(bytes, "byte");
}

const GgufTensor* GgufModel::find_tensor(std::string_view name) const noexcept {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : found->second;
}

void GgufModel::release_pages() const noexcept {
  for (const GgufFile& part : parts_) part.release_pages();
}

}  // namespace pocket
