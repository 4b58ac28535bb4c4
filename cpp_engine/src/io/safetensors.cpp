#include "pocket/io/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "pocket/base/error.h"
#include "pocket/base/quoted.h"
#include "pocket/io/json.h"

namespace pocket {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

constexpr std::size_t kMaxIndexBytes = std::size_t{64} << 20;
constexpr std::size_t kMaxDimensions = 8;

[[noreturn]] void fail(std::string_view file, const std::string& what,
                       ErrorCode code = ErrorCode::kBadFile) {
  throw Error(code, std::string(file) + ": " + what);
}

std::string bytes_text(std::uint64_t count) {
  return std::to_string(count) + " bytes";
}

/// Reads one entry of the header. `data_begin` is the offset of the data in the file.
class TensorReader {
 public:
  TensorReader(std::span<const std::byte> bytes, std::size_t data_begin, std::string_view file,
               const std::string& tensor, const JsonValue& entry)
      : bytes_(bytes), data_begin_(data_begin), file_(file), tensor_(tensor), entry_(entry) {}

  struct Placed {
    std::uint64_t begin, end;  // relative to the data
    SafetensorsTensor tensor;
  };

  Placed read() const {
    Placed placed{};
    placed.tensor.type = type();
    placed.tensor.shape = shape();
    const std::vector<std::uint64_t> extent = numbers("data_offsets");
    if (extent.size() != 2 || extent[0] > extent[1]) {
      bad("data_offsets must be [begin, end] with begin at most end");
    }
    placed.begin = extent[0];
    placed.end = extent[1];
    std::uint64_t size = dtype_info(placed.tensor.type).block_bytes;
    for (const std::size_t n : placed.tensor.shape) {
      if (__builtin_mul_overflow(size, std::uint64_t{n}, &size)) {
        bad("its shape overflows 64 bits");
      }
    }
    if (size != placed.end - placed.begin) {
      bad("its shape and type take " + bytes_text(size) + ", its data_offsets span " +
          std::to_string(placed.end - placed.begin));
    }
    const std::uint64_t available = bytes_.size() - data_begin_;
    if (placed.end > available) {
      bad("ends at byte " + std::to_string(placed.end) + " of the data, of which the file has " +
          std::to_string(available) + ": it is truncated by at least " +
          bytes_text(placed.end - available));
    }
    placed.tensor.data = bytes_.subspan(data_begin_ + placed.begin, size);
    return placed;
  }

  [[noreturn]] void bad(const std::string& what, ErrorCode code = ErrorCode::kBadFile) const {
    fail(file_, "tensor " + pocket::quoted(tensor_) + ": " + what, code);
  }

 private:
  DType type() const {
    const JsonValue* const value = entry_.find("dtype");
    const auto* const text = value == nullptr ? nullptr : value->as<std::string>();
    if (text == nullptr) {
      bad("has no dtype");
    }
    if (*text == "F32") return DType::kF32;
    if (*text == "F16") return DType::kF16;
    if (*text == "BF16") return DType::kBF16;
    bad("has dtype " + pocket::quoted(*text) + "; supported are F32, F16 and BF16",
        ErrorCode::kUnsupported);
  }

  std::vector<std::size_t> shape() const {
    const std::vector<std::uint64_t> sizes = numbers("shape");
    if (sizes.size() > kMaxDimensions) {
      bad("has " + std::to_string(sizes.size()) + " dimensions; at most " +
          std::to_string(kMaxDimensions) + " are supported");
    }
    return {sizes.begin(), sizes.end()};
  }

  std::vector<std::uint64_t> numbers(const char* member) const {
    const JsonValue* const value = entry_.find(member);
    const auto* const array = value == nullptr ? nullptr : value->as<JsonArray>();
    if (array == nullptr) {
      bad(std::string(member) + " must be an array of integers");
    }
    std::vector<std::uint64_t> out;
    for (const JsonValue& item : *array) {
      const auto* const number = item.as<std::int64_t>();
      if (number == nullptr || *number < 0) {
        bad(std::string(member) + " must hold integers that are not negative");
      }
      out.push_back(static_cast<std::uint64_t>(*number));
    }
    return out;
  }

  std::span<const std::byte> bytes_;
  std::size_t data_begin_;
  std::string_view file_;
  const std::string& tensor_;
  const JsonValue& entry_;
};

}  // namespace

SafetensorsMap parse_safetensors(std::span<const std::byte> bytes, std::string_view name) {
  std::uint64_t header = 0;
  if (bytes.size() < sizeof header) {
    fail(name, "has " + bytes_text(bytes.size()) + "; a safetensors file starts with 8");
  }
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header > kMaxSafetensorsHeader) {
    fail(name, "the header claims " + bytes_text(header) + "; at most " +
                   bytes_text(kMaxSafetensorsHeader) + " are allowed (no safetensors file?)");
  }
  if (header > bytes.size() - sizeof header) {
    fail(name, "the header takes " + bytes_text(header) + ", but only " +
                   std::to_string(bytes.size() - sizeof header) + " follow: the file is truncated");
  }
  const std::size_t data_begin = sizeof header + header;
  const std::string_view text{reinterpret_cast<const char*>(bytes.data()) + sizeof header, header};
  const JsonValue root = parse_json(text, std::string(name) + " (header)");
  const auto* const entries = root.as<JsonObject>();
  if (entries == nullptr) {
    fail(name, "the header must be an object and is " + std::string(root.kind()));
  }

  SafetensorsMap tensors;
  struct Extent {
    std::uint64_t begin, end;
    const std::string* tensor;
  };
  std::vector<Extent> extents;
  for (const auto& [tensor, entry] : *entries) {
    if (tensor == "__metadata__") {
      continue;
    }
    auto placed = TensorReader(bytes, data_begin, name, tensor, entry).read();
    extents.push_back({placed.begin, placed.end, &tensor});
    tensors.emplace(tensor, std::move(placed.tensor));
  }
  // The format allows neither overlap nor gaps: both mean that header and data do not belong
  // together.
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  std::uint64_t covered = 0;
  for (const Extent& extent : extents) {
    if (extent.begin != covered) {
      fail(name, "tensor " + pocket::quoted(*extent.tensor) + ": starts at byte " +
                     std::to_string(extent.begin) + " of the data, " +
                     (extent.begin < covered ? "inside the tensor before it, which ends at "
                                             : "but the tensor before it ends at ") +
                     std::to_string(covered));
    }
    covered = extent.end;
  }
  if (const std::uint64_t data = bytes.size() - data_begin; covered != data) {
    fail(name, "its tensors take " + bytes_text(covered) + ", but " + std::to_string(data) +
                   " follow the header");
  }
  return tensors;
}

