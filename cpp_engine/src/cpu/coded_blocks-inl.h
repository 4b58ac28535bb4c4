// Blocks of the coded layouts (block_layouts.h) as both matmuls want them: eight vectors of bytes,
// and float scales and mins.

#include "block_layouts.h"
#include "pocket/cpu/kernels.h"

namespace pocket::POCKET_ISA {
namespace {

template <PackedLayout kLayout>
inline constexpr BlockLayout kBlocks =
    kBlockLayouts[static_cast<std::size_t>(kLayout) - kFirstCoded];

template <PackedLayout kLayout>
inline constexpr bool kIsIq4 =
    kLayout == PackedLayout::kT4Scale || kLayout == PackedLayout::kT4Sub32;
/// Scales per 16 columns: a block's halves are scaled apart.
template <PackedLayout kLayout>
inline constexpr bool kPerHalf =
    kLayout == PackedLayout::kU2Sub16Min || kLayout == PackedLayout::kU3Sub16 ||
    kLayout == PackedLayout::kU6Sub16;
template <PackedLayout kLayout>
inline constexpr bool kCodedMin =
    kLayout == PackedLayout::kU5ScaleMin || kLayout == PackedLayout::kU4Sub32Min ||
    kLayout == PackedLayout::kU5Sub32Min || kLayout == PackedLayout::kU2Sub16Min;
/// Codes are unpacked shifted up by this: Q3_K's then have the offset of Q6_K's, 32, so that
/// `QuantisedRows::half_bias` serves both. Its scales shrink by as much.
template <PackedLayout kLayout>
inline constexpr int kLift = kLayout == PackedLayout::kU3Sub16 ? 3 : 0;
/// What an unpacked byte is above the format's signed value.
template <PackedLayout kLayout>
inline constexpr int kOffset = kIsIq4<kLayout>                     ? 128
                               : kCodedMin<kLayout>                ? 0
                               : kLayout == PackedLayout::kU5Scale ? 16
                                                                   : 32;
template <PackedLayout kLayout>
inline constexpr unsigned kMaxCode =
    kIsIq4<kLayout>
        ? 255u
        : ((1u << (kBlocks<kLayout>.low_bits + kBlocks<kLayout>.high_bits)) - 1u) << kLift<kLayout>;

/// Column group kGroup of a plane of kBits bits, moved to bit kTo.
template <unsigned kBits, int kTo, std::size_t kGroup>
inline Bytes plane_field(const std::uint8_t* plane) {
  constexpr unsigned kMask = ((1u << kBits) - 1u) << kTo;
  constexpr int kFrom = static_cast<int>(kBits * (kGroup / kBits));
  return field<kMask, kFrom - kTo>(load_bytes(plane + kGroup % kBits * 64));
}

/// w[0..8) = a block's codes, one byte each.
template <PackedLayout kLayout, std::size_t kGroup = 0>
inline void unpack_codes(const std::uint8_t* planes, Bytes* w) {
  constexpr BlockLayout kL = kBlocks<kLayout>;
  if constexpr (kGroup < 8) {
    Bytes codes = plane_field<kL.low_bits, kLift<kLayout>, kGroup>(planes);
    if constexpr (kL.high_bits > 0) {
      codes = either(codes, plane_field<kL.high_bits, kLift<kLayout> + kL.low_bits, kGroup>(
                                planes + kL.low_bits * 64));
    }
    if constexpr (kIsIq4<kLayout>) {
      codes = iq4_bytes(codes);
    }
    w[kGroup] = codes;
    unpack_codes<kLayout, kGroup + 1>(planes, w);
  }
}

/// What 256 (or 32) columns share, prepared once.
struct RunScales {
  Vec d;
  Vec m;
};
/// Scales of a block's halves, and what its mins add: `m` per unit of `scaled_sum`, or (kPerHalf)
/// per unit of `half_bias`.
struct BlockScales {
  Vec d[2];
  Vec m[2];
};

template <PackedLayout kLayout>
inline RunScales load_run_scales(const std::uint8_t* header) {
  const auto* halves = reinterpret_cast<const std::uint16_t*>(header);
  RunScales run;
  run.d = load(halves);
  if constexpr (kLift<kLayout> > 0) {
    run.d = mul(run.d, splat(1.0f / (1 << kLift<kLayout>)));
  }
  if constexpr (kCodedMin<kLayout>) {
    run.m = load(halves + kPanelRows);
    if constexpr (kPerHalf<kLayout>) {
      run.m = mul(run.m, splat(1.0f / 32.0f));  // half_bias = -32 * sum
    } else if constexpr (kBlocks<kLayout>.blocks > 1) {
      run.m = mul(run.m, splat(-1.0f));
    }
  }
  return run;
}

/// Products of a half (11 bits) and a byte: exact.
template <PackedLayout kLayout>
inline BlockScales load_block_scales(const RunScales& run, const std::uint8_t* block) {
  constexpr std::size_t kVector = kPanelRows;  // bytes
  BlockScales out;
  if constexpr (kLayout == PackedLayout::kU2Sub16Min) {
#pragma GCC unroll 2
    for (std::size_t half = 0; half < 2; ++half) {
      out.d[half] = mul(run.d, load_low_nibbles(block + half * kVector));
      out.m[half] = mul(run.m, load_high_nibbles(block + half * kVector));
    }
  } else if constexpr (kPerHalf<kLayout>) {
    out.d[0] = mul(run.d, load_signed(block));
    out.d[1] = mul(run.d, load_signed(block + kVector));
  } else if constexpr (kBlocks<kLayout>.scales > 0) {
    out.d[0] = mul(run.d, load_signed(block));
    if constexpr (kCodedMin<kLayout>) {
      out.m[0] = mul(run.m, load_unsigned(block + kVector));
    }
  } else {
    out.d[0] = run.d;
    out.m[0] = run.m;
  }
  return out;
}

/// 32 columns of a panel in float, out[c * 16 + row], with the bits of `decode_coded_block`.
template <PackedLayout kLayout>
void decode_coded_columns(const std::uint8_t* panel, std::size_t block, float* out) {
  constexpr BlockLayout kL = kBlocks<kLayout>;
  const std::uint8_t* header = panel + block / kL.blocks * kL.run_bytes;
  const std::uint8_t* at = header + kL.header_bytes + block % kL.blocks * kL.block_bytes;
  const BlockScales scales = load_block_scales<kLayout>(load_run_scales<kLayout>(header), at);
  Bytes w[8];
  unpack_codes<kLayout>(at + kL.scale_bytes, w);
  alignas(64) std::uint8_t codes[8 * 64];
  for (std::size_t group = 0; group < 8; ++group) {
    store_bytes(codes + group * 64, w[group]);
  }
  for (std::size_t c = 0; c < kQuantBlock; ++c) {
    const std::size_t half = kPerHalf<kLayout> ? c / 16 : 0;
    const Vec code = sub(load_code_column<false>(codes, c), splat(kOffset<kLayout>));
    Vec value = mul(code, scales.d[half]);
    if constexpr (kCodedMin<kLayout>) {
      const Vec m = kPerHalf<kLayout> ? mul(scales.m[half], splat(-32.0f)) : scales.m[half];
      value = add(value, m);
    }
    store(out + c * kLanes, value);
  }
}

/// Calls `function` with the layout as a template argument.
template <typename Function>
void with_coded_layout(PackedLayout layout, Function function) {
  switch (layout) {
    case PackedLayout::kU5Scale:
      return function.template operator()<PackedLayout::kU5Scale>();
    case PackedLayout::kU5ScaleMin:
      return function.template operator()<PackedLayout::kU5ScaleMin>();
    case PackedLayout::kT4Scale:
      return function.template operator()<PackedLayout::kT4Scale>();
    case PackedLayout::kT4Sub32:
      return function.template operator()<PackedLayout::kT4Sub32>();
    case PackedLayout::kU4Sub32Min:
      return function.template operator()<PackedLayout::kU4Sub32Min>();
    case PackedLayout::kU5Sub32Min:
      return function.template operator()<PackedLayout::kU5Sub32Min>();
    case PackedLayout::kU2Sub16Min:
      return function.template operator()<PackedLayout::kU2Sub16Min>();
    case PackedLayout::kU3Sub16:
      return function.template operator()<PackedLayout::kU3Sub16>();
    case PackedLayout::kU6Sub16:
      return function.template operator()<PackedLayout::kU6Sub16>();
    default:
      return;
  }
}

}  // namespace
}  // namespace pocket::POCKET_ISA
