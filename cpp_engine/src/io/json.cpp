#include "pocket/io/json.h"

#include <charconv>
#include <limits>
#include <string>
#include <utility>

#include "pocket/base/error.h"
#include "pocket/base/quoted.h"

namespace pocket {
namespace {

constexpr int kMaxDepth = 64;

class JsonParser {
 public:
  JsonParser(std::string_view text, std::string_view name, std::string_view skipped)
      : text_(text), name_(name), skipped_(skipped) {}

  JsonValue parse() {
    JsonValue value = read_value(0);
    skip_space();
    if (at_ < text_.size()) {
      fail("unexpected bytes after the value");
    }
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(ErrorCode::kBadFile, std::string(name_) + ": not valid JSON at byte " +
                                         std::to_string(at_) + ": " + what);
  }

  void skip_space() {
    while (at_ < text_.size() &&
           (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\r' || text_[at_] == '\t')) {
      ++at_;
    }
  }

  /// The next byte that is no white space; 0 at the end.
  char peek() {
    skip_space();
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  bool take(char c) {
    if (peek() != c || at_ >= text_.size()) {
      return false;
    }
    ++at_;
    return true;
  }

  bool take_word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) {
      return false;
    }
    at_ += word.size();
    return true;
  }

  JsonValue read_value(int depth) {
    if (depth > kMaxDepth) {
      fail("nested deeper than " + std::to_string(kMaxDepth));
    }
    const char next = peek();
    if (next == '{') {
      return JsonValue(read_object(depth));
    }
    if (next == '[') {
      return JsonValue(read_array(depth));
    }
    if (next == '"') {
      return JsonValue(read_string());
    }
    if (next == '-' || (next >= '0' && next <= '9')) {
      return read_number();
    }
    if (take_word("true")) {
      return JsonValue(true);
    }
    if (take_word("false")) {
      return JsonValue(false);
    }
    if (take_word("null")) {
      return JsonValue(nullptr);
    }
    if (take_word("NaN")) {
      return JsonValue(std::numeric_limits<double>::quiet_NaN());
    }
    if (take_word("Infinity")) {
      return JsonValue(std::numeric_limits<double>::infinity());
    }
    fail(at_ < text_.size() ? "expected a value" : "the text ends where a value should be");
  }

  JsonObject read_object(int depth) {
    JsonObject object;
    ++at_;
    if (take('}')) {
      return object;
    }
    do {
      if (peek() != '"') {
        fail("expected a member's name");
      }
      std::string member = read_string();
      if (!take(':')) {
        fail("expected ':'");
      }
      const auto [place, added] = object.try_emplace(std::move(member));
      if (!added) {
        fail("the member " + quoted(place->first) + " is repeated");
      }
      if (!skipped_.empty() && place->first == skipped_) {
        skip_value();
      } else {
        place->second = read_value(depth + 1);
      }
    } while (take(','));
    if (!take('}')) {
      fail("expected ',' or '}'");
    }
    return object;
  }

  JsonArray read_array(int depth) {
    JsonArray array;
    ++at_;
    if (take(']')) {
      return array;
    }
    do {
      array.push_back(read_value(depth + 1));
    } while (take(','));
    if (!take(']')) {
      fail("expected ',' or ']'");
    }
    return array;
  }

  /// Passes over an array or object by its brackets.
  void skip_value() {
    std::size_t open = 0;
    do {
      const char c = peek();
      if (c == '"') {
        skip_string();
        continue;
      }
      if (at_ >= text_.size()) {
        fail("an array or object has no end");
      }
      open += c == '[' || c == '{' ? 1 : 0;
      if (open == 0) {
        read_value(0);  // a scalar
        return;
      }
      open -= c == ']' || c == '}' ? 1 : 0;
      ++at_;
    } while (open > 0);
  }

  void skip_string() {
    for (++at_; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      at_ += text_[at_] == '\\' ? 1 : 0;
    }
    if (at_ >= text_.size()) {
      fail("a string has no end");
    }
    ++at_;
  }

  std::string read_string() {
    std::string out;
    ++at_;
    while (true) {
      // Whole runs at once: a tokenizer's vocabulary is megabytes of strings.
      std::size_t end = at_;
      while (end < text_.size() && text_[end] != '"' && text_[end] != '\\' &&
             static_cast<unsigned char>(text_[end]) >= 0x20) {
        ++end;
      }
      out.append(text_.substr(at_, end - at_));
      at_ = end;
      if (at_ >= text_.size()) {
        fail("a string has no end");
      }
      const char c = text_[at_++];
      if (c == '"') {
        return out;
      }
      if (c != '\\') {
        --at_;
        fail("a control character inside a string");
      }
      read_escape(out);
    }
  }

