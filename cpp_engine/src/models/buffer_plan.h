#pragma once

#include <cstddef>
#include <span>

#include "pocket/base/aligned_buffer.h"

namespace pocket {

/// Lays out one arena: add every array first, then allocate, then take views.
class BufferPlan {
 public:
  /// Returns the offset to pass to `AlignedBuffer::view`; arrays start on cache lines.
  template <typename T>
  std::size_t add(std::size_t count) {
    const std::size_t offset = bytes_;
    bytes_ += (count * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    return offset;
  }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

 private:
  static constexpr std::size_t kAlign = 64;
  std::size_t bytes_ = 0;
};

}  // namespace pocket
