#include "pocket/io/gguf_model.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "gguf_builder.h"
#include "pocket/base/error.h"

namespace pocket {
namespace {

namespace fs = std::filesystem;
using test::GgufBuilder;

/// A folder that is deleted at the end of scope.
class Folder {
 public:
  Folder()
      : path_(fs::temp_directory_path() / ("pocket-gguf-model-" + std::to_string(::getpid()))) {
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  fs::path write(const std::string& name, const std::vector<std::byte>& bytes) const {
    const fs::path path = path_ / name;
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
    return path;
  }
  [[nodiscard]] fs::path at(const std::string& name) const { return path_ / name; }

 private:
  fs::path path_;
};

std::string name_of(int number) {
  std::string name = "m-00000-of-00003.gguf";
  name[6] = static_cast<char>('0' + number);
  return name;
}

/// Part `number` (from 1) of 3, with the keys that belong there.
GgufBuilder part(int number, std::uint16_t count = 3, std::int32_t tensors = 4) {
  GgufBuilder file;
  if (number == 1) file.key("general.architecture", "llama").key("llama.block_count", 7U);
  file.key("split.no", static_cast<std::uint16_t>(number - 1)).key("split.count", count);
  file.key("split.tensors.count", tensors);
  return file;
}

void add(GgufBuilder& file, const std::string& name, float value) {
  file.tensor(name, {2}, DType::kF32, std::vector<float>{value, value + 0.5F});
}

std::vector<std::byte> healthy(int number) {
  GgufBuilder file = part(number);
  constexpr const char* kTensors[] = {"t1", "t2", "t3"};
  add(file, kTensors[number - 1], static_cast<float>(number));
  if (number == 3) add(file, "last", 9.0F);
  return file.bytes();
}

fs::path write_healthy(const Folder& folder) {
  for (const int number : {3, 2, 1}) folder.write(name_of(number), healthy(number));
  return folder.at(name_of(1));
}

void check_refused(const fs::path& path, const std::vector<std::string>& mentions) {
  try {
    const GgufModel model(path);
    FAIL_CHECK("accepted");
  } catch (const Error& error) {
    const std::string message = error.what();
    CAPTURE(message);
    CHECK(error.code() == ErrorCode::kBadFile);
    for (const std::string& mention : mentions) {
      CAPTURE(mention);
      CHECK(message.find(mention) != std::string::npos);
    }
  }
}

TEST_CASE("names of parts") {
  const auto name = parse_gguf_part_name("a-b-00002-of-00010.gguf");
  REQUIRE(name.has_value());
  CHECK(name->stem == "a-b");
  CHECK(name->number == 2);
  CHECK(name->count == 10);
  for (const char* other :
       {"a.gguf", "a-0002-of-00010.gguf", "a-00002-of-00010.ggu", "a-00011-of-00010.gguf",
        "a-00000-of-00010.gguf", "-00001-of-00002.gguf", "00001-of-00002.gguf",
        "a-00001-of-0000x.gguf", "a-00001_of-00002.gguf", "-of-00002.gguf", ".gguf", ""}) {
    CAPTURE(other);
    CHECK_FALSE(parse_gguf_part_name(other).has_value());
  }
}

TEST_CASE("a split model has the tensors of all parts and the metadata of the first") {
  const Folder folder;
  const GgufModel model(write_healthy(folder));
  CHECK(model.parts() == 3);
  CHECK(model.first().get_uint("llama.block_count") == 7U);
  CHECK(model.tensors().size() == 4);
  CHECK(model.find_tensor("absent") == nullptr);
  model.release_pages();
  for (const auto& [name, first] : {std::pair{"t1", 1.0F}, {"t2", 2.0F}, {"last", 9.0F}}) {
    const GgufTensor* const tensor = model.find_tensor(name);
    REQUIRE(tensor != nullptr);
    CHECK(tensor->name == name);
    CHECK(*reinterpret_cast<const float*>(tensor->data.data()) == first);
  }
}

TEST_CASE("the models of a folder") {
  const Folder folder;
  CHECK(gguf_models_in(folder.at("")).empty());
  write_healthy(folder);
  folder.write("notes.txt", {});
  folder.write("a.gguf", {});
  CHECK(gguf_models_in(folder.at("")) ==
        std::vector<fs::path>{folder.at("a.gguf"), folder.at(name_of(1))});
  fs::remove(folder.at(name_of(1)));  // what is missing is said when the model is opened
  CHECK(gguf_models_in(folder.at("")).size() == 2);
  CHECK_THROWS_AS(static_cast<void>(gguf_models_in(folder.at("absent"))), Error);
}

TEST_CASE("one file is a model, whatever its name says of one part") {
  const Folder folder;
  GgufBuilder plain, single = part(1, 1, 1);
  add(plain, "t", 1.0F);
  add(single, "t", 1.0F);
  for (const auto& [name, bytes] : {std::pair{"plain.gguf", plain.bytes()},
                                    {"m-00001-of-00001.gguf", plain.bytes()},
                                    {"n-00001-of-00001.gguf", single.bytes()}}) {
    const GgufModel model(folder.write(name, bytes));
    CHECK(model.parts() == 1);
    CHECK(model.find_tensor("t") != nullptr);
  }
}

TEST_CASE("the first part may hold metadata only") {
  const Folder folder;
  write_healthy(folder);
  folder.write(name_of(1), part(1, 3, 3).bytes());
  GgufBuilder second = part(2, 3, 3), third = part(3, 3, 3);
  add(second, "a", 1.0F);
  add(second, "b", 1.0F);
  add(third, "c", 1.0F);
  folder.write(name_of(2), second.bytes());
  folder.write(name_of(3), third.bytes());
  CHECK(GgufModel(folder.at(name_of(1))).tensors().size() == 3);
}

TEST_CASE("a part that is missing is named, with what the others hold") {
  const Folder folder;
  const fs::path first = write_healthy(folder);
  fs::remove(folder.at(name_of(2)));
  check_refused(first, {folder.at(name_of(2)).string(), "part 2 of 3", "the model has 4 tensors",
                        "2 parts here hold 3 tensors of 24 bytes"});
  fs::remove(folder.at(name_of(3)));
  check_refused(first, {"part 2 of 3 (and 1 other part)", "1 part here holds 1 tensor of 8 bytes"});
}

TEST_CASE("a part other than the first is not a model") {
  const Folder folder;
  write_healthy(folder);
  check_refused(folder.at(name_of(2)), {name_of(2), "is part 2 of 3", name_of(1)});
  const fs::path renamed = folder.write("renamed.gguf", healthy(1));
  check_refused(renamed, {"renamed.gguf", "3 files", "-00001-of-00003.gguf"});
}

TEST_CASE("a truncated part is refused by its file, tensor and bytes") {
  const Folder folder;
  const fs::path first = write_healthy(folder);
  std::vector<std::byte> cut = healthy(3);
  cut.pop_back();
  folder.write(name_of(3), cut);
  check_refused(first, {folder.at(name_of(3)).string(), "'last'", "needs 8 bytes"});
}

TEST_CASE("parts in each other's place, or of different models, are refused") {
  const Folder folder;
  const fs::path first = write_healthy(folder);
  folder.write(name_of(3), healthy(2));
  check_refused(first, {name_of(3), "its name says part 3 of 3", "split.no is 1, not 2"});

  folder.write(name_of(3), part(3, 4).bytes());
  check_refused(first, {name_of(3), "split.count is 4, not 3"});

  folder.write(name_of(3), part(3, 3, 5).bytes());
  check_refused(first, {name_of(3), "split.tensors.count is 5, not 4"});

  folder.write(name_of(3), part(3).key("general.architecture", "qwen2").bytes());
  check_refused(first, {name_of(3), "'qwen2'", "'llama'"});

  GgufBuilder without_keys;
  add(without_keys, "t3", 1.0F);
  folder.write(name_of(3), without_keys.bytes());
  check_refused(first, {name_of(3), "split.no is missing"});

  GgufBuilder bad_type;
  bad_type.key("split.no", "two");
  folder.write(name_of(3), bad_type.bytes());
  check_refused(first, {name_of(3), "'split.no'", "a string"});
}

TEST_CASE("a tensor that two parts hold, or that none holds, is refused") {
  const Folder folder;
  const fs::path first = write_healthy(folder);
  GgufBuilder twice = part(3);
  add(twice, "t3", 3.0F);
  add(twice, "t1", 3.0F);
  folder.write(name_of(3), twice.bytes());
  check_refused(first, {name_of(3), "'t1'", "is in " + name_of(1)});

  GgufBuilder few = part(3);
  add(few, "t3", 3.0F);
  folder.write(name_of(3), few.bytes());
  check_refused(first, {"split.tensors.count is 4", "3 parts here hold 3 tensors of 24 bytes"});
}

}  // namespace
}  // namespace pocket
