#include "pocket/quant/dtype.h"

#include <iterator>
#include <limits>
#include <string>

#include "formats.h"
#include "pocket/base/error.h"

namespace pocket {
namespace {

// By type id, as ggml numbers them; removed and unassigned ids are empty.
constexpr std::string_view kGgufTypeNames[] = {
    "F32",     "F16",   "Q4_0",   "Q4_1",  "",      "",       "Q5_0", "Q5_1",    "Q8_0",
    "Q8_1",    "Q2_K",  "Q3_K",   "Q4_K",  "Q5_K",  "Q6_K",   "Q8_K", "IQ2_XXS", "IQ2_XS",
    "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8",   "I16",     "I32",
    "I64",     "F64",   "IQ1_M",  "BF16",  "",      "",       "",     "TQ1_0",   "TQ2_0",
    "",        "",      "",       "MXFP4", "NVFP4", "Q1_0",
};

}  // namespace

bool is_supported_dtype(std::uint32_t gguf_type_id) noexcept {
  return quant::find_format(gguf_type_id) != nullptr;
}

std::string_view gguf_type_name(std::uint32_t gguf_type_id) noexcept {
  if (gguf_type_id >= std::size(kGgufTypeNames) || kGgufTypeNames[gguf_type_id].empty()) {
    return "unknown";
  }
  return kGgufTypeNames[gguf_type_id];
}

const DTypeInfo& dtype_info(DType type) {
  return quant::format_of(type).info;
}

std::size_t row_bytes(DType type, std::size_t columns) {
  const DTypeInfo& info = dtype_info(type);
  if (columns % info.block_size != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "a row of " + std::to_string(columns) + " columns cannot be stored as " +
                    std::string(info.name) + ": not a multiple of its block of " +
                    std::to_string(info.block_size));
  }
  const std::size_t blocks = columns / info.block_size;
  if (blocks > std::numeric_limits<std::size_t>::max() / info.block_bytes) {
    throw Error(ErrorCode::kInvalidArgument,
                "a row of " + std::to_string(columns) + " columns does not fit the address space");
  }
  return blocks * info.block_bytes;
}

}  // namespace pocket
