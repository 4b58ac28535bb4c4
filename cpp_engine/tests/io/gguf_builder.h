#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "pocket/quant/dtype.h"

/// Writes GGUF files in memory for tests, from the format's specification and without any of the
/// parser's code. It checks nothing: tests use it to write invalid files, too.

namespace pocket::test {

/// Little-endian bytes.
class ByteWriter {
 public:
  template <typename T>
    requires std::is_arithmetic_v<T>
  ByteWriter& number(T value) {
    const auto raw = std::bit_cast<std::array<std::byte, sizeof(T)>>(value);
    return append(raw);
  }
  ByteWriter& raw(std::string_view text) { return append(std::as_bytes(std::span(text))); }
  ByteWriter& text(std::string_view value) {
    return number(std::uint64_t{value.size()}).raw(value);
  }

  ByteWriter& append(std::span<const std::byte> raw);
  /// Zeros up to the next multiple of `alignment`.
  ByteWriter& pad(std::uint64_t alignment);

  std::vector<std::byte> bytes;
};

/// Value type ids of the specification.
template <typename T>
constexpr std::uint32_t value_type() {
  if constexpr (std::is_same_v<T, std::uint8_t>) return 0;
  if constexpr (std::is_same_v<T, std::int8_t>) return 1;
  if constexpr (std::is_same_v<T, std::uint16_t>) return 2;
  if constexpr (std::is_same_v<T, std::int16_t>) return 3;
  if constexpr (std::is_same_v<T, std::uint32_t>) return 4;
  if constexpr (std::is_same_v<T, std::int32_t>) return 5;
  if constexpr (std::is_same_v<T, float>) return 6;
  if constexpr (std::is_same_v<T, bool>) return 7;
  if constexpr (std::is_same_v<T, std::uint64_t>) return 10;
  if constexpr (std::is_same_v<T, std::int64_t>) return 11;
  if constexpr (std::is_same_v<T, double>) return 12;
}
inline constexpr std::uint32_t kStringType = 8;
inline constexpr std::uint32_t kArrayType = 9;

class GgufBuilder {
 public:
  /// Header fields that a test may falsify; counts default to what was added.
  std::string magic = "GGUF";
  std::uint32_t version = 3;
  std::uint64_t alignment = 32;
  std::uint64_t extra_keys = 0;
  std::uint64_t extra_tensors = 0;

  template <typename T>
    requires std::is_arithmetic_v<T>
  GgufBuilder& key(std::string_view name, T value) {
    begin_key(name, value_type<T>()).number(value);
    return *this;
  }
  GgufBuilder& key(std::string_view name, std::string_view value) {
    begin_key(name, kStringType).text(value);
    return *this;
  }
  GgufBuilder& key(std::string_view name, const char* value) {
    return key(name, std::string_view(value));
  }
  template <typename T>
  GgufBuilder& array(std::string_view name, const std::vector<T>& values) {
    ByteWriter& out = begin_key(name, kArrayType);
    if constexpr (std::is_arithmetic_v<T>) {
      out.number(value_type<T>()).number(std::uint64_t{values.size()});
      for (const T value : values) out.number(value);
    } else {
      out.number(kStringType).number(std::uint64_t{values.size()});
      for (const std::string& value : values) out.text(value);
    }
    return *this;
  }
  /// A key whose value the test writes itself.
  ByteWriter& begin_key(std::string_view name, std::uint32_t type) {
    ++keys_;
    return meta_.text(name).number(type);
  }

  /// `file_shape` is innermost first, as in the file. The data goes to the next aligned offset.
  GgufBuilder& tensor(std::string_view name, const std::vector<std::uint64_t>& file_shape,
                      std::uint32_t type, std::span<const std::byte> data) {
    info(name, file_shape, type, data_.pad(alignment).bytes.size());
    data_.append(data);
    return *this;
  }
  template <typename T>
  GgufBuilder& tensor(std::string_view name, const std::vector<std::uint64_t>& file_shape,
                      DType type, const std::vector<T>& data) {
    return tensor(name, file_shape, static_cast<std::uint32_t>(type),
                  std::as_bytes(std::span(data)));
  }
  /// Only the description of a tensor, with an offset of the test's choice.
  GgufBuilder& info(std::string_view name, const std::vector<std::uint64_t>& file_shape,
                    std::uint32_t type, std::uint64_t offset) {
    ++tensors_;
    infos_.text(name).number(static_cast<std::uint32_t>(file_shape.size()));
    for (const std::uint64_t dimension : file_shape) infos_.number(dimension);
    infos_.number(type).number(offset);
    return *this;
  }

  [[nodiscard]] std::vector<std::byte> bytes() const {
    ByteWriter out;
    out.raw(magic).number(version).number(tensors_ + extra_tensors).number(keys_ + extra_keys);
    out.append(meta_.bytes).append(infos_.bytes);
    if (!data_.bytes.empty()) out.pad(alignment).append(data_.bytes);
    return out.bytes;
  }

 private:
  ByteWriter meta_, infos_, data_;
  std::uint64_t keys_ = 0, tensors_ = 0;
};

}  // namespace pocket::test
