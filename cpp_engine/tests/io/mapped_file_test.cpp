#include "pocket/io/mapped_file.h"

#include <doctest/doctest.h>
#include <sys/stat.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "pocket/base/error.h"
#include "temp_file.h"

namespace pocket {
namespace {

using test::TempFile;

void check_refused(const std::filesystem::path& path, const std::string& mention) {
  try {
    const MappedFile file(path);
    FAIL_CHECK("accepted");
  } catch (const Error& error) {
    const std::string message = error.what();
    CAPTURE(message);
    CHECK(error.code() == ErrorCode::kBadFile);
    CHECK(message.find(path.string()) != std::string::npos);
    CHECK(message.find(mention) != std::string::npos);
  }
}

TEST_CASE("the bytes are the file's, also after its pages were released") {
  std::vector<std::byte> contents(10'000);
  for (std::size_t i = 0; i < contents.size(); ++i) contents[i] = static_cast<std::byte>(i * 31);
  const TempFile on_disk(contents);
  const MappedFile file(on_disk.path());
  CHECK(file.path() == on_disk.path());
  CHECK(std::equal(contents.begin(), contents.end(), file.bytes().begin(), file.bytes().end()));
  file.release_pages();
  CHECK(std::equal(contents.begin(), contents.end(), file.bytes().begin(), file.bytes().end()));
}

TEST_CASE("moving hands the mapping over") {
  const std::vector<std::byte> contents(10, std::byte{9});
  const TempFile first(contents);
  const TempFile second(std::vector<std::byte>(5, std::byte{1}));
  MappedFile a(first.path());
  const std::byte* const address = a.bytes().data();
  MappedFile b(std::move(a));
  CHECK(b.bytes().data() == address);
  MappedFile c(second.path());
  c = std::move(b);
  CHECK(c.bytes().data() == address);
  CHECK(c.path() == first.path());
  CHECK(b.bytes().empty());  // NOLINT(bugprone-use-after-move): moved-from means empty
}

TEST_CASE("what cannot be mapped is refused with its path") {
  check_refused("/nonexistent/model.gguf", "No such file");
  check_refused(std::filesystem::temp_directory_path(), "directory");
  const TempFile empty({});
  check_refused(empty.path(), "empty");
  check_refused("/dev/null", "not a regular file");
}

TEST_CASE("a FIFO without a writer is refused, not waited for") {
  const std::filesystem::path fifo = TempFile({}).path();
  REQUIRE(::mkfifo(fifo.c_str(), 0600) == 0);
  check_refused(fifo, "not a regular file");
  std::filesystem::remove(fifo);
}

}  // namespace
}  // namespace pocket
