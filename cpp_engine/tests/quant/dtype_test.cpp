#include "pocket/quant/dtype.h"

#include <doctest/doctest.h>

#include <limits>
#include <string>

#include "pocket/base/error.h"

namespace pocket {
namespace {

TEST_CASE("geometry of the formats") {
  CHECK(row_bytes(DType::kF32, 7) == 28);
  CHECK(row_bytes(DType::kF16, 7) == 14);
  CHECK(row_bytes(DType::kBF16, 7) == 14);
  CHECK(row_bytes(DType::kQ4_0, 64) == 36);
  CHECK(row_bytes(DType::kQ4_1, 64) == 40);
  CHECK(row_bytes(DType::kQ8_0, 64) == 68);
  CHECK(row_bytes(DType::kQ8_0, 0) == 0);
  CHECK(row_bytes(DType::kQ5_0, 64) == 44);
  CHECK(row_bytes(DType::kQ5_1, 64) == 48);
  CHECK(row_bytes(DType::kIQ4_NL, 64) == 36);
  CHECK(row_bytes(DType::kQ2_K, 512) == 168);
  CHECK(row_bytes(DType::kQ3_K, 512) == 220);
  CHECK(row_bytes(DType::kQ4_K, 512) == 288);
  CHECK(row_bytes(DType::kQ5_K, 512) == 352);
  CHECK(row_bytes(DType::kQ6_K, 512) == 420);
  CHECK(row_bytes(DType::kIQ4_XS, 512) == 272);
}

TEST_CASE("rows that are not whole blocks or do not fit the address space are refused") {
  CHECK_THROWS_AS((void)row_bytes(DType::kQ4_0, 33), Error);
  CHECK_THROWS_AS((void)row_bytes(DType::kQ4_K, 288), Error);
  CHECK_THROWS_AS((void)row_bytes(DType::kF32, std::numeric_limits<std::size_t>::max() / 2), Error);
}

TEST_CASE("names of supported formats agree with GGUF's") {
  for (std::uint32_t id = 0; id < 64; ++id) {
    if (!is_supported_dtype(id)) continue;
    CHECK(dtype_info(static_cast<DType>(id)).name == gguf_type_name(id));
  }
  CHECK(gguf_type_name(12) == "Q4_K");
  CHECK(gguf_type_name(29) == "IQ1_M");
  CHECK(gguf_type_name(40) == "NVFP4");
  CHECK(gguf_type_name(4) == "unknown");
  CHECK(gguf_type_name(4'000'000'000u) == "unknown");
}

TEST_CASE("an unsupported format is refused by name and id") {
  CHECK_FALSE(is_supported_dtype(29));
  try {
    (void)dtype_info(static_cast<DType>(29));
    FAIL("no exception");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kUnsupported);
    CHECK(std::string(error.what()).find("IQ1_M (id 29)") != std::string::npos);
  }
}

}  // namespace
}  // namespace pocket
