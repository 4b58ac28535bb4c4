#include "gguf_builder.h"

namespace pocket::test {

// Out of line: GCC 12 warns wrongly about an inlined range insert of a few bytes.
ByteWriter& ByteWriter::append(std::span<const std::byte> raw) {
  bytes.insert(bytes.end(), raw.begin(), raw.end());
  return *this;
}

ByteWriter& ByteWriter::pad(std::uint64_t alignment) {
  bytes.resize((bytes.size() + alignment - 1) / alignment * alignment);
  return *this;
}

}  // namespace pocket::test