  void read_escape(std::string& out) {
    const char c = at_ < text_.size() ? text_[at_++] : '\0';
    constexpr std::string_view kLetters = "\"\\/bfnrt";
    constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
    if (const std::size_t i = kLetters.find(c); i != std::string_view::npos && c != '\0') {
      out.push_back(kMeanings[i]);
      return;
    }
    if (c != 'u') {
      fail("an unknown escape");
    }
    std::uint32_t code = read_hex4();
    if (code >= 0xd800 && code < 0xdc00 && text_.substr(at_, 2) == "\\u") {
      const std::size_t before = at_;
      at_ += 2;
      const std::uint32_t low = read_hex4();
      if (low >= 0xdc00 && low < 0xe000) {
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
      } else {
        at_ = before;
      }
    }
    append_utf8(code >= 0xd800 && code < 0xe000 ? 0xfffd : code, out);
  }

  std::uint32_t read_hex4() {
    std::uint32_t code = 0;
    const std::string_view digits = text_.substr(at_, 4);
    const auto [end, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
    if (error != std::errc{} || digits.size() != 4 || end != digits.data() + 4) {
      fail("\\u needs four hexadecimal digits");
    }
    at_ += 4;
    return code;
  }

  static void append_utf8(std::uint32_t code, std::string& out) {
    const auto byte = [&out](std::uint32_t value) { out.push_back(static_cast<char>(value)); };
    const auto continuation = [&](int shift) { byte(0x80 | ((code >> shift) & 0x3f)); };
    if (code < 0x80) {
      byte(code);
    } else if (code < 0x800) {
      byte(0xc0 | (code >> 6));
      continuation(0);
    } else if (code < 0x10000) {
      byte(0xe0 | (code >> 12));
      continuation(6);
      continuation(0);
    } else {
      byte(0xf0 | (code >> 18));
      continuation(12);
      continuation(6);
      continuation(0);
    }
  }

  static bool digit(char c) { return c >= '0' && c <= '9'; }

  JsonValue read_number() {
    const std::size_t begin = at_;
    if (text_[at_] == '-') {
      ++at_;
      if (take_word("Infinity")) {
        return JsonValue(-std::numeric_limits<double>::infinity());
      }
    }
    const auto digits = [this] {
      const std::size_t first = at_;
      while (at_ < text_.size() && digit(text_[at_])) {
        ++at_;
      }
      if (at_ == first) {
        fail("expected a digit");
      }
      return at_ - first;
    };
    const bool zero = at_ < text_.size() && text_[at_] == '0';
    if (digits() > 1 && zero) {
      fail("a number starts with 0");
    }
    bool integral = true;
    if (at_ < text_.size() && text_[at_] == '.') {
      integral = false;
      ++at_;
      digits();
    }
    if (at_ < text_.size() && (text_[at_] == 'e' || text_[at_] == 'E')) {
      integral = false;
      ++at_;
      if (at_ < text_.size() && (text_[at_] == '+' || text_[at_] == '-')) {
        ++at_;
      }
      digits();
    }
    const std::string_view number = text_.substr(begin, at_ - begin);
    const char* const end = number.data() + number.size();
    if (std::int64_t value = 0;
        integral && std::from_chars(number.data(), end, value).ec == std::errc{}) {
      return JsonValue(value);
    }
    double value = 0.0;
    if (std::from_chars(number.data(), end, value).ec != std::errc{}) {
      fail("the number " + quoted(number) + " does not fit a double");
    }
    return JsonValue(value);
  }

  std::string_view text_;
  std::string_view name_;
  std::string_view skipped_;
  std::size_t at_ = 0;
};

}  // namespace

const JsonValue* JsonValue::find(std::string_view member) const noexcept {
  const auto* const object = as<JsonObject>();
  if (object == nullptr) {
    return nullptr;
  }
  const auto found = object->find(member);
  return found == object->end() || found->second.is_null() ? nullptr : &found->second;
}

std::string_view JsonValue::kind() const noexcept {
  constexpr std::string_view kKinds[] = {"null",     "a bool",   "an integer", "a number",
                                         "a string", "an array", "an object"};
  return kKinds[value_.index()];
}

JsonValue parse_json(std::string_view text, std::string_view name, std::string_view skipped) {
  return JsonParser(text, name, skipped).parse();
}

}  // namespace pocket
