#include "pocket/kv/state_store.h"

#include <cstring>
#include <string>

#include "pocket/base/error.h"

namespace pocket {
namespace {

// A cache line: states of different slots are written by different threads.
constexpr std::size_t kAlign = 64;
// Far above any machine; keeps products of sizes inside 64 bits.
constexpr std::size_t kMaxFloats = std::size_t{1} << 40;
constexpr std::size_t kMaxPlaces = std::size_t{1} << 20;

}  // namespace

std::size_t state_bytes(const StateShape& shape) {
  if (shape.conv_floats > kMaxFloats || shape.memory_floats > kMaxFloats || shape.layers > 4096) {
    throw Error(ErrorCode::kInvalidArgument,
                "state store: " + std::to_string(shape.layers) + " layers of " +
                    std::to_string(shape.memory_floats) + " floats are more than can be kept");
  }
  const std::size_t bytes =
      shape.layers * (shape.conv_floats + shape.memory_floats) * sizeof(float);
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

StateStore::StateStore(const StateShape& shape) : shape_(shape), stride_(state_bytes(shape)) {
  if (empty()) {
    return;
  }
  const std::size_t places = shape.slots + shape.snapshots;
  if (shape.slots == 0 || shape.slots > kMaxPlaces || shape.snapshots > kMaxPlaces ||
      places > std::numeric_limits<std::size_t>::max() / stride_) {
    throw Error(ErrorCode::kInvalidArgument,
                "state store: " + std::to_string(shape.slots) + " slots and " +
                    std::to_string(shape.snapshots) +
                    " snapshots; use from 1 to 1048576 slots (max_sequences), and fewer snapshots");
  }
  positions_.assign(places, kNothing);
  buffer_ = AlignedBuffer(places * stride_);
}

void StateStore::begin(std::size_t slot, std::size_t position) {
  positions_[slot] = kNothing;
  if (position == 0) {
    std::memset(at(slot), 0, stride_);
  }
}

void StateStore::save(std::span<const std::int32_t> slots,
                      std::span<const std::int32_t> snapshots) {
  copy("save_states", slots, 0, snapshots, shape_.slots);
}

void StateStore::load(std::span<const std::int32_t> snapshots,
                      std::span<const std::int32_t> slots) {
  copy("load_states", snapshots, shape_.slots, slots, 0);
}

void StateStore::copy(const char* name, std::span<const std::int32_t> from, std::size_t from_base,
                      std::span<const std::int32_t> to, std::size_t to_base) {
  const auto fail = [name](const std::string& what) {
    throw Error(ErrorCode::kInvalidArgument, std::string(name) + ": " + what);
  };
  if (empty()) {
    fail("the model has no recurrent layers");
  }
  if (from.size() != to.size()) {
    fail("got " + std::to_string(from.size()) + " sources and " + std::to_string(to.size()) +
         " targets; they must be pairs");
  }
  const auto check = [&](std::int32_t index, std::size_t base) {
    const bool snapshot = base > 0;
    const std::size_t count = snapshot ? shape_.snapshots : shape_.slots;
    if (index < 0 || static_cast<std::size_t>(index) >= count) {
      fail(std::string(snapshot ? "snapshot" : "slot") + ": got " + std::to_string(index) +
           "; there are " + std::to_string(count));
    }
    return base + static_cast<std::size_t>(index);
  };
  for (std::size_t i = 0; i < from.size(); ++i) {
    (void)check(to[i], to_base);
    if (positions_[check(from[i], from_base)] == kNothing) {
      fail(std::string(from_base > 0 ? "snapshot " : "slot ") + std::to_string(from[i]) +
           " holds no state");
    }
  }
  for (std::size_t i = 0; i < from.size(); ++i) {
    const std::size_t source = from_base + static_cast<std::size_t>(from[i]);
    const std::size_t target = to_base + static_cast<std::size_t>(to[i]);
    std::memcpy(at(target), at(source), stride_);
    positions_[target] = positions_[source];
  }
}

}  // namespace pocket
