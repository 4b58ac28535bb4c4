#pragma once

#include <cstddef>
#include <span>

namespace pocket {

/// A zeroed, move-only block of memory from `mmap`, aligned to 2 MiB and advised to use huge pages.
///
/// Weights and the KV pool live in such arenas: with 4 KiB pages the same kernel varies by a factor
/// of two from run to run (docs/benchmarks.md). Pages are touched on first write, so the resident
/// size grows with use. Throws `Error(kResourceExhausted)` when the mapping is refused.
class AlignedBuffer {
 public:
  static constexpr std::size_t kAlignment = std::size_t{2} << 20;

  AlignedBuffer() = default;
  explicit AlignedBuffer(std::size_t bytes);
  AlignedBuffer(AlignedBuffer&& other) noexcept;
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept;
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  ~AlignedBuffer();

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] std::byte* data() noexcept { return data_; }
  [[nodiscard]] const std::byte* data() const noexcept { return data_; }

  /// The bytes from `offset` on as `count` elements of `T`; bounds and alignment are checked.
  template <typename T>
  [[nodiscard]] std::span<T> view(std::size_t offset, std::size_t count) {
    check_view(offset, count, sizeof(T), alignof(T));
    return {reinterpret_cast<T*>(data_ + offset), count};
  }

 private:
  void check_view(std::size_t offset, std::size_t count, std::size_t size, std::size_t align) const;

  std::byte* data_ = nullptr;  // aligned start, inside [mapping_, mapping_ + mapping_size_)
  std::size_t size_ = 0;
  void* mapping_ = nullptr;
  std::size_t mapping_size_ = 0;
};

}  // namespace pocket
