#include "pocket/kv/state_store.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "pocket/base/error.h"

namespace pocket {
namespace {

StateShape small_shape() {
  return {.layers = 2, .conv_floats = 6, .memory_floats = 40, .slots = 3, .snapshots = 2};
}

void fill(StateStore& store, std::size_t slot, float value) {
  for (std::size_t layer = 0; layer < 2; ++layer) {
    std::fill_n(store.conv(layer, slot), 6, value);
    std::fill_n(store.memory(layer, slot), 40, value + 0.5F);
  }
}

bool holds(StateStore& store, std::size_t slot, float value) {
  for (std::size_t layer = 0; layer < 2; ++layer) {
    if (std::count(store.conv(layer, slot), store.conv(layer, slot) + 6, value) != 6 ||
        std::count(store.memory(layer, slot), store.memory(layer, slot) + 40, value + 0.5F) != 40) {
      return false;
    }
  }
  return true;
}

std::string message_of(auto&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code() == ErrorCode::kInvalidArgument ? error.what() : "another code";
  }
  return "";
}

using Ids = std::vector<std::int32_t>;

TEST_CASE("a slot continues where its last step ended, or starts afresh from zeros") {
  StateStore store(small_shape());
  CHECK(store.bytes() == 5 * state_bytes(small_shape()));
  CHECK(state_bytes(small_shape()) == 384);  // 2 * 46 floats, in whole cache lines
  CHECK(store.continues(1, 0));
  CHECK(!store.continues(1, 7));
  fill(store, 0, 1.0F);
  fill(store, 1, 2.0F);
  store.begin(1, 0);
  CHECK(store.position(1) == StateStore::kNothing);
  CHECK(store.memory(1, 1)[39] == 0.0F);
  CHECK(store.conv(0, 1)[0] == 0.0F);
  CHECK(holds(store, 0, 1.0F));
  store.end(1, 7);
  CHECK(store.continues(1, 7));
  CHECK(!store.continues(1, 6));
  CHECK(!store.continues(0, 7));
}

TEST_CASE("snapshots bring back bytes and position, also into another slot") {
  StateStore store(small_shape());
  fill(store, 0, 1.0F);
  store.end(0, 16);
  fill(store, 2, 3.0F);
  store.end(2, 48);
  store.save(Ids{2, 0}, Ids{0, 1});
  fill(store, 0, 9.0F);
  fill(store, 2, 9.0F);
  store.load(Ids{1, 0, 0}, Ids{0, 1, 2});
  CHECK(holds(store, 0, 1.0F));
  CHECK(holds(store, 1, 3.0F));
  CHECK(holds(store, 2, 3.0F));
  CHECK(store.position(0) == 16);
  CHECK(store.position(1) == 48);
}

TEST_CASE("what cannot be copied is refused before anything is") {
  StateStore store(small_shape());
  fill(store, 0, 1.0F);
  store.end(0, 4);
  CHECK(message_of([&] { store.save(Ids{0, 0}, Ids{0}); }) ==
        "save_states: got 2 sources and 1 targets; they must be pairs");
  CHECK(message_of([&] { store.save(Ids{0, 1}, Ids{0, 1}); }) ==
        "save_states: slot 1 holds no state");
  CHECK(message_of([&] { store.save(Ids{0}, Ids{2}); }) ==
        "save_states: snapshot: got 2; there are 2");
  CHECK(message_of([&] { store.save(Ids{-1}, Ids{0}); }) ==
        "save_states: slot: got -1; there are 3");
  CHECK(message_of([&] { store.load(Ids{0}, Ids{1}); }) ==
        "load_states: snapshot 0 holds no state");
  CHECK(message_of([&] { StateStore({.layers = 1, .conv_floats = 1, .memory_floats = 1}); }) != "");
  CHECK(store.position(1) == StateStore::kNothing);
}

TEST_CASE("a model without states needs no memory and has no snapshots") {
  StateStore store;
  CHECK(store.empty());
  CHECK(store.bytes() == 0);
  CHECK(message_of([&] { store.save(Ids{0}, Ids{0}); }) ==
        "save_states: the model has no recurrent layers");
}

}  // namespace
}  // namespace pocket
