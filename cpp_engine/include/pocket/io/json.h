#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace pocket {

class JsonValue;
using JsonArray = std::vector<JsonValue>;
using JsonObject = std::map<std::string, JsonValue, std::less<>>;

/// One JSON value. Numbers without fraction or exponent that fit are 64-bit integers, all others
/// doubles.
class JsonValue {
 public:
  using Variant =
      std::variant<std::nullptr_t, bool, std::int64_t, double, std::string, JsonArray, JsonObject>;

  JsonValue() = default;
  /// T is one of the variant's types.
  template <typename T>
    requires(!std::is_same_v<T, JsonValue>)
  explicit JsonValue(T value) : value_(std::in_place_type<T>, std::move(value)) {}

  [[nodiscard]] bool is_null() const noexcept {
    return std::holds_alternative<std::nullptr_t>(value_);
  }
  /// The value if it is a T (bool, std::int64_t, double, std::string, JsonArray, JsonObject), else
  /// nullptr.
  template <typename T>
  [[nodiscard]] const T* as() const noexcept {
    return std::get_if<T>(&value_);
  }
  /// The member of an object; nullptr if this is no object, or has no such member, or it is null.
  [[nodiscard]] const JsonValue* find(std::string_view member) const noexcept;
  /// "an integer", "an object", ...: for messages.
  [[nodiscard]] std::string_view kind() const noexcept;

 private:
  Variant value_;
};

/// Parses a whole text as RFC 8259 JSON, and NaN, Infinity and -Infinity, which Python writes.
/// `name` is the file's name in messages. Members named `skipped`, at any depth, are passed over
/// unparsed and become null: a tokenizer's merges, say, which take a hundred megabytes as values.
///
/// Throws `Error(kBadFile)` with the byte offset for anything malformed, a repeated member, nesting
/// deeper than 64, or bytes after the value. Strings are not checked to be UTF-8; a \u escape of a
/// lone surrogate becomes U+FFFD. Pure.
[[nodiscard]] JsonValue parse_json(std::string_view text, std::string_view name,
                                   std::string_view skipped = {});

}  // namespace pocket
