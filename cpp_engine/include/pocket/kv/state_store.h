#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "pocket/base/aligned_buffer.h"

namespace pocket {

/// Geometry of the recurrent states of a model's linear-attention layers. Sizes count floats.
struct StateShape {
  std::size_t layers = 0;         ///< layers with a state; 0: the model keeps none
  std::size_t conv_floats = 0;    ///< per layer: the last inputs of its convolution
  std::size_t memory_floats = 0;  ///< per layer: the matrices of its heads
  std::size_t slots = 0;          ///< sequences that are resident at once
  std::size_t snapshots = 0;      ///< states kept beside them
};

/// Bytes of one slot's state, over all layers.
[[nodiscard]] std::size_t state_bytes(const StateShape& shape);

/// The recurrent state of every slot, and snapshots of states, in one arena.
///
/// Unlike KV blocks a state cannot be cut at a position: it is what is left of all tokens so far.
/// So the store remembers, for each slot and snapshot, after how many tokens it is; a step that
/// would continue from anywhere else is refused instead of being silently wrong. The store owns
/// storage only: which snapshot belongs to which prefix is decided elsewhere (`pocket_backend.kv`).
///
/// Errors: `Error(kInvalidArgument)` for an index out of range or a state that is not there,
/// `Error(kResourceExhausted)` when the memory is refused. Thread contract: as for plain memory;
/// concurrent calls may not touch the same slot. Memory of a slot or snapshot is resident once
/// used.
class StateStore {
 public:
  /// A store for models without states.
  StateStore() = default;
  explicit StateStore(const StateShape& shape);

  [[nodiscard]] const StateShape& shape() const noexcept { return shape_; }
  [[nodiscard]] bool empty() const noexcept { return shape_.layers == 0; }
  [[nodiscard]] std::size_t bytes() const noexcept { return buffer_.size(); }

  /// A layer's part of a slot's state; unchecked, for the forward pass.
  [[nodiscard]] float* conv(std::size_t layer, std::size_t slot) noexcept {
    return at(slot) + layer * (shape_.conv_floats + shape_.memory_floats);
  }
  [[nodiscard]] float* memory(std::size_t layer, std::size_t slot) noexcept {
    return conv(layer, slot) + shape_.conv_floats;
  }

  /// Whether the slot can continue at `position`: a fresh start, or after as many tokens.
  [[nodiscard]] bool continues(std::size_t slot, std::size_t position) const noexcept {
    return position == 0 || positions_[slot] == position;
  }
  /// Tokens that the slot's state has seen; `kNothing` if it holds none.
  [[nodiscard]] std::size_t position(std::size_t slot) const noexcept { return positions_[slot]; }
  /// Before a step that `continues`: at position 0 the state becomes zero. Until `end` the slot
  /// holds nothing, so a step that fails half-way leaves no state to continue from.
  void begin(std::size_t slot, std::size_t position);
  /// After the step: the slot's state has seen `position` tokens.
  void end(std::size_t slot, std::size_t position) noexcept { positions_[slot] = position; }

  /// Copies the state of slots[i] into snapshots[i], in order. Nothing is copied if an index is out
  /// of range, a slot holds nothing, or the spans differ in length.
  void save(std::span<const std::int32_t> slots, std::span<const std::int32_t> snapshots);
  /// Copies snapshots[i] into slots[i], likewise.
  void load(std::span<const std::int32_t> snapshots, std::span<const std::int32_t> slots);

  static constexpr std::size_t kNothing = std::numeric_limits<std::size_t>::max();

 private:
  [[nodiscard]] float* at(std::size_t place) noexcept {
    return reinterpret_cast<float*>(buffer_.data() + place * stride_);
  }
  void copy(const char* name, std::span<const std::int32_t> from, std::size_t from_base,
            std::span<const std::int32_t> to, std::size_t to_base);

  StateShape shape_;
  std::size_t stride_ = 0;              // bytes between slots; snapshots follow the slots
  std::vector<std::size_t> positions_;  // of slots, then of snapshots
  AlignedBuffer buffer_;
};

}  // namespace pocket
