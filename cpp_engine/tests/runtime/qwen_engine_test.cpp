#include "pocket/runtime/qwen_engine.h"

#include <doctest/doctest.h>

#include <functional>
#include <string>

#include "small_model.h"
#include "temp_file.h"

namespace pocket {
namespace {

QwenEngineOptions small_options() {
  QwenEngineOptions options;
  options.max_batch_size = 4;
  options.prefill_chunk_tokens = 24;
  options.threads = 1;
  return options;
}

std::vector<std::int32_t> ids(std::size_t n, std::size_t first = 1) {
  std::vector<std::int32_t> tokens(n);
  for (std::size_t i = 0; i < n; ++i) {
    tokens[i] = static_cast<std::int32_t>((first + i * 7) % test::kVocab);
  }
  return tokens;
}

struct Failure {
  ErrorCode code = ErrorCode::kInternal;
  std::string message;
};

Failure failure_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return {error.code(), error.what()};
  }
  return {ErrorCode::kInternal, "nothing was thrown"};
}

bool holds(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

TEST_CASE("prefill and decode steps give what one long prefill gives, bit for bit") {
  const test::TempFile file(test::small_model());
  QwenEngine engine(file.path(), small_options(), 64, 32768);
  CHECK(engine.max_context() == 256);  // the model's own
  const auto prompt = ids(60);
  const ForwardResult whole = engine.prefill(prompt, 0);
  CHECK(whole.position == 60);
  CHECK(whole.token == prompt.back());
  CHECK(whole.logits.size() == test::kVocab);
  CHECK(whole.logits[static_cast<std::size_t>(whole.top_token)] == whole.top_logit);
  ForwardResult stepped = engine.prefill(std::span(prompt).first(50), 2);
  for (std::size_t i = 50; i < prompt.size(); ++i) {
    stepped = engine.decode_step(prompt[i], 2);
  }
  CHECK(stepped.logits == whole.logits);
  CHECK(engine.position(2) == 60);
  CHECK(engine.position(1) == 0);
}

TEST_CASE("slots are misused in no way that goes unnoticed") {
  const test::TempFile file(test::small_model());
  QwenEngine engine(file.path(), small_options(), 0, 32);
  const auto refused = [](const Failure& failure, const char* part) {
    CAPTURE(failure.message);
    CHECK(failure.code == ErrorCode::kInvalidArgument);
    CHECK(holds(failure.message, part));
  };
  refused(failure_of([&] { engine.prefill(ids(3), 4); }), "slot_id: got 4; must be from 0 to 3");
  refused(failure_of([&] { engine.prefill(ids(3), -1); }), "slot_id: got -1");
  refused(failure_of([&] { engine.reset(9); }), "slot_id: got 9");
  refused(failure_of([&] { engine.decode_step(1, 0); }), "slot 0: holds no tokens; prefill it");
  refused(failure_of([&] { engine.prefill({}, 0); }), "token_ids: got none");
  refused(failure_of([&] { engine.prefill(ids(33), 0); }), "the context holds 32");
  const std::int32_t wrong[] = {1, static_cast<std::int32_t>(test::kVocab)};
  refused(failure_of([&] { engine.prefill(wrong, 0); }), "token_ids[1]: got 75; must be from 0");
  CHECK(engine.prefill(ids(31), 0).position == 31);
  refused(failure_of([&] { engine.prefill(ids(3), 0); }), "slot 0: already holds 31 tokens");
  CHECK(engine.decode_step(5, 0).position == 32);
  refused(failure_of([&] { engine.decode_step(5, 0); }), "context of 32 tokens is full");
  engine.reset(0);
  CHECK(engine.prefill(ids(3), 0).position == 3);
}

TEST_CASE("options of absent features are refused by name") {
  const test::TempFile file(test::small_model());
  const auto refused = [&](const char* name, const std::function<void(QwenEngineOptions&)>& set) {
    CAPTURE(name);
    QwenEngineOptions options = small_options();
    set(options);
    try {
      const QwenEngine engine(file.path(), options);
      FAIL("accepted");
    } catch (const UnsupportedFeature& error) {
      CHECK(holds(error.feature(), name));
      CHECK(holds(error.what(), name));
    }
  };
  refused("tp_world", [](auto& o) { o.tp_world = 2; });
  refused("mtp", [](auto& o) { o.mtp = true; });
  refused("dspark_checkpoint", [](auto& o) { o.dspark_checkpoint = std::string("draft"); });
  refused("attention_window", [](auto& o) { o.attention_window = 128; });
  refused("kv_paged", [](auto& o) { o.kv_paged = false; });
  refused("kv_block_size", [](auto& o) { o.kv_block_size = 32; });
  refused("kv_cache_dtype fp8", [](auto& o) { o.kv_cache_dtype = QwenKvCacheDType::kFp8; });
  try {
    const QwenEngine engine(file.path(), small_options(), 1);
    FAIL("accepted");
  } catch (const UnsupportedFeature& error) {
    CHECK(error.feature() == "layer_count 1");
  }
  QwenEngineOptions bad = small_options();
  bad.max_batch_size = 0;
  CHECK(holds(failure_of([&] { const QwenEngine e(file.path(), bad); }).message,
              "max_batch_size: got 0"));
  bad = small_options();
  bad.top_p = 2.0F;
  CHECK(holds(failure_of([&] { const QwenEngine e(file.path(), bad); }).message, "top_p"));
}

TEST_CASE("slots share the blocks of a common beginning without sharing results") {
  const test::TempFile file(test::small_model());
  QwenEngine engine(file.path(), small_options());
  const auto prompt = ids(60);
  const ForwardResult first = engine.prefill(prompt, 0);
  CHECK(engine.prefix_cache_stats().reused_tokens == 0);
  CHECK(engine.prefill(prompt, 1).logits == first.logits);
  const QwenPrefixCacheStats stats = engine.prefix_cache_stats();
  CHECK(stats.reused_tokens == 48);
  CHECK(stats.computed_tokens == 12);
  CHECK(stats.hits == 1);
  CHECK(stats.resume_source == "blocks");
  CHECK(stats.blocks.in_use == 5);  // three shared, one each
  const ForwardResult a = engine.decode_step(3, 0);
  CHECK(engine.decode_step(3, 1).logits == a.logits);
  engine.reset(0);
  engine.reset(1);
  CHECK(engine.kv_cache_pinned_blocks() == 3);
  engine.clear_prefix_cache();
  CHECK(engine.kv_free_blocks() == engine.kv_total_blocks());
  QwenEngineOptions off = small_options();
  off.prefix_cache = false;
  QwenEngine plain(file.path(), off);
  plain.prefill(prompt, 0);
  CHECK(plain.prefill(prompt, 1).logits == first.logits);
  CHECK(plain.prefix_cache_stats().hits == 0);
}

TEST_CASE("a full pool refuses, and the failed slot is as it was") {
  const test::TempFile file(test::small_model());
  QwenEngineOptions options = small_options();
  options.kv_cache_bytes = 4 * inspect_model(file.path(), KvDType::kF16).kv_bytes_per_block;
  QwenEngine engine(file.path(), options);
  CHECK(engine.kv_total_blocks() == 4);
  engine.prefill(ids(40), 0);
  const Failure failure = failure_of([&] { engine.prefill(ids(40, 3), 1); });
  CHECK(failure.code == ErrorCode::kResourceExhausted);
  CHECK(holds(failure.message, "slot 1: 24 tokens need 2 KV blocks and the pool of 4"));
  CHECK(engine.position(1) == 0);
  engine.reset(0);
  CHECK(engine.prefill(ids(40, 3), 1).position == 40);
  CHECK(engine.allocate_slot() == 0);
}

TEST_CASE("generate, and sampled tokens by seed") {
  const test::TempFile file(test::small_model());
  QwenEngineOptions options = small_options();
  QwenEngine greedy(file.path(), options);
  const auto prompt = ids(20);
  const auto output = greedy.generate(prompt, 6);
  CHECK(output.size() == 6);
  std::int32_t next = greedy.prefill(prompt, 0).top_token;
  for (const std::int32_t token : output) {
    CHECK(token == next);
    next = greedy.decode_step(token, 0).top_token;
  }
  CHECK(greedy.allocate_slot() == 1);  // generate gave its slot back
  options.temperature = 1.0F;
  options.sampling_seed = 5;
  QwenEngine drawn(file.path(), options);
  const auto sample = drawn.generate(prompt, 12);
  CHECK(drawn.generate(prompt, 12) == sample);
  CHECK(sample != greedy.generate(prompt, 12));
}

TEST_CASE("a batched step of prompts and decodes gives what each slot gives alone") {
  const test::TempFile file(test::small_model());
  QwenEngine engine(file.path(), small_options());
  BatchedRequest one{.request_id = 1, .prompt_tokens = ids(5, 2), .slot_id = 0};
  BatchedRequest* first[] = {&one};
  CHECK(engine.allocate_batch_slots(2) == std::vector<std::int32_t>{0, 1});
  CHECK(failure_of([&] { (void)engine.allocate_batch_slots(3); }).code ==
        ErrorCode::kResourceExhausted);
  const BatchPrefillResult started = engine.batch_prefill(first, 100);
  REQUIRE(started.results.size() == 1);
  one.last_token = started.results[0].top_token;
  one.generated_tokens = {one.last_token};
  BatchedRequest two{.request_id = 2, .prompt_tokens = ids(30, 9), .slot_id = 1};
  BatchedRequest* second[] = {&two};
  const BatchStepResult mixed = engine.batch_step(second, first, 100);
  CHECK(mixed.prefill.total_tokens == 24);  // a chunk
  CHECK(mixed.prefill.incomplete[0]);
  CHECK(mixed.prefill.results[0].position == 24);
  const BatchPrefillResult rest = engine.batch_prefill(second, 100);
  CHECK_FALSE(rest.incomplete[0]);

  engine.reset(0);
  engine.reset(1);
  CHECK(engine.prefill(ids(5, 2), 2).top_token == one.last_token);
  CHECK(engine.decode_step(one.last_token, 2).top_token == mixed.decode.next_tokens[0]);
  CHECK(engine.prefill(ids(30, 9), 3).top_token == rest.results[0].top_token);
}

}  // namespace
}  // namespace pocket
