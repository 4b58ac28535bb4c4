#include "coded_panels.h"

#include <cstring>

#include "block_layouts.h"
#include "pocket/quant/coded_block.h"

namespace pocket {
namespace {

constexpr std::size_t kGroups = kQuantBlock / 4;

const BlockLayout& layout_of(PackedLayout layout) {
  return kBlockLayouts[static_cast<std::size_t>(layout) - kFirstCoded];
}

/// The format that a layout holds: each coded layout serves one.
DType stored_type(PackedLayout layout) {
  switch (layout) {
    case PackedLayout::kU5Scale:
      return DType::kQ5_0;
    case PackedLayout::kU5ScaleMin:
      return DType::kQ5_1;
    case PackedLayout::kT4Scale:
      return DType::kIQ4_NL;
    case PackedLayout::kT4Sub32:
      return DType::kIQ4_XS;
    case PackedLayout::kU4Sub32Min:
      return DType::kQ4_K;
    case PackedLayout::kU5Sub32Min:
      return DType::kQ5_K;
    case PackedLayout::kU2Sub16Min:
      return DType::kQ2_K;
    case PackedLayout::kU3Sub16:
      return DType::kQ3_K;
    default:
      return DType::kQ6_K;
  }
}

/// Scale bytes of block `block` of a run, as they stand in the panel.
void pack_scales(PackedLayout layout, const CodedBlock& from, std::size_t block,
                 std::uint8_t* bytes) {
  switch (layout) {
    case PackedLayout::kT4Sub32:
      bytes[0] = static_cast<std::uint8_t>(from.scale[block]);
      break;
    case PackedLayout::kU4Sub32Min:
    case PackedLayout::kU5Sub32Min:
      bytes[0] = static_cast<std::uint8_t>(from.scale[block]);
      bytes[1] = from.min[block];
      break;
    case PackedLayout::kU2Sub16Min:
      for (std::size_t half = 0; half < 2; ++half) {
        const std::size_t j = 2 * block + half;
        bytes[half] = static_cast<std::uint8_t>(from.scale[j] | from.min[j] << 4);
      }
      break;
    case PackedLayout::kU3Sub16:
    case PackedLayout::kU6Sub16:
      bytes[0] = static_cast<std::uint8_t>(from.scale[2 * block]);
      bytes[1] = static_cast<std::uint8_t>(from.scale[2 * block + 1]);
      break;
    default:
      break;
  }
}

void unpack_scales(PackedLayout layout, const std::uint8_t* bytes, std::size_t block,
                   CodedBlock& to) {
  switch (layout) {
    case PackedLayout::kT4Sub32:
      to.scale[block] = static_cast<std::int8_t>(bytes[0]);
      break;
    case PackedLayout::kU4Sub32Min:
    case PackedLayout::kU5Sub32Min:
      to.scale[block] = static_cast<std::int8_t>(bytes[0]);
      to.min[block] = bytes[1];
      break;
    case PackedLayout::kU2Sub16Min:
      for (std::size_t half = 0; half < 2; ++half) {
        to.scale[2 * block + half] = static_cast<std::int8_t>(bytes[half] & 15);
        to.min[2 * block + half] = bytes[half] >> 4;
      }
      break;
    case PackedLayout::kU3Sub16:
    case PackedLayout::kU6Sub16:
      to.scale[2 * block] = static_cast<std::int8_t>(bytes[0]);
      to.scale[2 * block + 1] = static_cast<std::int8_t>(bytes[1]);
      break;
    default:
      break;
  }
}

/// `bits` of 32 codes, from bit `shift` up, into a plane's bytes of one lane.
void pack_plane(const std::uint8_t* code, unsigned bits, unsigned shift, std::byte* lane) {
  const unsigned mask = (1u << bits) - 1u;
  for (std::size_t vector = 0; vector < bits; ++vector) {
    for (std::size_t c = 0; c < 4; ++c) {
      unsigned byte = 0;
      for (std::size_t group = vector; group < kGroups; group += bits) {
        const unsigned field = static_cast<unsigned>(code[4 * group + c]) >> shift & mask;
        byte |= field << (group - vector);  // = bits * (group / bits)
      }
      lane[vector * 4 * kPanelRows + c] = static_cast<std::byte>(byte);
    }
  }
}

void unpack_plane(const std::byte* lane, unsigned bits, unsigned shift, std::uint8_t* code) {
  if (bits == 0) {
    return;
  }
  const unsigned mask = (1u << bits) - 1u;
  for (std::size_t group = 0; group < kGroups; ++group) {
    const std::size_t vector = group % bits;
    for (std::size_t c = 0; c < 4; ++c) {
      const auto byte = static_cast<unsigned>(lane[vector * 4 * kPanelRows + c]);
      const unsigned field = byte >> (group - vector) & mask;
      code[4 * group + c] = static_cast<std::uint8_t>(code[4 * group + c] | field << shift);
    }
  }
}

}  // namespace

bool is_coded(PackedLayout layout) noexcept {
  return layout >= PackedLayout::kU5Scale && layout <= PackedLayout::kU6Sub16;
}

std::size_t coded_panel_bytes(PackedLayout layout, std::size_t columns) noexcept {
  const BlockLayout& l = layout_of(layout);
  return columns / (l.blocks * kQuantBlock) * l.run_bytes;
}

void pack_coded_row(DType type, PackedLayout layout, const std::byte* row, std::size_t columns,
                    std::size_t lane, std::byte* panel) {
  const BlockLayout& l = layout_of(layout);
  const std::size_t stored_bytes = dtype_info(type).block_bytes;
  CodedBlock from{};
  for (std::size_t k = 0; k < columns; k += l.blocks * kQuantBlock) {
    read_coded_block(type, row, from);
    row += stored_bytes;
    std::memcpy(panel + 2 * lane, &from.d, 2);
    if (l.halves == 2) {
      std::memcpy(panel + 2 * (kPanelRows + lane), &from.m, 2);
    }
    panel += l.header_bytes;
    for (std::size_t block = 0; block < l.blocks; ++block) {
      std::uint8_t scales[2] = {};
      pack_scales(layout, from, block, scales);
      for (std::size_t s = 0; s < l.scales; ++s) {
        panel[s * kPanelRows + lane] = static_cast<std::byte>(scales[s]);
      }
      const std::uint8_t* code = from.code + block * kQuantBlock;
      std::byte* planes = panel + l.scale_bytes + 4 * lane;
      pack_plane(code, l.low_bits, 0, planes);
      pack_plane(code, l.high_bits, l.low_bits, planes + l.low_bits * 4 * kPanelRows);
      panel += l.block_bytes;
    }
  }
}

void unpack_coded_row(PackedLayout layout, const std::byte* panel, std::size_t columns,
                      std::size_t lane, float* out) {
  const BlockLayout& l = layout_of(layout);
  const DType type = stored_type(layout);
  for (std::size_t k = 0; k < columns; k += l.blocks * kQuantBlock) {
    CodedBlock to{};
    std::memcpy(&to.d, panel + 2 * lane, 2);
    if (l.halves == 2) {
      std::memcpy(&to.m, panel + 2 * (kPanelRows + lane), 2);
    }
    panel += l.header_bytes;
    for (std::size_t block = 0; block < l.blocks; ++block) {
      std::uint8_t scales[2] = {};
      for (std::size_t s = 0; s < l.scales; ++s) {
        scales[s] = static_cast<std::uint8_t>(panel[s * kPanelRows + lane]);
      }
      unpack_scales(layout, scales, block, to);
      std::uint8_t* code = to.code + block * kQuantBlock;
      const std::byte* planes = panel + l.scale_bytes + 4 * lane;
      unpack_plane(planes, l.low_bits, 0, code);
      unpack_plane(planes + l.low_bits * 4 * kPanelRows, l.high_bits, l.low_bits, code);
      panel += l.block_bytes;
    }
    decode_coded_block(type, to, out + k);
  }
}

}  // namespace pocket
