#pragma once

#include <cstdint>
#include <string>

#include "pocket/base/error.h"

namespace pocket {

[[noreturn]] inline void misuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

inline std::string slot_name(std::int32_t slot) {
  return "slot " + std::to_string(slot);
}

}  // namespace pocket
