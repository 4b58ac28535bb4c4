#include "pocket/io/safetensors.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "pocket/base/error.h"

namespace pocket {
namespace {

namespace fs = std::filesystem;

/// A file with this header and `data` bytes, each of which is its index.
std::vector<std::byte> file_of(const std::string& header, std::size_t data) {
  std::vector<std::byte> bytes(8 + header.size() + data);
  const std::uint64_t size = header.size();
  std::memcpy(bytes.data(), &size, 8);
  std::memcpy(bytes.data() + 8, header.data(), header.size());
  for (std::size_t i = 0; i < data; ++i) {
    bytes[8 + header.size() + i] = static_cast<std::byte>(i);
  }
  return bytes;
}

std::string entry(const std::string& name, const std::string& type, const std::string& shape,
                  std::size_t begin, std::size_t end) {
  std::string text = "\"";
  text.append(name).append("\":{\"dtype\":\"").append(type);
  text.append("\",\"shape\":").append(shape).append(",\"data_offsets\":[");
  text.append(std::to_string(begin)).append(",").append(std::to_string(end)).append("]}");
  return text;
}

std::string header_of(std::initializer_list<std::string> entries) {
  std::string text = "{";
  for (const std::string& item : entries) {
    text.append(text.size() == 1 ? "" : ",").append(item);
  }
  return text.append("}");
}

const std::string kTwo =
    header_of({"\"__metadata__\":{\"format\":\"pt\"}", entry("b", "BF16", "[2,3]", 16, 28),
               entry("a", "F32", "[4]", 0, 16), entry("e", "F16", "[0,7]", 28, 28)});

void parse(std::span<const std::byte> bytes, std::string_view name = "f") {
  static_cast<void>(parse_safetensors(bytes, name));
}

/// A directory of the given files, deleted at the end of scope.
class TempDirectory {
 public:
  TempDirectory() : path_(fs::temp_directory_path() / ("pocket-st-" + std::to_string(::getpid()))) {
    fs::remove_all(path_);
    fs::create_directory(path_);
  }
  ~TempDirectory() { fs::remove_all(path_); }
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;

