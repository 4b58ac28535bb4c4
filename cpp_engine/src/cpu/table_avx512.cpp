#include "tables.h"

namespace pocket {

const KernelTable& avx512_table() noexcept {
  return scalar_table();
}

}  // namespace pocket
