#include "pocket/io/json.h"

#include <doctest/doctest.h>

#include <cmath>
#include <string>

#include "pocket/base/error.h"

namespace pocket {
namespace {

JsonValue parse(std::string_view text) {
  return parse_json(text, "test.json");
}

TEST_CASE("values of every kind") {
  const JsonValue root = parse(
      R"( {"i": -12, "d": 2.5e1, "big": 99999999999999999999, "t": true, "n": null,
           "a": [1, [], {}], "s": "x\n\"\u00e9\ud83d\ude00"} )");
  CHECK(*root.find("i")->as<std::int64_t>() == -12);
  CHECK(*root.find("d")->as<double>() == 25.0);
  CHECK(*root.find("big")->as<double>() == 1e20);
  CHECK(*root.find("t")->as<bool>());
  CHECK(root.find("n") == nullptr);
  CHECK(root.find("absent") == nullptr);
  CHECK(root.find("a")->as<JsonArray>()->size() == 3);
  CHECK(*root.find("s")->as<std::string>() == "x\n\"\xc3\xa9\xf0\x9f\x98\x80");
  CHECK(root.find("i")->find("member") == nullptr);
}

TEST_CASE("what Python writes beyond the standard") {
  CHECK(std::isnan(*parse("NaN").as<double>()));
  CHECK(*parse("-Infinity").as<double>() == -HUGE_VAL);
}

TEST_CASE("a lone surrogate becomes U+FFFD") {
  CHECK(*parse(R"("\ud83dx")").as<std::string>() == "\xef\xbf\xbdx");
  CHECK(*parse(R"("\ud83d\u0041")").as<std::string>() == "\xef\xbf\xbd\x41");
}

TEST_CASE("skipped members are passed over, whatever they hold") {
  const JsonValue root = parse_json(
      R"({"merges": [["a]", "b\"}"], {"x": 1}], "model": {"merges": "text", "kept": 7}})", "t",
      "merges");
  CHECK(root.find("merges") == nullptr);
  CHECK(root.find("model")->find("merges") == nullptr);
  CHECK(*root.find("model")->find("kept")->as<std::int64_t>() == 7);
  CHECK_THROWS_AS(parse_json(R"({"merges": [1, 2)", "t", "merges"), Error);
  CHECK_THROWS_AS(parse_json(R"({"merges": ["a)", "t", "merges"), Error);
}

TEST_CASE("malformed texts are refused with the place") {
  for (const char* text : {"",
                           "{",
                           "[1,",
                           "[1 2]",
                           "{\"a\"}",
                           "{\"a\":}",
                           "{a: 1}",
                           "\"open",
                           "\"\\x\"",
                           "\"\\u12\"",
                           "01",
                           "-",
                           "1.",
                           "1e",
                           "tru",
                           "[1] 2",
                           "{\"a\": 1, \"a\": 2}",
                           "1e999",
                           "\"\x01\"",
                           "]"}) {
    CAPTURE(text);
    try {
      static_cast<void>(parse(text));
      FAIL("accepted");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kBadFile);
      CHECK(std::string(error.what()).find("test.json: not valid JSON at byte ") == 0);
    }
  }
}

TEST_CASE("nesting is bounded") {
  const auto nested = [](std::size_t depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  CHECK_NOTHROW(parse(nested(60)));
  CHECK_THROWS_AS(parse(nested(100000)), Error);
}

}  // namespace
}  // namespace pocket
