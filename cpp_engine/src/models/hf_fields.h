#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "pocket/base/error.h"
#include "pocket/io/json.h"

namespace pocket {

/// Typed access to one JSON object of a file. Absent fields are `nullopt` or null; a field of
/// another type throws `Error(kBadFile)` naming file and field. Borrows both arguments.
class Fields {
 public:
  Fields(const JsonValue& object, std::string_view file) : object_(object), file_(file) {}

  [[noreturn]] void fail(const std::string& what, ErrorCode code = ErrorCode::kBadFile) const {
    throw Error(code, std::string(file_) + ": " + what);
  }

  [[nodiscard]] const JsonValue* find(std::string_view field) const { return object_.find(field); }

  [[nodiscard]] std::optional<std::uint64_t> uint(std::string_view field) const {
    const JsonValue* const value = find(field);
    if (value == nullptr) return std::nullopt;
    if (const auto* const number = value->as<std::int64_t>(); number != nullptr && *number >= 0) {
      return static_cast<std::uint64_t>(*number);
    }
    wrong(field, *value, "an integer that is not negative");
  }

  [[nodiscard]] std::optional<double> number(std::string_view field) const {
    const JsonValue* const value = find(field);
    if (value == nullptr) return std::nullopt;
    if (const auto* const real = value->as<double>()) return *real;
    if (const auto* const integer = value->as<std::int64_t>()) return static_cast<double>(*integer);
    wrong(field, *value, "a number");
  }

  [[nodiscard]] std::optional<std::string> string(std::string_view field) const {
    const JsonValue* const value = find(field);
    if (value == nullptr) return std::nullopt;
    if (const auto* const text = value->as<std::string>()) return *text;
    wrong(field, *value, "a string");
  }

  [[nodiscard]] bool boolean(std::string_view field, bool fallback) const {
    const JsonValue* const value = find(field);
    if (value == nullptr) return fallback;
    if (const auto* const flag = value->as<bool>()) return *flag;
    wrong(field, *value, "true or false");
  }

  [[nodiscard]] const JsonArray* array(std::string_view field) const {
    const JsonValue* const value = find(field);
    if (value == nullptr) return nullptr;
    if (const auto* const list = value->as<JsonArray>()) return list;
    wrong(field, *value, "a list");
  }

  [[nodiscard]] const JsonValue* object(std::string_view field) const {
    const JsonValue* const value = find(field);
    if (value != nullptr && value->as<JsonObject>() == nullptr) wrong(field, *value, "an object");
    return value;
  }

  [[nodiscard]] std::string_view file() const { return file_; }

 private:
  [[noreturn]] void wrong(std::string_view field, const JsonValue& value,
                          std::string_view wanted) const {
    fail(std::string(field) + " is " + std::string(value.kind()) + ", must be " +
         std::string(wanted));
  }

  const JsonValue& object_;
  std::string_view file_;
};

}  // namespace pocket