std::map<std::string, std::string, std::less<>> parse_safetensors_index(std::string_view text,
                                                                        std::string_view name) {
  const JsonValue root = parse_json(text, name);
  const JsonValue* const member = root.find("weight_map");
  const auto* const entries = member == nullptr ? nullptr : member->as<JsonObject>();
  if (entries == nullptr || entries->empty()) {
    fail(name, "weight_map must be an object that names the shard of every tensor");
  }
  std::map<std::string, std::string, std::less<>> shards;
  for (const auto& [tensor, value] : *entries) {
    const auto* const shard = value.as<std::string>();
    constexpr std::string_view kNotInNames("/\0", 2);
    if (shard == nullptr || shard->empty() || *shard == "." || *shard == ".." ||
        shard->find_first_of(kNotInNames) != std::string::npos) {
      fail(name, "tensor " + pocket::quoted(tensor) + ": its shard must be a file's name");
    }
    shards.emplace(tensor, *shard);
  }
  return shards;
}

SafetensorsCheckpoint::SafetensorsCheckpoint(const std::filesystem::path& directory) {
  const std::filesystem::path single = directory / "model.safetensors";
  const std::filesystem::path index = directory / "model.safetensors.index.json";
  if (std::filesystem::exists(single)) {
    add_shard(single);
    return;
  }
  if (std::filesystem::exists(index)) {
    add_indexed(directory, index);
    return;
  }
  std::vector<std::filesystem::path> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    if (entry.path().extension() == ".safetensors") {
      found.push_back(entry.path());
    }
  }
  if (error) {
    fail(directory.string(), "cannot be listed: " + error.message());
  }
  if (found.size() != 1) {
    fail(directory.string(),
         "holds " + std::to_string(found.size()) +
             " safetensors files; expected model.safetensors or model.safetensors.index.json");
  }
  add_shard(found.front());
}

void SafetensorsCheckpoint::add_shard(const std::filesystem::path& file) {
  const MappedFile& mapped = files_.emplace_back(file);
  for (auto& [tensor, value] : parse_safetensors(mapped.bytes(), file.string())) {
    if (!tensors_.try_emplace(tensor, std::move(value)).second) {
      fail(file.string(), "tensor " + pocket::quoted(tensor) + ": is in another shard as well");
    }
  }
}

void SafetensorsCheckpoint::add_indexed(const std::filesystem::path& directory,
                                        const std::filesystem::path& index) {
  const auto shard_of =
      parse_safetensors_index(read_text_file(index, kMaxIndexBytes), index.string());
  std::map<std::string_view, std::vector<std::string_view>> shards;
  for (const auto& [tensor, shard] : shard_of) {
    shards[shard].push_back(tensor);
  }
  for (const auto& [shard, expected] : shards) {
    const std::filesystem::path file = directory / shard;
    if (!std::filesystem::exists(file)) {
      fail(index.string(), "the shard " + pocket::quoted(shard) + " is missing; tensor " +
                               pocket::quoted(expected.front()) + " and " +
                               std::to_string(expected.size() - 1) + " more are in it");
    }
    const MappedFile& mapped = files_.emplace_back(file);
    for (auto& [tensor, value] : parse_safetensors(mapped.bytes(), file.string())) {
      const auto named = shard_of.find(tensor);
      if (named == shard_of.end() || named->second != shard) {
        fail(file.string(),
             "tensor " + pocket::quoted(tensor) + ": the index names " +
                 (named == shard_of.end() ? std::string("no shard for it")
                                          : "the shard " + pocket::quoted(named->second)) +
                 "; index and shards do not belong together");
      }
      tensors_.emplace(tensor, std::move(value));
    }
  }
  for (const auto& [tensor, shard] : shard_of) {
    if (!tensors_.contains(tensor)) {
      fail((directory / shard).string(),
           "tensor " + pocket::quoted(tensor) +
               ": the index places it here, the file does not hold it");
    }
  }
}

void SafetensorsCheckpoint::release_pages() const noexcept {
  for (const MappedFile& file : files_) {
    file.release_pages();
  }
}

std::string read_text_file(const std::filesystem::path& path, std::size_t limit) {
  const MappedFile file(path);
  if (file.bytes().size() > limit) {
    fail(path.string(), "has " + bytes_text(file.bytes().size()) + "; at most " +
                            bytes_text(limit) + " are accepted");
  }
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

}  // namespace pocket
