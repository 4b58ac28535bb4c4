#pragma once

#include <cstddef>

namespace pocket::test {

/// Calls of `operator new` in this program so far, on all threads.
[[nodiscard]] std::size_t allocation_count() noexcept;

}  // namespace pocket::test
