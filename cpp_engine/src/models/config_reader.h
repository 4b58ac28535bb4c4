#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "pocket/base/error.h"
#include "pocket/models/weight_source.h"

namespace pocket {

/// Reads a source's hyper-parameters with bounds; every error names file, key and value.
class ConfigReader {
 public:
  explicit ConfigReader(const WeightSource& source) : source_(source) {}

  [[noreturn]] void fail(ErrorCode code, const std::string& what) const {
    throw Error(code, source_.name() + ": " + what);
  }

  /// From 1 to `max`; `Error(kBadFile)` when missing.
  std::size_t size(const char* key, std::uint64_t max) const {
    const auto value = source_.get_uint(key);
    if (!value) {
      fail(ErrorCode::kBadFile, std::string(key) + " is missing");
    }
    return check(key, *value, max);
  }

  std::size_t size_or(const char* key, std::uint64_t max, std::size_t fallback) const {
    const auto value = source_.get_uint(key);
    return value ? check(key, *value, max) : fallback;
  }

  /// Finite and above 0; `Error(kBadFile)` when missing.
  double positive(const char* key) const {
    if (!source_.get_float(key)) {
      fail(ErrorCode::kBadFile, std::string(key) + " is missing");
    }
    return positive_or(key, 0.0);
  }

  double positive_or(const char* key, double fallback) const {
    const double value = source_.get_float(key).value_or(fallback);
    if (!std::isfinite(value) || value <= 0.0) {
      fail(ErrorCode::kBadFile, std::string(key) + ": got " + std::to_string(value) +
                                    "; must be a finite positive number");
    }
    return value;
  }

  void multiple(const char* what, std::size_t value, std::size_t of) const {
    if (value % of != 0) {
      fail(ErrorCode::kUnsupported, std::string(what) + ": got " + std::to_string(value) +
                                        "; the kernels need a multiple of " + std::to_string(of));
    }
  }

 private:
  std::size_t check(const char* key, std::uint64_t value, std::uint64_t max) const {
    if (value == 0 || value > max) {
      fail(ErrorCode::kBadFile, std::string(key) + ": got " + std::to_string(value) +
                                    "; must be from 1 to " + std::to_string(max));
    }
    return static_cast<std::size_t>(value);
  }

  const WeightSource& source_;
};

}  // namespace pocket
