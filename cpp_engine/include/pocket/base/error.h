#pragma once

#include <stdexcept>
#include <string>

namespace pocket {

/// What went wrong, for callers that map errors to another system's codes (the Python bindings do).
enum class ErrorCode {
  kInvalidArgument,    ///< the caller broke a documented precondition
  kBadFile,            ///< a model file is truncated, inconsistent or malformed
  kUnsupported,        ///< well-formed, but a feature this build does not have
  kResourceExhausted,  ///< memory, blocks or threads are not to be had
  kInternal,           ///< an invariant of the engine does not hold: a bug
};

/// The only exception type that crosses the engine's API edge.
///
/// The message names the field or file, the offending value and the remedy; it never quotes more
/// than a few bytes of untrusted input.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  [[nodiscard]] ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace pocket
