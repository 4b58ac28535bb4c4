#include "pocket/quant/dequantize.h"

#include <string>

#include "formats.h"
#include "pocket/base/error.h"

namespace pocket {

void dequantize_row(DType type, std::span<const std::byte> row, std::span<float> out) {
  const quant::Format& format = quant::format_of(type);
  const std::size_t expected = row_bytes(type, out.size());
  if (row.size() != expected) {
    throw Error(ErrorCode::kInvalidArgument, "a row of " + std::to_string(out.size()) + " " +
                                                 std::string(format.info.name) +
                                                 " elements takes " + std::to_string(expected) +
                                                 " bytes, not " + std::to_string(row.size()));
  }
  if (out.empty()) return;
  format.decode(row.data(), out.size() / format.info.block_size, out.data());
}

}  // namespace pocket
