#include "pocket/base/aligned_buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <limits>
#include <string>
#include <system_error>
#include <utility>

#include "pocket/base/error.h"

namespace pocket {
namespace {

std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

[[noreturn]] void throw_refused(std::size_t bytes, const std::string& reason) {
  throw Error(ErrorCode::kResourceExhausted,
              "cannot map " + std::to_string(bytes) + " bytes of memory: " + reason +
                  "; use a smaller model or fewer KV blocks, or raise the memory limit");
}

}  // namespace

AlignedBuffer::AlignedBuffer(std::size_t bytes) {
  if (bytes == 0) return;
  if (bytes > std::numeric_limits<std::size_t>::max() / 2 - 2 * kAlignment) {
    throw_refused(bytes, "more than the address space holds");
  }
  // A buffer below one huge page keeps 4 KiB granularity, so that small arenas stay small.
  const bool huge = bytes >= kAlignment;
  const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t length = round_up(bytes, huge ? kAlignment : page);
  // mmap aligns to 4 KiB only: map one alignment more, then give the two ends back.
  const std::size_t reserve = length + kAlignment;
  void* mapped =
      ::mmap(nullptr, reserve, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw_refused(bytes, std::generic_category().message(errno));

  auto* const begin = static_cast<std::byte*>(mapped);
  const std::size_t head =
      (kAlignment - reinterpret_cast<std::uintptr_t>(begin) % kAlignment) % kAlignment;
  const std::size_t tail = reserve - head - length;
  if (head != 0) ::munmap(begin, head);
  if (tail != 0) ::munmap(begin + head + length, tail);

  data_ = begin + head;
  size_ = bytes;
  mapping_ = data_;
  mapping_size_ = length;
  // Advice: a kernel without transparent huge pages refuses it, and the buffer works all the same.
  if (huge) ::madvise(mapping_, mapping_size_, MADV_HUGEPAGE);
}

AlignedBuffer::AlignedBuffer(AlignedBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      mapping_(std::exchange(other.mapping_, nullptr)),
      mapping_size_(std::exchange(other.mapping_size_, 0)) {}

AlignedBuffer& AlignedBuffer::operator=(AlignedBuffer&& other) noexcept {
  AlignedBuffer taken(std::move(other));  // releases what this one held
  std::swap(data_, taken.data_);
  std::swap(size_, taken.size_);
  std::swap(mapping_, taken.mapping_);
  std::swap(mapping_size_, taken.mapping_size_);
  return *this;
}

AlignedBuffer::~AlignedBuffer() {
  if (mapping_ != nullptr) ::munmap(mapping_, mapping_size_);
}

void AlignedBuffer::check_view(std::size_t offset, std::size_t count, std::size_t size,
                               std::size_t align) const {
  if (offset > size_ || count > (size_ - offset) / size) {
    throw Error(ErrorCode::kInvalidArgument,
                "view of " + std::to_string(count) + " elements of " + std::to_string(size) +
                    " bytes at offset " + std::to_string(offset) + " does not fit a buffer of " +
                    std::to_string(size_) + " bytes");
  }
  if (offset % align != 0) {
    throw Error(ErrorCode::kInvalidArgument, "view at offset " + std::to_string(offset) +
                                                 " is not aligned to " + std::to_string(align) +
                                                 " bytes");
  }
}

}  // namespace pocket
