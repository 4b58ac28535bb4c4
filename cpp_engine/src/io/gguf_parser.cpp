#include "pocket/io/gguf_parser.h"

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>

#include "pocket/base/error.h"
#include "pocket/base/quoted.h"

namespace pocket {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF files are little-endian");

constexpr std::uint64_t kDefaultAlignment = 32;
constexpr std::uint64_t kMinAlignment = 8;
constexpr std::uint32_t kMaxDimensions = 4;

// Smallest encodings, to check a count against the bytes that are left: a key is its length, one
// byte, a type and a one-byte value; a tensor is the length of its name, one byte, the number of
// dimensions, one dimension, type and offset.
constexpr std::uint64_t kMinKeyBytes = 8 + 1 + 4 + 1;
constexpr std::uint64_t kMinTensorBytes = 8 + 1 + 4 + 8 + 4 + 8;

enum class ValueType : std::uint32_t {
  kUint8 = 0,
  kInt8 = 1,
  kUint16 = 2,
  kInt16 = 3,
  kUint32 = 4,
  kInt32 = 5,
  kFloat32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kUint64 = 10,
  kInt64 = 11,
  kFloat64 = 12,
};

std::string count_of(std::uint64_t count, std::string_view what) {
  return std::to_string(count) + " " + std::string(what);
}

/// The smallest multiple of `alignment` (a power of two) not below `value`.
std::uint64_t align_up(std::uint64_t value, std::uint64_t alignment) {
  return (value + alignment - 1) & ~(alignment - 1);
}

std::optional<std::uint64_t> multiply(std::uint64_t a, std::uint64_t b) {
  std::uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

/// Element of a decoded array or scalar, by the type in the file.
template <typename Stored>
using Widened = std::conditional_t<
    std::floating_point<Stored>, double,
    std::conditional_t<std::signed_integral<Stored>, std::int64_t, std::uint64_t>>;

/// Reads front to back. `where_` names what is being read, for messages.
class Parser {
 public:
  Parser(std::span<const std::byte> bytes, std::string_view name) : bytes_(bytes), name_(name) {}

  GgufContents parse() {
    const auto [tensors, keys] = read_header();
    GgufContents contents;
    for (std::uint64_t i = 0; i < keys; ++i) read_key(contents, i);
    const std::uint64_t alignment = alignment_of(contents);
    std::vector<Placed> placed;
    placed.reserve(tensors);
    for (std::uint64_t i = 0; i < tensors; ++i)
      placed.push_back(read_tensor(contents, i, alignment));
    place_tensors(placed, alignment);
    return contents;
  }

 private:
  struct Counts {
    std::uint64_t tensors, keys;
  };
  /// A tensor with its extent relative to the start of the data section.
  struct Placed {
    GgufTensor* tensor;
    std::uint64_t offset, size;
  };

  [[noreturn]] void fail(const std::string& what, ErrorCode code = ErrorCode::kBadFile) const {
    throw Error(code, std::string(name_) + ": " + (where_.empty() ? "" : where_ + ": ") + what);
  }

  [[nodiscard]] std::uint64_t remaining() const { return bytes_.size() - position_; }

  std::span<const std::byte> take(std::uint64_t count) {
    if (count > remaining()) {
      fail("truncated: needs " + count_of(count, "bytes") + " at offset " +
           std::to_string(position_) + ", the file ends after " + std::to_string(bytes_.size()));
    }
    const auto taken = bytes_.subspan(position_, count);
    position_ += count;
    return taken;
  }

  template <typename T>
  T read() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }

  /// Counts memory for decoded values against the limit, before it is allocated.
  void charge(std::uint64_t count, std::uint64_t each) {
    const auto bytes = multiply(count, each);
    if (!bytes || *bytes > GgufLimits::kMetadataBytes - charged_) {
      fail("metadata of more than " + count_of(GgufLimits::kMetadataBytes, "bytes") +
           " when decoded");
    }
    charged_ += *bytes;
  }

  std::string_view read_string(std::uint64_t limit, std::string_view what) {
    const auto length = read<std::uint64_t>();
    if (length > limit) {
      fail(std::string(what) + " of " + count_of(length, "bytes") + "; at most " +
           std::to_string(limit) + " are accepted");
    }
    const auto text = take(length);
    return {reinterpret_cast<const char*>(text.data()), text.size()};
  }

  Counts read_header() {
    where_ = "header";
    constexpr char kMagic[] = {'G', 'G', 'U', 'F'};
    const std::size_t shown = std::min(bytes_.size(), sizeof kMagic);
    if (shown < sizeof kMagic || std::memcmp(bytes_.data(), kMagic, sizeof kMagic) != 0) {
      fail("not a GGUF file: it begins with " +
           quoted({reinterpret_cast<const char*>(bytes_.data()), shown}) + " instead of 'GGUF'");
    }
    position_ = sizeof kMagic;
    const auto version = read<std::uint32_t>();
    if ((version & 0xffffu) == 0 && version != 0) {
      fail(
          "big-endian GGUF files are not supported; convert it to little-endian "
          "(gguf-convert-endian)",
          ErrorCode::kUnsupported);
    }
    if (version != 2 && version != 3) {
      fail("GGUF version " + std::to_string(version) + " is not supported, only 2 and 3",
           ErrorCode::kUnsupported);
    }
    Counts counts{};
    counts.tensors = read<std::uint64_t>();
    counts.keys = read<std::uint64_t>();
    check_count(counts.keys, GgufLimits::kKeys, kMinKeyBytes, "metadata keys");
    check_count(counts.tensors, GgufLimits::kTensors, kMinTensorBytes, "tensors");
    return counts;
  }

  void check_count(std::uint64_t count, std::uint64_t limit, std::uint64_t min_bytes,
                   std::string_view what) const {
    if (count > limit) {
      fail(count_of(count, what) + "; at most " + std::to_string(limit) + " are accepted");
    }
    if (count > remaining() / min_bytes) {
      fail("truncated: " + count_of(count, what) + " announced, but only " +
           count_of(remaining(), "bytes") + " follow");
    }
  }

  void read_key(GgufContents& contents, std::uint64_t index) {
    where_ = "metadata key " + std::to_string(index);
    const std::string_view key = read_string(GgufLimits::kKeyBytes, "a key");
    if (key.empty()) fail("a key is empty");
    where_ = "metadata key " + quoted(key);
    if (contents.metadata.contains(key)) fail("occurs twice");
    charge(1, key.size() + sizeof(GgufValue));
    contents.metadata.emplace(std::string(key), read_value(read<std::uint32_t>()));
  }

  bool read_bool() {
    const auto value = read<std::uint8_t>();
    if (value > 1) fail("a bool is " + std::to_string(value) + ", must be 0 or 1");
    return value == 1;
  }

  std::string read_text() {
    const std::string_view text = read_string(GgufLimits::kMetadataBytes, "a string");
    charge(text.size(), 1);
    return std::string(text);
  }

  template <typename Stored>
  GgufValue read_number() {
    return static_cast<Widened<Stored>>(read<Stored>());
  }

  GgufValue read_value(std::uint32_t type) {
    switch (static_cast<ValueType>(type)) {
      case ValueType::kUint8:
        return read_number<std::uint8_t>();
      case ValueType::kInt8:
        return read_number<std::int8_t>();
      case ValueType::kUint16:
        return read_number<std::uint16_t>();
      case ValueType::kInt16:
        return read_number<std::int16_t>();
      case ValueType::kUint32:
        return read_number<std::uint32_t>();
      case ValueType::kInt32:
        return read_number<std::int32_t>();
      case ValueType::kFloat32:
        return read_number<float>();
      case ValueType::kUint64:
        return read_number<std::uint64_t>();
      case ValueType::kInt64:
        return read_number<std::int64_t>();
      case ValueType::kFloat64:
        return read_number<double>();
      case ValueType::kBool:
        return read_bool();
      case ValueType::kString:
        return read_text();
      case ValueType::kArray:
        return read_array();
    }
    fail("unknown value type " + std::to_string(type));
  }

  template <typename Stored>
  GgufArray read_numbers(std::uint64_t count) {
    using Element = Widened<Stored>;
    check_elements(count, sizeof(Stored), sizeof(Element));
    std::vector<Element> values(count);
    const std::byte* in = take(count * sizeof(Stored)).data();
    for (Element& value : values) {
      Stored stored;
      std::memcpy(&stored, in, sizeof stored);
      value = static_cast<Element>(stored);
      in += sizeof stored;
    }
    return values;
  }

  GgufArray read_bools(std::uint64_t count) {
    check_elements(count, 1, 1);
    std::vector<bool> values(count);
    for (std::uint64_t i = 0; i < count; ++i) values[i] = read_bool();
    return values;
  }

  GgufArray read_strings(std::uint64_t count) {
    check_elements(count, sizeof(std::uint64_t), sizeof(std::string));
    std::vector<std::string> values;
    values.reserve(count);
    for (std::uint64_t i = 0; i < count; ++i) values.push_back(read_text());
    return values;
  }

  /// Refuses a count whose elements cannot be in the file, or would take too much memory.
  void check_elements(std::uint64_t count, std::uint64_t stored_bytes, std::uint64_t bytes) {
    if (count > remaining() / stored_bytes) {
      fail("truncated: an array of " + count_of(count, "elements") + " announced, but only " +
           count_of(remaining(), "bytes") + " follow");
    }
    charge(count, bytes);
  }

  GgufArray read_array() {
    const auto type = read<std::uint32_t>();
    const auto count = read<std::uint64_t>();
    switch (static_cast<ValueType>(type)) {
      case ValueType::kUint8:
        return read_numbers<std::uint8_t>(count);
      case ValueType::kInt8:
        return read_numbers<std::int8_t>(count);
      case ValueType::kUint16:
        return read_numbers<std::uint16_t>(count);
      case ValueType::kInt16:
        return read_numbers<std::int16_t>(count);
      case ValueType::kUint32:
        return read_numbers<std::uint32_t>(count);
      case ValueType::kInt32:
        return read_numbers<std::int32_t>(count);
      case ValueType::kFloat32:
        return read_numbers<float>(count);
      case ValueType::kUint64:
        return read_numbers<std::uint64_t>(count);
      case ValueType::kInt64:
        return read_numbers<std::int64_t>(count);
      case ValueType::kFloat64:
        return read_numbers<double>(count);
      case ValueType::kBool:
        return read_bools(count);
      case ValueType::kString:
        return read_strings(count);
      case ValueType::kArray:
        fail("arrays of arrays are not supported", ErrorCode::kUnsupported);
    }
    fail("unknown array element type " + std::to_string(type));
  }

  std::uint64_t alignment_of(const GgufContents& contents) {
    where_ = "metadata key 'general.alignment'";
    const auto found = contents.metadata.find("general.alignment");
    if (found == contents.metadata.end()) return kDefaultAlignment;
    const auto* const value = std::get_if<std::uint64_t>(&found->second);
    if (value == nullptr) fail("must be an unsigned integer");
    if (!std::has_single_bit(*value) || *value < kMinAlignment || *value > GgufLimits::kAlignment) {
      fail("is " + std::to_string(*value) + ", must be a power of two from " +
           std::to_string(kMinAlignment) + " to " + std::to_string(GgufLimits::kAlignment));
    }
    return *value;
  }

  /// The dimensions, outermost first; the file has them innermost first.
  std::vector<std::size_t> read_shape() {
    const auto dimensions = read<std::uint32_t>();
    if (dimensions == 0 || dimensions > kMaxDimensions) {
      fail(count_of(dimensions, "dimensions") + ", must be 1 to " + std::to_string(kMaxDimensions));
    }
    std::vector<std::size_t> shape(dimensions);
    for (auto dimension = shape.rbegin(); dimension != shape.rend(); ++dimension) {
      *dimension = read<std::uint64_t>();
      if (*dimension == 0) fail("a dimension is 0");
    }
    return shape;
  }

  std::uint64_t tensor_bytes(DType type, const std::vector<std::size_t>& shape) const {
    const DTypeInfo& info = dtype_info(type);
    if (shape.back() % info.block_size != 0) {
      fail("its rows have " + count_of(shape.back(), "elements") + ", not a multiple of the " +
           std::to_string(info.block_size) + " of a " + std::string(info.name) + " block");
    }
    std::optional<std::uint64_t> bytes = multiply(shape.back() / info.block_size, info.block_bytes);
    for (std::size_t i = 0; bytes && i + 1 < shape.size(); ++i) bytes = multiply(*bytes, shape[i]);
    if (!bytes) fail("its shape overflows 64 bits");
    return *bytes;
  }

  Placed read_tensor(GgufContents& contents, std::uint64_t index, std::uint64_t alignment) {
    where_ = "tensor " + std::to_string(index);
    const std::string_view name = read_string(GgufLimits::kTensorNameBytes, "a tensor name");
    if (name.empty()) fail("its name is empty");
    where_ = "tensor " + quoted(name);
    GgufTensor tensor;
    tensor.name = name;
    tensor.shape = read_shape();
    const auto type = read<std::uint32_t>();
    const auto offset = read<std::uint64_t>();
    if (!is_supported_dtype(type)) {
      fail("its format " + std::string(gguf_type_name(type)) + " (type id " + std::to_string(type) +
               ") is not supported",
           ErrorCode::kUnsupported);
    }
    tensor.type = static_cast<DType>(type);
    const std::uint64_t size = tensor_bytes(tensor.type, tensor.shape);
    if (offset % alignment != 0) {
      fail("its offset " + std::to_string(offset) + " is not a multiple of the alignment " +
           std::to_string(alignment));
    }
    const auto [entry, inserted] = contents.tensors.emplace(std::string(name), std::move(tensor));
    if (!inserted) fail("occurs twice");
    return {&entry->second, offset, size};
  }

  /// Checks every extent against the file and the other tensors, and fills in the data spans.
  void place_tensors(std::vector<Placed>& placed, std::uint64_t alignment) {
    const std::uint64_t start = align_up(position_, alignment);
    const std::uint64_t available = bytes_.size() > start ? bytes_.size() - start : 0;
    std::sort(placed.begin(), placed.end(),
              [](const Placed& a, const Placed& b) { return a.offset < b.offset; });
    std::uint64_t previous_end = 0;
    for (const Placed& p : placed) {
      where_ = "tensor " + quoted(p.tensor->name);
      if (p.offset > available || p.size > available - p.offset) {
        fail("truncated: needs " + count_of(p.size, "bytes") + " at offset " +
             std::to_string(p.offset) + " of the data section, which has " +
             std::to_string(available));
      }
      if (p.offset < previous_end) {
        fail("overlaps another tensor: it begins at offset " + std::to_string(p.offset) +
             " of the data section, the one before ends at " + std::to_string(previous_end));
      }
      previous_end = p.offset + p.size;
      p.tensor->data = bytes_.subspan(start + p.offset, p.size);
    }
  }

  std::span<const std::byte> bytes_;
  std::string_view name_;
  std::uint64_t position_ = 0;
  std::uint64_t charged_ = 0;
  std::string where_;
};

}  // namespace

GgufContents parse_gguf(std::span<const std::byte> bytes, std::string_view name) {
  return Parser(bytes, name).parse();
}

}  // namespace pocket
