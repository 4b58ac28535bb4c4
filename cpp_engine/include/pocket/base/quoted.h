#pragma once

#include <string>
#include <string_view>

namespace pocket {

/// `text` in single quotes for an error message: at most 48 bytes of it, everything but printable
/// ASCII escaped as \xNN, so that a hostile file cannot put control characters into a log.
[[nodiscard]] std::string quoted(std::string_view text);

}  // namespace pocket
