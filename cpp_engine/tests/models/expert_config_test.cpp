#include "expert_config.h"

#include <doctest/doctest.h>

#include <string>
#include <utility>

#include "memory_source.h"
#include "pocket/base/error.h"
#include "pocket/models/model.h"

namespace pocket {
namespace {

using test::MemorySource;

MemorySource expert_source() {
  MemorySource source = test::small_source();
  source.architecture_name = "qwen3moe";
  source.uints["expert_count"] = 8;
  source.uints["expert_used_count"] = 2;
  source.uints["expert_feed_forward_length"] = 32;
  source.add("blk.1.ffn_gate_inp.weight", {8, 64}, std::vector<float>(8 * 64));
  return source;
}

ExpertConfig read(const MemorySource& source, ExpertDefaults defaults = {}) {
  return read_expert_config(source, read_decoder_config(source, true), defaults);
}

TEST_CASE("sizes, and the layers that have a router") {
  const ExpertConfig experts = read(expert_source());
  CHECK(experts.count == 8);
  CHECK(experts.used == 2);
  CHECK(experts.ffn == 32);
  CHECK(experts.shared_ffn == 0);
  CHECK(experts.layers == std::vector<bool>{false, true});
  MemorySource source = expert_source();
  source.flags["expert_layers"] = {true, true};
  CHECK(read(source).layers == std::vector<bool>{true, true});
  source.flags["expert_layers"] = {true};
  CHECK_THROWS_AS(read(source), Error);
}

TEST_CASE("what files leave out follows from the architecture and the dense length") {
  MemorySource source = expert_source();
  source.uints["feed_forward_length"] = 128;
  source.uints.erase("expert_feed_forward_length");
  CHECK(read(source).ffn == 64);
  CHECK(read(source, {.ffn = 128}).ffn == 128);
  CHECK(read(source, {.shared = true}).shared_ffn == 128);
  source.uints["expert_shared_feed_forward_length"] = 96;
  CHECK(read(source, {.shared = true}).shared_ffn == 96);
  CHECK_FALSE(read(source).normalised);
  CHECK(read(source, {.normalised = true}).normalised);
  source.bools["expert_weights_norm"] = false;
  CHECK_FALSE(read(source, {.normalised = true}).normalised);
}

TEST_CASE("impossible sizes and other routers are refused") {
  for (const auto& [key, value] : {std::pair<const char*, std::uint64_t>{"expert_count", 0},
                                   {"expert_count", 1},
                                   {"expert_count", std::uint64_t{1} << 40},
                                   {"expert_used_count", 0},
                                   {"expert_used_count", 9},
                                   {"expert_feed_forward_length", 48},
                                   {"expert_gating_func", 2},
                                   {"expert_group_count", 4}}) {
    MemorySource source = expert_source();
    source.uints[key] = value;
    CAPTURE(key);
    CHECK_THROWS_AS(read(source), Error);
  }
  MemorySource source = expert_source();
  source.floats["expert_weights_scale"] = 2.5;
  CHECK_THROWS_AS(read(source), Error);
  source.floats["expert_weights_scale"] = 1.0;
  source.uints["expert_gating_func"] = 1;
  CHECK_NOTHROW(read(source));
}

TEST_CASE("only architectures with experts take them") {
  MemorySource source = expert_source();
  const ModelInfo info = describe_model(source);
  CHECK(info.experts == 8);
  CHECK(info.experts_used == 2);
  for (const char* dense : {"qwen2", "qwen3", "gemma3"}) {
    source.architecture_name = dense;
    CHECK_THROWS_AS(describe_model(source), Error);
  }
  source.architecture_name = "llama";  // Mixtral
  CHECK(describe_model(source).experts == 8);
  source.uints.erase("expert_count");
  CHECK(describe_model(source).experts == 0);
}

}  // namespace
}  // namespace pocket
