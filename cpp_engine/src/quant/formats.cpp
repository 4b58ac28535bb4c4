#include "formats.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "blocks.h"
#include "pocket/base/error.h"
#include "pocket/quant/coded_block.h"

namespace pocket::quant {
namespace {

/// Decoder of the formats that are taken apart first.
template <DType kType, std::size_t kElements, std::size_t kBytes>
void decode_coded(const std::byte* in, std::size_t blocks, float* out) {
  CodedBlock block;
  for (std::size_t b = 0; b < blocks; ++b) {
    read_coded_block(kType, in + b * kBytes, block);
    decode_coded_block(kType, block, out + b * kElements);
  }
}

template <DType kType, std::size_t kElements, std::size_t kBytes>
constexpr Format coded(std::string_view name) {
  return {kType, {name, kElements, kBytes}, decode_coded<kType, kElements, kBytes>};
}

// One row per readable format: GGUF type, name, elements and bytes of a block, decoder.
constexpr Format kFormats[] = {
    {DType::kF32, {"F32", 1, 4}, decode_f32},      {DType::kF16, {"F16", 1, 2}, decode_f16},
    {DType::kBF16, {"BF16", 1, 2}, decode_bf16},   {DType::kQ4_0, {"Q4_0", 32, 18}, decode_q4_0},
    {DType::kQ4_1, {"Q4_1", 32, 20}, decode_q4_1}, {DType::kQ8_0, {"Q8_0", 32, 34}, decode_q8_0},
    coded<DType::kQ5_0, 32, 22>("Q5_0"),           coded<DType::kQ5_1, 32, 24>("Q5_1"),
    coded<DType::kQ2_K, 256, 84>("Q2_K"),          coded<DType::kQ3_K, 256, 110>("Q3_K"),
    coded<DType::kQ4_K, 256, 144>("Q4_K"),         coded<DType::kQ5_K, 256, 176>("Q5_K"),
    coded<DType::kQ6_K, 256, 210>("Q6_K"),         coded<DType::kIQ4_NL, 32, 18>("IQ4_NL"),
    coded<DType::kIQ4_XS, 256, 136>("IQ4_XS"),
};

}  // namespace

const Format* find_format(std::uint32_t gguf_type_id) noexcept {
  const auto* const row = std::find_if(
      std::begin(kFormats), std::end(kFormats),
      [&](const auto& f) { return static_cast<std::uint32_t>(f.type) == gguf_type_id; });
  return row == std::end(kFormats) ? nullptr : row;
}

const Format& format_of(DType type) {
  const auto id = static_cast<std::uint32_t>(type);
  if (const Format* const format = find_format(id)) return *format;
  throw Error(ErrorCode::kUnsupported, "tensor type " + std::string(gguf_type_name(id)) + " (id " +
                                           std::to_string(id) + ") is not supported");
}

}  // namespace pocket::quant