  void write(const std::string& name, std::span<const std::byte> bytes) const {
    std::ofstream(path_ / name, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  }
  void write(const std::string& name, const std::string& text) const {
    write(name, std::as_bytes(std::span(text)));
  }
  [[nodiscard]] const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

template <typename Action>
std::string message_of(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("tensors by name, with their bytes") {
  const auto bytes = file_of(kTwo, 28);
  const SafetensorsMap tensors = parse_safetensors(bytes, "f");
  REQUIRE(tensors.size() == 3);
  CHECK(tensors.at("a").type == DType::kF32);
  CHECK(tensors.at("a").data.size() == 16);
  CHECK(tensors.at("b").type == DType::kBF16);
  CHECK(tensors.at("b").shape == std::vector<std::size_t>{2, 3});
  CHECK(tensors.at("b").data[0] == std::byte{16});
  CHECK(tensors.at("e").data.empty());
}

TEST_CASE("a truncated file is refused with tensor and byte counts") {
  auto bytes = file_of(kTwo, 28);
  bytes.resize(bytes.size() - 5);
  const std::string message = message_of([&] { parse(bytes, "shard"); });
  CHECK(message.find("shard: tensor 'b'") == 0);
  CHECK(message.find("byte 28 of the data, of which the file has 23") != std::string::npos);
  CHECK(message.find("5 bytes") != std::string::npos);
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    CHECK_THROWS_AS(parse(std::span(bytes).first(size), "shard"), Error);
  }
}

TEST_CASE("headers that do not describe the data are refused") {
  const auto refuse = [](const std::string& header, std::size_t data, const std::string& why) {
    CAPTURE(header);
    const auto bytes = file_of(header, data);
    const std::string message = message_of([&] { parse(bytes, "f"); });
    CAPTURE(message);
    CHECK(message.find(why) != std::string::npos);
  };
  refuse("[]", 0, "must be an object");
  refuse(header_of({entry("a", "F32", "[4]", 0, 16)}), 20, "its tensors take 16 bytes, but 20");
  refuse(header_of({entry("a", "F32", "[4]", 0, 12)}), 12, "shape and type take 16 bytes");
  refuse(header_of({entry("a", "F32", "[4]", 4, 20)}), 20, "starts at byte 4");
  refuse(header_of({entry("a", "F32", "[4]", 0, 16), entry("b", "F32", "[4]", 8, 24)}), 24,
         "inside the tensor before it");
  refuse(header_of({entry("a", "F32", "[-4]", 0, 16)}), 16, "not negative");
  refuse(header_of({entry("a", "F32", "[4]", 16, 0)}), 16, "begin at most end");
  refuse(header_of({entry("a", "F32", "[4611686018427387904,4]", 0, 16)}), 16, "overflows");
  refuse(header_of({entry("a", "F8_E4M3", "[4]", 0, 4)}), 4, "dtype 'F8_E4M3'; supported are F32");
  refuse("{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "has no dtype");
  refuse("{\"a\":3}", 0, "has no dtype");
}

TEST_CASE("a header larger than the file or the limit is refused before it is read") {
  auto bytes = file_of(kTwo, 28);
  std::uint64_t huge = 1ULL << 60;
  std::memcpy(bytes.data(), &huge, 8);
  CHECK(message_of([&] { parse(bytes, "f"); }).find("at most 100000000") != std::string::npos);
  huge = 4096;
  std::memcpy(bytes.data(), &huge, 8);
  CHECK(message_of([&] { parse(bytes, "f"); }).find("truncated") != std::string::npos);
}

TEST_CASE("test_l2: index and shards must agree") {
  const auto first = file_of(header_of({entry("a", "F32", "[4]", 0, 16)}), 16);
  const auto second = file_of(header_of({entry("b", "F32", "[2]", 0, 8)}), 8);
  const auto load = [&](const std::string& weight_map) {
    const TempDirectory directory;
    directory.write("one.safetensors", first);
    directory.write("two.safetensors", second);
    directory.write("model.safetensors.index.json", "{\"weight_map\":" + weight_map + "}");
    return message_of([&] {
      const SafetensorsCheckpoint checkpoint(directory.path());
      CHECK(checkpoint.tensors().contains("a"));
    });
  };
  CHECK(load(R"({"a":"one.safetensors","b":"two.safetensors"})") == "");
  CHECK(
      load(R"({"a":"one.safetensors","b":"three.safetensors"})").find("'three.safetensors' is m") !=
      std::string::npos);
  CHECK(load(R"({"a":"one.safetensors","b":"three.safetensors","c":"three.safetensors"})")
            .find("tensor 'b' and 1 more are in it") != std::string::npos);
  CHECK(load(R"({"a":"one.safetensors"})") == "");  // a file that no tensor names is not opened
}

TEST_CASE("test_l2: stale indices, by name") {
  const auto shard =
      file_of(header_of({entry("a", "F32", "[4]", 0, 16), entry("b", "F32", "[2]", 16, 24)}), 24);
  const auto load = [&](const std::string& index) {
    const TempDirectory directory;
    directory.write("one.safetensors", shard);
    directory.write("model.safetensors.index.json", index);
    return message_of([&] { const SafetensorsCheckpoint checkpoint(directory.path()); });
  };
  const auto names = [](const std::string& message, const char* part) {
    CAPTURE(message);
    return message.find(part) != std::string::npos;
  };
  CHECK(names(load(R"({"weight_map":{"a":"one.safetensors"}})"), "'b': the index names no shard"));
  CHECK(names(load(R"({"weight_map":{"a":"one.safetensors","b":"one.safetensors",
                       "c":"one.safetensors"}})"),
              "'c': the index places it here"));
  CHECK(names(load(R"({"weight_map":{"a":"../one.safetensors"}})"), "must be a file's name"));
  CHECK(names(load(R"({"weight_map":{}})"), "weight_map must be an object"));
}

TEST_CASE("test_l2: a truncated shard of several is refused with file, tensor and bytes") {
  const TempDirectory directory;
  directory.write("one.safetensors", file_of(header_of({entry("a", "F32", "[4]", 0, 16)}), 16));
  auto cut = file_of(header_of({entry("b", "F32", "[2]", 0, 8)}), 8);
  cut.resize(cut.size() - 3);
  directory.write("two.safetensors", cut);
  directory.write("model.safetensors.index.json",
                  R"({"weight_map":{"a":"one.safetensors","b":"two.safetensors"}})");
  const std::string message =
      message_of([&] { const SafetensorsCheckpoint checkpoint(directory.path()); });
  CAPTURE(message);
  CHECK(message.find("two.safetensors: tensor 'b': ends at byte 8 of the data, of which the file "
                     "has 5: it is truncated by at least 3 bytes") != std::string::npos);
}

TEST_CASE("an index's shards are names of files beside it") {
  for (const std::string bad : {"", ".", "..", "a/b", "/etc/passwd", "a\\u0000b"}) {
    CAPTURE(bad);
    CHECK(message_of([&] {
            static_cast<void>(
                parse_safetensors_index("{\"weight_map\":{\"t\":\"" + bad + "\"}}", "i"));
          }).find("i: tensor 't': its shard must be a file's name") == 0);
  }
}

TEST_CASE("a directory without weights, and one with too many files") {
  const TempDirectory directory;
  CHECK(message_of([&] {
          const SafetensorsCheckpoint checkpoint(directory.path());
        }).find("holds 0 safetensors files") != std::string::npos);
  const auto only = file_of(header_of({entry("a", "F32", "[4]", 0, 16)}), 16);
  directory.write("any.safetensors", only);
  CHECK(SafetensorsCheckpoint(directory.path()).tensors().size() == 1);
  directory.write("other.safetensors", only);
  CHECK(message_of([&] {
          const SafetensorsCheckpoint checkpoint(directory.path());
        }).find("holds 2 safetensors files") != std::string::npos);
}

}  // namespace
}  // namespace pocket
