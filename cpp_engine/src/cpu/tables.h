#pragma once

#include "pocket/cpu/kernels.h"

/// What the per-ISA translation units offer to kernel_table.cpp, and the few portable routines they
/// share. Nothing here may be an inline function: the linker keeps one copy of such a function, and
/// it could be the one compiled for AVX-512.

namespace pocket {

const KernelTable& scalar_table() noexcept;
const KernelTable& avx2_table() noexcept;
/// `wide`: with the matmul tiles for many rows, which pay only where a core starts two 512-bit dot
/// products per cycle. `pair_instruction`: with AVX512_BF16, which the CPU must have.
const KernelTable& avx512_table(bool wide, bool pair_instruction) noexcept;

/// `KernelTable::unpack_row`: a few rows per step, so one portable version serves all tables.
void unpack_packed_row(const PackedMatrix& w, std::size_t row, float* out);

}  // namespace pocket
