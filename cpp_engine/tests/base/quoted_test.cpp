#include "pocket/base/quoted.h"

#include <doctest/doctest.h>

#include <string>

namespace pocket {
namespace {

TEST_CASE("plain text is quoted as it is") {
  CHECK(quoted("blk.0.attn_q.weight") == "'blk.0.attn_q.weight'");
  CHECK(quoted("") == "''");
}

TEST_CASE("whatever could forge or garble a log line is escaped") {
  CHECK(quoted("a\nb\x1b[0m") == "'a\\x0ab\\x1b[0m'");
  CHECK(quoted("it's\\") == "'it\\x27s\\x5c'");
  CHECK(quoted("\xe2\x96\x81") == "'\\xe2\\x96\\x81'");
  CHECK(quoted(std::string_view("\0", 1)) == "'\\x00'");
}

TEST_CASE("long text is cut") {
  CHECK(quoted(std::string(48, 'x')) == "'" + std::string(48, 'x') + "'");
  CHECK(quoted(std::string(49, 'x')) == "'" + std::string(48, 'x') + "...'");
}

}  // namespace
}  // namespace pocket
