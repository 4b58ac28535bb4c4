#include "formats.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "blocks.h"
#include "pocket/base/error.h"

namespace pocket::quant {
namespace {

// One row per readable format: GGUF type, name, elements and bytes of a block, decoder.
constexpr Format kFormats[] = {
    {DType::kF32, {"F32", 1, 4}, decode_f32},      {DType::kF16, {"F16", 1, 2}, decode_f16},
    {DType::kQ4_0, {"Q4_0", 32, 18}, decode_q4_0}, {DType::kQ4_1, {"Q4_1", 32, 20}, decode_q4_1},
    {DType::kQ8_0, {"Q8_0", 32, 34}, decode_q8_0}, {DType::kBF16, {"BF16", 1, 2}, decode_bf16},
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
