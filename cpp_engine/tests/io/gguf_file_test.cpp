#include <doctest/doctest.h>

#include <string>

#include "gguf_samples.h"
#include "pocket/base/error.h"
#include "pocket/io/gguf.h"
#include "pocket/quant/dequantize.h"
#include "temp_file.h"

namespace pocket {
namespace {

using test::sample_file;
using test::TempFile;

template <typename Call>
void check_bad_key(const GgufFile& file, const Call& call, const std::string& key,
                   const std::string& mention) {
  try {
    (void)call(key);
    FAIL_CHECK("accepted");
  } catch (const Error& error) {
    const std::string message = error.what();
    CAPTURE(message);
    CHECK(error.code() == ErrorCode::kBadFile);
    CHECK(message.find(file.path().string()) != std::string::npos);
    CHECK(message.find("'" + key + "'") != std::string::npos);
    CHECK(message.find(mention) != std::string::npos);
  }
}

TEST_CASE("typed access to metadata") {
  const TempFile on_disk(sample_file().bytes());
  const GgufFile file(on_disk.path());
  CHECK(file.get_uint("u32") == 4'000'000'000u);
  CHECK(file.get_uint("absent") == std::nullopt);
  CHECK(file.get_float("f32") == double{1e-5f});
  CHECK(file.get_float("absent") == std::nullopt);
  CHECK(file.get_string("general.architecture") == "llama");
  CHECK(file.get_string("absent") == std::nullopt);
  CHECK(file.get_bool("yes") == true);
  CHECK(file.get_bool("absent") == std::nullopt);

  const auto uint = [&](const std::string& key) { return file.get_uint(key); };
  const auto real = [&](const std::string& key) { return file.get_float(key); };
  const auto text = [&](const std::string& key) { return file.get_string(key); };
  check_bad_key(file, uint, "i8", "-100");
  check_bad_key(file, uint, "f32", "is a float, expected an integer");
  check_bad_key(file, uint, "yes", "is a bool");
  check_bad_key(file, real, "u8", "is an unsigned integer, expected a float");
  check_bad_key(file, real, "empty", "is a string");
  check_bad_key(file, text, "a.string", "is an array, expected a string");
  check_bad_key(file, text, "i64", "is a signed integer");
  const auto flag = [&](const std::string& key) { return file.get_bool(key); };
  check_bad_key(file, flag, "u32", "is an unsigned integer, expected a bool");
}

TEST_CASE("non-negative signed integers are accepted as unsigned") {
  const TempFile on_disk(test::GgufBuilder().key("n", std::int32_t{7}).bytes());
  CHECK(GgufFile(on_disk.path()).get_uint("n") == 7u);
}

TEST_CASE("tensors are found by name and their pages come back after release") {
  const TempFile on_disk(sample_file().bytes());
  const GgufFile file(on_disk.path());
  CHECK(file.find_tensor("absent") == nullptr);
  const GgufTensor* const norm = file.find_tensor("norm.weight");
  REQUIRE(norm != nullptr);
  file.release_pages();
  std::vector<float> values(3);
  dequantize_row(norm->type, norm->data, values);
  CHECK(values == std::vector<float>{1.0f, -2.0f, 0.5f});
}

TEST_CASE("errors name the file") {
  std::vector<std::byte> bytes = sample_file().bytes();
  bytes.pop_back();
  const TempFile on_disk(bytes);
  try {
    const GgufFile file(on_disk.path());
    FAIL("accepted");
  } catch (const Error& error) {
    const std::string message = error.what();
    CHECK(message.find(on_disk.path().string()) != std::string::npos);
    CHECK(message.find("'cube'") != std::string::npos);
  }
}

TEST_CASE("a file that gguf-py wrote") {
  const GgufFile file(std::string(POCKET_GGUF_CORPUS) + "/gguf_py.gguf");
  CHECK(file.get_string("general.architecture") == "llama");
  CHECK(file.get_uint("llama.block_count") == 2u);
  CHECK(file.get_float("llama.attention.layer_norm_rms_epsilon") == double{1e-5f});
  const GgufTensor* const matrix = file.find_tensor("blk.0.attn_q.weight");
  REQUIRE(matrix != nullptr);
  CHECK(matrix->type == DType::kQ8_0);
  CHECK(matrix->shape == std::vector<std::size_t>{2, 32});
  // gguf-py quantised rows of 0, 1, ... 31 and of -127.
  std::vector<float> row(32);
  dequantize_row(matrix->type, matrix->data.subspan(34), row);
  CHECK(row == std::vector<float>(32, -127.0f));
  const GgufTensor* const norm = file.find_tensor("output_norm.weight");
  REQUIRE(norm != nullptr);
  CHECK(norm->shape == std::vector<std::size_t>{4});
}

}  // namespace
}  // namespace pocket
