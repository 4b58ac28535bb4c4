#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gguf_samples.h"
#include "pocket/base/error.h"
#include "pocket/io/gguf_parser.h"

// Every way to be wrong that the parser must refuse, with the message that names the culprit.

namespace pocket {
namespace {

using test::ByteWriter;
using test::GgufBuilder;
using test::kArrayType;
using test::kStringType;
using test::sample_file;

constexpr std::uint64_t kHuge = std::numeric_limits<std::uint64_t>::max();
constexpr auto kF32 = static_cast<std::uint32_t>(DType::kF32);

void check_refused(const std::vector<std::byte>& bytes, const std::vector<std::string>& mentions,
                   ErrorCode code = ErrorCode::kBadFile) {
  try {
    (void)parse_gguf(bytes, "model.gguf");
    FAIL_CHECK("accepted");
  } catch (const Error& error) {
    const std::string message = error.what();
    CAPTURE(message);
    CHECK(error.code() == code);
    CHECK(message.starts_with("model.gguf: "));
    CHECK(message.size() < 400);
    for (const std::string& mention : mentions) {
      CAPTURE(mention);
      CHECK(message.find(mention) != std::string::npos);
    }
  }
}

GgufBuilder one_tensor(const std::vector<std::uint64_t>& file_shape, std::uint32_t type,
                       std::uint64_t offset = 0) {
  GgufBuilder file;
  file.info("w", file_shape, type, offset);
  return file;
}

std::vector<std::byte> with_data(const GgufBuilder& file, std::size_t count) {
  std::vector<std::byte> bytes = file.bytes();
  while (bytes.size() % 32 != 0) bytes.push_back(std::byte{0});
  bytes.resize(bytes.size() + count);
  return bytes;
}

TEST_CASE("a file cut at any byte is refused") {
  const std::vector<std::byte> whole = sample_file().bytes();
  (void)parse_gguf(whole, "whole");
  for (std::size_t length = 0; length < whole.size(); ++length) {
    CAPTURE(length);
    // Its own allocation, so that AddressSanitizer sees a read past the cut.
    const auto cut = std::make_unique<std::byte[]>(length);
    std::copy_n(whole.begin(), length, cut.get());
    try {
      (void)parse_gguf({cut.get(), length}, "cut");
      FAIL("accepted");
    } catch (const Error& error) {
      REQUIRE(error.code() == ErrorCode::kBadFile);
    }
  }
}

TEST_CASE("what is not a GGUF file of a known version") {
  check_refused({}, {"not a GGUF file"});
  GgufBuilder file = sample_file();
  file.magic = "GGML";
  check_refused(file.bytes(), {"not a GGUF file", "'GGML'"});
  file.magic = std::string("\x1b[2J", 4);
  check_refused(file.bytes(), {"\\x1b[2J"});  // control characters are escaped
  file.magic = "GGUF";
  for (const std::uint32_t version : {0u, 1u, 4u, 65535u}) {
    file.version = version;
    check_refused(file.bytes(), {"version " + std::to_string(version)}, ErrorCode::kUnsupported);
  }
  file.version = 0x03000000;
  check_refused(file.bytes(), {"big-endian"}, ErrorCode::kUnsupported);
}

TEST_CASE("counts that the file cannot hold are refused before anything is allocated") {
  for (const std::uint64_t extra : {std::uint64_t{1} << 20, std::uint64_t{1} << 40, kHuge - 28}) {
    CAPTURE(extra);
    GgufBuilder keys = sample_file();
    keys.extra_keys = extra;
    check_refused(keys.bytes(), {"metadata keys"});
    GgufBuilder tensors = sample_file();
    tensors.extra_tensors = extra;
    check_refused(tensors.bytes(), {"tensors"});
  }
  GgufBuilder file;
  file.extra_tensors = 10;
  check_refused(file.bytes(), {"10 tensors announced, but only 0 bytes follow"});
}

TEST_CASE("string lengths") {
  for (const std::uint64_t length : {std::uint64_t{100}, std::uint64_t{1} << 35, kHuge}) {
    CAPTURE(length);
    GgufBuilder value;
    value.begin_key("k", kStringType).number(length).raw("abc");
    check_refused(value.bytes(), {"metadata key 'k'", std::to_string(length) + " bytes"});
    GgufBuilder element;
    element.begin_key("k", kArrayType).number(kStringType).number(std::uint64_t{1}).number(length);
    check_refused(element.bytes(), {"metadata key 'k'", std::to_string(length) + " bytes"});
  }
  const std::vector<std::byte> long_key = GgufBuilder().key(std::string(65536, 'k'), true).bytes();
  check_refused(long_key, {"metadata key 0", "a key of 65536 bytes"});
  const std::vector<std::byte> longest_key =
      GgufBuilder().key(std::string(65535, 'k'), true).bytes();
  CHECK(parse_gguf(longest_key, "longest").metadata.size() == 1);
  GgufBuilder name;
  name.info(std::string(257, 'n'), {1}, kF32, 0);
  check_refused(with_data(name, 4), {"tensor 0", "257 bytes"});
}

TEST_CASE("names") {
  check_refused(GgufBuilder().key("", 1.0).bytes(), {"metadata key 0", "empty"});
  check_refused(GgufBuilder().key("k", true).key("j", 1.0).key("k", true).bytes(),
                {"metadata key 'k'", "twice"});
  GgufBuilder unnamed;
  unnamed.info("", {1}, kF32, 0);
  check_refused(with_data(unnamed, 4), {"tensor 0", "empty"});
  GgufBuilder twice;
  twice.info("w", {1}, kF32, 0).info("w", {1}, kF32, 32);
  check_refused(with_data(twice, 64), {"tensor 'w'", "twice"});
}

TEST_CASE("value types and values") {
  for (const std::uint32_t type : {13u, 255u, 0xffffffffu}) {
    GgufBuilder scalar;
    scalar.begin_key("k", type).number(std::uint64_t{0});
    check_refused(scalar.bytes(), {"'k'", "unknown value type " + std::to_string(type)});
    GgufBuilder array;
    array.begin_key("k", kArrayType).number(type).number(std::uint64_t{0});
    check_refused(array.bytes(), {"'k'", "element type " + std::to_string(type)});
  }
  GgufBuilder nested;
  nested.begin_key("k", kArrayType).number(kArrayType).number(std::uint64_t{1});
  check_refused(nested.bytes(), {"'k'", "arrays of arrays"}, ErrorCode::kUnsupported);
  GgufBuilder flag;
  flag.begin_key("k", 7).number(std::uint8_t{2});
  check_refused(flag.bytes(), {"'k'", "a bool is 2"});
  GgufBuilder flags;
  flags.begin_key("k", kArrayType)
      .number(std::uint32_t{7})
      .number(std::uint64_t{1})
      .number(std::uint8_t{128});
  check_refused(flags.bytes(), {"'k'", "a bool is 128"});
}

TEST_CASE("array counts") {
  for (std::uint32_t type = 0; type <= 12; ++type) {
    if (type == kArrayType) continue;
    // The last one overflows when multiplied by an element size of 2, 4 or 8.
    for (const std::uint64_t count : {std::uint64_t{9}, kHuge, (kHuge >> 1) + 1}) {
      CAPTURE(type);
      CAPTURE(count);
      GgufBuilder file;
      file.begin_key("k", kArrayType).number(type).number(count).number(std::uint64_t{1});
      check_refused(file.bytes(), {"metadata key 'k'", "truncated"});
    }
  }
}

TEST_CASE("metadata that grows beyond the limit when decoded is refused before it is allocated") {
  // 2^23 + 1 empty strings would take 256 MiB of std::string.
  constexpr std::uint64_t kCount = (std::uint64_t{1} << 23) + 1;
  GgufBuilder file;
  file.begin_key("k", kArrayType).number(kStringType).number(kCount);
  std::vector<std::byte> bytes = file.bytes();
  bytes.resize(bytes.size() + kCount * 8);
  check_refused(bytes, {"metadata key 'k'", "more than 268435456 bytes"});
}

TEST_CASE("alignment") {
  for (const std::uint32_t alignment : {0u, 1u, 4u, 24u, 33u, 1u << 21, 0x80000000u}) {
    const std::string value = std::to_string(alignment);
    check_refused(GgufBuilder().key("general.alignment", alignment).bytes(),
                  {"'general.alignment'", "is " + value, "power of two"});
  }
  check_refused(GgufBuilder().key("general.alignment", "32").bytes(), {"unsigned integer"});
  check_refused(GgufBuilder().key("general.alignment", std::int32_t{32}).bytes(),
                {"unsigned integer"});
}

TEST_CASE("shapes") {
  check_refused(with_data(one_tensor({}, kF32), 64), {"tensor 'w'", "0 dimensions"});
  check_refused(with_data(one_tensor({1, 1, 1, 1, 1}, kF32), 64), {"tensor 'w'", "5 dimensions"});
  check_refused(with_data(one_tensor({4, 0}, kF32), 64), {"tensor 'w'", "a dimension is 0"});
  check_refused(with_data(one_tensor({33}, 2), 64), {"tensor 'w'", "33 elements", "Q4_0"});
  const std::uint64_t big = std::uint64_t{1} << 32;
  check_refused(with_data(one_tensor({big, big}, kF32), 64), {"tensor 'w'", "overflows"});
  check_refused(with_data(one_tensor({kHuge}, kF32), 64), {"tensor 'w'", "overflows"});
  check_refused(with_data(one_tensor({4, kHuge, kHuge, kHuge}, kF32), 64), {"overflows"});
  // 2^62 elements: 2^64 bytes wrap to 0.
  check_refused(with_data(one_tensor({big, big / 4}, kF32), 64), {"tensor 'w'", "overflows"});
}

TEST_CASE("tensor formats that this build cannot read are named") {
  check_refused(with_data(one_tensor({256}, 29), 56), {"tensor 'w'", "IQ1_M", "id 29"},
                ErrorCode::kUnsupported);
  check_refused(with_data(one_tensor({256}, 4), 144), {"tensor 'w'", "unknown", "id 4"},
                ErrorCode::kUnsupported);
  check_refused(with_data(one_tensor({256}, 0xffffffffu), 144), {"tensor 'w'", "id 4294967295"},
                ErrorCode::kUnsupported);
}

TEST_CASE("tensor extents") {
  CHECK(parse_gguf(with_data(one_tensor({16}, kF32), 64), "fits").tensors.size() == 1);
  check_refused(with_data(one_tensor({17}, kF32), 64), {"tensor 'w'", "needs 68 bytes", "has 64"});
  check_refused(with_data(one_tensor({16}, kF32, 32), 64), {"tensor 'w'", "offset 32"});
  check_refused(with_data(one_tensor({1}, kF32, 4), 64),
                {"tensor 'w'", "offset 4", "alignment 32"});
  check_refused(with_data(one_tensor({16}, kF32, kHuge - 31), 64), {"tensor 'w'", "truncated"});
  check_refused(one_tensor({1}, kF32).bytes(), {"tensor 'w'", "has 0"});
  GgufBuilder overlapping;
  overlapping.info("a", {16}, kF32, 0).info("b", {8}, kF32, 32);
  check_refused(with_data(overlapping, 64), {"tensor 'b'", "overlaps", "offset 32", "ends at 64"});
}

}  // namespace
}  // namespace pocket
