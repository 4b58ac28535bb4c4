#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string_view>

#include "pocket/base/error.h"
#include "pocket/io/json.h"

namespace {

// Walks everything that was parsed, so that a sanitizer sees a wrong string or a dangling member.
std::size_t visit(const pocket::JsonValue& value) {
  std::size_t seen = 1;
  if (const auto* const text = value.as<std::string>()) {
    for (const char c : *text) seen += static_cast<unsigned char>(c) != 0 ? 1 : 0;
  } else if (const auto* const array = value.as<pocket::JsonArray>()) {
    for (const pocket::JsonValue& item : *array) seen += visit(item);
  } else if (const auto* const object = value.as<pocket::JsonObject>()) {
    for (const auto& [name, item] : *object) {
      if (!item.is_null() && value.find(name) != &item) {
        throw std::logic_error("a member is not found by its name");
      }
      seen += visit(item);
    }
  }
  return seen;
}

}  // namespace

// Any text is either refused with pocket::Error or becomes a value that can be walked; skipping
// members never makes a text unacceptable that was acceptable in full.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  bool whole = false;
  try {
    whole = visit(pocket::parse_json(text, "fuzz")) > 0;
  } catch (const pocket::Error&) {
  }
  try {
    visit(pocket::parse_json(text, "fuzz", "merges"));
  } catch (const pocket::Error&) {
    if (whole) {
      throw std::logic_error("refused only when members are skipped");
    }
  }
  return 0;
}
