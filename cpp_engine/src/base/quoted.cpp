#include "pocket/base/quoted.h"

#include <cstddef>

namespace pocket {

std::string quoted(std::string_view text) {
  constexpr std::size_t kShown = 48;
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out = "'";
  for (const char c : text.substr(0, kShown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f && c != '\'' && c != '\\') {
      out += c;
    } else {
      out += "\\x";
      out += kDigits[byte >> 4];
      out += kDigits[byte & 15];
    }
  }
  if (text.size() > kShown) out += "...";
  return out + "'";
}

}  // namespace pocket
