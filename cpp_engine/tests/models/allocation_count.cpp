// Replaces the global operator new by one that counts. Alone in its file: where calls of both could
// be inlined, the compiler takes malloc with a replaced delete for a mistake.

#include "allocation_count.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<std::size_t> calls{0};

}  // namespace

void* operator new(std::size_t size) {
  ++calls;
  if (void* const memory = std::malloc(size == 0 ? 1 : size)) {
    return memory;
  }
  throw std::bad_alloc();
}

// Every form that the library calls: a sanitizer's own one would not match the delete below.
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  ++calls;
  return std::malloc(size == 0 ? 1 : size);
}

void operator delete(void* memory) noexcept {
  std::free(memory);
}

void operator delete(void* memory, const std::nothrow_t&) noexcept {
  std::free(memory);
}

void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace pocket::test {

std::size_t allocation_count() noexcept {
  return calls;
}

}  // namespace pocket::test
