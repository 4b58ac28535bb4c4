#include "pocket/io/gguf_parser.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <variant>
#include <vector>

#include "gguf_samples.h"
#include "pocket/quant/dequantize.h"

namespace pocket {
namespace {

using test::GgufBuilder;
using test::sample_file;

template <typename T>
const T& value_at(const GgufContents& contents, std::string_view key) {
  const auto found = contents.metadata.find(key);
  REQUIRE(found != contents.metadata.end());
  REQUIRE(std::holds_alternative<T>(found->second));
  return std::get<T>(found->second);
}

template <typename T>
const std::vector<T>& array_at(const GgufContents& contents, std::string_view key) {
  const auto& array = value_at<GgufArray>(contents, key);
  REQUIRE(std::holds_alternative<std::vector<T>>(array));
  return std::get<std::vector<T>>(array);
}

TEST_CASE("scalars of every type are widened without loss") {
  const std::vector<std::byte> bytes = sample_file().bytes();
  const GgufContents file = parse_gguf(bytes, "sample");
  CHECK(file.metadata.size() == 28);
  CHECK(value_at<std::string>(file, "general.architecture") == "llama");
  CHECK(value_at<std::string>(file, "empty").empty());
  CHECK(value_at<std::uint64_t>(file, "u8") == 200);
  CHECK(value_at<std::int64_t>(file, "i8") == -100);
  CHECK(value_at<std::uint64_t>(file, "u16") == 60000);
  CHECK(value_at<std::int64_t>(file, "i16") == -30000);
  CHECK(value_at<std::uint64_t>(file, "u32") == 4'000'000'000);
  CHECK(value_at<std::int64_t>(file, "i32") == -2'000'000'000);
  CHECK(value_at<std::uint64_t>(file, "u64") == std::numeric_limits<std::uint64_t>::max());
  CHECK(value_at<std::int64_t>(file, "i64") == std::int64_t{-1} << 62);
  CHECK(value_at<double>(file, "f32") == double{1e-5f});
  CHECK(value_at<double>(file, "f64") == 0.1);
  CHECK(value_at<bool>(file, "yes"));
  CHECK_FALSE(value_at<bool>(file, "no"));
}

TEST_CASE("arrays of every type") {
  const std::vector<std::byte> bytes = sample_file().bytes();
  const GgufContents file = parse_gguf(bytes, "sample");
  using Unsigned = std::vector<std::uint64_t>;
  using Signed = std::vector<std::int64_t>;
  CHECK(array_at<std::uint64_t>(file, "a.u8") == Unsigned{0, 255});
  CHECK(array_at<std::int64_t>(file, "a.i8") == Signed{-128, 127});
  CHECK(array_at<std::uint64_t>(file, "a.u16") == Unsigned{65535});
  CHECK(array_at<std::int64_t>(file, "a.i16") == Signed{-32768});
  CHECK(array_at<std::uint64_t>(file, "a.u32") == Unsigned{1, 2, 3});
  CHECK(array_at<std::int64_t>(file, "a.i32") == Signed{-1, 5});
  CHECK(array_at<std::uint64_t>(file, "a.u64") == Unsigned{~std::uint64_t{0}});
  CHECK(array_at<std::int64_t>(file, "a.i64") == Signed{-7});
  CHECK(array_at<double>(file, "a.f32") == std::vector<double>{0.5, -0.25});
  CHECK(array_at<double>(file, "a.f64") == std::vector<double>{2.5});
  CHECK(array_at<bool>(file, "a.bool") == std::vector<bool>{true, false, true});
  CHECK(array_at<std::string>(file, "a.string") ==
        std::vector<std::string>{"", "token", "\xe2\x96\x81long enough for the heap"});
  CHECK(array_at<std::string>(file, "a.none").empty());
}

TEST_CASE("tensors have row-major shapes and exactly their bytes") {
  const std::vector<std::byte> bytes = sample_file().bytes();
  const GgufContents file = parse_gguf(bytes, "sample");
  test::check_contents(file, bytes);
  REQUIRE(file.tensors.size() == 3);
  const GgufTensor& matrix = file.tensors.at("blk.0.weight");
  CHECK(matrix.type == DType::kQ4_0);
  CHECK(matrix.shape == std::vector<std::size_t>{3, 64});
  CHECK(matrix.data.size() == 3 * 2 * 18);
  CHECK(matrix.data[5] == std::byte{35});
  CHECK(file.tensors.at("cube").shape == std::vector<std::size_t>{5, 4, 3, 2});
  std::vector<float> norm(3);
  dequantize_row(DType::kF32, file.tensors.at("norm.weight").data, norm);
  CHECK(norm == std::vector<float>{1.0f, -2.0f, 0.5f});
}

TEST_CASE("version 2 has the same layout") {
  GgufBuilder file = sample_file();
  file.version = 2;
  const std::vector<std::byte> bytes = file.bytes();
  CHECK(parse_gguf(bytes, "v2").tensors.size() == 3);
}

TEST_CASE("files without keys, without tensors or without either") {
  const std::vector<std::byte> nothing = GgufBuilder().bytes();
  CHECK(parse_gguf(nothing, "nothing").metadata.empty());
  const std::vector<std::byte> keys = GgufBuilder().key("a", true).bytes();
  CHECK(parse_gguf(keys, "keys").metadata.size() == 1);
  const std::vector<std::byte> tensors =
      GgufBuilder().tensor("t", {1}, DType::kF32, std::vector<float>{4.0f}).bytes();
  CHECK(parse_gguf(tensors, "tensors").tensors.at("t").data.size() == 4);
}

TEST_CASE("the alignment key moves the data") {
  for (const std::uint32_t alignment : {8u, 64u, 4096u}) {
    CAPTURE(alignment);
    GgufBuilder file;
    file.alignment = alignment;
    file.key("general.alignment", alignment)
        .tensor("a", {1}, DType::kF32, std::vector<float>{4.0f})
        .tensor("b", {1}, DType::kF32, std::vector<float>{5.0f});
    const std::vector<std::byte> bytes = file.bytes();
    const GgufContents contents = parse_gguf(bytes, "aligned");
    float value = 0;
    dequantize_row(DType::kF32, contents.tensors.at("b").data, {&value, 1});
    CHECK(value == 5.0f);
    CHECK((contents.tensors.at("b").data.data() - bytes.data()) % alignment == 0);
  }
}

TEST_CASE("names and keys may be any bytes") {
  const std::string odd("k\0\xff", 3);
  const std::vector<std::byte> bytes = GgufBuilder().key(odd, "v").bytes();
  CHECK(parse_gguf(bytes, "odd").metadata.contains(odd));
}

}  // namespace
}  // namespace pocket
