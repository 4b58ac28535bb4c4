#include "decoder_config.h"

#include <doctest/doctest.h>

#include "memory_source.h"
#include "pocket/base/error.h"
#include "pocket/models/model.h"

namespace pocket {
namespace {

using test::MemorySource;
using test::small_source;

TEST_CASE("defaults follow from the given keys") {
  const DecoderConfig config = read_decoder_config(small_source());
  CHECK(config.head_dim == 16);
  CHECK(config.rope.dims == 16);
  CHECK(config.group() == 2);
  CHECK(config.query_width() == 64);
  CHECK(config.kv_width() == 32);
  CHECK(config.vocab == 40);
  CHECK(config.rope.base == 10000.0);
  CHECK(config.rope.position_scale == 1.0);
  CHECK(config.norm_epsilon == 1e-6F);

  MemorySource multi_head = small_source();
  multi_head.uints.erase("attention.head_count_kv");
  CHECK(read_decoder_config(multi_head).kv_heads == 4);
}

TEST_CASE("scaling factors count only with a scaling type") {
  MemorySource source = small_source();
  source.floats["rope.scaling.factor"] = 8.0;
  CHECK(read_decoder_config(source).rope.position_scale == 1.0);
  source.strings["rope.scaling.type"] = "linear";
  CHECK(read_decoder_config(source).rope.position_scale == 8.0);
  source.strings["rope.scaling.type"] = "longrope";
  CHECK_THROWS_AS(read_decoder_config(source), Error);
}

TEST_CASE("a window counts in the layers that slide, and only inside the context") {
  MemorySource source = small_source();
  CHECK(read_decoder_config(source).window_of(1) == 0);
  source.uints["attention.sliding_window"] = 128;  // the context
  CHECK(read_decoder_config(source).window_of(0) == 0);
  source.uints["attention.sliding_window"] = 127;
  CHECK(read_decoder_config(source).window_of(0) == 127);
  CHECK(read_decoder_config(source).window_of(1) == 127);
  source.flags["attention.sliding_window_pattern"] = {true, false};
  CHECK(read_decoder_config(source).window_of(0) == 127);
  CHECK(read_decoder_config(source).window_of(1) == 0);
  source.flags["attention.sliding_window_pattern"] = {true, false, true};
  CHECK_THROWS_AS(read_decoder_config(source), Error);
}

TEST_CASE("soft caps are refused where the model would need them") {
  for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping"}) {
    MemorySource source = small_source();
    source.architecture_name = "gemma3";
    CHECK(describe_model(source).architecture == "gemma3");
    source.floats[key] = 0.0;
    CHECK_NOTHROW(describe_model(source));
    source.floats[key] = 30.0;
    CHECK_THROWS_AS(describe_model(source), Error);
  }
}

TEST_CASE("describe_model counts parameters without loading them") {
  MemorySource source = small_source();
  source.add("output_norm.weight", {64}, std::vector<float>(64, 1.0F));
  const ModelInfo info = describe_model(source);
  CHECK(info.architecture == "llama");
  CHECK(info.parameter_count == 40 * 64 + 64);
  CHECK(info.weight_bytes == 0);
  CHECK(info.layers == 2);
}

TEST_CASE("sizes that overflow or vanish are refused") {
  for (const auto& [key, value] : {std::pair<const char*, std::uint64_t>{"block_count", 0},
                                   {"block_count", ~std::uint64_t{0}},
                                   {"embedding_length", std::uint64_t{1} << 62},
                                   {"attention.head_count", 0},
                                   {"attention.head_count", 3},
                                   {"feed_forward_length", 33},
                                   {"context_length", std::uint64_t{1} << 40},
                                   {"vocab_size", 41}}) {
    MemorySource source = small_source();
    source.uints[key] = value;
    CHECK_THROWS_AS(read_decoder_config(source), Error);
  }
}

}  // namespace
}  // namespace pocket
