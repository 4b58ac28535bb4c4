#include "tables.h"

namespace pocket {

const KernelTable& avx2_table() noexcept {
  return scalar_table();
}

}  // namespace pocket
