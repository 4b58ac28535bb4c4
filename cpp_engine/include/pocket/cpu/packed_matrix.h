#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "pocket/quant/dtype.h"

namespace pocket {

/// How a weight matrix is laid out for the kernels. One layout serves every ISA.
enum class PackedLayout : std::uint8_t {
  kU4ScaleMin,  ///< Q4_1: x = d*q + m, q in 0..15
  kU4Scale,     ///< Q4_0: x = d*(q - 8), q in 0..15
  kU8Scale,  ///< Q8_0: x = d*(q - 128), q in 1..255 (stored offset by 128 for u8 x s8 dot products)
  // Coded layouts (docs/kernels.md): planes of codes; s and n are bytes per 32 or 16 columns, d and
  // dmin are shared by 256 columns.
  kU5Scale,     ///< Q5_0: x = d*(q - 16)
  kU5ScaleMin,  ///< Q5_1: x = d*q + m
  kT4Scale,     ///< IQ4_NL: x = d*table[q]
  kT4Sub32,     ///< IQ4_XS: x = d*s*table[q]
  kU4Sub32Min,  ///< Q4_K: x = d*s*q - dmin*n
  kU5Sub32Min,  ///< Q5_K: x = d*s*q - dmin*n
  kU2Sub16Min,  ///< Q2_K: x = d*s*q - dmin*n
  kU3Sub16,     ///< Q3_K: x = d*s*(q - 4)
  kU6Sub16,     ///< Q6_K: x = d*s*(q - 32)
  kF32,         ///< float panels, also for F16 and BF16 sources on the exact path
  kF16,
  kBF16,
};

/// Output rows of a panel: one 512-bit vector of floats.
inline constexpr std::size_t kPanelRows = 16;
/// Elements of K that share one activation scale, and one weight scale in the quantised layouts.
inline constexpr std::size_t kQuantBlock = 32;

/// A weight matrix W [rows, columns], repacked into panels of `kPanelRows` rows (the last one
/// padded with zeros). Non-owning: the bytes live in the model's weight arena.
///
/// A quantised panel holds, for each block of 32 columns: 16 half scales d, (16 half mins m,) then
/// the codes so that byte i of vector g holds column 4g + i % 4 of row i / 4; in the 4-bit layouts
/// the low nibble of vector g is column group g and the high nibble group g + 4. So one u8 x s8
/// dot-product instruction serves 16 rows x 4 columns, and a kernel reads a panel, and one panel
/// after the other, in strictly ascending order: the hardware prefetcher then sustains the full
/// memory bandwidth (with scales and codes in two streams it gave a third). Float panels hold, for
/// each column, the 16 rows' values. A panel is padded with zeros to a multiple of 64 bytes.
struct PackedMatrix {
  const std::byte* data = nullptr;
  std::size_t rows = 0;
  std::size_t columns = 0;
  PackedLayout layout = PackedLayout::kF32;

  [[nodiscard]] std::size_t panels() const noexcept { return (rows + kPanelRows - 1) / kPanelRows; }
  [[nodiscard]] std::size_t panel_bytes() const noexcept;
  [[nodiscard]] bool quantised() const noexcept { return layout < PackedLayout::kF32; }
  [[nodiscard]] bool coded() const noexcept {
    return layout > PackedLayout::kU8Scale && layout < PackedLayout::kF32;
  }
};

/// The layout that tensors of this format are packed into.
[[nodiscard]] PackedLayout packed_layout(DType type);

/// Bytes that `pack_matrix` writes, a multiple of 64.
[[nodiscard]] std::size_t packed_bytes(PackedLayout layout, std::size_t rows, std::size_t columns);

/// Repacks `rows` stored rows into `out` (64-byte aligned, `packed_bytes` long). `row_order` maps
/// an output row to its stored row (empty: identity); loaders use it to un-permute Llama's q and k.
/// Lossless: every value keeps its bits. Throws `Error(kInvalidArgument)` on a size mismatch.
PackedMatrix pack_matrix(DType type, std::span<const std::byte> stored, std::size_t rows,
                         std::size_t columns, std::span<const std::uint32_t> row_order,
                         std::span<std::byte> out);

}  // namespace pocket
