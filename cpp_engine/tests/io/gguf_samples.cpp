#include "gguf_samples.h"

#include <stdexcept>

#include "pocket/quant/dequantize.h"

namespace pocket::test {
namespace {

void require(bool condition, const char* what) {
  if (!condition) throw std::logic_error(what);
}

void check_tensor(const GgufTensor& tensor, std::span<const std::byte> bytes) {
  require(!tensor.shape.empty() && tensor.shape.size() <= 4, "number of dimensions");
  std::size_t rows = 1;
  for (std::size_t i = 0; i + 1 < tensor.shape.size(); ++i) rows *= tensor.shape[i];
  const std::size_t row = row_bytes(tensor.type, tensor.shape.back());
  require(rows > 0 && row > 0 && tensor.data.size() / row == rows && tensor.data.size() % row == 0,
          "size of the data");
  require(tensor.data.data() >= bytes.data() &&
              tensor.data.data() + tensor.data.size() <= bytes.data() + bytes.size(),
          "data inside the file");
  std::vector<float> values(tensor.shape.back());
  for (std::size_t r = 0; r < rows; ++r) {
    dequantize_row(tensor.type, tensor.data.subspan(r * row, row), values);
  }
}

}  // namespace

GgufBuilder sample_file() {
  GgufBuilder file;
  file.key("general.architecture", "llama")
      .key("general.alignment", std::uint32_t{32})
      .key("u8", std::uint8_t{200})
      .key("i8", std::int8_t{-100})
      .key("u16", std::uint16_t{60000})
      .key("i16", std::int16_t{-30000})
      .key("u32", std::uint32_t{4'000'000'000})
      .key("i32", std::int32_t{-2'000'000'000})
      .key("u64", ~std::uint64_t{0})
      .key("i64", std::int64_t{-1} << 62)
      .key("f32", 1e-5f)
      .key("f64", 0.1)
      .key("yes", true)
      .key("no", false)
      .key("empty", "")
      .array<std::uint8_t>("a.u8", {0, 255})
      .array<std::int8_t>("a.i8", {-128, 127})
      .array<std::uint16_t>("a.u16", {65535})
      .array<std::int16_t>("a.i16", {-32768})
      .array<std::uint32_t>("a.u32", {1, 2, 3})
      .array<std::int32_t>("a.i32", {-1, 5})
      .array<std::uint64_t>("a.u64", {~std::uint64_t{0}})
      .array<std::int64_t>("a.i64", {-7})
      .array<float>("a.f32", {0.5f, -0.25f})
      .array<double>("a.f64", {2.5})
      .array<bool>("a.bool", {true, false, true})
      .array<std::string>("a.string", {"", "token", "\xe2\x96\x81long enough for the heap"})
      .array<std::string>("a.none", {});
  std::vector<std::uint8_t> q4(3 * 2 * 18);
  for (std::size_t i = 0; i < q4.size(); ++i) q4[i] = static_cast<std::uint8_t>(i * 7);
  file.tensor("norm.weight", {3}, DType::kF32, std::vector<float>{1.0f, -2.0f, 0.5f})
      .tensor("blk.0.weight", {64, 3}, DType::kQ4_0, q4)
      .tensor("cube", {2, 3, 4, 5}, DType::kF16, std::vector<std::uint16_t>(120, 0x3c00));
  return file;
}

void check_contents(const GgufContents& contents, std::span<const std::byte> bytes) {
  for (const auto& [name, tensor] : contents.tensors) {
    require(!name.empty() && name == tensor.name, "name of a tensor");
    check_tensor(tensor, bytes);
  }
  for (const auto& [key, value] : contents.metadata) require(!key.empty(), "empty key");
}

}  // namespace pocket::test
